"""Element and scale formats as data: a new one is a few declarative lines.

Both are small binary floating-point formats. With exponent field E, mantissa field M of ``m`` bits and a bias, a code
means ``(1 + M/2^m) · 2^(E - bias)``, or ``M/2^m · 2^(1 - bias)`` where E is 0 (subnormals). An integer format is one
without exponent bits, so that every value is subnormal: a uniform grid.

Sources: OCP Microscaling Formats v1.0 (E2M1, E2M3, E3M2, E4M3, E5M2, INT8, E8M0); "Oscillation-Reduced MXFP4 Training
for Vision Transformers" (TetraJet) Tables 2 and 7 (E3M0, INT4); "Elucidating the design space of FP4 training",
A.4 and A.5 (UE5M3, E8M3).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TypeVar

from fp4graph.text import suggest

_Format = TypeVar("_Format")


@dataclass(frozen=True)
class ElementFormat:
    """What one element of a quantized tensor may be.

    Attributes:
        name: how policies call it.
        exponent_bits: 0 makes it an integer format, coded in two's complement and without a negative zero.
        mantissa_bits: stored bits below the leading one.
        bias: of the exponent field.
        max: the largest finite value; what lies above saturates to it.
        nan_code: the bit pattern written for NaN, or None where the format has none.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    nan_code: int | None = None

    def __post_init__(self) -> None:
        if self.max not in _magnitudes(self.mantissa_bits, self.bias, self.max, self.integer, True):
            raise ValueError(f"element format {self.name!r}: max={self.max} is not one of its values")

    @property
    def integer(self) -> bool:
        return self.exponent_bits == 0

    @property
    def code_bits(self) -> int:
        """Width of a code, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the lowest binade; below it the spacing no longer shrinks."""
        return 1 - self.bias

    @property
    def emax(self) -> int:
        """floor(log2 max), the Emax of OCP's scale rule."""
        return math.frexp(self.max)[1] - 1

    @property
    def top_mantissa_bits(self) -> int:
        """Bits below the leading one that tell the values of the top binade apart: fewer for an integer format."""
        return self.mantissa_bits - max(0, self.min_exponent - self.emax)

    def magnitudes(self) -> tuple[float, ...]:
        """Non-negative finite values; the position of each is its code."""
        return _magnitudes(self.mantissa_bits, self.bias, self.max, self.integer, True)

    def values(self) -> tuple[float, ...]:
        """All finite values, negative ones included, ascending; zero appears once."""
        positive = self.magnitudes()[1:]
        return (*(-value for value in reversed(positive)), 0.0, *positive)


@dataclass(frozen=True)
class ScaleFormat:
    """What the stored scale of a block may be: an unsigned format.

    Attributes:
        name: how policies call it.
        exponent_bits, mantissa_bits, bias: of the code.
        max: the largest finite value; what lies above saturates to it.
        has_zero: whether code 0 is zero and the codes above it are subnormal (all formats but E8M0, where code 0 is a
            power of two like any other).
        nan_code: the bit pattern of NaN where the format is stored as a code; None where it is stored as a float.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    has_zero: bool = True
    nan_code: int | None = None

    def __post_init__(self) -> None:
        if (self.mantissa_bits == 0) == self.has_zero:
            raise ValueError(f"scale format {self.name!r}: formats of powers of two, and only they, have no zero")
        if self.min_exponent < -127 or self.max >= 2.0**128:
            raise ValueError(f"scale format {self.name!r}: the range exceeds fp32's, in which scales are computed")

    @property
    def code_bits(self) -> int:
        return self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the lowest binade."""
        return 1 - self.bias if self.has_zero else -self.bias

    @property
    def top_exponent(self) -> int:
        """Exponent of the highest binade."""
        return math.frexp(self.max)[1] - 1

    @property
    def min(self) -> float:
        """The smallest positive value."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    def values(self) -> tuple[float, ...]:
        """All finite values, ascending; the position of each is its code.

        Raises:
            ValueError: for fp32, whose two thousand million values nobody wants in a tuple.
        """
        if self.mantissa_bits > 10:
            raise ValueError(f"scale format {self.name!r} has too many values to list")
        return _magnitudes(self.mantissa_bits, self.bias, self.max, False, self.has_zero)

    def with_max(self, value: float) -> ScaleFormat:
        """The variant that saturates at ``value``, named after it: ``UE5M3.with_max(61440)`` is "ue5m3_61440"."""
        variant = replace(self, name=f"{self.name}_{value:.0f}", max=float(value))
        if variant.max not in variant.values():
            raise ValueError(f"{value} is not a value of scale format {self.name!r}")
        return variant


@functools.cache
def _magnitudes(mantissa_bits: int, bias: int, largest: float, integer: bool, has_zero: bool) -> tuple[float, ...]:
    """Values of the codes from 0 up to that of ``largest``."""
    values: list[float] = []
    for code in range(1 << 16):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        if integer or (exponent == 0 and has_zero):
            value = code * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        if value > largest:
            break
        values.append(value)
    return tuple(values)


E2M1 = ElementFormat("e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max=6.0)
E3M0 = ElementFormat("e3m0", exponent_bits=3, mantissa_bits=0, bias=3, max=16.0)
INT4 = ElementFormat("int4", exponent_bits=0, mantissa_bits=3, bias=-2, max=7.0)
E2M3 = ElementFormat("e2m3", exponent_bits=2, mantissa_bits=3, bias=1, max=7.5)
E3M2 = ElementFormat("e3m2", exponent_bits=3, mantissa_bits=2, bias=3, max=28.0)
#: Called so because E4M3 is better known here as a scale; policies say "e4m3" for either.
E4M3_ELEMENT = ElementFormat("e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max=448.0, nan_code=0x7F)
E5M2 = ElementFormat("e5m2", exponent_bits=5, mantissa_bits=2, bias=15, max=57344.0, nan_code=0x7E)
#: OCP's: a step of 2^-6, kept symmetric (the code of -2 is not used).
INT8 = ElementFormat("int8", exponent_bits=0, mantissa_bits=7, bias=0, max=127 / 64)

E8M0 = ScaleFormat("e8m0", exponent_bits=8, mantissa_bits=0, bias=127, max=2.0**127, has_zero=False, nan_code=0xFF)
E4M3 = ScaleFormat("e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max=448.0, nan_code=0x7F)
UE5M3 = ScaleFormat("ue5m3", exponent_bits=5, mantissa_bits=3, bias=15, max=114688.0, nan_code=0xFF)
#: The top exponent reserved, as in an IEEE format.
UE5M3_61440 = UE5M3.with_max(61440.0)
E8M3 = ScaleFormat("e8m3", exponent_bits=8, mantissa_bits=3, bias=127, max=1.875 * 2.0**127)
FP32 = ScaleFormat("fp32", exponent_bits=8, mantissa_bits=23, bias=127, max=(2 - 2.0**-23) * 2.0**127)
BF16 = ScaleFormat("bf16", exponent_bits=8, mantissa_bits=7, bias=127, max=(2 - 2.0**-7) * 2.0**127)

ELEMENTS: dict[str, ElementFormat] = {
    element.name: element for element in (E2M1, E3M0, INT4, E2M3, E3M2, E4M3_ELEMENT, E5M2, INT8)
}
SCALES: dict[str, ScaleFormat] = {scale.name: scale for scale in (E8M0, E4M3, UE5M3, UE5M3_61440, E8M3, FP32, BF16)}


def element_format(name: str) -> ElementFormat:
    """The built-in element format called ``name``; ValueError, naming the nearest, where there is none."""
    return _look_up(name, ELEMENTS, "element")


def scale_format(name: str) -> ScaleFormat:
    """The built-in scale format called ``name``; ValueError, naming the nearest, where there is none."""
    return _look_up(name, SCALES, "scale")


def _look_up(name: str, table: dict[str, _Format], kind: str) -> _Format:
    if name not in table:
        raise ValueError(f"no {kind} format {name!r}; {suggest(name.lower(), table)}")
    return table[name]
