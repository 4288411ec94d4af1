"""Outlier clamping and compensation: clamps values beyond two quantiles and multiplies the cut-off parts separately."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from fp4graph import Context, Overhead, Technique, hookimpl
from fp4graph.technique import Operands, Part, SiteView, Wrapper

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_DENOMINATOR = 10**9  # of the fraction 1 − α; under this bound numerator · n fits 64 bits


class OutlierClamp(Technique):
    """Clamps the largest and the smallest elements before quantization; the cut-off parts are a sparse residual.

    Y = Q(clamp(X, x_low, x_high))·Ŵᵀ + ΔX·Ŵᵀ with ΔX = X − clamp(X, x_low, x_high), X [..., K] and Ŵ the other operand
    of the GEMM, quantized. x_low and x_high are the (1 − α)- and the α-quantile of all n elements of the operand, where
    α is ``quantile``. In ascending order they are elements c and n − 1 − c, counted from 0, with c = ⌊(1 − α)·n⌋. Every
    expert of a grouped product has its own quantiles. Thus c elements at either end are clamped, or fewer if they tie
    with the threshold. A threshold is an element of X, never interpolated, so every algorithm finds the same one. −X
    has the thresholds of X, negated and swapped. A clamped element becomes equal to its threshold. Scales then follow
    the bulk of X. ΔX is nonzero for at most 2(1 − α)·n elements and stays in the GEMM's dtype, to which it is rounded
    once. ``residual: false`` leaves ΔX out.

    NaN and Inf are not clamped, so that their block is NaN also with ``residual: false``; NaN counts as the largest
    value. Gradients pass straight through, also at clamped elements. If X is transformed first, as by hadamard,
    the transformed X is clamped to its own quantiles, padding included.

    Source: Wang et al. 2025, "Optimizing Large Language Model Training Using FP4 Quantization", outlier clamping and
    compensation, for activations, with α 0.999, 0.99 and 0.97 compared. The authors' code (MS-AMP) sorts the tensor and
    takes the places ⌊(1 − α)·n⌋ and ⌊α·n⌋; the second is at most one place above n − 1 − c. The layers of that code
    leave the residual out, as ``residual: false`` does.

    Stage: split.

    Cost: a selection over the whole tensor, twice, before the first block can be quantized, and with the residual a
    second, sparse GEMM. The complexity weight is ours, by Table 2 of the design-space paper: 2.0 with the residual
    (unfusable, O(n) memory: 2 to 3); 0.5 without it (unfusable, O(1) memory, if a radix selection finds thresholds).

    Use it on activations with outliers in a few channels.
    """

    name: ClassVar[str] = "outlier_clamp"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(n)", fusable=False)

    quantile: float = Field(
        0.99, gt=0.5, lt=1, description="α: elements beyond the α-quantile and below the (1 − α)-quantile are clamped."
    )
    residual: bool = Field(
        True, description="Whether the cut-off parts are multiplied separately, in high precision, or dropped."
    )
    operands: Operands = Field(("fprop.input",), description="Operands, or groups of them, that are clamped.")

    @property
    def complexity(self) -> float:
        """Our weights: 2.0 with the residual, 0.5 without it."""
        return 2.0 if self.residual else 0.5

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return (SplitOutliers(options=self),)


class SplitOutliers(Wrapper):
    """Clamps, and splits ΔX off."""

    mixes = "expert"
    counts = True
    options: OutlierClamp

    def split(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Return clamped X and ΔX, rounded to the dtype of ``x``; without ``residual``, None in place of ΔX."""
        low, high = self.thresholds(x, context)
        part = torch.where(x.abs() < math.inf, x.clamp(low, high), x)
        return part, torch.where(part == x, 0.0, x - part) if self.options.residual else None

    def thresholds(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return x_low and x_high, 0-d; in a grouped product, one pair for each expert, broadcastable to ``x``."""
        ordered = torch.where(x == x, x, math.inf)  # NaN as the largest value
        # The share is a ratio of integers, so that a hundredth of 300 elements is 3 and n may be symbolic.
        share = (1 - Fraction(str(self.options.quantile))).limit_denominator(_LARGEST_DENOMINATOR)
        if (segments := context.blocking.segments) is not None:
            return segments.order_statistics(ordered, share)
        n = math.prod(x.shape)  # not from reshape(-1): Dynamo cannot retrace its numel for a tensor of no elements
        return context.order_statistics(ordered.reshape(-1), n * share.numerator // share.denominator)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [OutlierClamp]
