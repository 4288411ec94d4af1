"""The ordered list of kernels. The first kernel that does not refuse a request takes it.

Every module of this folder has ``ROWS``, a tuple of :class:`~fp4graph.kernels.request.Kernel`. The list has them in the
order of their places, and of their modules' names at equal places. The last kernel, tensor code, takes every request.
"""

from __future__ import annotations

import importlib
import pkgutil

import torch

from fp4graph.kernels.machine import Machine
from fp4graph.kernels.request import Asked, Kernel, Quantizing, Request
from fp4graph.numerics.spec import QuantSpec

_MODULES = sorted(module.name for module in pkgutil.iter_modules(__path__))
_FOUND: list[Kernel] = [row for name in _MODULES for row in importlib.import_module(f"{__name__}.{name}").ROWS]
ROWS: tuple[Kernel, ...] = tuple(sorted(_FOUND, key=lambda row: row.place))
TENSOR_CODE = ROWS[-1]


def chosen(request: Request) -> tuple[Kernel, str]:
    """Return the kernel that takes ``request``, and why earlier kernels refuse it; "" if no kernel refuses it."""
    reasons: list[str] = []
    for row in ROWS:
        if not row.concerns(request):
            continue
        refused = row.refuses(request)
        if refused is None:
            nothing = request.machine.lacks if row is TENSOR_CODE else None
            return row, "; ".join(dict.fromkeys(reasons)) or nothing or ""
        reasons.append(refused)
    raise AssertionError("tensor code refuses nothing")


def of_spec(
    spec: QuantSpec,
    device: torch.device,
    asked: Asked = Asked.VALUES,
    source: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
) -> Kernel:
    """Return the kernel that takes a request for an operand on which no technique acts."""
    return chosen(Request(asked, Machine.of(device), Quantizing(spec, drawn=True), source, dtype))[0]
