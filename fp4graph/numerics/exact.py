"""Operations that give the same bits in every PyTorch build, compiler and processor.

These are correctly rounded everywhere, and so safe in a quantizer: +, -, *, / of tensors, comparisons, integer and bit
operations, conversions, minima, maxima, rounding to integers. All other results depend on the vector library of eager
mode (MKL's square root of fp32 is an ulp off on some processors), on the order of a sum, or on a GEMM's precision. This
module has exact forms of the operations that quantizers need; docs/parity.md lists those without an exact form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fp4graph.numerics.blocking import maximum
from fp4graph.numerics.rounding import power_of_two
from fp4graph.numerics.spec import Block, QuantSpec, Selector

if TYPE_CHECKING:
    from torch import Tensor

#: Significant bits of bf16, and the exponent of its smallest subnormal number.
_BITS, _SMALLEST = 8, -133
#: The exponent of the smallest power of two that a tensor scale multiplies operands by on CUDA.
LEAST_FACTOR = -100
#: An upper bound on the number of elements of a block whose length is not fixed.
_MOST = {"row": 1 << 24, "tensor": 1 << 33}
_SMALLEST_NORMAL = 2.0**-126  # of fp32


def in_bfloat16(spec: QuantSpec, *, scaled: bool = False) -> bool:
    """Return whether every value that ``spec`` can give is a bf16 number: an element times a stored scale.

    A product of numbers with p and q significant bits has at most p + q bits, and q if p is 1. If the factors are
    multiples of a and b, the product is a multiple of a·b, which must not lie below bf16's smallest subnormal number.
    bf16 has fp32's largest exponent. The quotient by a power-of-two encode scale is exact.

    Args:
        scaled: whether values are multiplied by a power of two of at least 2^:data:`LEAST_FACTOR`.
    """
    element, scale = spec.element, spec.scale.format
    if any(other.max != element.max for other in spec.others):
        return False  # a value stretched to another maximum may have more significant bits than bf16
    if spec.others:
        single = (replace(spec, element=each, others=(), selector=None) for each in spec.elements)
        return all(in_bfloat16(each, scaled=scaled) for each in single)
    if spec.scale.convention == "encode" and scale.mantissa_bits:
        return False
    bits = [element.mantissa_bits + (not element.integer), scale.mantissa_bits + 1]
    unit = element.min_exponent - element.mantissa_bits
    unit += -scale.top_exponent if spec.scale.convention == "encode" else scale.min_exponent - scale.mantissa_bits
    unit += LEAST_FACTOR if scaled else 0
    return (max(bits) if 1 in bits else sum(bits)) <= _BITS and unit >= _SMALLEST


def root(x: Tensor) -> Tensor:
    """Return the correctly rounded square root of fp32 ``x >= 0``, in its shape; NaN below zero.

    The root is taken in float64, where a library may be an ulp off. Rounding it to fp32 removes the error:

    Scaling by a power of four moves ``x`` to [1, 4), where it is a multiple of 2^-23 and y = √x lies in [1, 2). Let m
    be the midpoint of two neighbouring fp32 numbers in [1, 2): an odd multiple of 2^-24, so that m² is an odd multiple
    of 2^-48, and ``x`` is not m². Both are multiples of 2^-48, so |x - m²| >= 2^-48, and since y + m < 4,
    |y - m| = |x - m²|/(y + m) > 2^-50. A float64 in [1, 2) has an ulp of 2^-52. A root with an error of up to four
    ulps therefore lies on the same side of every midpoint as y, and rounds to the same fp32 number.
    """
    return torch.sqrt(x.to(torch.float64)).to(torch.float32)


def column_norms(x: Tensor) -> Tensor:
    """Return √Σ_t x_tk² of the columns of ``x [T, K]``, fp32 ``[K]``: NaN for a column with NaN or Inf."""
    if x.shape[0] == 0:
        return x.new_zeros(x.shape[1])
    largest = x.abs().amax(0)
    share = (x / torch.where(largest == 0, 1.0, largest)).to(torch.float64)
    return largest * root(total(share * share, (0,), _MOST["row"])[0].to(torch.float32))


def block_error(error: Tensor, measure: Selector, block: Block, axes: tuple[int, ...]) -> Tensor:
    """Return the error of each block, float64, ``axes`` kept with size 1; no order of summation changes its bits.

    Args:
        error: abs(e), float64, from 0 to 1, in the blocked layout.
        measure: ``mse`` is Σe², ``mae`` Σabs(e), ``amax`` max abs(e).
        axes: the axes inside a block.
    """
    if measure == "amax":
        return error.amax(axes, keepdim=True)
    return total(error * error if measure == "mse" else error, axes, most_elements(block))


def most_elements(block: Block) -> int:
    """Return an upper bound on the number of elements of a block."""
    return _MOST[block] if isinstance(block, str) else math.prod(block) if isinstance(block, tuple) else block


def total(shares: Tensor, axes: tuple[int, ...], most: int) -> Tensor:
    """Return the sum over ``axes``, float64, axes kept with size 1; no order of summation changes its bits.

    Args:
        shares, most: as in :func:`total_by`.
    """
    return total_by(shares, lambda x: x.sum(axes, keepdim=True), most)


def total_by(shares: Tensor, add: Callable[[Tensor], Tensor], most: int) -> Tensor:
    """Return the sums of ``shares`` that ``add`` computes, float64; no order of summation changes their bits.

    The summands are rounded to multiples of 2^-k, with the largest k for which ``most`` summands add up to at most
    2^53 units. Integers of that size are float64 numbers, so no partial sum is rounded.

    Args:
        shares: float64, from 0 to 1; larger shares count as 1. NaN gives NaN.
        most: the number of summands of one sum, or an upper bound on it.
    """
    units = units_of(most)
    return add(torch.round(shares.clamp(max=1.0) * units)) * (1 / units)


def mean(x: Tensor, axis: int) -> Tensor:
    """Return the mean of ``x`` over ``axis``, of at most 2^24 elements: fp32, the axis kept with size 1.

    :func:`mean_by` computes it; without elements it is NaN.
    """
    largest = maximum(x.abs(), (axis % x.dim(),)).to(torch.float32)
    count = torch.full((), x.shape[axis], dtype=torch.float64, device=x.device)
    return mean_by(x, largest, count, lambda shares: shares.sum(axis, keepdim=True))


def mean_by(x: Tensor, largest: Tensor, count: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
    """Return means of ``x``, fp32. Before rounding to fp32 a mean is off by at most 2^-28 of the largest magnitude.

    Each element is divided by the power of two above the largest magnitude, and [-1, 1] is mapped to [0, 1], so that
    :func:`total_by` can add the results. No order of summation changes the mean's bits. The mean of elements with NaN
    or Inf is NaN.

    Args:
        largest: the largest magnitude of the elements of each mean, fp32, broadcastable to ``x``.
        count: the number of elements of each mean, at most 2^24, float64, broadcastable to ``largest``.
        add: sums the elements of each mean, in the shape of ``largest``.
    """
    above = 2 * power_of_two(largest.clamp(min=_SMALLEST_NORMAL)).double()
    share = total_by((x.double() / above + 1) / 2, add, _MOST["row"]) / count
    return ((2 * share - 1) * above).to(torch.float32)


def units_of(most: int) -> float:
    """Return 2^k, the reciprocal of the multiples to which :func:`total_by` rounds."""
    return 2.0 ** (53 - max(1, (most - 1).bit_length()))
