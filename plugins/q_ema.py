"""Q-EMA: rounds weights to the neighbour nearer to their moving average, so that they stop oscillating."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from fp4graph import Context, Operand, Overhead, StateEntry, Technique, hookimpl
from fp4graph.numerics import initial
from fp4graph.numerics.rounding import bracket, round_nearest
from fp4graph.numerics.scaling import ratio as scaled
from fp4graph.technique import OperandSpecs, OptimizerHook, Part, Rounding, Share, SiteView, WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor


class QEma(Technique):
    """Rounds a weight to the FP4 neighbour that is nearer to the weight's moving average.

    S is the scale of a block of W [N, K], and q1 <= w/S <= q2 are the element values around w/S; S, q1 and q2 depend on
    W, not on e: Q(w) = q1 where abs(e/S − q1) < abs(e/S − q2), else q2. After each optimizer step e ← β·e + (1 − β)·w.
    A weight that wanders about a threshold between two values crosses it at nearly every step; the average does not. e
    has the shape of W, starts at W, and is kept in fp32, because in bf16 e would stall at 1 − β = 0.002.

    Source: Chen et al. 2025, "Oscillation-Reduced MXFP4 Training for Vision Transformers", sec. 5, Algorithm 1 and
    Eq. 10, with β = 0.998. Their code trains DeiT-T, -S and -B with 0.9983, 0.9972 and 0.999, rounds to nearest for
    its first 10 steps (``start_after: 10``), and starts e from weights that are not initialized yet; we start e from
    initialized weights.

    Stages: element rounding of fprop.weight, which an operand with ``source: fprop`` requantizes; optimizer, after the
    step.

    Cost: e, read at every forward and updated at every step.

    The complexity weight is ours: 2.0, by Table 2 of the design-space paper for O(n) memory.

    Use it if validation loss falls behind late in training, when the learning rate is low, and rounding to nearest
    flips many weights back and forth. It cannot be combined with ``q_ramping``, the other remedy.
    """

    name: ClassVar[str] = "q_ema"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(n)", fusable=True)
    complexity: ClassVar[float] = 2.0
    conflicts: ClassVar[frozenset[str]] = frozenset({"q_ramping"})
    on_weight: ClassVar[bool] = True

    beta: Share = Field(0.998, description="β, the share of e that a step keeps.")
    start_after: int = Field(0, ge=0, lt=2**31, description="Training forwards that round to nearest first.")

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse a stochastic weight quantizer: one operand has one rounding."""
        spec = specs.get(Operand.FPROP_WEIGHT)
        if spec is not None and spec.rounding == "stochastic":
            raise ValueError("fprop.weight already rounds stochastically; q_ema chooses its rounding, so drop one")

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        average = StateEntry("weight", Operand.FPROP_WEIGHT, initial.copy)  # e, fp32
        counts_forwards = self.start_after > 0
        return RoundToAverage(options=self, state=(average,), draws=counts_forwards), MoveAverage(options=self)


class RoundToAverage(Rounding):
    """Rounds a weight to the neighbour nearer to the weight's average."""

    mixes = "none"
    options: QEma

    def round(self, ratio: Tensor, scale: Tensor, context: Context) -> Tensor:
        """Round by Algorithm 1, lines 4 to 11."""
        assert context.spec is not None
        lower, upper = bracket(ratio, context.spec.element)
        average = scaled(context.state["weight"], scale, context.spec)
        chosen = torch.where((average - lower).abs() < (average - upper).abs(), lower, upper)
        if context.count is None:
            return chosen
        nearest = round_nearest(ratio, context.spec.element, context.spec.ties)
        return torch.where(context.count < self.options.start_after, nearest, chosen)


class MoveAverage(OptimizerHook):
    """Updates e."""

    reads_quantized = False
    options: QEma

    def after_step(self, update: WeightUpdate) -> None:
        """Move e by Eq. 10."""
        update.state["weight"].lerp_(update.parameter.to(torch.float32), 1 - self.options.beta)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [QEma]
