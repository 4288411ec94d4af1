"""The lines that fp4graph adds to the user's own training loop, and to files of its weights."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp4graph.training.optimizer import grad_scaler, prepare_optimizer
    from fp4graph.training.stripping import strip_file

__all__ = ["grad_scaler", "prepare_optimizer", "strip_file"]


def __getattr__(name: str) -> Any:
    """Import these functions at first use: plugins import other modules of this package, and listing policies must not
    wait for Dynamo."""
    if name not in __all__:
        raise AttributeError(f"module 'fp4graph.training' has no attribute {name!r}")
    home = "stripping" if name == "strip_file" else "optimizer"
    return getattr(importlib.import_module(f"fp4graph.training.{home}"), name)
