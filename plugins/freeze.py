"""Iterative weight freezing: freezes weights whose quantized value flips too often."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field, model_validator

from fp4graph import Operand, Overhead, Technique, hookimpl
from fp4graph.policy import checks
from fp4graph.technique import OperandSpecs, OptimizerHook, Part, Share, SiteView, WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor

#: A quantized value has changed if it moved by more than this share of the larger value. The share is below 1/7, the
#: least step of the finest four-bit grid (INT4), and above 1/9, the largest move of an E4M3 scale that is rounded anew.
CHANGE = 1 / 8


class Freeze(Technique):
    """Freezes elements of a weight whose quantized value turns back too often, at the running mean of that value.

    After the optimizer's t-th step each element of W is updated as follows. q_t is its quantized value, m is
    ``momentum``, θ is ``threshold``, and right-hand sides have the values before the step:
    o = 1 where q changes in the direction opposite to its previous change, else 0;
    f ← m·o + (1 − m)·f;  w ← q̄ for good where f > θ, else q̄ ← m·q_t + (1 − m)·q̄.
    At first f = 0, and q̄ is the quantized value of the initial weight. The mean lies between two values of the grid,
    nearer to the value that the weight had more often, and the forward rounds it to that value. Frozen elements are
    restored after every step, whatever moves them. Only a distance of more than 1/8 of the larger of q_t and q_(t−1)
    counts as a change: q is dequantized, so a block scale that is rounded anew, or a tensor scale that follows its
    maximum, moves q a little although the code of q stays. With ``final_threshold``, θ moves there along half a cosine
    from step s·T to T, with T ``total_steps`` and s ``start``, and nothing is frozen before step s·T.

    Source: Nagel et al. 2022, "Overcoming Oscillations in Quantization-Aware Training", sec. 4.1 and 4.3, where q and
    q̄ are integers, times a learned scale, and q̄ is rounded when it is frozen. Chen et al. 2025, "Oscillation-Reduced
    MXFP4 Training for Vision Transformers", compare their methods with freezing in this form. Their code has m = 0.001
    and lets θ fall from 0.1 to 0.01 after a quarter of the training (``start: 0.25``).

    Stage: optimizer, after the step; also before the first step, for the first q.

    Cost: five tensors of the weight's size (one of its dtype, two fp32, one int8, one boolean), which are saved with
    the optimizer, and one more run of the weight's quantizer at each step. The complexity weight is ours: 3.0, by
    Table 2 of the design-space paper the most for unfusable work with O(n) memory.

    Use it to compare remedies for oscillation, or to fine-tune at small learning rates. In pre-training, where weights
    flip because they move far, it freezes most weights early and ruins the result (Chen et al., Table 4).
    """

    name: ClassVar[str] = "freeze"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(n)", fusable=False)
    complexity: ClassVar[float] = 3.0
    on_weight: ClassVar[bool] = True
    # q_ramping multiplies every move of a weight, also its return to the mean; noise makes q flip at random.
    conflicts: ClassVar[frozenset[str]] = frozenset({"q_ramping", "adaptive_quantization_noise"})

    momentum: Share = Field(0.001, description="m, the weight of the latest step in f and in the mean.")
    threshold: Share = Field(0.01, description="θ, the flips per step that freeze an element; several times momentum.")
    final_threshold: Share | None = Field(None, description="The final value of θ; null for a constant θ.")
    total_steps: int | None = Field(None, ge=1, description="T, steps of the schedule.")
    start: float = Field(0.0, ge=0, lt=1, description="s, the share of total_steps before which nothing is frozen.")

    @model_validator(mode="after")
    def _schedule(self) -> Freeze:
        scheduled = self.final_threshold is not None or self.start > 0
        if scheduled and self.total_steps is None:
            raise ValueError("final_threshold and start need a schedule; set total_steps")
        if not scheduled and self.total_steps is not None:
            raise ValueError("total_steps needs a schedule; set final_threshold or start")
        return self

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse quantizers under which q flips although the weight does not oscillate."""
        checks.refuse_transforms(techniques, "rounded values that oscillate are not elements of the weight")
        checks.refuse_noise(specs)
        if (spec := specs.get(Operand.FPROP_WEIGHT)) is None:
            return
        if spec.others:
            raise ValueError(
                f"the blocks of fprop.weight choose between {' and '.join(each.name for each in spec.elements)}, and a "
                "block that chooses anew moves weights that do not oscillate; name one element there"
            )
        if any((upper - lower) / upper <= CHANGE for lower, upper in pairwise(spec.element.magnitudes())):
            raise ValueError(
                f"freeze takes small changes of fprop.weight for changes of scales and ignores them, but neighbouring "
                f"values of {spec.element.name} are as close; use an element of 4 bits"
            )

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return (FreezeOscillating(options=self),)


class FreezeOscillating(OptimizerHook):
    """Counts flips and freezes."""

    options: Freeze

    def before_step(self, update: WeightUpdate) -> None:
        """Store the values that later steps are compared with, before the first step."""
        memory, weight = update.memory, update.parameter
        if "frozen" in memory:
            return
        memory["previous"] = update.quantize(weight)
        memory["direction"] = torch.zeros_like(weight, dtype=torch.int8)
        memory["frequency"] = torch.zeros_like(weight, dtype=torch.float32)
        memory["mean"] = memory["previous"].to(torch.float32, copy=True)
        memory["frozen"] = torch.zeros_like(weight, dtype=torch.bool)

    def after_step(self, update: WeightUpdate) -> None:
        """Restore frozen elements, count flips, freeze."""
        memory, weight = update.memory, update.parameter
        frozen, mean = memory["frozen"].to(torch.bool), memory["mean"]
        weight.copy_(torch.where(frozen, mean.to(weight.dtype), weight))

        quantized = update.quantize(weight)
        q, previous = quantized.to(torch.float32), memory["previous"].to(torch.float32)
        changed = (q - previous).abs() > CHANGE * torch.maximum(q.abs(), previous.abs())
        direction = torch.where(changed, (q - previous).sign(), 0).to(torch.int8)
        flipped = direction * memory["direction"] == -1
        frequency = memory["frequency"].lerp(flipped.to(torch.float32), self.options.momentum)
        frozen = frozen | (frequency > self._threshold(update))

        weight.copy_(torch.where(frozen, mean.to(weight.dtype), weight))
        memory["previous"] = quantized
        memory["direction"] = torch.where(changed, direction, memory["direction"]).to(torch.int8)
        memory["frequency"] = frequency
        memory["mean"] = torch.where(frozen, mean, mean.lerp(q, self.options.momentum))
        memory["frozen"] = frozen

    def _threshold(self, update: WeightUpdate) -> Tensor | float:
        """Count the step and return θ for it."""
        options, first = self.options, self.options.threshold
        if options.total_steps is None:
            return first
        progress = update.count_progress(options.total_steps, options.start)
        end = first if options.final_threshold is None else options.final_threshold
        theta = end + (first - end) / 2 * (1 + torch.cos(math.pi * progress.clamp(0, 1)))
        return torch.where(progress < 0, math.inf, theta)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [Freeze]
