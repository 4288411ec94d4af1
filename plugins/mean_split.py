"""Mean split: quantizes the mean over tokens of an operand, and the residual without it, under separate scales."""

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
    """Splits each operand that has tokens into its mean over them and a residual: x̂ = Q(X − 1·μᵀ) + Q(1·μᵀ).

    μ_k is the mean of channel k over all tokens of a call, or over those of one expert. Where activations share a large
    mean, it sets the scales of all blocks, and only few FP4 values are left for the differences between tokens; without
    it blocks are small and even. The two parts are quantized one after the other, with separate tensor scales and block
    scales, and added. In fprop and dgrad all rows of 1·μᵀ are equal, so that its quantizer is that of the vector μ in
    blocks along the channels, and the product with it costs one row. In wgrad blocks run along the tokens, where μ_k
    is constant: Q rounds one number by its scale. The parts are added in the operand's dtype; bf16 rounds that sum.

    Source: Cao et al. 2026, "The Curse and Blessing of Mean Bias in FP4-Quantized LLM Training" (Averis), as its
    reproduction in MindSpeed-LLM has it: X in the forward, dY in the backward, mean and residual quantized
    independently. That code multiplies an unquantized X in wgrad and quantizes dW instead, which no GEMM in FP4 does;
    splitting both operands of wgrad is ours.

    Stage: around the quantizer.

    Cost: a mean over tokens, which no block-wise kernel sees, and a subtraction. The simulation quantizes the operand
    and one line of means; where it draws, or has experts, the means of all tokens. The complexity weight is ours: 0.5,
    Table 2's unfusable O(n) with O(1) memory (K values).

    Use it for language models, whose activations have a mean that grows in training. It replaces Hadamard rotations.
    Beside ``hadamard``, which rotates along the tokens in wgrad, it splits off the mean of the rotated tokens there.
    """

    name: ClassVar[str] = "mean_split"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=False)
    complexity: ClassVar[float] = 0.5

    operands: Annotated[tuple[str, ...], OperandList(_OF_TOKENS)] = Field(
        ("inputs", "gradients"), description="Operands, or groups of them, that are split: those that have tokens."
    )

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        of_wgrad = self.operands_listed & {*Gemm.WGRAD.operands}
        return (
            SplitMean(options=self, operands=self.operands_listed - of_wgrad, axis=-2),
            SplitMean(options=self, operands=of_wgrad, axis=-1),
        )


class SplitMean(Wrapper):
    """Quantizes residual and mean; ``axis`` is that of the tokens."""

    mixes = "expert"
    axis: int
    options: MeanSplit

    def around(self, quantize: Callable[[Tensor], Tensor], x: Tensor, context: Context) -> Tensor:
        """Return the quantized residual plus the quantized mean."""
        if is_known(x.shape[self.axis] == 0):  # no tokens have no mean
            return quantize(x)
        wide = x.to(torch.float32)
        # The mean's operator reads 16 bits as they are; float64 is rounded to fp32 first, as what is quantized is.
        mean = self._mean(wide if x.dtype is torch.float64 else x, context)
        return (quantize(wide - mean) + quantize(mean)).to(x.dtype)

    def _mean(self, x: Tensor, context: Context) -> Tensor:
        """Return μ, fp32, broadcastable to ``x``; of experts the μ of each token's expert, or 0 without one."""
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
