"""Q-Ramping: weights that oscillate between two FP4 values step more seldom, and further."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import Field, model_validator

from fp4graph.hookspecs import hookimpl
from fp4graph.operands import Operand
from fp4graph.site import SiteView
from fp4graph.technique import OperandSpecs, Overhead, Technique

if TYPE_CHECKING:
    from fp4graph.training import OptimizerStep, WeightUpdate

#: What a detection keeps of each element: the way of w and of Q(w) so far, and where both were last.
_DETECTION = ("moved", "moved_q", "last", "last_q")
_SAVED = "saved."


class QRamping(Technique):
    """Each weight element has a batch size and a learning rate of its own, N times those of the run.

    In the first T0 of every T_update optimizer steps, plain ones, the ways of each element w and of its quantized
    value are measured; then N is set for the rest of them:
    R = Σ_t abs(w_Q[t] − w_Q[t−1]) / Σ_t abs(w[t] − w[t−1]),  N = min(k2·⌊R/k1⌋ + 1, N_max).
    0/0 is 0, and x/0 gives N_max. An element with N > 1 adds up its gradients and is left alone, with its entries of
    the optimizer's state, for N − 1 steps; at the N-th the optimizer steps with the mean of the N gradients, and the
    element moves N times as far as it would: w ← w + N·Δw. That is a step with learning rate N·lr and a batch N times
    as large, in any optimizer whose learning rate multiplies its update; decoupled weight decay included, at N times
    the rate and every N-th step. Step counts and what is not of the weight's shape (bias corrections) advance at every
    step. An element that oscillates has R far above 1, since the quantized value jumps where the weight creeps.

    ``restore``: weights, all other parameters, and the optimizer's state return after a detection to what they were
    before it, so that its steps only measure. Otherwise they are steps of the training like others.

    Source: Chen et al. 2025, "Oscillation-Reduced MXFP4 Training for Vision Transformers", sec. 6 and Algorithm 2,
    with k1 = 16, k2 = 5 and T0 = 30; N_max and T_update are not given, nor whether training goes on from the state
    after detection. In their code both are the steps of one epoch, state is restored, and weight decay goes on while an
    element waits.

    Stage: optimizer, before and after the step.

    Cost: two passes over each weight with N > 1 somewhere and its state, which are copied before the step; the sum of
    gradients and N, kept. During a detection four tensors of the weight's size and its quantizer, once more a step.

    The complexity weight is ours: 2.5, since Table 2's rules give unfusable work with O(n) memory 2 to 3.

    Use it against oscillation where ``q_ema``, with which it cannot be combined, does not help or its average in the
    forward is not wanted. Quantizers of forward weights that draw noise move without the weight, which R cannot tell
    from oscillation.
    """

    name: ClassVar[str] = "q_ramping"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(n)", fusable=False)
    conflicts: ClassVar[frozenset[str]] = frozenset({"q_ema"})

    t_update: int = Field(
        ge=1, description="Optimizer steps from one detection to the next; a steps-per-epoch's worth."
    )
    n_max: int = Field(ge=1, lt=2**15, description="Largest N.")
    t0: int = Field(30, ge=1, description="Steps of a detection.")
    k1: float = Field(16.0, gt=0, description="R is counted in multiples of it.")
    k2: int = Field(5, ge=1, description="What each multiple adds to N.")
    restore: bool = Field(False, description="Whether the steps of a detection are taken back after it.")

    @model_validator(mode="after")
    def _detects_and_trains(self) -> QRamping:
        if self.t0 >= self.t_update:
            raise ValueError(f"a detection of t0 {self.t0} steps leaves nothing of t_update {self.t_update} to ramp")
        return self

    @property
    def complexity(self) -> float:
        """2.5, ours: unfusable, O(n) persistent memory."""
        return 2.5

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuses a stochastic weight quantizer, under which every weight seems to oscillate."""
        spec = specs.get(Operand.FPROP_WEIGHT)
        if spec is not None and "stochastic" in (spec.rounding, spec.scale.rounding):
            raise ValueError(
                "fprop.weight rounds stochastically, under which every weight seems to oscillate; round it to nearest"
            )

    def acts_on(self, site: SiteView) -> frozenset[Operand]:
        """The forward weight."""
        return frozenset({Operand.FPROP_WEIGHT}) if site.op == "linear" else frozenset()

    # ------------------------------------------------------------------ one weight

    def before_step(self, update: WeightUpdate) -> None:
        """Starts a detection, or gives the optimizer the gradients of the elements that are due."""
        memory, weight, grad = update.memory, update.parameter, update.parameter.grad
        assert grad is not None
        place = self._place(memory, weight)
        if place == 0:
            for name in ("factor", "summed"):
                memory.pop(name, None)
            memory["last"] = weight.to(torch.float32, copy=True)
            memory["last_q"] = update.quantize(weight).to(torch.float32, copy=True)
            memory["moved"], memory["moved_q"] = (torch.zeros_like(memory["last"]) for _ in range(2))
        if place < self.t0 or "factor" not in memory:
            return
        factor, summed = memory["factor"], memory["summed"]
        summed += grad
        due = (place - self.t0 + 1) % factor.to(torch.int32) == 0
        state = dict(_shaped(update.optimizer, weight))
        update.scratch.update(due=due, old=weight.clone(), state={name: x.clone() for name, x in state.items()})
        mean = summed / factor.to(torch.float32)
        # Elements with N = 1 get their gradient as it is; those that wait give none to norms over the tensor.
        grad.copy_(torch.where(factor == 1, grad, torch.where(due, mean, 0.0).to(grad.dtype)))

    def after_step(self, update: WeightUpdate) -> None:
        """Measures, ends a detection, or undoes the step for the elements that were not due."""
        memory, weight = update.memory, update.parameter
        place = self._place(memory, weight)
        if place < self.t0:
            self._measure(memory, weight, update.quantize(weight))
            if place == self.t0 - 1:
                self._set_factors(memory)
            return
        if "due" not in update.scratch:
            return
        due, old = update.scratch["due"], update.scratch["old"]
        factor = memory["factor"]
        far = (old.to(torch.float32) + factor * (weight.to(torch.float32) - old.to(torch.float32))).to(weight.dtype)
        weight.copy_(torch.where(due, torch.where(factor == 1, weight, far), old))
        for name, new in _shaped(update.optimizer, weight):
            former = update.scratch["state"].get(name)
            new.copy_(torch.where(due, new, torch.zeros_like(new) if former is None else former))
        memory["summed"].masked_fill_(due, 0.0)

    def _place(self, memory: dict[str, torch.Tensor], weight: torch.Tensor) -> int:
        """Steps since the latest detection began. The count is kept on the CPU, where reading it waits for nothing."""
        return int(memory.setdefault("steps", torch.zeros((), dtype=torch.int64))) % self.t_update

    def _measure(self, memory: dict[str, torch.Tensor], weight: torch.Tensor, quantized: torch.Tensor) -> None:
        for way, last, now in (("moved", "last", weight), ("moved_q", "last_q", quantized)):
            memory[way] += (now.to(torch.float32) - memory[last]).abs()
            memory[last].copy_(now)

    def _set_factors(self, memory: dict[str, torch.Tensor]) -> None:
        """Algorithm 2, lines 5 to 7; where all N are 1 nothing is kept."""
        moved, moved_q = memory["moved"], memory["moved_q"]
        ratio = torch.where(moved_q == 0, 0.0, moved_q / moved)
        factor = (self.k2 * (ratio / self.k1).floor() + 1).clamp(max=self.n_max).to(torch.int16)
        for name in _DETECTION:
            del memory[name]
        if bool((factor > 1).any()):
            memory["factor"], memory["summed"] = factor, torch.zeros_like(moved)

    # ------------------------------------------------------------------ the whole optimizer

    def before_optimizer(self, step: OptimizerStep) -> None:
        """Saves what ``restore`` brings back."""
        if not self.restore:
            return
        for parameter, _ in step.parameters():
            memory = step.memory(parameter)
            if self._place(memory, parameter) == 0:
                memory[_SAVED] = parameter.detach().clone()
                for name, value in _tensors(step.optimizer, parameter):
                    memory[_SAVED + name] = value.clone()

    def after_optimizer(self, step: OptimizerStep) -> None:
        """Counts the step, and takes back a detection that ends with it."""
        for parameter, _ in step.parameters():
            memory = step.memory(parameter)
            if "steps" not in memory:
                continue
            if self.restore and self._place(memory, parameter) == self.t0 - 1:
                parameter.copy_(memory.pop(_SAVED))
                for name, value in _tensors(step.optimizer, parameter):
                    saved = memory.pop(_SAVED + name, None)
                    value.zero_() if saved is None else value.copy_(saved)
            memory["steps"] += 1


def _tensors(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The optimizer's own state of a parameter, as far as it is tensors."""
    state: Mapping[Any, Any] = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and not str(name).startswith("fp4graph."):
            yield name, value


def _shaped(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What of it has one value for each element."""
    return ((name, value) for name, value in _tensors(optimizer, weight) if value.shape == weight.shape)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [QRamping]
