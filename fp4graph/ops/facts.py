"""The facts of one operand's quantizer that follow from its spec and its techniques, and the kernels that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from fp4graph.kernels.machine import Machine
from fp4graph.kernels.request import OUTSIDE, Asked, Quantizing, Request
from fp4graph.kernels.rows import chosen
from fp4graph.numerics import exact
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.schedule import Code
from fp4graph.ops.state import StateSlot
from fp4graph.technique import GRADIENT_STAGES, QUANTIZER_STAGES, Technique, overrides


@dataclass(frozen=True)
class OperandFacts:
    """One operand's quantizer as data.

    Attributes:
        spec: None leaves the operand in high precision.
        techniques: those that act on the operand, in the policy's order.
        state: their state.
        reuses: True if an operand in high precision reads the dequantized fprop operand as it is.
        shares: the blocks of one expert that share a scale, "tensor" or "row", where the policy's blocks would reach
            into several experts; the spec's own are parts of them.
    """

    spec: QuantSpec | None
    techniques: tuple[Technique, ...] = ()
    state: tuple[StateSlot, ...] = ()
    reuses: bool = False
    shares: Literal["tensor", "row"] | None = None

    @property
    def draws(self) -> bool:
        """True if calling the program needs a source of random bits."""
        return self.spec is not None and (self.spec.needs_key or any(t.draws for t in self.techniques))

    @property
    def from_fprop(self) -> bool:
        """True if the program starts from the dequantized fprop operand."""
        return self.reuses or (self.spec is not None and self.spec.source == "fprop")

    @property
    def from_master(self) -> bool:
        """True if the operand is quantized from before autocast's cast."""
        return self.spec is not None and self.spec.from_master

    @property
    def observes(self) -> bool:
        """True if calling the program while training changes state."""
        return any(slot.written for slot in self.state)

    def is_exact_in_bfloat16(self, multiplied: bool | None = None) -> bool:
        """Return whether every value of the quantized operand is a bf16 number by construction.

        Args:
            multiplied: whether the group scales wait for the GEMM's accumulator, which shows when the program runs;
                None takes it that they do.
        """
        if self.spec is None or any(self.at(stage) for stage in ("around", "rescale", "after")):
            return False
        scaled = bool(self.at("group_scale"))
        return exact.in_bfloat16(self.spec, scaled=scaled) and not (scaled and multiplied is False)

    @cached_property
    def is_wrapped(self) -> bool:
        """True if a technique acts outside of the calls of the quantizer."""
        return any(self.at(stage) for stage in OUTSIDE)

    @cached_property
    def has_gradient_factor(self) -> bool:
        """True if a technique replaces the straight-through estimator."""
        return self.spec is not None and any(self.at(stage) for stage in GRADIENT_STAGES)

    def at(self, stage: str) -> list[Technique]:
        """Return the techniques that act at ``stage``, in order."""
        return [technique for technique in self.techniques if overrides(technique, stage)]

    def quantizing(self, *, drawn: bool, experts: bool, again: bool = False) -> Quantizing:
        """Return the quantizer as kernels are asked about it.

        Args:
            drawn: whether there is a source of random bits.
            experts: whether the operand is one of experts.
            again: of calls after the first, in which techniques with state do not round.
        """
        assert self.spec is not None, "a high-precision operand has no quantizer"
        idle = {slot.technique for slot in self.state} if again else set[str]()
        acts: list[tuple[str, tuple[str, ...]]] = []
        for stage in QUANTIZER_STAGES:
            acting = [t for t in self.at(stage) if experts or stage not in t.on_experts]
            names = tuple(t.name for t in acting if not (stage == "round" and t.name in idle))
            if names:
                acts.append((stage, names))
        whole = all(t.group_granularity in ("tensor", "all") for t in self.at("group_scale"))
        return Quantizing(self.spec, tuple(acts), drawn, self.shares, bool(self.state), whole)

    def chosen(
        self, machine: Machine, source: torch.dtype, dtype: torch.dtype, *, drawn: bool, experts: bool
    ) -> tuple[Code, str]:
        """Return the kernels that quantize values on ``machine``, and why those before the first do not: the same every
        time.

        Args:
            source: the dtype of the operand.
            dtype: the dtype of the GEMM.
            drawn, experts: of :meth:`quantizing`.
        """
        setting = machine, source, dtype, drawn, experts
        if torch.compiler.is_dynamo_compiling():
            return self._chosen(*setting)
        if setting not in self._codes:
            self._codes[setting] = self._chosen(*setting)
        return self._codes[setting]

    def _chosen(
        self, machine: Machine, source: torch.dtype, dtype: torch.dtype, drawn: bool, experts: bool
    ) -> tuple[Code, str]:
        quantizing = self.quantizing(drawn=drawn, experts=experts)
        first, why = chosen(Request(Asked.VALUES, machine, quantizing, source, dtype))
        if not (self.state and self.at("around")):
            return Code(first, first), why
        quantizing = self.quantizing(drawn=drawn, experts=experts, again=True)
        again, _ = chosen(Request(Asked.VALUES, machine, quantizing, source, dtype))
        return Code(first, again), why

    @cached_property
    def _codes(self) -> dict[tuple[Machine, torch.dtype, torch.dtype, bool, bool], tuple[Code, str]]:
        """The results of :meth:`chosen`, by its arguments."""
        return {}
