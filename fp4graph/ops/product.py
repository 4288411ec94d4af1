"""The product of two operands given as terms, each perhaps with a scalar that waits for the GEMM's accumulator.

Hardware multiplies the fp32 accumulator of a GEMM by alpha = γ_a·γ_b and adds the addend before it rounds the result.
The products of torch return the rounded result, and their alpha is a Python number. :mod:`fp4graph.kernels.product`
multiplies as hardware does. FP4 codes times block scales are bf16 numbers by construction. On CUDA such fp32 operands
are multiplied as bf16: their products are the same, exact in fp32, and tensor cores sum them many times faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from fp4graph.kernels.product import accumulated, scaled_product, with_addend
from fp4graph.numerics.segments import Segments


@dataclass(frozen=True, eq=False)
class Term:
    """One summand of an operand: ``values`` times a scalar that waits for the GEMM's accumulator, if there is one.

    With ``segments``, ``multiplier`` is 1-d: a scalar for each expert (and perhaps one for positions of no expert).
    """

    values: Tensor
    multiplier: Tensor | None = None
    segments: Segments | None = None

    def product(self) -> Tensor:
        """Return the summand itself, in the dtype of ``values``."""
        if self.multiplier is None:
            return self.values
        factor = self.multiplier
        if self.segments is not None:
            factor = self.segments.at_positions(factor, self.values.dim())
        return (self.values * factor).to(self.values.dtype)

    def to(self, dtype: torch.dtype) -> Term:
        """Return the term with values of ``dtype``."""
        return Term(self.values.to(dtype), self.multiplier, self.segments)


Terms = tuple[Term, ...]


def total(terms: Terms) -> Tensor:
    """Return the operand that ``terms`` stand for, as one tensor in their dtype."""
    return reduce(add, [term.product() for term in terms])


def multiply(
    left: Terms,
    right: Terms,
    addend: Tensor | None = None,
    alpha: float = 1,
    beta: float = 1,
    *,
    narrows: bool = False,
) -> Tensor:
    """Return ``alpha · Σᵢⱼ γᵢ·γⱼ · leftᵢ @ rightⱼᵀ + beta · addend``, with one GEMM for each pair of terms.

    γ are the terms' multipliers. The result has the dtype of the terms. If a term has a multiplier, the expression is
    computed on the GEMMs' fp32 accumulators and rounded once to that dtype, as hardware does. If no term has a
    multiplier, every operation rounds, as operations of torch do; Inductor may make a product and a sum one addmm.

    Args:
        addend: broadcastable to the product.
        narrows: whether to multiply the first terms of fp32 operands as bf16, because their values are bf16 numbers;
            later terms are residuals.
    """
    if narrows:
        return _narrowed(left, right, addend, alpha, beta)
    if all(term.multiplier is None for term in (*left, *right)):
        return _unscaled(left, right, addend, alpha, beta)
    dtype = left[0].values.dtype
    addend = None if addend is None else addend.to(dtype)
    scaled = [(a.values, b.values, scale_of(a, b, alpha)) for a in left for b in right]
    a, b, scale = scaled[0]
    if len(scaled) == 1 and isinstance(scale, Tensor):
        return scaled_product(a, b, scale, addend, beta)
    accumulator = reduce(add, [accumulated(a, b) * scale for a, b, scale in scaled])
    return with_addend(accumulator, addend, beta).to(dtype)


def _narrowed(left: Terms, right: Terms, addend: Tensor | None, alpha: float, beta: float) -> Tensor:
    """Return :func:`multiply` of fp32 terms, whose first pair is multiplied as bf16."""
    products = []
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            first = i == j == 0
            x, y = (a.to(torch.bfloat16), b.to(torch.bfloat16)) if first else (a, b)
            products.append(_times(accumulated(x.values, y.values), scale_of(a, b, alpha)))
    return with_addend(reduce(add, products), None if addend is None else addend.to(torch.float32), beta)


def _times(x: Tensor, scale: Tensor | float) -> Tensor:
    return x if not isinstance(scale, Tensor) and scale == 1 else x * scale


def scale_of(a: Term, b: Term, alpha: float) -> Tensor | float:
    """Return ``alpha · γ_a · γ_b``."""
    if a.multiplier is None or b.multiplier is None:
        gamma = b.multiplier if a.multiplier is None else a.multiplier
    else:
        gamma = a.multiplier * b.multiplier
    return alpha if gamma is None else gamma if alpha == 1 else gamma * alpha


def _unscaled(left: Terms, right: Terms, addend: Tensor | None, alpha: float, beta: float) -> Tensor:
    """Return :func:`multiply` of terms without multipliers."""
    pairs = [(a.values, b.values) for a in left for b in right]
    a, b = pairs[0]
    if addend is not None and addend.dim() == 1 and alpha == beta == 1 and len(pairs) == 1 and a.dim() == 2:
        # addmm adds the bias in the GEMM's epilogue, as hardware does, before the only rounding to the output dtype.
        return torch.addmm(addend.to(a.dtype), a, b.mT)
    y = reduce(add, [a @ b.mT for a, b in pairs])
    y = y if alpha == 1 else y * alpha
    return y if addend is None else y + (addend if beta == 1 else addend * beta).to(y.dtype)
