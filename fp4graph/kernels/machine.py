"""The device that code runs on: whether kernels exist for it, and whether they are used."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass

import torch

from fp4graph import torch_internals
from fp4graph.kernels import build, cpu, gpu, switches
from fp4graph.numerics import target


@dataclass(frozen=True)
class Machine:
    """The facts about the device that runs the code, by which kernels are chosen.

    Attributes:
        kind: "cpu" or "cuda".
        lacks: why the kernels of the device are not used, in a few words; None if they are used.
        narrows: whether exact products of fp32 operands are multiplied as bf16.
    """

    kind: str
    lacks: str | None = None
    narrows: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """Return the machine for code that runs on ``device`` or is traced for it."""
        kind = target.kind(device)
        return cls(kind, _lack(kind), gpu.multiplies_bfloat16(device))

    @property
    def has_cpu_kernels(self) -> bool:
        """True if kernels compute statistics, rotations and normal variates too. Only a CPU has such kernels."""
        return self.kind == "cpu" and self.lacks is None


def _lack(kind: str) -> str | None:
    if kind not in ("cpu", "cuda"):
        return f"no kernels exist for {kind}"
    if not switches.current().quantizers:
        return f"the kernels of this {kind} are switched off ({switches.VARIABLE})"
    available = available_on_gpu() if kind == "cuda" else _available_on_cpu()
    return None if available else f"the kernels of this {kind} cannot be used, as a warning says"


@torch_internals.constant_result
def _available_on_cpu() -> bool:
    """Return ``cpu.available()``; Dynamo does not trace it, because in torch 2.11 tracing the build fails."""
    return cpu.available()


@torch_internals.constant_result
def available_on_gpu() -> bool:
    """Return ``gpu.available()``, which Dynamo does not trace either."""
    return gpu.available()


def report() -> dict[str, str]:
    """Return the names of this machine's compiler and GPU, whether kernels are used, and the value of the switches."""
    facts = {
        "C++ compiler": _compiler(),
        "CPU kernels": _state("cpu"),
        "GPU": "none",
    }
    if torch.cuda.is_available():
        facts |= {"GPU": torch.cuda.get_device_name(), "GPU kernels": _state("cuda")}
    return facts | {switches.VARIABLE: str(switches.current())}


def _compiler() -> str:
    try:
        words = build.command()
    except ValueError as error:
        return f"none ({error})"
    return " ".join(words) if shutil.which(words[0]) else f"none ({' '.join(words)} not found)"


def _state(kind: str) -> str:
    """Return "used", or why kernels are not used: the warning of a failed trial if there is one, which says most."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lack = _lack(kind)
    return "; ".join(str(warning.message) for warning in caught) or lack or "used"
