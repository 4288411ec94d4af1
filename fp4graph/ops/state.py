"""State tensors as programs take them: a technique's entries for one operand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4graph.technique import StateEntry
from fp4graph.technique.operands import Operand

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: State of one operand: technique, then entry name.
OperandState = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class StateSlot:
    """A state tensor that a program takes: an entry, and the name of the technique that declared it."""

    technique: str
    entry: StateEntry

    @property
    def label(self) -> str:
        """The entry's name, unique in its technique: prefixed by the operand's name, unless that is fprop.weight."""
        operand = self.entry.operand
        prefix = "" if operand is Operand.FPROP_WEIGHT else f"{operand.replace('.', '_')}_"
        return prefix + self.entry.name

    @property
    def written(self) -> bool:
        """True if the graph writes the tensor."""
        return self.entry.writer == "graph"

    @property
    def shared(self) -> bool:
        """True if siblings share the tensor, which is computed from their weights."""
        return self.entry.writer == "siblings"


def in_each_dtype(maximum: Tensor) -> Tensor:
    """Return the fp32 maximum of magnitudes unrounded, rounded to bf16 and rounded to fp16: ``[3, ...]``, fp32.

    A graph picks the maximum of its operand's dtype. If the graph rounded it, Inductor's C++ would drop the two casts.
    """
    return torch.stack([maximum.to(dtype).to(torch.float32) for dtype in _DTYPES])


def in_dtype(maxima: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the maximum for an operand of ``dtype``, from the result of :func:`in_each_dtype`."""
    return maxima[_DTYPES.index(dtype) if dtype in _DTYPES else 0]
