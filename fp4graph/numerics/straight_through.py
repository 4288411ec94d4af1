"""The straight-through gradient of a quantizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StraightThrough(torch.autograd.Function):
    """Returns ``y``, and passes its gradient to ``x``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return y.clone()  # a view could not be changed in place

    @staticmethod
    def setup_context(*_: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
