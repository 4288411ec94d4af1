"""The switches that select kernels: the environment variable FP4GRAPH_KERNELS, and contexts that change them.

``1``, or unset: all are on. ``0``: no kernel of this project is used; quantizers are tensor code, and products run in
PyTorch's library. ``none``: like ``0``, and exact products of an fp32 model are not multiplied as bf16. Any other value
is a list of names separated by commas, which turns the other switches off:

=================  ====================================================================================================
``quantizers``     kernels of quantizers, rotations and statistics on both devices
``products=4096``  this project's GEMM on a GPU, for products whose accumulator a tensor scale multiplies, up to this
                   contraction length; ``products`` without a length means the default length
``bf16-products``  bf16 multiplication on a GPU for the exact products of an fp32 model
=================  ====================================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from fp4graph.errors import Error

VARIABLE = "FP4GRAPH_KERNELS"
_FORMER = ("FP4GRAPH_PRODUCT_LENGTH", "FP4GRAPH_BF16_PRODUCTS")
#: The library's way moves 4 to 8 more bytes per element of the result. At 4 TB/s and 650 TFLOP/s these take half of its
#: time for a length of 1024, and an eighth for 4096. The speed of the kernel beside cuBLAS was not measured on a card.
_LENGTH = 4096


@dataclass(frozen=True)
class Switches:
    """The kernels that may be used where they exist.

    Attributes:
        quantizers: whether to use kernels of quantizers, rotations and statistics.
        products: the longest contraction for which this project's GEMM multiplies an accumulator by a scalar; 0: none.
        bf16_products: whether to multiply exact products of an fp32 model as bf16 if the GPU supports it.
    """

    quantizers: bool = True
    products: int = _LENGTH
    bf16_products: bool = True

    def __str__(self) -> str:
        """Return the value of the environment variable that sets these switches."""
        names = (
            *(["quantizers"] if self.quantizers else []),
            *([f"products={self.products}"] if self.products else []),
            *(["bf16-products"] if self.bf16_products else []),
        )
        return ",".join(names) or "none"


ALL = Switches()
TENSOR_CODE = Switches(quantizers=False, products=0)
_WHOLE = {"1": ALL, "0": TENSOR_CODE, "none": Switches(False, 0, False)}
_HELP = (
    "unset it or write 1 for everything, 0 for tensor code only, none for tensor code with an fp32 model's products in "
    "fp32, or a list of what to use, such as quantizers,products=4096,bf16-products, where 4096 is the longest "
    "contraction that this project's GEMM takes"
)


def read(environment: Mapping[str, str]) -> Switches:
    """Return the switches that ``environment`` sets.

    Raises:
        Error: the value is not understood, or a variable of a former version is set. The message has a valid value.
    """
    value = environment.get(VARIABLE, "").strip() or "1"
    switches = _parsed(value)
    former = [name for name in _FORMER if name in environment]
    if former:
        raise Error(
            f"the environment variable {' and '.join(former)} is no longer read; unset it and write "
            f"{VARIABLE}={_with_former(switches, environment)}"
        )
    return switches


def _parsed(value: str) -> Switches:
    if value.strip() in _WHOLE:
        return _WHOLE[value.strip()]
    chosen: dict[str, Any] = {}
    for part in value.split(","):
        name, equals, length = (piece.strip() for piece in part.partition("="))
        field = name.replace("-", "_")
        numbered = name == "products" and equals and length.isdecimal()
        if name not in ("quantizers", "products", "bf16-products") or field in chosen or (equals and not numbered):
            raise Error(
                f"the environment variable {VARIABLE} is {value!r}, and {part.strip()!r} is not understood: {_HELP}"
            )
        chosen[field] = int(length) if numbered else _LENGTH if name == "products" else True
    return replace(_WHOLE["none"], **chosen)


def _with_former(switches: Switches, environment: Mapping[str, str]) -> str:
    """Return the value of the variable for ``switches``, changed as the variables of a former version ask."""
    length, narrow = (environment.get(name, "").strip() for name in _FORMER)
    if length.isdecimal() and switches.products:
        switches = replace(switches, products=int(length))
    return str(replace(switches, bf16_products=switches.bf16_products and narrow != "0"))


_current = read(os.environ)


def current() -> Switches:
    """Return the switches in effect."""
    return _current


@contextmanager
def using(**changes: Any) -> Iterator[None]:
    """Change fields of :class:`Switches` in this context."""
    global _current
    former, _current = _current, replace(_current, **changes)
    try:
        yield
    finally:
        _current = former
