"""What a technique is written with: the class, what its stages are handed, the six operands, and the plugin hook."""

from fp4graph.technique.hookspecs import hookimpl
from fp4graph.technique.operands import Gemm, Operand
from fp4graph.technique.site import BlockPosition, SiteView
from fp4graph.technique.technique import (
    GRADIENT_STAGES,
    OPTIMIZER_STAGES,
    QUANTIZER_STAGES,
    STAGES,
    Context,
    OperandSpecs,
    Overhead,
    StateEntry,
    Technique,
    checked_plan,
    overrides,
)

__all__ = [
    "GRADIENT_STAGES",
    "OPTIMIZER_STAGES",
    "QUANTIZER_STAGES",
    "STAGES",
    "BlockPosition",
    "Context",
    "Gemm",
    "Operand",
    "OperandSpecs",
    "Overhead",
    "SiteView",
    "StateEntry",
    "Technique",
    "checked_plan",
    "hookimpl",
    "overrides",
]
