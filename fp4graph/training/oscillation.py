"""Measures how far a weight w and its quantized value Q(w) move. By these distances techniques find oscillations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fp4graph.technique import WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor


def begin(update: WeightUpdate) -> None:
    """Store w and Q(w), and set the distances of all elements to 0: four fp32 tensors in ``update.memory``."""
    memory, weight = update.memory, update.parameter
    memory["last"] = weight.to(torch.float32, copy=True)
    memory["last_q"] = update.quantize(weight).to(torch.float32, copy=True)
    memory["moved"], memory["moved_q"] = (torch.zeros_like(memory["last"]) for _ in range(2))


def add(update: WeightUpdate) -> None:
    """Add the distances from the stored w and Q(w) to the present w and Q(w), and store these."""
    memory, weight = update.memory, update.parameter
    for distance, last, now in (("moved", "last", weight), ("moved_q", "last_q", update.quantize(weight))):
        memory[distance] += (now.to(torch.float32) - memory[last]).abs()
        memory[last].copy_(now)


def end(memory: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the distances that w and Q(w) have moved since :func:`begin`, and forget them."""
    del memory["last"], memory["last_q"]
    return memory.pop("moved"), memory.pop("moved_q")
