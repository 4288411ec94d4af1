"""Says for which kind of device code is traced, where that may be another than the one the tensors are on.

Which operators a program calls depends on the device: kernels on a CPU, tensor code that Inductor fuses on a GPU. What
asks for the device, asks here. So the program of a GPU can be traced on a machine without one, on tensors of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_traced: str | None = None


def kind(device: torch.device) -> str:
    """Return the type of the device that code on ``device`` is traced for or runs on: ``cpu``, ``cuda``."""
    return _traced or device.type


@contextmanager
def traced_for(device_type: str) -> Iterator[None]:
    """Trace code on tensors of any device as for ``device_type``, in this context. The code cannot run."""
    global _traced
    former, _traced = _traced, device_type
    try:
        yield
    finally:
        _traced = former
