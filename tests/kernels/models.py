"""A small model for tests of kernels in training, and three steps of its training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fp4graph


class Net(nn.Module):
    """A linear that shipped policies keep, then residual blocks of two linears that they quantize."""

    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def train(policy: Any, dtype: torch.dtype = torch.float32, backend: str = "eager", **sizes: int) -> Tensor:
    """Return all parameters after three steps under ``policy`` as one vector; with ``dtype`` bf16, under autocast."""
    torch._dynamo.reset()
    model = fp4graph.apply(Net(**sizes), policy, backend=backend, total_forwards=100)
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    x = torch.randn(5, 7, model.stem.in_features, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = (model(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
