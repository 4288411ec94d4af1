"""Trains 2k steps in one process, or the last k of them from a checkpoint: ``interrupted.py BACKEND whole|rest DIR``.

For each recipe the whole run leaves ``NAME.checkpoint`` after k steps and ``NAME.end``; the rest reads the former and
writes ``NAME.resumed``. Both ends hold losses and the state of model, optimizer, scheduler and scaler.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch

import fp4graph
from tests.helpers.steps import Blocks

HALF = 6  # past the detection of q_ramping, and amid its accumulation
RECIPES: dict[str, tuple[str, list[Any]]] = {
    "tetrajet": ("tetrajet", []),
    "tetrajet-qema": ("tetrajet-qema", []),
    "tetrajet-qramping": ("tetrajet", [{"q_ramping": {"t_update": 9, "n_max": 3, "t0": 4, "k1": 1.0, "k2": 1}}]),
    "everything": (
        "mxfp4",
        [
            {"hadamard": {"kind": "random", "block": 32}},
            {"stochastic_rounding": {"operands": "backward"}},
            {"stable_spam": {"reset_interval": 4, "total_steps": 20}},
            {"loss_scaling": {"init_scale": 1024.0, "growth_interval": 3}},
        ],
    ),
}


def train(name: str, backend: str, saved: dict[str, Any] | None, steps: range) -> tuple[dict[str, Any], Any]:
    """Return the state after ``steps``, and of a whole run the state after its first half."""
    torch._dynamo.reset()
    base, techniques = RECIPES[name]
    recipe = {"version": 1, "name": name, "extends": base, "techniques": techniques} if techniques else base
    model = fp4graph.apply(Blocks(dropout=0.0), recipe, backend=backend, seed=7)
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * HALF)
    scaler = fp4graph.grad_scaler(model)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    losses, half = [], None
    for part, state in (saved or {}).items():
        parts[part].load_state_dict(state)
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
            half = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
    return {"losses": losses[-HALF:]} | {name: part.state_dict() for name, part in parts.items()}, half


if __name__ == "__main__":
    backend, part, folder = sys.argv[1:]
    for name in RECIPES:
        file = Path(folder, f"{name}.checkpoint")
        if part == "whole":
            end, half = train(name, backend, None, range(2 * HALF))
            torch.save(half, file)
        else:
            end, _ = train(name, backend, torch.load(file, weights_only=True), range(HALF, 2 * HALF))
        torch.save(end, file.with_suffix(".end" if part == "whole" else ".resumed"))
