"""Computes block scales in fp32: rounds the block statistic Z to a value of the scale format, by exponent bits.

Logarithms are not used: ``floor(log2(z))`` is wrong just below most powers of two.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fp4graph.numerics.blocking import maximum
from fp4graph.numerics.formats import ElementFormat, ScaleFormat
from fp4graph.numerics.rounding import spacing, stochastic_integer, uniform
from fp4graph.numerics.spec import QuantSpec, ScaleSpec

if TYPE_CHECKING:
    from torch import Tensor

    from fp4graph.numerics.noise import Noise

_MANTISSA = 0x7FFFFF  # the mantissa bits of an fp32
_ONE = 127 << 23  # the bits of 1.0 in fp32


def amax(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the largest magnitude over ``axes``, fp32, axes kept with size 1: NaN if one is NaN, 0 without values."""
    return maximum(values.to(torch.float32).abs(), axes)


def block_scale(z: Tensor, spec: ScaleSpec, element: ElementFormat, noise: Noise | None = None) -> Tensor:
    """Return the stored scale of each block, in the spec's convention.

    With ``decode`` scales S ≈ Z / Qmax, x / S is rounded to the element q, which stands for q · S. With ``encode``
    scales s ≈ Qmax / Z, x · s is rounded to q, which stands for q / s. :class:`ScaleSpec` lists the rounding rules.

    A scale above the format's range saturates. ``spec.zero`` replaces a scale that underflows, that is, rounds to zero.
    E8M0 has no zero. There, and under rules that give powers of two, the scale is rounded with an unbounded exponent,
    and underflows if the result lies below the smallest value. Z = 0 underflows (with ``encode`` it saturates: Qmax/0
    is Inf).

    Args:
        z: fp32, non-negative; NaN and Inf give NaN.
        noise: the source of random bits; ``stochastic`` uses its ``block_bits``.

    Returns:
        fp32 of the shape of ``z``.

    Raises:
        ValueError: the rule is ``stochastic`` and there is no noise, or the rule is unknown.
    """
    shift = exponent_shift(spec, element)
    if shift is not None:
        scale = _from_exponent(((_unbounded(z) + shift) >> 23) - (127 + element.emax), spec)
    else:
        qmax = constant(element.max, z)
        ideal = z / qmax if spec.convention == "decode" else qmax / z
        bits = None
        if spec.rounding == "stochastic":
            if noise is None:
                raise ValueError("stochastic scale rounding needs noise")
            bits = noise.block_bits()
        scale = _to_format(ideal, spec, bits)
    return torch.where(z < math.inf, scale, math.nan)


def constant(value: float, like: Tensor) -> Tensor:
    """Return ``value`` as an fp32 tensor of the shape of ``like``, so that divisions with it are correctly rounded.

    With a Python number c, x / c is computed as x · (1/c) on some devices, and c / x as c · (1/x) on all devices. For
    GPUs Inductor treats a tensor that it can prove constant, such as a result of torch.full, like a number. It does not
    see that torch.where chooses between two equal tensors.
    """
    filled = torch.full((), value, dtype=torch.float32, device=like.device)
    return torch.where(like == like, filled, filled)


def group_scale(g: Tensor, kappa: float) -> Tensor:
    """Return γ = g/κ, fp32, raised to fp32's smallest normal number so that x/γ stays finite; 1 where ``g`` is 0."""
    return torch.where(g == 0, 1.0, (g / constant(kappa, g)).clamp(min=2.0**-126))


def kappa(spec: QuantSpec, target: float | None, headroom: float = 1.0) -> float:
    """Return κ = Qmax·T·headroom, where T is the ``target``, or without a target the largest scale of the format.

    Return 1 without a target if the format spans fp32's exponents. After division by γ = g/κ, the largest block of a
    group has the decode scale T·headroom.
    """
    scale_format = spec.scale.format
    if target is None and scale_format.spans_fp32:
        return 1.0
    return spec.element.max * (scale_format.max if target is None else target) * headroom


def mantissa(z: Tensor, divisor: float, bits: int) -> Tensor:
    """Return the mantissa of ``z / divisor``, from 1 to 2, rounded up to ``bits`` stored bits: fp32, shape of ``z``.

    It is 1 where the quotient is zero, subnormal, Inf or NaN.

    Args:
        z: fp32, non-negative.
    """
    quotient = (z / constant(divisor, z)).view(torch.int32)
    below = (1 << (23 - bits)) - 1
    # Rounding up past the largest mantissa carries into the exponent and gives 2.
    rounded = (((quotient & _MANTISSA) + below) & ~below) + _ONE
    exponent = quotient >> 23
    ordinary = (exponent > 0) & (exponent < 255)
    return torch.where(ordinary, rounded, _ONE).view(torch.float32)


def ratio(values: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """Return the ratio to be rounded to elements, ``x / S`` or ``x · s``; all tensors in the blocked layout."""
    return values / scale if spec.scale.convention == "decode" else values * scale


def dequantize(elements: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """Return the values that elements represent, ``q · S`` or ``q / s``; Inf beyond fp32's range, as in any cast."""
    return elements * scale if spec.scale.convention == "decode" else elements / scale


def exponent_shift(spec: ScaleSpec, element: ElementFormat) -> int | None:
    """Return the number to add to the bits of Z for a rule that gives powers of two, and None for the other rules.

    The scale's exponent is the exponent of the sum, less Emax. Adding 2^23 - 1 - t carries into the exponent exactly
    where the mantissa exceeds t.

    Raises:
        ValueError: the rule is unknown.
    """
    match spec.rounding:
        case "floor":
            return 0
        case "ceil":  # up where Z's mantissa exceeds the mantissa of Qmax
            return _MANTISSA - int((2 * math.frexp(element.max)[0] - 1) * 2**23)
        case "amax_ceil":  # up unless Z is a power of two
            return _MANTISSA
        case "amax_even":  # up where Z rounds up to a power of two
            return 1 << (22 - element.top_mantissa_bits)
        case "nearest_even" | "toward_positive" | "stochastic":
            return None
    raise ValueError(f"scale rounding {spec.rounding!r} has no implementation")


def _unbounded(z: Tensor) -> Tensor:
    """Return the bits of fp32 ``z >= 0`` with an unbounded exponent field, which is at most 0 for subnormal numbers.

    The integer-to-float conversion normalises subnormals without arithmetic on them, which some devices flush to zero.
    """
    bits = z.view(torch.int32)
    return torch.where(bits > _MANTISSA, bits, bits.to(torch.float32).view(torch.int32) - (149 << 23))


def _from_exponent(exponent: Tensor, spec: ScaleSpec) -> Tensor:
    """Return 2^exponent, for an int32 exponent, clamped to the range of ``spec.format``."""
    scale_format = spec.format
    lowest, highest = scale_format.min_exponent - scale_format.mantissa_bits, scale_format.top_exponent
    within = exponent.clamp(lowest, highest)
    bits = (within + 127) << 23
    if lowest < -126:
        subnormal = torch.ones_like(within) << (within + 149).clamp(0, 22)
        bits = torch.where(within < -126, subnormal, bits)
    scale = bits.view(torch.float32)
    if scale_format.max != 2.0**highest:
        scale = torch.where(exponent > highest, scale_format.max, scale)
    return torch.where(exponent < lowest, 1.0, scale) if spec.zero == "to_one" else scale


def _to_format(ideal: Tensor, spec: ScaleSpec, noise: Tensor | None) -> Tensor:
    """Return ``ideal`` (fp32, >= 0) rounded to ``spec.format``; ``noise`` is int32 bits if the rule is stochastic."""
    scale_format = spec.format
    ideal = ideal.clamp(max=scale_format.max)
    if not scale_format.has_zero:
        bits = _unbounded(ideal)
        return _from_exponent(((bits + _carry(bits, 23, spec, noise)) >> 23) - 127, spec)
    dropped = 23 - scale_format.mantissa_bits
    if scale_format.min_exponent != -126:
        scale = _round_spaced(ideal, spec, noise)
    elif dropped:  # the format has fp32's exponents: its values are the fp32 numbers with zeros in the low bits
        bits = ideal.view(torch.int32)
        scale = ((bits + _carry(bits, dropped, spec, noise)) & -(1 << dropped)).view(torch.float32)
    else:
        scale = ideal
    return torch.where(scale == 0, 1.0, scale) if spec.zero == "to_one" else scale.clamp(min=scale_format.min)


def _carry(bits: Tensor, dropped: int, spec: ScaleSpec, noise: Tensor | None) -> Tensor | int:
    """Return the number to add to ``bits`` so that dropping the ``dropped`` low bits rounds by the spec's rule."""
    below = (1 << dropped) - 1
    if spec.rounding == "toward_positive":
        return below
    if noise is not None:
        # Up iff fraction/2^dropped > k/2^24, in integers: fraction > k >> (24 - dropped).
        return below - (((noise >> 8) & 0xFFFFFF) >> (24 - dropped))
    if dropped == 23:
        if spec.ties == "even":  # the code counts exponents from the lowest; a tie above an odd code goes up
            return below // 2 + ((bits >> 23) - (127 + spec.format.min_exponent) & 1)
        # A tie lies between a power of two and its double, 1 and 2 in units of the lower: 2 is even, so ties go up, as
        # in ml_dtypes and torch. By the parity of the code every second tie would go down.
        return 1 << 22
    return (below >> 1) + ((bits >> dropped) & 1)


def round_stochastically(x: Tensor, scale_format: ScaleFormat, bits: Tensor) -> Tensor:
    """Return ``x >= 0`` rounded stochastically to a format with fewer exponents than fp32, by int32 ``bits``."""
    step, inverse = spacing(x, scale_format.min_exponent, scale_format.mantissa_bits)
    return stochastic_integer(x * inverse, uniform(bits)) * step


def _round_spaced(ideal: Tensor, spec: ScaleSpec, noise: Tensor | None) -> Tensor:
    """Return ``ideal`` rounded to a format with fewer exponents than fp32, in the way elements are rounded."""
    if noise is not None and spec.rounding != "toward_positive":
        return round_stochastically(ideal, spec.format, noise)
    step, inverse = spacing(ideal, spec.format.min_exponent, spec.format.mantissa_bits)
    v = ideal * inverse
    return (v.ceil() if spec.rounding == "toward_positive" else torch.round(v)) * step
