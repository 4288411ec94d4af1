"""Element and scale formats as data: a new format is a few declarative lines.

Both kinds are small binary floating-point formats. A code with exponent field E and mantissa field M of ``m`` bits
means ``(1 + M/2^m) · 2^(E - bias)``, or ``M/2^m · 2^(1 - bias)`` where E is 0 (subnormals). An integer format has no
exponent bits: all of its values are subnormal and form a uniform grid.

Sources: OCP Microscaling Formats v1.0 (E2M1, E2M3, E3M2, E4M3, E5M2, INT8, E8M0); "Oscillation-Reduced MXFP4 Training
for Vision Transformers" (TetraJet) Tables 2 and 7 (E3M0, INT4); "Elucidating the design space of FP4 training",
A.4 and A.5 (UE5M3, E8M3).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TypeVar

from fp4graph.errors import suggest

_Format = TypeVar("_Format")


@dataclass(frozen=True)
class ElementFormat:
    """The values that one element of a quantized tensor may have.

    Attributes:
        name: the name in policies.
        exponent_bits: the width of the exponent field. A width of 0 makes an integer format, which is coded in two's
            complement and has no negative zero.
        mantissa_bits: the number of stored mantissa bits, without the implicit 1.
        bias: the bias of the exponent field.
        max: the largest finite value, to which larger values saturate.
        nan_code: the code of NaN, or None if the format has none.
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
        """The width of a code, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """The exponent of the lowest binade, below which the spacing no longer shrinks."""
        return 1 - self.bias

    @property
    def emax(self) -> int:
        """floor(log2 max), the Emax of OCP's scale rule."""
        return math.frexp(self.max)[1] - 1

    @property
    def top_mantissa_bits(self) -> int:
        """The number of mantissa bits that distinguish values of the top binade; an integer format has fewer there."""
        return self.mantissa_bits - max(0, self.min_exponent - self.emax)

    def magnitudes(self) -> tuple[float, ...]:
        """Return the non-negative finite values; the position of each is its code."""
        return _magnitudes(self.mantissa_bits, self.bias, self.max, self.integer, True)

    def values(self) -> tuple[float, ...]:
        """Return all finite values, ascending, negative ones included; zero appears once."""
        positive = self.magnitudes()[1:]
        return (*(-value for value in reversed(positive)), 0.0, *positive)


@dataclass(frozen=True)
class ScaleFormat:
    """The values that the stored scale of a block may have: an unsigned format.

    Attributes:
        name, exponent_bits, mantissa_bits, bias, max: as in an :class:`ElementFormat`.
        has_zero: whether code 0 is zero and the codes above it are subnormal (all formats but E8M0, where code 0 is a
            power of two like any other).
        nan_code: the code of NaN if the format is stored as a code; None if it is stored as a float.
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
            raise ValueError(f"scale format {self.name!r}: has_zero must be False without mantissa bits, else True")
        if self.min_exponent < -127 or self.max >= 2.0**128:
            raise ValueError(f"scale format {self.name!r}: the range exceeds fp32's, in which scales are computed")
        if self.has_zero and self.min_exponent != -126 and self.min < 2.0**-126:  # its spacing has no fp32 reciprocal
            raise ValueError(
                f"scale format {self.name!r}: its smallest value, {self.min:.4g}, is subnormal in fp32, so it needs "
                f"fp32's bias, 127; got bias={self.bias}"
            )

    @property
    def code_bits(self) -> int:
        return self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """The exponent of the lowest binade."""
        return 1 - self.bias if self.has_zero else -self.bias

    @property
    def top_exponent(self) -> int:
        """The exponent of the highest binade."""
        return math.frexp(self.max)[1] - 1

    @property
    def min(self) -> float:
        """The smallest positive value."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    def values(self) -> tuple[float, ...]:
        """Return all finite values, ascending; the position of each is its code.

        Raises:
            ValueError: the format has more than 10 mantissa bits, like fp32, and so too many values to list.
        """
        if self.mantissa_bits > 10:
            raise ValueError(f"scale format {self.name!r} has too many values to list")
        return _magnitudes(self.mantissa_bits, self.bias, self.max, False, self.has_zero)

    @property
    def spans_fp32(self) -> bool:
        """True if the lowest binade has the exponent of fp32's smallest normal number, or a lower exponent."""
        return self.min_exponent <= -126

    def with_max(self, value: float) -> ScaleFormat:
        """Return the variant that saturates at ``value``: ``UE5M3.with_max(61440)`` is called "ue5m3_61440"."""
        variant = replace(self, name=f"{self.name}_{value:.0f}", max=float(value))
        if variant.max not in variant.values():
            raise ValueError(f"{value} is not a value of scale format {self.name!r}")
        return variant


@functools.cache
def _magnitudes(mantissa_bits: int, bias: int, largest: float, integer: bool, has_zero: bool) -> tuple[float, ...]:
    """Return the values of all codes from 0 up to the code of ``largest``."""
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
#: Named so because ``E4M3`` is the scale format; policies write "e4m3" for both.
E4M3_ELEMENT = ElementFormat("e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max=448.0, nan_code=0x7F)
E5M2 = ElementFormat("e5m2", exponent_bits=5, mantissa_bits=2, bias=15, max=57344.0, nan_code=0x7E)
#: INT8 of OCP: multiples of 2^-6 from -127/64 to 127/64 (the code of -2 is not used).
INT8 = ElementFormat("int8", exponent_bits=0, mantissa_bits=7, bias=0, max=127 / 64)

E8M0 = ScaleFormat("e8m0", exponent_bits=8, mantissa_bits=0, bias=127, max=2.0**127, has_zero=False, nan_code=0xFF)
E4M3 = ScaleFormat("e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max=448.0, nan_code=0x7F)
UE5M3 = ScaleFormat("ue5m3", exponent_bits=5, mantissa_bits=3, bias=15, max=114688.0, nan_code=0xFF)
#: UE5M3 with the top exponent reserved, as in an IEEE format.
UE5M3_61440 = UE5M3.with_max(61440.0)
E8M3 = ScaleFormat("e8m3", exponent_bits=8, mantissa_bits=3, bias=127, max=1.875 * 2.0**127)
FP32 = ScaleFormat("fp32", exponent_bits=8, mantissa_bits=23, bias=127, max=(2 - 2.0**-23) * 2.0**127)
BF16 = ScaleFormat("bf16", exponent_bits=8, mantissa_bits=7, bias=127, max=(2 - 2.0**-7) * 2.0**127)

ELEMENTS: dict[str, ElementFormat] = {
    element.name: element for element in (E2M1, E3M0, INT4, E2M3, E3M2, E4M3_ELEMENT, E5M2, INT8)
}
SCALES: dict[str, ScaleFormat] = {scale.name: scale for scale in (E8M0, E4M3, UE5M3, UE5M3_61440, E8M3, FP32, BF16)}


def element_format(name: str) -> ElementFormat:
    """Return the built-in element format ``name``; raise ValueError, with the nearest name, if it is unknown."""
    return _look_up(name, ELEMENTS, "element")


def scale_format(name: str) -> ScaleFormat:
    """Return the built-in scale format ``name``; raise ValueError, with the nearest name, if it is unknown."""
    return _look_up(name, SCALES, "scale")


def _look_up(name: str, table: dict[str, _Format], kind: str) -> _Format:
    if name not in table:
        raise ValueError(f"no {kind} format {name!r}; {suggest(name.lower(), table)}")
    return table[name]
