"""Which code computes one operand's quantizer: a kernel, a kernel that is given scales, or tensor code; and why.

:mod:`fp4graph.ops.lower` decides here for the operands of a product, and a quantizer for each of its calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch

from fp4graph.kernels import gpu, operators
from fp4graph.numerics import target
from fp4graph.numerics.spec import QuantSpec
from fp4graph.technique import QUANTIZER_STAGES, Technique, overrides

#: The stages outside one call of the quantizer.
OUTSIDE = ("split", "around", "after")
_INSIDE = tuple(stage for stage in QUANTIZER_STAGES if stage not in OUTSIDE)
_DOES = {
    "split": "splits the operand",
    "around": "calls the quantizer",
    "after": "changes the result",
    "block_statistic": "chooses the statistic of blocks",
    "group_statistic": "chooses the statistic of groups",
    "group_scale": "divides by a scale of groups",
    "scale": "chooses the scale of blocks",
    "round": "rounds elements",
    "rescale": "replaces scales",
}


class Code(StrEnum):
    """What computes a quantizer."""

    KERNEL = "one kernel"
    WITHIN = "one kernel, within what a technique does around it"
    GIVEN = "tensor code for scales, a kernel for the rest"
    TENSOR = "tensor code"


@dataclass(frozen=True)
class Choice:
    """The code of one call, and why it is not one kernel; "" where it is."""

    code: Code
    why: str = ""


@dataclass(frozen=True)
class Machine:
    """What runs the code.

    Attributes:
        kind: of device: "cpu", "cuda".
        kernels: whether its kernels are there and switched on.
        narrows: whether exact products of fp32 operands multiply as bf16.
    """

    kind: str
    kernels: bool
    narrows: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """Return the machine that code on ``device`` runs on, or is traced for."""
        return cls(target.kind(device), operators.usable(device), gpu.multiplies_bfloat16(device))

    @property
    def reads_whole(self) -> bool:
        """True if the largest magnitude of a whole tensor is found from the tensor, and not from its blocks'.

        On a GPU, where nothing else reads the maxima of blocks if a kernel quantizes: they would be written for this
        alone.
        """
        return self.kind == "cuda" and self.kernels

    def lacks(self, what: str | None) -> str | None:
        """Return why no kernel serves, where kernels do not know ``what``; None where one does."""
        if not self.kernels:
            return f"no kernels are used on this {self.kind}"
        return None if what is None else f"no kernel knows {what}"


@dataclass(frozen=True)
class Quantizing:
    """What the code of a quantizer depends on.

    Attributes:
        techniques: those that act on the operand.
        drawn: whether there is a source of random bits.
        shares: the blocks that share a scale, of experts.
    """

    spec: QuantSpec
    techniques: tuple[Technique, ...]
    drawn: bool
    shares: Literal["tensor", "row"] | None = None

    def acting(self, stages: Iterable[str], but: Sequence[str] = ()) -> str | None:
        """Return the first of the ``stages`` at which a technique acts, as words; None where none does.

        Args:
            but: names of techniques that do not count.
        """
        for stage in stages:
            if name := next((t.name for t in self.techniques if t.name not in but and overrides(t, stage)), None):
                return f"{name} {_DOES[stage]}"
        return None

    def of_call(self, machine: Machine, idle: Sequence[str] = ()) -> Choice:
        """Return the code of one call of the quantizer, without what techniques do outside of it.

        Args:
            idle: names of techniques that do not round in this call.
        """
        alters = self.acting(_INSIDE) or (f"a {self.shares} of one expert shares a scale" if self.shares else None)
        undrawn = "there are no random bits" if self.spec.needs_key and not self.drawn else None
        why = alters or undrawn or machine.lacks(operators.unserved(self.spec, machine.kind))
        if why is None:
            return Choice(Code.KERNEL)
        kept = self.acting(["round"], idle) or self.acting(["rescale"])
        refused = machine.lacks(operators.unrounded(self.spec, machine.kind)) or kept
        return Choice(Code.GIVEN, why) if refused is None else Choice(Code.TENSOR, refused)

    def of_whole(self, machine: Machine) -> Choice:
        """Return the code of the quantizer with what techniques do outside of its calls."""
        own = self.of_call(machine)
        outside = self.acting(OUTSIDE)
        if outside is None or own.code is Code.TENSOR:
            return own
        return Choice(Code.WITHIN if own.code is Code.KERNEL else own.code, outside)

    def refused_in_one_read(self, machine: Machine, *, stateful: bool) -> str | None:
        """Return why one kernel cannot quantize in one read, given at most what techniques make of the blocks; None
        where it can.

        Args:
            stateful: whether techniques have state.
        """
        if self.of_whole(machine).code is Code.KERNEL:
            return None
        if stateful or self.shares or (self.spec.needs_key and not self.drawn):
            return "scales depend on more than the tensor"
        if (outside := self.acting((*OUTSIDE, "round", "rescale"))) is not None:
            return outside
        if sum(overrides(t, "group_scale") for t in self.techniques) > 1:
            return "several techniques divide by a scale of groups"
        return machine.lacks(operators.unrounded(self.spec, machine.kind))
