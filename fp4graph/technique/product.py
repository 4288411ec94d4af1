"""Product operations that plugins teach the graph pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Factors:
    """The parts of a product ``beta·addend + alpha·A @ B``, each an argument of the call that computes it.

    Attributes:
        a: ``A [..., M, K]``.
        b: the second factor, ``[N, K]`` for form "linear" and ``[..., K, N]`` for form "matmul". Where ``b`` is a
            parameter, policies see a site ``linear``, whatever the form.
        form: how ``b`` is stored.
        addend: the bias or accumulator, or None.
        alpha, beta: the numbers that multiply the product and ``addend``.
    """

    a: Any
    b: Any
    form: Literal["linear", "matmul"] = "linear"
    addend: Any = None
    alpha: float = 1
    beta: float = 1


@dataclass(frozen=True)
class ProductOperation:
    """An operator of a library that computes one product of two matrices.

    Where a rule quantizes a call, the quantized product and its backward take the place of the call. Elsewhere the
    operator itself runs. The FLOPs follow from the factors.

    Attributes:
        operator: qualified name of the operator, "library::name".
        read: called with the arguments of a call, returns its factors. The arguments stand for tensors and may only be
            passed on.
        plugin: the plugin that offers the operation; set by the registry.
    """

    operator: str
    read: Callable[..., Factors]
    plugin: str = ""
