"""Three blocks of linears or of experts, in which blocks of quantizers do not divide every axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.helpers.models import grouped_mm

#: With 48 tokens and widths of 160 and 96, blocks of 32 and more do not divide every axis.
TOKENS, WIDTH, HIDDEN, EXPERTS = 48, 160, 96, 3
KINDS = ("linear", "experts")


class Linears(nn.Module):
    """The gated feed-forward of LLaMA, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y


class Experts(nn.Module):
    """The gated feed-forward of experts, for tokens sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        gate, up = grouped_mm(x, self.gate_up, offs=ends).chunk(2, -1)
        return grouped_mm(nn.functional.silu(gate) * up, self.down, offs=ends)


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Linears() if kind == "linear" else Experts()

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x), ends)
        return y


class Blocks(nn.Module):
    """Three blocks, because policies treat the first and the last differently."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, ends)
        return x
