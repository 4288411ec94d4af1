"""Which kernels are used: what the environment variable FP4GRAPH_KERNELS says, and contexts that change it.

``1``, or nothing: all. ``0``: none of this project's, so that quantizers are tensor code and products the library's.
``none``: nor are exact products of an fp32 model multiplied as bf16. Otherwise names, with commas between them; what is
not named is off:

=================  ====================================================================================================
``quantizers``     kernels of quantizers, rotations and statistics on both devices
``products=4096``  on a GPU the project's GEMM, where a tensor scale waits for the accumulator, up to this contraction
                   length; ``products`` alone: up to the length that is the default
``bf16-products``  on a GPU exact products of an fp32 model multiply as bf16
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
#: The library's GEMM moves 4 to 8 bytes more for each element of the result: at 4 TB/s and 650 TFLOP/s, of its time a
#: half for a length of 1024 and an eighth for 4096. How much slower than cuBLAS the kernel is, no card has been asked.
_LENGTH = 4096


@dataclass(frozen=True)
class Switches:
    """The kernels that may be used where they exist.

    Attributes:
        quantizers: kernels of quantizers.
        products: contraction length up to which a GEMM with a scalar on its accumulator is this project's; 0: never.
        bf16_products: exact products of an fp32 model multiply as bf16 where the card does.
    """

    quantizers: bool = True
    products: int = _LENGTH
    bf16_products: bool = True

    def __str__(self) -> str:
        """The value of the variable that says this."""
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
    """Return what ``environment`` asks for.

    Raises:
        Error: the value is not understood, or a variable of a former version is set. The message says what to write.
    """
    value = environment.get(VARIABLE, "").strip() or "1"
    found = _parsed(value)
    former = [name for name in _FORMER if name in environment]
    if former:
        raise Error(
            f"the environment variable {' and '.join(former)} is no longer read; unset it and write "
            f"{VARIABLE}={_with_former(found, environment)}"
        )
    return found


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
    """Return the value that says what the variables of a former version said."""
    length, narrow = (environment.get(name, "").strip() for name in _FORMER)
    if length.isdecimal() and switches.products:
        switches = replace(switches, products=int(length))
    return str(replace(switches, bf16_products=switches.bf16_products and narrow != "0"))


_current = read(os.environ)


def current() -> Switches:
    """Return what is used."""
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
