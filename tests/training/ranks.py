"""A training on several processes that goes on from a checkpoint: ``run_ranks(python("ranks.py", FOLDER), FOLDER)``.

Each process checks that its second half is the same from the checkpoint, and writes its tensors after the first half.
"""

from __future__ import annotations

import random
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp4graph
from fp4graph.training import checkpoint
from tests.helpers.processes import PARTNER, rendezvous
from tests.helpers.steps import Blocks, descend

#: Held tensor scales depend on the operands of each process, so this state differs from rank to rank.
HELD = {"version": 1, "name": "held", "extends": "ue5m3-d50", "techniques": [{"tensor_scaling": {"hold_steps": 5}}]}


def make(sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = fp4graph.apply(Blocks(), "tetrajet-qema" if sharded else HELD, backend="eager")
    if sharded:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    return model, fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    def loss() -> torch.Tensor:
        x = torch.randn(16, 64) * random.uniform(0.5, 2.0) + float(np.random.randn())
        return (model(x) - x.roll(1, 1)).square().mean()

    return descend(loss, optimizer, steps)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the tensors of the state dict; of sharded ones, this process's part."""
    entries = {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {key: getattr(value, "_local_tensor", value).clone() for key, value in entries.items()}


def main(folder: Path, sharded: bool) -> None:
    rank, file = distributed.get_rank(), folder / ("sharded.pt" if sharded else "copied.pt")
    model, optimizer = make(sharded)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(rank + 1)
    train(model, optimizer, 3)
    checkpoint.save(file, model, optimizer, progress={"step": 3})
    before = tensors(model)
    expected = train(model, optimizer, 3)

    other, its_optimizer = make(sharded)
    # If the file of one rank is missing, all ranks stop before any has loaded anything.
    with pytest.raises(fp4graph.Error, match="there is no checkpoint"):
        checkpoint.load(file if rank == 0 else folder / "none.pt", other, its_optimizer)
    assert checkpoint.load(file, other, its_optimizer) == {"step": 3}
    assert train(other, its_optimizer, 3) == expected, f"rank {rank}: the losses differ"
    left, right = tensors(model), tensors(other)
    wrong = [key for key in left if not torch.equal(left[key], right[key])]
    assert not wrong, f"rank {rank}: {wrong} differ after training on"
    if not sharded:
        torch.save(before, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    distributed.init_process_group("gloo", timeout=timedelta(seconds=PARTNER), **rendezvous(folder))
    try:
        for sharded in (False, True):
            main(folder, sharded)
    finally:
        distributed.destroy_process_group()
