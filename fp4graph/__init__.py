"""fp4graph: one YAML policy, applied to an unmodified PyTorch model, trains it with simulated FP4 linear layers.

>>> model = fp4graph.apply(model, "tetrajet")
>>> optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters()))
>>> scaler = fp4graph.grad_scaler(model)
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from fp4graph.errors import Error

if TYPE_CHECKING:
    from fp4graph import formats, integrations, lab, optim, training
    from fp4graph.errors import (
        CaptureError,
        NonFiniteError,
        PluginError,
        PolicyError,
        PolicyWarning,
        SpecError,
        UncompiledError,
    )
    from fp4graph.exports import export, load_quantized
    from fp4graph.exports.frozen import pack_frozen, unpack_frozen
    from fp4graph.exports.refit import packed_weights
    from fp4graph.graph.site import Site
    from fp4graph.lab.compare import compare
    from fp4graph.lab.search import search
    from fp4graph.lab.sensitivity import sensitivity
    from fp4graph.model.api import apply, bypass, detect_nonfinite, remove, set_total_forwards
    from fp4graph.model.explain import explain
    from fp4graph.model.explanation import Explanation
    from fp4graph.model.state import strip
    from fp4graph.numerics.packing import Packed, pack, unpack
    from fp4graph.numerics.quantize import fake_quantize
    from fp4graph.numerics.spec import QuantSpec, ScaleSpec
    from fp4graph.policy import Policy, load_policy
    from fp4graph.technique import Context, Overhead, StateEntry, Technique
    from fp4graph.technique.hookspecs import hookimpl
    from fp4graph.technique.operands import Gemm, Operand
    from fp4graph.training import grad_scaler, prepare_optimizer

__version__ = "0.1.0"

_CACHE = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
if os.path.exists(_CACHE) and not os.path.isdir(_CACHE):
    raise Error(
        f"torch cannot compile: its folder of compiled code, {_CACHE}, is a file. Unset the environment variable "
        "TORCHINDUCTOR_CACHE_DIR, or set it to a folder"
    )

_MODULES = ("formats", "integrations", "lab", "optim", "training")
#: Maps every other public name to its module, which is imported when the name is first used, to keep the import quick.
_HOME = {
    name: f"fp4graph.{module}"
    for module, names in {
        "errors": "CaptureError NonFiniteError PluginError PolicyError PolicyWarning SpecError UncompiledError",
        "exports": "export load_quantized",
        "exports.frozen": "pack_frozen unpack_frozen",
        "exports.refit": "packed_weights",
        "graph.site": "Site",
        "lab.search": "search",
        "lab.sensitivity": "sensitivity",
        "lab.compare": "compare",
        "model.api": "apply bypass detect_nonfinite remove set_total_forwards",
        "model.explain": "explain",
        "model.explanation": "Explanation",
        "model.state": "strip",
        "numerics.packing": "Packed pack unpack",
        "numerics.quantize": "fake_quantize",
        "numerics.spec": "QuantSpec ScaleSpec",
        "policy": "Policy load_policy",
        "technique": "Context Overhead StateEntry Technique",
        "technique.hookspecs": "hookimpl",
        "technique.operands": "Gemm Operand",
        "training": "grad_scaler prepare_optimizer",
    }.items()
    for name in names.split()
}

__all__ = [
    "CaptureError", "Context", "Error", "Explanation", "Gemm", "NonFiniteError", "Operand", "Overhead", "Packed",
    "PluginError", "Policy", "PolicyError", "PolicyWarning", "QuantSpec", "ScaleSpec", "Site", "SpecError",
    "StateEntry", "Technique", "UncompiledError", "apply", "bypass", "compare", "detect_nonfinite", "explain", "export",
    "fake_quantize", "formats", "grad_scaler", "hookimpl", "integrations", "lab", "load_policy", "load_quantized",
    "optim", "pack", "pack_frozen", "packed_weights", "prepare_optimizer", "remove", "search", "sensitivity",
    "set_total_forwards", "strip", "training", "unpack", "unpack_frozen",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"fp4graph.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value  # the next look-up does not come here
        return value
    raise AttributeError(f"module 'fp4graph' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
