"""A block's scale: from its statistic Z to a value of the scale format, in fp32, by exponent bits.

Logarithms are not used: ``floor(log2(z))`` is wrong just below most powers of two.
"""

from __future__ import annotations

import math

import torch

from fp4graph.numerics.formats import ElementFormat
from fp4graph.numerics.noise import Noise
from fp4graph.numerics.rounding import spacing, stochastic_integer, uniform
from fp4graph.numerics.spec import QuantSpec, ScaleSpec

_MANTISSA = 0x7FFFFF  # the mantissa bits of an fp32


def amax(values: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """The largest magnitude over ``axes``, fp32, axes kept with size 1. NaN if any value is NaN."""
    return values.to(torch.float32).abs().amax(axes, keepdim=True)


def block_scale(z: torch.Tensor, spec: ScaleSpec, element: ElementFormat, noise: Noise | None = None) -> torch.Tensor:
    """The scale that is stored for each block, in the spec's convention.

    ``decode``: S ≈ Z / Qmax, elements are ``x / S`` and stand for ``q · S``. ``encode``: s ≈ Qmax / Z, elements are
    ``x · s`` and stand for ``q / s``. Rounding rules: :class:`ScaleSpec`.

    Above the format's range the scale saturates. One that underflows becomes what ``spec.zero`` says. Underflow means
    rounding to zero; for E8M0, which has no zero, and for the rules that give powers of two, it means lying below the
    smallest value once rounded with unbounded exponent. Z = 0 underflows (with ``encode``, saturates: Qmax/0 is Inf).

    Args:
        z: fp32, non-negative; NaN and Inf give NaN.
        noise: for ``stochastic``, which uses its ``block_bits``.

    Returns:
        fp32 of the shape of ``z``.

    Raises:
        ValueError: ``stochastic`` without noise.
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


def constant(value: float, like: torch.Tensor) -> torch.Tensor:
    """``value`` as fp32 in the shape of ``like``, to divide by it or to divide it: with the correctly rounded quotient.

    Dividing by a number multiplies by its reciprocal on some devices, and dividing a number multiplies by the
    reciprocal on all. For GPUs Inductor does the first with any tensor that it can prove to be constant, one of
    torch.full included; a choice, if between equals, it does not see through.
    """
    number = torch.full((), value, dtype=torch.float32, device=like.device)
    return torch.where(like == like, number, number)


def ratio(values: torch.Tensor, scale: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """What is rounded to elements: ``x / S``, or ``x · s``; ``values`` and ``scale`` in the blocked layout."""
    return values / scale if spec.scale.convention == "decode" else values * scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """What elements stand for: ``q · S``, or ``q / s``. Beyond fp32's range that is Inf, as in any cast."""
    return codes * scale if spec.scale.convention == "decode" else codes / scale


def exponent_shift(spec: ScaleSpec, element: ElementFormat) -> int | None:
    """What to add to the bits of Z so that the exponent of the sum, less Emax, is the scale's; None: another rule.

    Adding 2^23 - 1 - t carries into the exponent exactly where the mantissa exceeds t.
    """
    significand, _ = math.frexp(element.max)
    return {
        "floor": 0,
        "ceil": _MANTISSA - int((2 * significand - 1) * 2**23),  # up where Z's mantissa exceeds that of Qmax
        "amax_ceil": _MANTISSA,  # up unless Z is a power of two
        "amax_even": 1 << (22 - element.top_mantissa_bits),  # up where Z rounds up to a power of two
    }.get(spec.rounding)


def _unbounded(z: torch.Tensor) -> torch.Tensor:
    """The bits of fp32 ``z >= 0`` as if its exponent were unbounded: subnormals normalised, fields below 1 negative.

    The integer-to-float conversion normalises without arithmetic on subnormals, which some devices flush to zero.
    """
    bits = z.view(torch.int32)
    return torch.where(bits > _MANTISSA, bits, bits.to(torch.float32).view(torch.int32) - (149 << 23))


def _from_exponent(exponent: torch.Tensor, spec: ScaleSpec) -> torch.Tensor:
    """2^exponent (int32) brought into the range of ``spec.format``."""
    number = spec.format
    lowest, highest = number.min_exponent - number.mantissa_bits, number.top_exponent
    within = exponent.clamp(lowest, highest)
    bits = (within + 127) << 23
    if lowest < -126:
        subnormal = torch.ones_like(within) << (within + 149).clamp(0, 22)
        bits = torch.where(within < -126, subnormal, bits)
    scale = bits.view(torch.float32)
    if number.max != 2.0**highest:
        scale = torch.where(exponent > highest, number.max, scale)
    return torch.where(exponent < lowest, 1.0, scale) if spec.zero == "to_one" else scale


def _to_format(ideal: torch.Tensor, spec: ScaleSpec, noise: torch.Tensor | None) -> torch.Tensor:
    """``ideal`` (fp32, >= 0) rounded to ``spec.format``; ``noise`` is int32 bits where the rule is stochastic."""
    number = spec.format
    ideal = ideal.clamp(max=number.max)
    if not number.has_zero:
        bits = _unbounded(ideal)
        return _from_exponent(((bits + _carry(bits, 23, spec, noise)) >> 23) - 127, spec)
    if number.min_exponent == -126:
        scale = _round_bits(ideal, 23 - number.mantissa_bits, spec, noise)
    else:
        scale = _round_spaced(ideal, spec, noise)
    return torch.where(scale == 0, 1.0, scale) if spec.zero == "to_one" else scale.clamp(min=number.min)


def _round_bits(ideal: torch.Tensor, dropped: int, spec: ScaleSpec, noise: torch.Tensor | None) -> torch.Tensor:
    """Rounding to a format with fp32's exponents: its values are the fp32 numbers whose low bits are zero."""
    if dropped == 0:
        return ideal
    bits = ideal.view(torch.int32)
    return ((bits + _carry(bits, dropped, spec, noise)) & -(1 << dropped)).view(torch.float32)


def _carry(bits: torch.Tensor, dropped: int, spec: ScaleSpec, noise: torch.Tensor | None) -> torch.Tensor | int:
    """What to add to ``bits`` so that cutting the ``dropped`` low ones off rounds by the spec's rule."""
    below = (1 << dropped) - 1
    if spec.rounding == "toward_positive":
        return below
    if noise is not None:
        # Up iff rest/2^dropped > k/2^24, in integers: rest > k >> (24 - dropped).
        return below - (((noise >> 8) & 0xFFFFFF) >> (24 - dropped))
    if dropped == 23:
        # A power of two or its double: in units of the former 1 or 2, of which 2 is the even one. So do ml_dtypes and
        # torch; the parity of the code would send every second tie down.
        return 1 << 22
    return (below >> 1) + ((bits >> dropped) & 1)


def _round_spaced(ideal: torch.Tensor, spec: ScaleSpec, noise: torch.Tensor | None) -> torch.Tensor:
    """Rounding to a format with fewer exponents than fp32, as for elements."""
    step, inverse = spacing(ideal, spec.format.min_exponent, spec.format.mantissa_bits)
    v = ideal * inverse
    if spec.rounding == "toward_positive":
        return v.ceil() * step
    if noise is None:
        return torch.round(v) * step
    return stochastic_integer(v, uniform(noise)) * step
