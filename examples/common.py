"""What the pre-training examples share: options with a fixed choice, torchrun's processes, errors of one sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import distributed


class ExampleError(Exception):
    """Something the user of the example can put right, said in one sentence."""


class Backend(StrEnum):
    inductor = "inductor"
    aot_eager = "aot_eager"
    eager = "eager"


class Amp(StrEnum):
    none = "none"
    bf16 = "bf16"
    fp16 = "fp16"


def autocast(amp: str, device: str) -> AbstractContextManager[Any]:
    """The context of a forward pass."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(amp)
    return torch.autocast(torch.device(device).type, dtype) if dtype else nullcontext()


def device_named(name: str) -> str:
    """``name``, or for ``auto`` CUDA where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.device(name).type == "cuda" and not torch.cuda.is_available():
            raise ExampleError(f"--device {name}: torch sees no CUDA device here")
    except RuntimeError as error:
        raise ExampleError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return name


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Processes:
    """Where this process stands among those of torchrun; by itself it is the first of one."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mean(self, value: torch.Tensor) -> float:
        """Of a scalar of every process."""
        if self.world > 1:
            distributed.all_reduce(value)
        return value.item() / self.world

    def sums(self, *values: float, device: str) -> list[float]:
        """Of each of ``values`` over the processes; sent from ``device``."""
        if self.world == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=device)
        distributed.all_reduce(total)
        return total.tolist()

    def wait(self) -> None:
        if self.world > 1:
            distributed.barrier()


@contextmanager
def processes(device: str) -> Iterator[tuple[Processes, str]]:
    """Join torchrun's process group if it started this: (the place in it, this process's device)."""
    if "RANK" not in os.environ:
        yield Processes(), device
        return
    cuda = torch.device(device).type == "cuda"
    if cuda:
        number, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if number >= count:
            raise ExampleError(f"{number + 1} processes or more, but {count} CUDA devices: each needs one of its own")
        device = f"cuda:{number}"
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if cuda else "gloo")
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size()), device
    finally:
        distributed.destroy_process_group()


def first_console() -> Console:
    """The terminal for the first process, nothing for the others."""
    return Console(quiet=os.environ.get("RANK", "0") != "0")


def print_error(error: Exception) -> None:
    """On every process: what is wrong may be wrong on one only."""
    place = f" (process {os.environ['RANK']})" if "RANK" in os.environ else ""
    Console().print(f"[red]error:[/]{place} {escape(str(error))}", highlight=False, soft_wrap=True)
