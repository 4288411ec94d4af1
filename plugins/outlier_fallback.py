"""Outlier fallback: quantizes the residual too, in the blocks whose largest elements became zero, and adds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from fp4graph import Context, Overhead, Technique, hookimpl
from fp4graph.numerics.blocking import Groups
from fp4graph.technique import Operands, OperandSpecs, Part, SiteView, Wrapper

if TYPE_CHECKING:
    from torch import Tensor

_DEFAULT_FRACTION = 0.1


class OutlierFallback(Technique):
    """Quantizes chosen blocks twice: the residual of the first pass is quantized too, and added.

    h(X) = Q(X) + m_p·Q(X − Q(X)) for the elements of block p, where m_p is 1 for chosen blocks and 0 for others. An
    outlier makes its block's scale large, and values in the dead zone, below a quarter of that scale (for E2M1, to
    nearest), become zero. The residual of rounding to nearest is at most a fifth of the block's maximum, unless that
    maximum was clipped, so that the second pass has a finer grid and a narrower dead zone.

    Blocks are chosen by the largest magnitude that they lose: v_p = max abs(x_i) over the elements i of p with Q(x_i) =
    0. ``fraction`` φ chooses the ⌈φ·n/l⌉ of the operand's n/l blocks with the largest v_p, and of ties the earlier
    block. ``threshold`` τ chooses the blocks with v_p > τ·max abs(X); blocks with NaN or Inf do not count for the
    maximum. Every expert of a grouped product chooses among its own blocks. For a given number of chosen blocks this
    minimizes the largest dead-zone error of the other blocks. A maximum, unlike a sum of squares, does not depend on
    the order of its terms. The second pass draws its own noise. The sum is rounded to the GEMM's dtype.

    Source: "Decomposing MXFP4 quantization error for LLM reinforcement learning", whose abstract names the method and
    its gain; the choice of blocks is ours.

    Stage: around the quantizer. Surrogate gradients are those of the first pass.

    Cost: a second quantizer, n/l scores and, with ``fraction``, a choice of the largest; hardware would multiply φ
    of the blocks twice. The complexity weight is ours: 1.5, by Table 2 of the design-space paper for O(n/l) memory,
    for the scores and the second set of scales.

    Use it on forward operands with outliers, and where small values matter, such as rollouts. Both choices compare the
    blocks of a whole operand, so the other tokens influence which blocks of a token fall back. A token may therefore
    have another probability in a rollout than in the training forward. With ``granularity: row`` only the blocks of one
    line along the contraction axis compete, in fprop those of one token or of one output. φ is then the share of a
    line's blocks that are chosen, rounded up to whole blocks, and τ is a share of the line's largest magnitude. A token
    is then quantized independently of others.
    """

    name: ClassVar[str] = "outlier_fallback"
    overhead: ClassVar[Overhead] = Overhead("O(2n)", "O(n/l)", fusable=False)
    complexity: ClassVar[float] = 1.5

    operands: Operands = Field(("forward",), description="Operands, or groups of them, that fall back.")
    fraction: float | None = Field(
        None, gt=0, le=1, description=f"Share of chosen blocks; {_DEFAULT_FRACTION} unless threshold is set."
    )
    threshold: float | None = Field(
        None, ge=0, lt=1, description="Share of the amax; a block with a larger element that becomes zero is chosen."
    )
    granularity: Literal["tensor", "row"] = Field("tensor", description="Blocks that compete: of an operand or a line.")

    @model_validator(mode="after")
    def _one_rule(self) -> OutlierFallback:
        if self.fraction is not None and self.threshold is not None:
            raise ValueError("fraction and threshold are two ways to choose blocks; give one of them")
        return self

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse blocks that span several lines, or a whole line, if the blocks of a line compete."""
        for operand, spec in self.specs_listed(specs).items():
            if self.granularity == "row" and not isinstance(spec.block, int):
                raise ValueError(
                    f"with granularity: row the blocks of one line compete; the block of {operand} is {spec.block}; "
                    "use blocks of a fixed length, or leave granularity out"
                )

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return (SecondPass(options=self),)


class SecondPass(Wrapper):
    """Quantizes the chosen blocks twice."""

    mixes = "expert"
    counts = True
    options: OutlierFallback

    def around(self, quantize: Callable[[Tensor], Tensor], x: Tensor, context: Context) -> Tensor:
        """Return the sum of both passes. In fp32 the residual is exact unless a value was clipped."""
        exact = x.to(torch.float32)
        first = quantize(exact)
        second = quantize(exact - first)
        blocking = context.blocking
        lost = context.maxima(torch.where(first == 0, exact, 0.0))
        if self.options.threshold is None:
            chosen = self._largest(lost, context)
        else:
            finite = context.maxima(torch.where(first == first, exact, 0.0))
            chosen = lost > self.options.threshold * Groups(blocking, self.options.granularity).reduce(finite, "amax")
        once = blocking.split(first)
        return blocking.join(torch.where(chosen, once + blocking.split(second), once)).to(x.dtype)

    def _largest(self, score: Tensor, context: Context) -> Tensor:
        """Return whether each block has one of the ⌈φ·n/l⌉ largest scores of the operand, its expert or its line."""
        # The share is a ratio of integers, so that 0.1 of 30 blocks is 3 and the number of blocks may be symbolic.
        share = Fraction(str(_DEFAULT_FRACTION if self.options.fraction is None else self.options.fraction))
        if self.options.granularity == "row":
            lines = score.squeeze(-1)
            count = (lines.shape[-1] * share.numerator + share.denominator - 1) // share.denominator
            order = lines.sort(dim=-1, descending=True, stable=True).indices
            return torch.zeros_like(lines, dtype=torch.bool).scatter(-1, order[..., :count], True).unsqueeze(-1)
        blocking, segments = context.blocking, context.blocking.segments
        if segments is not None:
            return segments.largest(score, blocking.position(segments.axis), blocking.step(segments.axis), share)
        return context.largest(score, (score.numel() * share.numerator + share.denominator - 1) // share.denominator)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [OutlierFallback]
