"""Mean split: quantizes an operand's mean over tokens and the residual without the mean under separate scales."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from pydantic import Field

from fp4graph import Context, Gemm, Operand, Overhead, Technique, hookimpl
from fp4graph.numerics.blocking import is_known
from fp4graph.numerics.exact import mean_by
from fp4graph.technique import OperandList, Part, SiteView, Wrapper

if TYPE_CHECKING:
    from torch import Tensor

_OF_TOKENS = tuple(operand for operand in Operand if operand.value.split(".")[1] in ("input", "grad_output"))


class MeanSplit(Technique):
    """Splits each operand that has tokens into the mean over tokens and a residual: x̂ = Q(X − 1·μᵀ) + Q(1·μᵀ).

    μ_k is the mean of channel k over all tokens of a call, or over the tokens of one expert. If activations share a
    large mean, the mean sets the scales of all blocks, and few FP4 values are left for the differences between tokens;
    without the mean blocks are small and even. Residual and mean are quantized one after the other, with separate
    tensor scales and block scales, and added. In fprop and dgrad all rows of 1·μᵀ are equal, so hardware quantizes only
    the vector μ, in blocks along the channels, and its product costs one row. In wgrad a block runs along the tokens
    and repeats one μ_k, so Q rounds one number by one scale. The sum is in the dtype of X.

    Source: Cao et al. 2026, "The Curse and Blessing of Mean Bias in FP4-Quantized LLM Training" (Averis), as reproduced
    in MindSpeed-LLM: X is split in the forward, dY in the backward, and mean and residual are quantized independently.
    The wgrad of MindSpeed-LLM is no GEMM in FP4: it multiplies an unquantized X and quantizes dW. Here both operands of
    wgrad are split.

    Stage: around the quantizer.

    Cost: a mean over tokens, which no block-wise kernel sees, and a subtraction. The simulation quantizes the operand
    and one line of means; if the quantizer draws or the operand has experts, it quantizes the means of all tokens. The
    complexity weight is ours: 0.5, by Table 2 of the design-space paper for unfusable O(n) with O(1) memory (K values).

    Use it for language models, whose activations have a mean that grows in training. It replaces Hadamard rotations.
    Beside ``hadamard``, which rotates along the tokens in wgrad, it splits off the mean of the rotated tokens there.
    """

    name: ClassVar[str] = "mean_split"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=False)
    complexity: ClassVar[float] = 0.5

    operands: Annotated[tuple[str, ...], OperandList(_OF_TOKENS)] = Field(
        ("inputs", "gradients"), description="Operands, or groups of them, that are split; they must have tokens."
    )

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        of_wgrad = self.operands_listed & {*Gemm.WGRAD.operands}
        return (
            SplitMean(options=self, operands=self.operands_listed - of_wgrad, axis=-2),
            SplitMean(options=self, operands=of_wgrad, axis=-1),
        )


class SplitMean(Wrapper):
    """Quantizes residual and mean; ``axis`` is the axis of the tokens."""

    mixes = "expert"
    axis: int
    options: MeanSplit

    def around(self, quantize: Callable[[Tensor], Tensor], x: Tensor, context: Context) -> Tensor:
        """Return the quantized residual plus the quantized mean."""
        if is_known(x.shape[self.axis] == 0):  # without tokens there is no mean
            return quantize(x)
        wide = x.to(torch.float32)
        # The operator for means reads 16-bit dtypes unconverted; float64 is first rounded to fp32, as in the quantizer.
        mean = self._mean(wide if x.dtype is torch.float64 else x, context)
        return (quantize(wide - mean) + quantize(mean)).to(x.dtype)

    def _mean(self, x: Tensor, context: Context) -> Tensor:
        """Return μ, fp32, broadcastable to ``x``; with experts, μ of a token's expert, 0 for a token of no expert."""
        if (segments := context.blocking.segments) is None:
            return context.mean(x, self.axis)
        x, place, experts = x.to(torch.float32), x.dim() + self.axis, segments.unpadded
        assert experts.ids is not None, "operands with tokens have the expert of each"
        ids = experts.ids
        at_tokens = partial(experts.spread, x=x, axis=place, step=1)
        tokens = ids.new_zeros(experts.count + 1).scatter_add(0, ids, torch.ones_like(ids)).double()
        mean = mean_by(
            x,
            at_tokens(experts.table(x.abs(), place, 1)),
            experts.at_positions(tokens, x.dim()),
            lambda shares: at_tokens(experts.table(shares, place, 1, "sum")),
        )
        numbers = torch.arange(experts.count + 1, device=ids.device)
        return torch.where(experts.at_positions(numbers, x.dim()) < experts.count, mean, 0.0)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [MeanSplit]
