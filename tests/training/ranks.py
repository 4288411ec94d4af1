"""A training on several processes that goes on from a checkpoint, for test_checkpoint.py: torchrun ranks.py FOLDER.

Each process checks for itself that its second half is the same either way, and leaves what it was.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import fp4graph
from fp4graph.training import checkpoint

#: Held tensor scales are written from each process's own gradients: state that differs from rank to rank.
POLICY = {
    "version": 1,
    "name": "held",
    "extends": "ue5m3-d50",
    "techniques": [{"tensor_scaling": {"hold_steps": 5}}],
}


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 64))
    model = DistributedDataParallel(fp4graph.apply(plain, POLICY, backend="eager"))
    return model, fp4graph.prepare_optimizer(plain, torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 64) * random.uniform(0.5, 2.0) + float(np.random.randn())
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(folder: Path) -> None:
    rank = distributed.get_rank()
    model, optimizer = make()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(rank + 1)
    train(model, optimizer, 3)
    file = folder / "run.pt"
    checkpoint.save(file, model, optimizer, progress={"step": 3})
    before = {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    expected = train(model, optimizer, 3)
    after = {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}

    other, its = make()
    assert checkpoint.load(file, other, its) == {"step": 3}
    loaded = other.state_dict()
    wrong = [key for key in before if not torch.equal(before[key], loaded[key])]
    assert not wrong, f"rank {rank}: {wrong} were not restored"
    assert train(other, its, 3) == expected, f"rank {rank}: the losses differ"
    wrong = [key for key in after if not torch.equal(after[key], other.state_dict()[key])]
    assert not wrong, f"rank {rank}: {wrong} differ after training on"
    torch.save(before, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    try:
        main(Path(sys.argv[1]))
    finally:
        distributed.destroy_process_group()
