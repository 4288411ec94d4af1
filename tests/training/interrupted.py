"""Trains 2k steps in one process, or the last k of them from a checkpoint: ``interrupted.py BACKEND whole|rest DIR``.

For each recipe the whole run leaves ``NAME.checkpoint`` after k steps and ``NAME.end``; the rest reads the former and
writes ``NAME.resumed``. An end is losses, parameters, and all state of model, optimizer and scaler.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fp4graph

HALF = 6  # past the detection of q_ramping, and amid its accumulation
SPAM = {
    "version": 1,
    "name": "everything",
    "extends": "mxfp4",
    "techniques": [
        {"hadamard": {"kind": "random", "block": 32}},
        {"stochastic_rounding": {"operands": "backward"}},
        {"stable_spam": {"reset_interval": 4, "total_steps": 20}},
        {"loss_scaling": {"init_scale": 1024.0, "growth_interval": 3}},
    ],
}
RAMPING = {
    "version": 1,
    "name": "ramping",
    "extends": "tetrajet",
    "techniques": [{"q_ramping": {"t_update": 9, "n_max": 3, "t0": 4, "k1": 1.0, "k2": 1}}],
}
RECIPES: dict[str, Any] = {
    "tetrajet": "tetrajet",
    "tetrajet-qema": "tetrajet-qema",
    "tetrajet-qramping": RAMPING,
    "everything": SPAM,
}


class Mlp(nn.Module):
    """A stack of two blocks, so that policies for blocks find them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def train(recipe: Any, backend: str, saved: dict[str, Any] | None, steps: range) -> tuple[dict[str, Any], Any]:
    """State after ``steps``, and after the first half of them."""
    torch._dynamo.reset()
    model = fp4graph.apply(Mlp(), recipe, backend=backend, seed=7)
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * HALF)
    scaler = fp4graph.grad_scaler(model)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    losses = []

    def state() -> dict[str, Any]:
        return {name: part.state_dict() for name, part in parts.items()}

    if saved is not None:
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    half: Any = None
    for step in steps:
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.roll(1, 1)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if step + 1 == HALF:
            half = copy.deepcopy(state())
    return {**state(), "losses": losses[-HALF:]}, half


def main(backend: str, part: str, folder: Path) -> None:
    for name, recipe in RECIPES.items():
        if part == "whole":
            end, half = train(recipe, backend, None, range(2 * HALF))
            torch.save(half, folder / f"{name}.checkpoint")
            torch.save(end, folder / f"{name}.end")
        else:
            saved = torch.load(folder / f"{name}.checkpoint", weights_only=True)
            end, _ = train(recipe, backend, saved, range(HALF, 2 * HALF))
            torch.save(end, folder / f"{name}.resumed")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
