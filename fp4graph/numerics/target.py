"""Returns the kind of device that code is traced for, which may differ from the device of the tensors.

The device determines the operators of a program: kernels on a CPU, tensor code that Inductor fuses on a GPU. All code
asks this module for the device. So a GPU's program can be traced without a GPU, on tensors of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_traced: str | None = None


def kind(device: torch.device) -> str:
    """Return the type of device, ``cpu`` or ``cuda``, that code on ``device`` is traced for or runs on."""
    return _traced or device.type


@contextmanager
def traced_for(device_type: str) -> Iterator[None]:
    """Trace code in this context as if its tensors were on ``device_type``. The traced code is not for running."""
    global _traced
    previous, _traced = _traced, device_type
    try:
        yield
    finally:
        _traced = previous
