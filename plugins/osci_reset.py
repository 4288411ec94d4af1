"""OsciReset: moves weights that oscillate between two FP4 values to the value that they round to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field, model_validator

from fp4graph import Overhead, Technique, hookimpl
from fp4graph.policy import checks
from fp4graph.technique import OperandSpecs, OptimizerHook, Part, SiteView, WeightUpdate
from fp4graph.training import oscillation


class OsciReset(Technique):
    """Sets weights to their quantized values, once in every period, if these values move much more than the weights.

    The first period begins after step ``start``, and each lasts ``every`` steps. With ``absolute_steps``, as in the
    authors' code, periods begin after the steps >= ``start`` that are multiples of ``every``. W and Q(W) are stored,
    and over the next ``track`` steps

        D = Σ abs(ΔW),   D_q = Σ abs(ΔQ(W))

    are summed for each element. One step later, w ← Q(w) where D_q/D ≥ ``threshold``; an element that did not move has
    the ratio 0. Q(w) lies inside the range of numbers that round to it, and the weight has to leave that range
    before it flips again. The optimizer's moments do not change. Input channels that ``out_control`` multiplies
    separately are left out, as in the authors' code.

    Source: Chen et al. 2025, "TetraJet-v2: Accurate NVFP4 Training for Large Language Models with Oscillation
    Suppression and Outlier Control", and the authors' code (detection by distance ratio; period 200, track 50,
    threshold 8, start after 59 to 69 % of the training). Their variants are left out: one that tracks a tenth of the
    elements, and one that takes elements near the edge of their range without tracking them.

    Stage: optimizer, after the step.

    Cost: four tensors of the weight's size and one more pass of the weight's quantizer per step, while elements are
    tracked. The complexity weight is ours: 2.0, the least by Table 2 of the design-space paper for unfusable work with
    O(n) memory, because the technique is idle for most of a period.

    Use it late in a training, when learning rates are small and weights oscillate. Forward weights must round to
    nearest: a quantizer that draws noise moves without the weight.
    """

    name: ClassVar[str] = "osci_reset"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(n)", fusable=False)
    complexity: ClassVar[float] = 2.0
    on_weight: ClassVar[bool] = True
    #: Q-EMA rounds by an average that a reset of the weight does not move; freeze would put weights back; under noise
    #: on the weights all of them seem to oscillate.
    conflicts: ClassVar[frozenset[str]] = frozenset({"q_ema", "freeze", "adaptive_quantization_noise"})

    start: int = Field(0, ge=0, description="Optimizer steps before the first tracking; 0 means `every`.")
    every: int = Field(200, ge=1, description="Steps from one reset to the next.")
    track: int = Field(50, ge=1, description="Steps over which distances are summed.")
    absolute_steps: bool = Field(False, description="Whether periods count from the first step, not from start.")
    threshold: float = Field(8.0, gt=1, description="Ratio D_q/D from which an element is reset.")

    @model_validator(mode="after")
    def _fits(self) -> OsciReset:
        if self.track + 2 > self.every:
            raise ValueError(
                f"every must be at least {self.track + 2} (track, a step to begin, a step to reset), not {self.every}; "
                "lower track or raise every"
            )
        return self

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse quantizers under which every weight seems to oscillate: stochastic ones, and transforms of fprop."""
        checks.refuse_transforms(techniques, "Q(W) moves though W does not")
        checks.refuse_noise(specs)

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return (ResetOscillating(options=self),)


class ResetOscillating(OptimizerHook):
    """Sums the distances of weights and resets those that oscillate."""

    options: OsciReset

    def after_step(self, update: WeightUpdate) -> None:
        """Store W and Q(W), sum distances, or reset."""
        options = self.options
        memory, weight = update.memory, update.parameter
        steps = memory.setdefault("steps", torch.zeros((), dtype=torch.int64))  # on the CPU: reading it never waits
        steps += 1
        if steps < options.start:
            return
        position = (int(steps) - (0 if options.absolute_steps else options.start)) % options.every
        if position == 0:
            oscillation.begin(update)
        elif "last" not in memory:  # the period began before start, or the options changed in the middle of one
            return
        elif position <= options.track:
            oscillation.add(update)
        else:
            moved, moved_q = oscillation.end(memory)
            oscillates = (moved > 0) & (moved_q >= options.threshold * moved)
            multiplied_apart = update.apart()
            if multiplied_apart is not None:
                oscillates &= ~multiplied_apart
            weight.copy_(torch.where(oscillates, update.quantize(weight).to(weight.dtype), weight))


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [OsciReset]
