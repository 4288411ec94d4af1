"""What a technique is written with: the class, what its stages are handed, the six operands, and the plugin hook."""

from fp4graph.technique.context import Context, GroupScale, Quantization, Unrounded
from fp4graph.technique.hookspecs import hookimpl
from fp4graph.technique.operands import Gemm, Operand
from fp4graph.technique.site import BlockPosition, SiteView
from fp4graph.technique.technique import (
    GRADIENT_STAGES,
    OPTIMIZER_STAGES,
    QUANTIZER_STAGES,
    STAGES,
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
    "GroupScale",
    "Operand",
    "OperandSpecs",
    "Overhead",
    "Quantization",
    "SiteView",
    "StateEntry",
    "Technique",
    "Unrounded",
    "checked_plan",
    "hookimpl",
    "overrides",
]
