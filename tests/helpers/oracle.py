"""A slow scalar oracle for the quantizer, written from the definitions.

It shares nothing with the vectorised code but the format definitions: rounding looks for neighbours in the list of a
format's values, scale rules compare exact fractions. numpy's float32 serves for the single operations that are fp32 by
definition: Z/Qmax, x/S, q·S. Only :func:`quantized` splits tensors into blocks, and draws bits, as the engine does.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.formats import ElementFormat
from fp4graph.numerics.noise import Noise
from fp4graph.numerics.spec import QuantSpec, ScaleSpec

_NAN = float("nan")


def quantize_block(
    values: Sequence[float], spec: QuantSpec, bits: Sequence[int] | None = None, block_bits: int | None = None
) -> list[float]:
    """Return one block quantized and dequantized.

    Args:
        values: numbers that fp32 represents.
        spec: its block shape is ignored: ``values`` is the block.
        bits: 32 random bits per value (of either signedness), for stochastic rounding.
        block_bits: 32 random bits of the block, for stochastic scales.

    Returns:
        fp32 numbers as Python floats.
    """
    scale = scale_of_block(values, spec.scale, spec.element, block_bits)
    if math.isnan(scale):
        return [_NAN] * len(values)
    decode = spec.scale.convention == "decode"
    result = []
    for position, value in enumerate(values):
        u = _divide(value, scale) if decode else _multiply(value, scale)
        if spec.rounding == "stochastic":
            if bits is None:
                raise ValueError("stochastic rounding needs bits")
            q = round_stochastic(u, spec.element, bits[position], spec.random_bits)
        else:
            q = round_nearest(u, spec.element, spec.ties)
        result.append(_multiply(q, scale) if decode else _divide(q, scale))
    return result


def round_nearest(u: float, element: ElementFormat, ties: str) -> float:
    """Return the value of ``element`` nearest to ``u``, by the distances to its two neighbours."""
    lower, upper = neighbours(u, element)
    below, above = Fraction(u) - Fraction(lower), Fraction(upper) - Fraction(u)
    if lower == upper or above != below:
        q = lower if lower == upper or below < above else upper
    elif ties == "up":
        q = upper
    elif ties == "away":
        q = max(lower, upper, key=abs)
    else:
        q = min(lower, upper, key=lambda value: _code(value, element) % 2)
    return _signed(q, u, element)


def round_stochastic(u: float, element: ElementFormat, bits: int, random_bits: int) -> float:
    """Return the neighbour of ``u`` away from zero if ``u`` is more than r of the way to it, else the other."""
    near, far = sorted(neighbours(u, element), key=abs)
    if near == far:
        return _signed(near, u, element)
    r = Fraction((bits % 2**32) >> (32 - random_bits), 2**random_bits)
    if random_bits < 24:
        r += Fraction(1, 2 ** (random_bits + 1))
    fraction = (Fraction(u) - Fraction(near)) / (Fraction(far) - Fraction(near))
    return _signed(far if fraction > r else near, u, element)


def neighbours(u: float, element: ElementFormat) -> tuple[float, float]:
    """Return the values of ``element`` below and above ``u``; equal ones if ``u`` is a value or out of range."""
    grid = element.values()
    u = min(max(u, grid[0]), grid[-1])
    above = bisect.bisect_left(grid, u)
    return (u, u) if grid[above] == u else (grid[above - 1], grid[above])


def scale_of_block(values: Sequence[float], spec: ScaleSpec, element: ElementFormat, bits: int | None = None) -> float:
    """Return the stored scale of a block, in the spec's convention."""
    if not all(math.isfinite(value) for value in values):
        return _NAN
    z, qmax = max(abs(value) for value in values), element.max
    if spec.rounding in ("floor", "ceil", "amax_ceil", "amax_even"):
        return _power_of_two_scale(Fraction(z), spec, element)
    with np.errstate(all="ignore"):
        z32, qmax32 = np.float32(z), np.float32(qmax)
        ideal = float(z32 / qmax32 if spec.convention == "decode" else qmax32 / z32)
    return _round_scale(min(ideal, spec.format.max), spec, bits)


def _power_of_two_scale(z: Fraction, spec: ScaleSpec, element: ElementFormat) -> float:
    emax = _floor_log2(Fraction(element.max))
    if z == 0:
        return _underflow(spec)
    if spec.rounding == "floor":
        exponent = _floor_log2(z) - emax
    elif spec.rounding == "ceil":
        exponent = _ceil_log2(z / Fraction(element.max))
    elif spec.rounding == "amax_ceil":
        exponent = _ceil_log2(z) - emax
    else:
        # Z is rounded to as many bits as the element's largest value has, ties away from zero.
        grid = element.values()
        unit = Fraction(grid[-1]) - Fraction(grid[-2])
        if element.mantissa_bits == 0:
            unit *= 2  # the values 2^e and 2^(e-1) are half a unit of the upper one's binade apart
        unit *= _power(_floor_log2(z) - emax)
        exponent = _floor_log2(math.floor(z / unit + Fraction(1, 2)) * unit) - emax
    return _within_range(_power(exponent), spec)


def _round_scale(ideal: float, spec: ScaleSpec, bits: int | None) -> float:
    """Return ``ideal`` rounded to a value of the scale format."""
    number = spec.format
    if number.name == "fp32":
        return _within_range(Fraction(ideal), spec)
    if not number.has_zero:
        if ideal == 0:
            return _underflow(spec)
        # With unbounded exponent; the range is applied afterwards.
        exponent = _floor_log2(Fraction(ideal))
        lower, upper = _power(exponent), _power(exponent + 1)
        # Codes count powers of two from the smallest value up.
        code = exponent - _floor_log2(Fraction(number.min))
        tie = lower if spec.ties == "even" and code % 2 == 0 else upper
    else:
        grid = number.values()
        place = bisect.bisect_right(grid, ideal) - 1
        lower = Fraction(grid[place])
        upper = Fraction(grid[min(place + 1, len(grid) - 1)])
        tie = lower if place % 2 == 0 else upper
    exact = Fraction(ideal)
    if exact == lower:
        return _within_range(lower, spec)
    fraction = (exact - lower) / (upper - lower)
    if spec.rounding == "toward_positive":
        rounded = upper
    elif spec.rounding == "stochastic":
        if bits is None:
            raise ValueError("stochastic scale rounding needs block_bits")
        rounded = upper if fraction > Fraction((bits % 2**32) >> 8, 2**24) else lower
    elif fraction == Fraction(1, 2):
        rounded = tie
    else:
        rounded = upper if fraction > Fraction(1, 2) else lower
    return _within_range(rounded, spec)


def _within_range(scale: Fraction, spec: ScaleSpec) -> float:
    if scale < Fraction(spec.format.min):
        return _underflow(spec)
    return float(min(scale, Fraction(spec.format.max)))


def _underflow(spec: ScaleSpec) -> float:
    return 1.0 if spec.zero == "to_one" else spec.format.min


def _code(value: float, element: ElementFormat) -> int:
    """Return the code of a value's magnitude, which for integers has the parity of the value's own code."""
    return [v for v in element.values() if v >= 0].index(abs(value))


def _signed(q: float, u: float, element: ElementFormat) -> float:
    if q == 0:
        return 0.0 if element.integer else math.copysign(0.0, u)
    return q


def _power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def _floor_log2(x: Fraction) -> int:
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if _power(exponent) <= x else exponent - 1


def _ceil_log2(x: Fraction) -> int:
    exponent = _floor_log2(x)
    return exponent if _power(exponent) == x else exponent + 1


def _divide(a: float, b: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float32(a) / np.float32(b))


def _multiply(a: float, b: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float32(a) * np.float32(b))


def quantized(x: Tensor, spec: QuantSpec, key: Tensor, dim: int = -1) -> Tensor:
    """Return ``x [..., C]`` quantized along ``dim``, block by block, with the bits that its noise has under ``key``."""
    blocking = Blocking(tuple(x.shape), spec.block, dim)
    noise = Noise(key, blocking, x.device)
    number = blocking.block_index(x.device).expand(blocking.layout).flatten()
    order, lengths = number.argsort(stable=True), number.bincount().tolist()
    values, bits = blocking.split(x.float()), noise.bits().expand(blocking.layout)
    blocks = (torch.split(part.flatten()[order], lengths) for part in (values, bits))
    rows = zip(*blocks, noise.block_bits().flatten().tolist(), strict=True)
    found = [q for row, b, s in rows for q in quantize_block(row.tolist(), spec, b.tolist(), s)]
    result = torch.empty(number.shape).index_copy(0, order, torch.tensor(found))
    return blocking.join(result.view(blocking.layout)).to(x.dtype)
