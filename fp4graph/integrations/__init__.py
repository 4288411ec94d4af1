"""Integrations with Hugging Face's Trainer and Accelerate; a training loop needs one additional line.

Needs ``pip install fp4graph[hf]``; each part is imported at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fp4graph.errors import Error
from fp4graph.extras import install

if TYPE_CHECKING:
    from fp4graph.integrations.accelerate import apply_with_accelerate
    from fp4graph.integrations.trainer import FP4GraphCallback

__all__ = ["FP4GraphCallback", "apply_with_accelerate"]

_HOME = {"FP4GraphCallback": "trainer", "apply_with_accelerate": "accelerate"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fp4graph.integrations' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"fp4graph.integrations.{_HOME[name]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("fp4graph"):
            raise
        raise Error(f"fp4graph.integrations.{name} needs {error.name}; {install('hf')}") from error
    return getattr(module, name)
