"""Training functions for the tests of compare: two blocks and a head learn to shift their input."""

import sys
import time
from pathlib import Path

import torch
from torch import nn

import fp4graph

STEPS = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Four linears in two blocks, of 2048 weights each, and a head of 1024."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(32, 32)

    def forward(self, x, labels=None):
        y = self.head(self.blocks(x))
        return {"loss": (y - (x.roll(1, 1) if labels is None else labels)).square().mean()}


def applied(policy, seed):
    torch.manual_seed(seed)
    model = fp4graph.apply(Net(), policy, seed=seed, backend="eager")
    return model, fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def step(model, optimizer):
    loss = model(torch.randn(16, 32))["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def loop(policy, seed, log):
    model, optimizer = applied(policy, seed)
    for number in range(1, STEPS + 1):
        log(number, step(model, optimizer), square=number**2)


def generator(policy, seed, log):
    model, optimizer = applied(policy, seed)
    for number in range(1, STEPS + 1):
        yield number, step(model, optimizer), {"square": number**2}


def returning(policy, seed, log):
    model, optimizer = applied(policy, seed)
    losses = [step(model, optimizer) for _ in range(STEPS)]
    return {"loss": losses[-1], "square": STEPS**2}


def tensorboard(folder):
    """Return the events in ``folder`` as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def stop_at(step):
    """Return a hook that interrupts a training at this step."""

    def stop(number, *_):
        if number == step:
            raise KeyboardInterrupt

    return stop


def slow(policy, seed, log):
    """Write the run into a ledger beside the runs' folders when it begins, and take a fifth of a second."""
    model, optimizer = applied(policy, seed)
    with torch.no_grad():
        model(torch.randn(16, 32))  # the check before the trainings ends here
    if log.folder.name == f"{policy.name}-{seed}":  # which is not so where speed is measured
        with (log.folder.parent / "ledger").open("a", encoding="utf-8") as ledger:
            ledger.write(f"{policy.name} {seed}\n")
    for number in range(1, STEPS + 1):
        time.sleep(0.025)
        log(number, loss := step(model, optimizer))
    return float(loss.detach())


if __name__ == "__main__":
    from tests.lab import trainings  # by the name that a spawned process knows

    fp4graph.compare(trainings.slow, "mxfp4,tetrajet", seeds=20, folder=Path(sys.argv[1]), processes=int(sys.argv[2]))
