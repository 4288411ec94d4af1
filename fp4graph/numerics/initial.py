"""Makes the initial values of the tensors that techniques keep for a weight, each from the whole weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Constant:
    """Makes a tensor of ``shape`` that holds ``value``, fp32, on the weight's device."""

    shape: tuple[int, ...] = ()
    value: float = 0.0

    def __call__(self, weight: Tensor) -> Tensor:
        return torch.full(self.shape, self.value, dtype=torch.float32, device=weight.device)


def copy(weight: Tensor) -> Tensor:
    """Return the weight, fp32."""
    return weight.to(torch.float32).clone()


def largest(weight: Tensor) -> Tensor:
    """Return the largest magnitude of a weight, fp32: 0-d, or one per expert, ``[E]``, for a weight of three axes."""
    magnitudes = weight.abs().to(torch.float32)
    return magnitudes.flatten(1).amax(-1) if weight.dim() == 3 else magnitudes.amax()
