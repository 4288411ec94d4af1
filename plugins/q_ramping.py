"""Q-Ramping: lets weights that oscillate between two FP4 values step less often, but farther."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field, model_validator

from fp4graph import Overhead, Technique, hookimpl
from fp4graph.policy import checks
from fp4graph.technique import OperandSpecs, OptimizerHook, OptimizerStep, Part, SiteView, WeightUpdate
from fp4graph.training import held_state, oscillation


class QRamping(Technique):
    """Gives each weight element its own batch size and learning rate, N times those of the run.

    The first T0 of every T_update optimizer steps are a detection, which measures the distances that each element w and
    its quantized value w_Q move. The distances set N for the other steps; 0/0 is 0, and x/0 gives N_max:
    R = Σ_t abs(w_Q[t] − w_Q[t−1]) / Σ_t abs(w[t] − w[t−1]),  N = min(k2·⌊R/k1⌋ + 1, N_max).
    An element that oscillates has R far above 1: the quantized value jumps while the weight creeps. With N above 1 an
    element and its entries of the optimizer's state wait for N − 1 steps, and its gradients add up. At the N-th step
    the element moves with the mean of the N gradients, N times as far: w ← w + N·Δw, as at learning rate N·lr if the
    rate multiplies the update. Decoupled weight decay acts every N-th step at N times the rate. Step counts, and state
    of other shapes than the weight's (as for bias correction), advance at every step. A reset of the moments
    (``stable_spam``, ``fp4graph.optim.StableSPAM``) reaches waiting elements too. A detection drops unfinished sums.

    With ``restore`` a detection only measures: all parameters and the optimizer's state then return to their previous
    values. A parameter that had no state starts without state again, and all its elements step once. Schedules and the
    memory of other techniques are not undone. An optimizer that counts a group's steps (timm's LAMB, Adan) is refused.
    Options that change during training take effect where the next detection begins (t_update, restore) or ends.

    Source: Chen et al. 2025, "Oscillation-Reduced MXFP4 Training for Vision Transformers", sec. 6 and Algorithm 2, with
    k1 = 16, k2 = 5, T0 = 30. The paper gives no N_max or T_update, nor the state from which training goes on. In the
    authors' code N_max and T_update are an epoch's steps, state is restored, and waiting elements decay too.

    Stage: optimizer, before and after the step.

    Cost: a copy of each weight with some N > 1 and of its state before the step, merged after it; the sum of gradients
    and N are kept. During a detection: four tensors of the weight's size, and one more run of its quantizer at each
    step. The complexity weight is ours: 2.5; Table 2 of the design-space paper gives 2 to 3 for unfusable O(n) memory.

    Use it against oscillation if ``q_ema``, with which it cannot be combined, does not help, or if the forward must not
    use an average. Forward weights must round to nearest: R cannot tell drawn noise from oscillation.
    """

    name: ClassVar[str] = "q_ramping"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(n)", fusable=False)
    complexity: ClassVar[float] = 2.5
    on_weight: ClassVar[bool] = True
    conflicts: ClassVar[frozenset[str]] = frozenset({"q_ema"})

    t_update: int = Field(ge=1, description="Optimizer steps from one detection to the next, such as an epoch's.")
    n_max: int = Field(ge=1, lt=2**15, description="The largest N, at most t_update - t0.")
    t0: int = Field(30, ge=1, description="Steps of a detection.")
    k1: float = Field(16.0, gt=0, description="R is counted in multiples of k1.")
    k2: int = Field(5, ge=1, description="Increase of N for each multiple of k1 in R.")
    restore: bool = Field(False, description="Whether the steps of a detection are undone after it.")

    @model_validator(mode="after")
    def _detects_and_trains(self) -> QRamping:
        if self.n_max > (ramp := max(0, self.t_update - self.t0)):
            raise ValueError(
                f"n_max {self.n_max} is more than the {ramp} steps between two detections (t_update less t0): an "
                f"element with N = n_max would never step; lower {'n_max or ' * (ramp > 0)}t0, or raise t_update"
            )
        return self

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse a stochastic weight quantizer, under which every weight seems to oscillate."""
        checks.refuse_noise(specs)

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return (RampBatches(options=self),)


class RampBatches(OptimizerHook):
    """Measures R, sets N, and lets elements wait."""

    options: QRamping

    def before_step(self, update: WeightUpdate) -> None:
        """Start a detection, or give the optimizer the gradients of the elements that step now."""
        memory, grad = update.memory, update.parameter.grad
        assert grad is not None
        if self._place(memory) == 0:
            for name in ("factor", "summed", "ramped", "begins"):
                memory.pop(name, None)
            oscillation.begin(update)
        if "factor" not in memory or memory.pop("begins", None) is not None:
            return
        factor, summed, ramped = memory["factor"], memory["summed"], memory["ramped"]
        summed += grad
        ramped += 1
        stepping = update.scratch["stepping"] = int(ramped) % factor.to(torch.int32) == 0
        held_state.hold_elements(update)
        mean = summed / factor.to(torch.float32)
        # Elements with N = 1 keep their gradient; waiting elements have gradient 0, which adds nothing to norms.
        grad.copy_(torch.where(factor == 1, grad, torch.where(stepping, mean, 0.0).to(grad.dtype)))

    def after_step(self, update: WeightUpdate) -> None:
        """Measure and, at a detection's end, set N (Algorithm 2, lines 5 to 7); else undo steps of waiting elements."""
        options, memory, weight = self.options, update.memory, update.parameter
        if "moved" in memory:  # a detection is running
            oscillation.add(update)
            if self._place(memory) >= options.t0 - 1:
                moved, moved_q = oscillation.end(memory)
                ratio = torch.where(moved_q == 0, 0.0, moved_q / moved)
                factor = (options.k2 * (ratio / options.k1).floor() + 1).clamp(max=options.n_max).to(torch.int16)
                if bool((factor > 1).any()):  # else all elements step as usual, and no sums are needed
                    memory.update(factor=factor, summed=torch.zeros_like(moved), ramped=torch.tensor(0))
        elif "stepping" in update.scratch:
            factor, old = memory["factor"], update.scratch["old"].to(torch.float32)
            far = (old + factor * (weight.to(torch.float32) - old)).to(weight.dtype)
            weight.copy_(torch.where(factor == 1, weight, far))
            held_state.restore_elements(update, update.scratch["stepping"])
            memory["summed"].masked_fill_(update.scratch["stepping"], 0.0)

    def _place(self, memory: dict[str, torch.Tensor]) -> int:
        """Return the number of steps since the latest detection began; at 0, one begins."""
        if int(memory.get("steps", self.options.t_update)) >= self.options.t_update:
            memory["steps"] = torch.zeros((), dtype=torch.int64)  # on the CPU, so that reading waits for no device
        return int(memory["steps"])

    def before_optimizer(self, step: OptimizerStep) -> None:
        """Save the values that ``restore`` brings back, if a detection begins."""
        for parameter, _ in step.parameters():
            memory = step.memory(parameter)
            if self._place(memory) == 0:
                memory.pop("saved", None)
                if self.options.restore:
                    held_state.hold(step.optimizer, parameter, memory, "set restore: false of q_ramping")

    def after_optimizer(self, step: OptimizerStep) -> None:
        """Count the step, and undo a detection that ends with it."""
        if self.options.restore:
            held_state.refuse_group_counts(step.optimizer, "set restore: false of q_ramping")
        for parameter, _ in step.parameters():
            memory = step.memory(parameter)
            ends = "saved" in memory and self._place(memory) >= self.options.t0 - 1
            if ends and held_state.restore(step.optimizer, parameter, memory) and "factor" in memory:
                memory["begins"] = torch.ones((), dtype=torch.int64)
            memory["steps"] += 1


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [QRamping]
