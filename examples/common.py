"""What the pre-training examples share: options with a fixed choice, and errors of one sentence."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any

import torch


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
