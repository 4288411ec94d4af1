"""Q-Ramping: lets weights that oscillate between two FP4 values step less often, and further."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import Field, model_validator

from fp4graph import Error, Operand, Overhead, Technique, hookimpl
from fp4graph.technique import OperandSpecs, OptimizerHook, OptimizerStep, Part, SiteView, WeightUpdate
from fp4graph.training.conditioning import HELD

if TYPE_CHECKING:
    from torch import Tensor


class QRamping(Technique):
    """Gives each weight element its own batch size and learning rate, N times those of the run.

    The first T0 of every T_update optimizer steps are a detection, which measures the distances that each element w and
    its quantized value move. The distances set N for the other steps:
    R = Σ_t abs(w_Q[t] − w_Q[t−1]) / Σ_t abs(w[t] − w[t−1]),  N = min(k2·⌊R/k1⌋ + 1, N_max).
    Here 0/0 is 0, and x/0 gives N_max. An element that oscillates has R far above 1, because its quantized value jumps
    while the weight creeps. An element with N > 1 adds up its gradients for N − 1 steps, in which it and its entries of
    the optimizer's state do not change. At the N-th step the optimizer steps with the mean of the N gradients, and the
    element moves N times as far: w ← w + N·Δw. That is a step with learning rate N·lr and a batch N times as large, in
    any optimizer whose learning rate multiplies its update; decoupled weight decay acts every N-th step at N times the
    rate. Step counts and state that is not of the weight's shape (bias corrections) advance at every step. A reset of
    the moments (``stable_spam``, ``fp4graph.optim.StableSPAM``) also reaches waiting elements. N_max is at most
    T_update − T0, the steps between two detections. Gradients of a batch that the next detection cuts short are
    dropped.

    With ``restore``, weights, all other parameters and the optimizer's state return after a detection to their previous
    values, so that its steps only measure; else they are ordinary steps. A parameter without previous state in the
    optimizer begins anew, by an ordinary step of all its elements. Schedules and the memory of other techniques go on.
    An optimizer that counts steps for a group of parameters (timm's LAMB and Adan) is refused.

    Options that change during training, by a phase or another policy, take effect when a detection begins or ends; one
    is undone if ``restore`` was set when it began.

    Source: Chen et al. 2025, "Oscillation-Reduced MXFP4 Training for Vision Transformers", sec. 6 and Algorithm 2,
    with k1 = 16, k2 = 5 and T0 = 30. The paper gives neither N_max nor T_update, nor the state from which training goes
    on. In the authors' code both are the steps of one epoch, state is restored, and weight decay also acts on elements
    that wait.

    Stage: optimizer, before and after the step.

    Cost: two passes over each weight with some N > 1 and over its state, which are copied before the step; the sum of
    gradients and N are kept. During a detection: four tensors of the weight's size, and the weight's quantizer once
    more at each step. The complexity weight is ours: 2.5, as Table 2's rules give 2 to 3 for unfusable work with O(n)
    memory.

    Use it against oscillation if ``q_ema``, with which it cannot be combined, does not help or its average in the
    forward is not wanted. Forward weights must round to nearest: R cannot tell drawn noise from oscillation.
    """

    name: ClassVar[str] = "q_ramping"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(n)", fusable=False)
    complexity: ClassVar[float] = 2.5
    on_weight: ClassVar[bool] = True
    conflicts: ClassVar[frozenset[str]] = frozenset({"q_ema"})

    t_update: int = Field(ge=1, description="Optimizer steps from one detection to the next, such as an epoch's.")
    n_max: int = Field(ge=1, lt=2**15, description="Largest N.")
    t0: int = Field(30, ge=1, description="Steps of a detection.")
    k1: float = Field(16.0, gt=0, description="R is counted in multiples of k1.")
    k2: int = Field(5, ge=1, description="Increase of N for each multiple.")
    restore: bool = Field(False, description="Whether the steps of a detection are undone after it.")

    @model_validator(mode="after")
    def _detects_and_trains(self) -> QRamping:
        if self.t0 >= self.t_update:
            raise ValueError(f"a detection of t0 {self.t0} steps leaves nothing of t_update {self.t_update} to ramp")
        if self.n_max > self.t_update - self.t0:
            raise ValueError(
                f"n_max {self.n_max} is more than the {self.t_update - self.t0} steps from one detection to the next "
                f"(t_update {self.t_update} less t0 {self.t0}): an element with such an N would never step; "
                "lower n_max or raise t_update"
            )
        return self

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse a stochastic weight quantizer, under which every weight seems to oscillate."""
        spec = specs.get(Operand.FPROP_WEIGHT)
        if spec is not None and "stochastic" in (spec.rounding, spec.scale.rounding):
            raise ValueError(
                "fprop.weight rounds stochastically, under which every weight seems to oscillate; round it to nearest"
            )

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return (RampBatches(options=self),)


class RampBatches(OptimizerHook):
    """Measures R, sets N, and lets elements wait."""

    options: QRamping

    def before_step(self, update: WeightUpdate) -> None:
        """Start a detection, or give the optimizer the gradients of the elements that step now."""
        memory, weight, grad = update.memory, update.parameter, update.parameter.grad
        assert grad is not None
        if self._place(memory) == 0:
            for name in ("factor", "summed", "ramped", "begins"):
                memory.pop(name, None)
            # The latest values of w and Q(w), and the distances that both have moved so far.
            memory["last"] = weight.to(torch.float32, copy=True)
            memory["last_q"] = update.quantize(weight).to(torch.float32, copy=True)
            memory["moved"], memory["moved_q"] = (torch.zeros_like(memory["last"]) for _ in range(2))
        detects = "moved" in memory
        if detects or "factor" not in memory or memory.pop("begins", None) is not None:
            return
        factor, summed, ramped = memory["factor"], memory["summed"], memory["ramped"]
        summed += grad
        ramped += 1
        stepping = int(ramped) % factor.to(torch.int32) == 0
        update.scratch.update(stepping=stepping, old=weight.clone())
        entries = _state(update.optimizer, weight)
        _hold(memory, ((n, x) for n, x in entries if isinstance(x, torch.Tensor) and x.shape == weight.shape))
        mean = summed / factor.to(torch.float32)
        # Elements with N = 1 keep their gradient; elements that wait add nothing to norms over the tensor.
        grad.copy_(torch.where(factor == 1, grad, torch.where(stepping, mean, 0.0).to(grad.dtype)))

    def after_step(self, update: WeightUpdate) -> None:
        """Measure, end a detection, or undo the step for the elements that wait."""
        memory, weight = update.memory, update.parameter
        if "moved" in memory:  # a detection is running
            for way, last, now in (("moved", "last", weight), ("moved_q", "last_q", update.quantize(weight))):
                memory[way] += (now.to(torch.float32) - memory[last]).abs()
                memory[last].copy_(now)
            if self._place(memory) >= self.options.t0 - 1:
                self._set_factors(memory)
            return
        if "stepping" not in update.scratch:
            return
        stepping, old, factor = update.scratch["stepping"], update.scratch["old"], memory["factor"]
        far = (old.to(torch.float32) + factor * (weight.to(torch.float32) - old.to(torch.float32))).to(weight.dtype)
        weight.copy_(torch.where(stepping, torch.where(factor == 1, weight, far), old))
        held = _released(memory)
        for name, new in _state(update.optimizer, weight):
            if name in held:  # else the optimizer has just created the entry, without gradients of waiting elements
                new.copy_(torch.where(stepping, new, held[name]))
        memory["summed"].masked_fill_(stepping, 0.0)

    def _place(self, memory: dict[str, Tensor]) -> int:
        """Return the steps since the latest detection began; 0 begins one."""
        if int(memory.get("steps", self.options.t_update)) >= self.options.t_update:
            memory["steps"] = torch.zeros((), dtype=torch.int64)  # on the CPU, where reading waits for nothing
        return int(memory["steps"])

    def _set_factors(self, memory: dict[str, Tensor]) -> None:
        """Set N by Algorithm 2, lines 5 to 7; if all N are 1, nothing is kept."""
        options, moved, moved_q = self.options, memory["moved"], memory["moved_q"]
        ratio = torch.where(moved_q == 0, 0.0, moved_q / moved)
        factor = (options.k2 * (ratio / options.k1).floor() + 1).clamp(max=options.n_max).to(torch.int16)
        del memory["moved"], memory["moved_q"], memory["last"], memory["last_q"]
        if bool((factor > 1).any()):
            memory["factor"], memory["summed"] = factor, torch.zeros_like(moved)
            memory["ramped"] = torch.zeros((), dtype=torch.int64)

    def before_optimizer(self, step: OptimizerStep) -> None:
        """Save the values that ``restore`` brings back, if a detection begins."""
        for parameter, _ in step.parameters():
            memory = step.memory(parameter)
            if self._place(memory) == 0:
                memory.pop("saved", None)
                if self.options.restore:
                    memory["saved"] = parameter.detach().clone()
                    _hold(memory, _state(step.optimizer, parameter))

    def after_optimizer(self, step: OptimizerStep) -> None:
        """Count the step, and undo a detection that ends with it."""
        if self.options.restore and any("step" in group for group in step.optimizer.param_groups):
            raise Error(
                f"{type(step.optimizer).__name__} counts its steps for a whole group of parameters, which q_ramping "
                "cannot undo; set restore: false"
            )
        for parameter, _ in step.parameters():
            memory = step.memory(parameter)
            if "saved" in memory and self._place(memory) >= self.options.t0 - 1:
                parameter.copy_(memory.pop("saved"))
                _restore(step.optimizer, parameter, memory)
            memory["steps"] += 1


def _state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Iterator[tuple[str, Any]]:
    """Return the optimizer's state of a parameter, by name, without entries of techniques."""
    state: Mapping[Any, Any] = optimizer.state.get(parameter, {})
    return ((name, value) for name, value in state.items() if not str(name).startswith("fp4graph."))


def _hold(memory: dict[str, Tensor], state: Iterable[tuple[str, Any]]) -> None:
    """Copy entries of the optimizer's state into ``memory``, under names that a reset of the moments finds."""
    _released(memory)  # copies from a step that raised
    for name, value in state:
        if isinstance(value, torch.Tensor):
            memory[HELD + name] = value.clone()
        elif isinstance(value, bool | int | float):
            memory[HELD + name] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
        elif value is not None:
            raise Error(
                f"the optimizer keeps {name!r}, a {type(value).__name__}, for a parameter, which q_ramping cannot "
                "restore; set restore: false"
            )


def _released(memory: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the copies and return them by their names in the optimizer's state."""
    names = [name for name in memory if name.startswith(HELD)]
    return {name.removeprefix(HELD): memory.pop(name) for name in names}


def _restore(optimizer: torch.optim.Optimizer, parameter: Tensor, memory: dict[str, Tensor]) -> None:
    """Restore a parameter's state from the held copies; drop newer entries, which the optimizer then creates anew."""
    state, held = optimizer.state[parameter], _released(memory)
    for name, value in list(_state(optimizer, parameter)):
        if name not in held:
            del state[name]
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and "factor" in memory:
                memory["begins"] = torch.ones((), dtype=torch.int64)
        elif isinstance(value, torch.Tensor):
            value.copy_(held[name])
        else:
            state[name] = type(value)(held[name])


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [QRamping]
