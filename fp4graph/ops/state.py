"""State tensors as programs take them: a technique's entries for one operand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fp4graph.technique import StateEntry
from fp4graph.technique.operands import Operand

#: State of one operand: technique, then entry name.
OperandState = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class StateSlot:
    """A state tensor that a program takes: an entry, and the name of the technique that declared it."""

    technique: str
    entry: StateEntry

    @property
    def label(self) -> str:
        """The entry's name among those of its technique: the operand's name goes first unless it is fprop.weight."""
        operand = self.entry.operand
        prefix = "" if operand is Operand.FPROP_WEIGHT else f"{operand.replace('.', '_')}_"
        return prefix + self.entry.name

    @property
    def written(self) -> bool:
        """True if the graph writes the tensor."""
        return self.entry.writer == "graph"
