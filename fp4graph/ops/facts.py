"""The facts of one operand's quantizer that follow from its spec and its techniques, and the kernels that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from fp4graph.kernels.machine import Machine
from fp4graph.kernels.request import OUTSIDE, Asked, Quantizing, Request
from fp4graph.kernels.rows import chosen
from fp4graph.numerics import exact
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.schedule import Code
from fp4graph.ops.state import StateSlot
from fp4graph.technique import GRADIENT_STAGES, QUANTIZER_STAGES, TENSOR_STAGES, Part


@dataclass(frozen=True)
class OperandFacts:
    """One operand's quantizer as data.

    Attributes:
        spec: None leaves the operand in high precision.
        parts: the parts of techniques that act on the operand, in the policy's order.
        state: the state of their techniques.
        reuses: True if an operand in high precision reads the dequantized fprop operand as it is.
        shares: the policy's block, "tensor" or "row", if it would reach into several experts. The spec then has smaller
            blocks, of which those of one expert, or of one line in it, share a scale.
    """

    spec: QuantSpec | None
    parts: tuple[Part, ...] = ()
    state: tuple[StateSlot, ...] = ()
    reuses: bool = False
    shares: Literal["tensor", "row"] | None = None

    @property
    def draws(self) -> bool:
        """True if calling the program needs a source of random bits."""
        return self.spec is not None and (self.spec.needs_key or any(part.draws for part in self.parts))

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
            multiplied: whether the group scales wait for the GEMM's accumulator, which is known when the program runs;
                None assumes that they wait.
        """
        if self.spec is None or any(self.at(stage) for stage in ("around", "rescale", "after")):
            return False
        scaled = bool(self.at("group_scale"))
        return exact.in_bfloat16(self.spec, scaled=scaled) and not (scaled and multiplied is False)

    @cached_property
    def repeats(self) -> bool:
        """True if quantizing an operand of equal lines gives one quantized line, repeated.

        This holds where nothing draws, no technique keeps state, and scales follow from the largest magnitude alone.
        """
        acting = {stage for stage in TENSOR_STAGES if self.at(stage)}
        depends = self.draws or bool(self.state) or any(part.counts for part in self.parts)
        return not depends and acting <= {*OUTSIDE, "group_scale"}

    def quantizes_alone(self, rows: range, columns: range, whole: tuple[int, int]) -> bool:
        """Return whether a part of a matrix of size ``whole`` gets the same values alone as in the matrix."""
        if self.spec is None:
            return True

        def fits(part: range, size: int, unit: int | str) -> bool:
            if isinstance(unit, str):
                return len(part) == size
            return part.start % unit == 0 and (part.stop % unit == 0 or part.stop == size)

        block, groups = self.spec.block, {part.group_granularity for part in self.at("group_scale")}
        lines, length = block if isinstance(block, tuple) else (1, block)
        mixed = self.draws or any(part.mixes in ("tensor", "expert") for part in self.parts)
        if mixed or not {length, *groups}.isdisjoint({"tensor", "all"}):
            return False
        return fits(rows, whole[0], lines) and all(fits(columns, whole[1], unit) for unit in (length, *groups))

    @cached_property
    def is_wrapped(self) -> bool:
        """True if a technique acts outside of the calls of the quantizer."""
        return any(self.at(stage) for stage in OUTSIDE)

    @cached_property
    def has_gradient_factor(self) -> bool:
        """True if a technique replaces the straight-through estimator."""
        return self.spec is not None and any(self.at(stage) for stage in GRADIENT_STAGES)

    def at(self, stage: str) -> list[Any]:
        """Return the parts that act at ``stage``, in order."""
        return [part for part in self.parts if part.acts_at(stage)]

    def quantizing(self, *, drawn: bool, again: bool = False) -> Quantizing:
        """Return the quantizer in the form of a request to kernels.

        Args:
            drawn: whether there is a source of random bits.
            again: whether the request is for calls after the first, in which techniques with state do not round.
        """
        assert self.spec is not None, "a high-precision operand has no quantizer"
        idle = {slot.technique for slot in self.state} if again else set[str]()
        acts: list[tuple[str, tuple[str, ...]]] = []
        for stage in QUANTIZER_STAGES:
            names = tuple(part.name for part in self.at(stage) if not (stage == "round" and part.name in idle))
            if names:
                acts.append((stage, names))
        whole = all(part.group_granularity in ("tensor", "all") for part in self.at("group_scale"))
        return Quantizing(self.spec, tuple(acts), drawn, self.shares, bool(self.state), whole)

    def chosen(self, machine: Machine, source: torch.dtype, dtype: torch.dtype, *, drawn: bool) -> tuple[Code, str]:
        """Return the kernels that quantize values on ``machine``, and why the kernels before the first one refuse.

        Args:
            source: the dtype of the operand.
            dtype: the dtype of the GEMM.
            drawn: whether there is a source of random bits.
        """
        setting = machine, source, dtype, drawn
        if torch.compiler.is_dynamo_compiling():
            return self._chosen(*setting)
        if setting not in self._codes:
            self._codes[setting] = self._chosen(*setting)
        return self._codes[setting]

    def _chosen(self, machine: Machine, source: torch.dtype, dtype: torch.dtype, drawn: bool) -> tuple[Code, str]:
        quantizing = self.quantizing(drawn=drawn)
        first, why = chosen(Request(Asked.VALUES, machine, quantizing, source, dtype))
        if not (self.state and self.at("around")):
            return Code(first, first), why
        quantizing = self.quantizing(drawn=drawn, again=True)
        again, _ = chosen(Request(Asked.VALUES, machine, quantizing, source, dtype))
        return Code(first, again), why

    @cached_property
    def _codes(self) -> dict[tuple[Machine, torch.dtype, torch.dtype, bool], tuple[Code, str]]:
        """The results of :meth:`chosen`, by its arguments."""
        return {}
