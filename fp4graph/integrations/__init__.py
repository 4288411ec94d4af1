"""Integrations with Hugging Face's Trainer, Accelerate and ``from_pretrained``, and with Lightning's Trainer.

Each is imported at first use, and needs the extra ``hf`` or Lightning. It takes one additional line in a training.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fp4graph.errors import Error, install

if TYPE_CHECKING:
    from fp4graph.integrations.accelerate import apply_with_accelerate
    from fp4graph.integrations.from_pretrained import FP4GraphConfig
    from fp4graph.integrations.lightning import FP4GraphLightningCallback
    from fp4graph.integrations.trainer import FP4GraphCallback

__all__ = ["FP4GraphCallback", "FP4GraphConfig", "FP4GraphLightningCallback", "apply_with_accelerate"]

_HOME = {
    "FP4GraphCallback": "trainer",
    "FP4GraphConfig": "from_pretrained",
    "FP4GraphLightningCallback": "lightning",
    "apply_with_accelerate": "accelerate",
}
#: For each name, the extra that installs the library it needs.
_EXTRAS = dict.fromkeys(_HOME, "hf") | {"FP4GraphLightningCallback": "clients"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fp4graph.integrations' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"fp4graph.integrations.{_HOME[name]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("fp4graph"):
            raise
        raise Error(f"fp4graph.integrations.{name} needs {error.name}; {install(_EXTRAS[name])}") from error
    return getattr(module, name)
