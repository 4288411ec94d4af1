"""Surrogate gradients of maxima and roundings, whose derivatives do not exist or are zero.

The functions take fp32 tensors. Techniques that replace the straight-through estimator call them in the backward pass,
and :func:`log_sum_exp` in the forward pass too.

Source: "Elucidating the design space of FP4 training", sec. 4 and 5, Table 1, A.13; Wang et al. 2025 (DGE).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fp4graph.numerics import blocking
from fp4graph.numerics.blocking import Groups
from fp4graph.numerics.formats import ElementFormat, ScaleFormat
from fp4graph.numerics.rounding import bracket, power_of_two, spacing
from fp4graph.numerics.scaling import amax

if TYPE_CHECKING:
    from torch import Tensor

_LAST = 2**31 - 1


def maximum(values: Tensor, groups: Groups) -> Tensor:
    """Return m, the largest abs(x) of each group, broadcastable to ``values``."""
    return groups.reduce(amax(values, groups.blocking.axes), "amax")


def log_sum_exp(values: Tensor, m: Tensor, beta: Tensor, groups: Groups) -> Tensor:
    """Return Z = m + log(Σ exp(β(abs(x) - m)))/β, at least m, of each group; 0 where m is 0. β has the shape of m."""
    z = m + torch.log(_total(_soft_weights(values, m, beta, groups), groups)) / beta
    return torch.where(m > 0, z, m)


def relative_beta(beta: float, unit: Tensor) -> Tensor:
    """Return β/unit, in the shape of ``unit``: the β for X that has the effect of β for X/unit; β where unit is 0."""
    absolute = torch.full_like(unit, beta)
    return torch.where(unit > 0, absolute / torch.where(unit > 0, unit, 1.0), absolute)


def softmax_gradient(values: Tensor, m: Tensor, beta: Tensor, groups: Groups) -> Tensor:
    """Return dZ/dx = softmax(β·abs(x))·sign(x), with sign(0) = 0 (Eq. 5)."""
    weights = _soft_weights(values, m, beta, groups)
    return weights / _total(weights, groups) * values.sign()


def absmax_gradient(values: Tensor, m: Tensor, groups: Groups) -> Tensor:
    """Return dZ/dx = sign(x*) at the first element x* that attains the maximum, and 0 elsewhere (Eq. 4)."""
    index = groups.blocking.index(values.device).expand(values.shape)
    candidates = torch.where(values.abs() == m, index, torch.full_like(index, _LAST))
    first_of_blocks = -blocking.maximum(-candidates, groups.blocking.axes, -_LAST)
    first = -groups.reduce(-first_of_blocks, "amax", fill=-_LAST)
    attained = (candidates != _LAST).to(values.dtype)
    return torch.where(candidates == first, values.sign(), torch.zeros_like(values)) * attained


def inside(u: Tensor, limit: float) -> Tensor:
    """Return 1 where abs(u) <= ``limit`` and 0 elsewhere and for NaN: fp32, in the shape of ``u``, which is fp32.

    Bits are subtracted instead of compared, because the backward keeps a byte for each element, and Inductor's code for
    CPUs takes 25 ns to write a boolean, and less than 1 ns to write a number.
    """
    (bits,) = struct.unpack("<i", struct.pack("<f", limit))
    outside: Tensor = (bits - (u.view(torch.int32) & _LAST)) >> 31  # -1 or 0
    return (outside.to(torch.int8) + 1).to(torch.float32)


def fraction(u: Tensor, element: ElementFormat) -> Tensor:
    """Return the position of ``u`` between its neighbouring values of ``element``, from 0 to 1; 0 at a value."""
    lower, upper = bracket(u, element)
    return _position(u, lower, upper)


def scale_fraction(scale: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
    """Return :func:`fraction` of positive scales, and 1.0 where the nearest value, ties to even, has an odd code, else
    0.0."""
    if not scale_format.has_zero:
        lower, bits, first = power_of_two(scale), scale.view(torch.int32), 127 + scale_format.min_exponent
        odd = ((bits >> 23) - first) & 1  # the code counts exponents from the lowest
        nearest = ((bits + (1 << 22) - 1 + odd) >> 23) - first
        return _position(scale, lower, 2 * lower), (nearest & 1).to(torch.float32)
    if scale_format.spans_fp32:  # a code is the bits of an fp32 number without the low ones
        dropped, bits = 23 - scale_format.mantissa_bits, scale.view(torch.int32)
        code, part = bits >> dropped, (bits & ((1 << dropped) - 1)) * 2.0**-dropped
        up = (part > 0.5) | ((part == 0.5) & (code & 1 == 1))
        return part, ((code + up) & 1).to(torch.float32)
    _, inverse = spacing(scale.clamp(max=scale_format.max), scale_format.min_exponent, scale_format.mantissa_bits)
    lower = (scale * inverse).floor()
    nearest = torch.round(scale * inverse)
    return scale * inverse - lower, nearest - 2 * (nearest * 0.5).floor()


def dge(t: Tensor, k: float) -> Tensor:
    """Return (1/k)·abs(2t - 1)^(1/k - 1) for positions ``t`` of :func:`fraction`: Inf at 1/2, 1/k at 0 and 1."""
    return (2 * t - 1).abs().pow(1 / k - 1) / k


def sigmoid(t: Tensor, temperature: float) -> Tensor:
    """Return (12/T)·σ(z)(1 - σ(z)), z = 12(t - 1/2)/T, for positions ``t`` of :func:`fraction` (A.13)."""
    s = torch.sigmoid((t - 0.5) * (12 / temperature))
    return 12 / temperature * s * (1 - s)


def ties_even_knots(element: ElementFormat) -> tuple[tuple[float, float], ...]:
    """Return the knots (0, 0), (midpoint, its value by RTN to even) for each pair of neighbours, and (max, max)."""
    values = element.magnitudes()
    knots = [(0.0, 0.0)]
    for code, (low, high) in enumerate(itertools.pairwise(values)):
        knots.append(((low + high) / 2, low if code % 2 == 0 else high))
    return (*knots, (values[-1], values[-1]))


def spline(u: Tensor, knots: Sequence[tuple[float, float]]) -> Tensor:
    """Return the slope at abs(u) of the polyline through ``knots``, right-continuous; 0 beyond the last knot."""
    magnitude = u.abs()
    slope = torch.zeros_like(u)
    for (t, value), (following, next_value) in itertools.pairwise(knots):
        slope = torch.where(magnitude >= t, (next_value - value) / (following - t), slope)
    return torch.where(magnitude > knots[-1][0], torch.zeros_like(u), slope)


def _soft_weights(values: Tensor, m: Tensor, beta: Tensor, groups: Groups) -> Tensor:
    """Return exp(β(abs(x) - m)), zero at padding; m is the maximum, so no exponential overflows."""
    weights = torch.exp(beta * (values.abs() - m))
    valid = groups.blocking.valid(values.device)
    return weights if valid is None else weights * valid


def _total(x: Tensor, groups: Groups) -> Tensor:
    return groups.reduce(x.sum(groups.blocking.axes, keepdim=True), "sum")


def _position(u: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    width = upper - lower
    return torch.where(width > 0, (u - lower) / torch.where(width > 0, width, torch.ones_like(width)), 0.0)
