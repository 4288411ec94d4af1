"""The data that techniques declare: their cost, the tensors that they keep, the channels that they split off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fp4graph.numerics.spec import QuantSpec
from fp4graph.technique.operands import Operand

if TYPE_CHECKING:
    from torch import Tensor

#: Specs of one site's six operands; None is high precision.
OperandSpecs = Mapping[Operand, "QuantSpec | None"]
#: The elements that may change what a technique does to an element of the same operand; each includes the ones before.
Mixes = Literal["none", "block", "expert", "tensor"]


@dataclass(frozen=True)
class Overhead:
    """The cost on n elements in blocks of l, as in Table 2 of "Elucidating the Design Space of FP4 Training"."""

    compute: str
    memory: str
    fusable: bool


@dataclass(frozen=True)
class StateEntry:
    """A tensor that a technique keeps in the model for each weight it acts on, as a buffer of the weight's module.

    Tensor stages read the entry as ``context.state[name]``, stages of the optimizer as ``WeightUpdate.state[name]``.
    The buffer and ``WeightUpdate.state`` have the layout in which the module stores its weight: ``[K, N]`` for Hugging
    Face's Conv1D, ``[N, K]`` otherwise. Tensor stages get a ``weight_like`` entry as they get the operand: transposed,
    rotated and cut into blocks like the weight. Under FSDP2 its buffer is a DTensor, sharded like the weight, and is
    gathered inside the graph; ``WeightUpdate.state`` holds the DTensor. Floating-point buffers keep their dtype
    whatever ``model.to`` says. A tensor that only the optimizer's stages read belongs into ``WeightUpdate.memory``.

    Attributes:
        name: the name of the entry; the buffer's name begins with the technique's (and the operand's, unless that is
            ``fprop.weight``).
        operand: the operand whose stages receive the entry.
        init: makes the first value from the whole weight, as stored: in ``apply``, again at the first training forward,
            and when a checkpoint lacks the entry. It must be a function of a module, not a lambda or a closure, because
            a new function at each call of ``parts`` would prevent shared compiled code.
        writer: the side that changes the entry: the ``optimizer``'s step, or the ``graph`` by the part's ``observe``.
            With ``siblings`` the entry is not kept: before each forward it becomes the maximum of ``init`` over this
            weight and those that servers fuse with it (q, k, v; gate, up). Such an ``init`` must itself be a maximum
            over elements, because a sharded weight takes the maximum over its shards.
        weight_like: whether the entry has the weight's shape. The stages get other entries as they are stored.
        canonical: whether ``init`` takes and returns ``[..., N, K]``, contraction axis last, in place of the stored
            layout; only for a ``weight_like`` entry.
        families: groups of last names of modules with one parent that are siblings too, beside those that servers fuse.
    """

    name: str
    operand: Operand
    init: Callable[[Tensor], Tensor]
    writer: Literal["optimizer", "graph", "siblings"] = "optimizer"
    weight_like: bool = True
    canonical: bool = False
    families: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Partition:
    """Input channels that a linear layer multiplies apart from its others, under specs of their own.

    X and W are cut along K into the channels C of the largest scores and the rest R. Each part is gathered by falling
    score; of equal scores the first channel comes first::

        fprop   Y       = Q1(X_R) @ Q2(W_R)ᵀ + C1(X_C) @ C2(W_C)ᵀ
        dgrad   dX      = Q3(dY) @ Q4(Wᵀ)ᵀ
        wgrad   dW_R    = Q5(dYᵀ) @ Q6(X_Rᵀ)ᵀ,   dW_C = C5(dYᵀ) @ C6(X_Cᵀ)ᵀ

    Q are the site's quantizers, with its techniques; C are plain quantizers by :attr:`specs`. dgrad is one product in
    the layer's own order of channels; with ``source: fprop`` it reads what Q2 and C2 gave.

    Attributes:
        entry: the name of the technique's :class:`StateEntry` with the scores, fp32 ``[K]``: an entry of
            ``fprop.weight`` that is not ``weight_like``.
        count: the number of chosen channels, from 1 to K - 1.
        specs: the specs of the chosen channels in fprop and wgrad, None or absent for high precision.
    """

    entry: str
    count: int
    specs: tuple[tuple[Operand, QuantSpec | None], ...]
