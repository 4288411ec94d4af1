"""Rounding of fp32 numbers to the values of an element format.

Within a binade the values of a format are evenly spaced, and the exponent bits of a number ``u`` give the spacing
``step``, a power of two. So ``v = u / step`` is exact, and rounding ``v`` to an integer rounds ``u``. This is not done
by ``floor(v + 0.5)``, because the addition rounds: it would take 0.49999997 to 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from fp4graph.numerics.formats import ElementFormat

if TYPE_CHECKING:
    from torch import Tensor

_EXPONENT_MASK = 0x7F800000  # of an fp32's bits


def power_of_two(x: Tensor) -> Tensor:
    """Return the largest power of two <= abs(x), fp32: 0 where ``x`` is zero or subnormal, Inf where Inf or NaN."""
    return (x.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)


def spacing(u: Tensor, min_exponent: int, mantissa_bits: int) -> tuple[Tensor, Tensor]:
    """Return the distance ``step`` between neighbouring values around ``u``, and its reciprocal: powers of two.

    Args:
        u: fp32, finite and below 2^(127 - mantissa_bits) in magnitude (for NaN the steps are arbitrary numbers).
        min_exponent: exponent of the format's lowest binade, below which ``step`` is constant.
        mantissa_bits: mantissa bits of the format.
    """
    exponent = (u.view(torch.int32) & _EXPONENT_MASK).clamp(min=(min_exponent + 127) << 23)
    step = exponent - (mantissa_bits << 23)
    return step.view(torch.float32), ((254 << 23) - step).view(torch.float32)


def round_nearest(u: Tensor, element: ElementFormat, ties: Literal["even", "up", "away"] = "even") -> Tensor:
    """Return the value of ``element`` nearest to each of fp32 ``u``, saturating: fp32 of the same shape.

    NaN stays NaN; a zero keeps the sign of ``u`` if the format has a negative zero. Halfway between two values ``even``
    takes the value with the even code (OCP), ``up`` the greater value (TetraJet Alg. 1), ``away`` the larger magnitude.
    """
    u = u.clamp(-element.max, element.max)
    step, inverse = spacing(u, element.min_exponent, element.mantissa_bits)
    v = u * inverse
    if ties == "even" and element.mantissa_bits:
        # A binade starts at an even code, so a code has the parity of v, and torch.round rounds ties to even.
        return _normal_zero(torch.round(v) * step, element)
    if ties != "up":
        v = v.abs()
    lower = v.floor()
    fraction = v - lower
    if ties == "even":
        # Without mantissa bits every binade holds one value, and codes count binades.
        code = (step.view(torch.int32) >> 23) - (element.min_exponent + 127) + lower.to(torch.int32)
        rounded = lower + ((fraction > 0.5) | ((fraction == 0.5) & ((code & 1) == 1)))
    else:
        # Add 1 iff fraction >= 1/2. The difference has the right sign even if it is rounded. Float arithmetic is much
        # faster than a comparison, whose result compiled code on the CPU keeps as a tensor of bool.
        rounded = lower + (1 - (0.5 - fraction).ceil())
    return _with_sign(rounded * step, u, element)


def round_stochastic(u: Tensor, element: ElementFormat, bits: Tensor, random_bits: int = 24) -> Tensor:
    """Return one of the two values of ``element`` around each of fp32 ``u``, saturating: fp32 of the same shape.

    The value farther from zero is taken with a probability equal to the fraction of the way that ``u`` lies towards it.
    NaN and zeros are as in :func:`round_nearest`.

    Args:
        bits: int32, broadcastable to ``u``: 32 random bits per element, of which the top ``random_bits`` are used.
        random_bits: 24 compares the fraction with r = k·2^-24; b < 24 with the midpoint r = (k + 1/2)·2^-b
            (Fitzgibbon & Felix 2025, "Stochastic rounding with few random bits").
    """
    u = u.clamp(-element.max, element.max)
    step, inverse = spacing(u, element.min_exponent, element.mantissa_bits)
    v = (u * inverse).abs()
    return _with_sign(stochastic_integer(v, uniform(bits, random_bits)) * step, u, element)


def stochastic_integer(v: Tensor, r: Tensor) -> Tensor:
    """Return ⌊v⌋ + 1 where the fraction of ``v >= 0`` exceeds ``r``, which is in [0, 1), and ⌊v⌋ elsewhere."""
    lower = v.floor()
    return lower + (v - lower - r).ceil()  # in floats and not as a comparison: see round_nearest


def uniform(bits: Tensor, random_bits: int = 24) -> Tensor:
    """Return fp32 in [0, 1) from the top ``random_bits`` of int32 ``bits``: k·2^-24, or (k + 1/2)·2^-b for b < 24."""
    k = (bits >> (32 - random_bits)) & ((1 << random_bits) - 1)
    offset = 0.0 if random_bits == 24 else 2.0 ** -(random_bits + 1)
    scaled = k.to(torch.float32) * 2.0**-random_bits
    return scaled + offset if offset else scaled


def bracket(u: Tensor, element: ElementFormat) -> tuple[Tensor, Tensor]:
    """Return the neighbouring values ``lower <= u <= upper`` of ``element``: fp32, in the shape of fp32 ``u``.

    They are equal where ``u`` is a value or out of range, and NaN where ``u`` is NaN.
    """
    u = u.clamp(-element.max, element.max)
    step, inverse = spacing(u, element.min_exponent, element.mantissa_bits)
    v = u * inverse
    return _normal_zero(v.floor() * step, element), _normal_zero(v.ceil() * step, element)


def _with_sign(q: Tensor, u: Tensor, element: ElementFormat) -> Tensor:
    """Return ``q``, which has no sign or that of ``u``, with the sign of ``u``; a zero of integer formats has none."""
    # The exponent needs the bits of u anyway; torch.copysign is a slow call in compiled code on the CPU.
    sign = u.view(torch.int32) & -(1 << 31)
    return _normal_zero((q.view(torch.int32) | sign).view(torch.float32), element)


def _normal_zero(q: Tensor, element: ElementFormat) -> Tensor:
    """Return ``q`` with -0 replaced by 0 for integer formats, which have one zero."""
    return torch.where(q == 0, 0.0, q) if element.integer else q
