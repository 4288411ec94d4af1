"""A training that is killed again and again, for test_checkpoint.py: python killed.py FOLDER KILLS.

This process imports everything once and forks a child for each life of the training; each is killed by SIGKILL from
here. Half of the children are killed at a random moment, in a step or between two. The others stop in the middle of a
save, report it, and wait for the kill, so that the kill hits the save however busy the machine is. The last child is
not killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch._dynamo.testing  # imports what the first compilation would
from torch import nn

import fp4graph
from fp4graph.training import checkpoint

STEPS = 120
#: The technique keeps state for each weight, and stochastic rounding draws from the count of forwards.
POLICY = fp4graph.load_policy("tetrajet-qema")


def train(path: Path, report: int) -> None:
    """Train to the end, from the checkpoint ``path`` if it exists; write a byte to ``report`` before each step."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 64))
    fp4graph.apply(model, POLICY, backend="eager")
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    scaler = torch.amp.GradScaler("cpu", growth_interval=7)
    parts: dict[str, Any] = {"scaler": scaler, "scheduler": scheduler}
    losses: list[float] = checkpoint.load(path, model, optimizer, **parts)["losses"] if path.exists() else []
    for _ in range(len(losses), STEPS):
        os.write(report, b".")
        # The data depends on all three generators.
        x = torch.randn(16, 64) * random.uniform(0.5, 2.0) + float(np.random.randn())
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.item())
        checkpoint.save(path, model, optimizer, **parts, progress={"losses": losses})


@dataclass
class Stopping:
    """The file of a save; its ``writes``-th write calls ``stop``."""

    file: BinaryIO
    writes: int
    stop: Callable[[], None]

    def write(self, data: Any) -> int:
        self.writes -= 1
        if self.writes == 0:
            self.stop()
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def stop_in_a_save(report: int, saves: int, writes: int) -> None:
    """Let this process write "!" to ``report`` and stop, at that write of that save or after the last write."""
    replacing = checkpoint.replacing

    def stop() -> None:
        os.write(report, b"!")
        while True:
            signal.pause()

    @contextlib.contextmanager
    def watched(path: Path) -> Iterator[Any]:
        nonlocal saves
        saves -= 1
        with replacing(path) as file:
            yield file if saves else Stopping(file, writes, stop)
            if not saves:
                stop()

    checkpoint.replacing = watched


def live(path: Path, stops_at: tuple[int, int] | None = None) -> tuple[int, int]:
    """Fork a child that trains to its end, or stops in a save; return its pid and the end of the pipe with reports."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            if stops_at:
                stop_in_a_save(writer, *stops_at)
            train(path, writer)
            code = 0
        except BaseException:  # noqa: BLE001  # a child must not return to the caller
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)  # nothing of the parent's is cleaned up by the child
    os.close(writer)
    return pid, reader


def finish(path: Path) -> None:
    """Let a child train to the end."""
    pid, reader = live(path)
    while os.read(reader, 4096):
        pass
    os.close(reader)
    if status := os.waitpid(pid, 0)[1]:
        raise SystemExit(f"the training ended with status {status}")


def kill_one(path: Path, chance: random.Random, while_saving: bool) -> dict[str, object]:
    """Kill a child at a random moment, and return what the kill left."""
    if while_saving:
        pid, reader = live(path, (chance.randint(3, 6), chance.choice([1, 2, 3, 5, 8, 13, 1000])))
        while os.read(reader, 1) == b".":
            pass
    else:
        pid, reader = live(path)
        moments = [time.perf_counter() for _ in range(chance.randint(3, 6)) if os.read(reader, 1)]
        time.sleep(chance.uniform(0, moments[-1] - moments[-2]))  # not of the first step, which compiles
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(reader)
    return {
        "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
        "left_half_a_file": path.with_name(path.name + ".tmp").exists(),
        "steps": len(checkpoint.read_summary(path).progress["losses"]),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(20)
    finish(folder / "whole.pt")
    deaths = [kill_one(folder / "killed.pt", chance, while_saving=bool(index % 2)) for index in range(kills)]
    finish(folder / "killed.pt")
    print(json.dumps(deaths))
