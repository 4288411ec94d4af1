"""Everything that a technique is written with: the base class, the parts and their arguments, operands, the hook.

A plugin imports from this package and from the other modules of :data:`IMPORTABLE`. The shipped plugins do the same.
"""

from fp4graph.technique.context import Context, GroupScale, Quantization
from fp4graph.technique.facts import Mixes, OperandSpecs, Overhead, Partition, StateEntry
from fp4graph.technique.hookspecs import hookimpl
from fp4graph.technique.operands import ADDRESSES, GROUPS, Gemm, Operand
from fp4graph.technique.options import (
    BackwardOperands,
    ForwardOperands,
    OperandList,
    Operands,
    Positive,
    Share,
    check_kind,
)
from fp4graph.technique.parts import (
    GRADIENT_STAGES,
    OPTIMIZER_STAGES,
    QUANTIZER_STAGES,
    STAGES,
    TENSOR_STAGES,
    BlockScale,
    ChannelSplit,
    Gradient,
    OptimizerHook,
    PairTransform,
    Part,
    Rounding,
    Wrapper,
)
from fp4graph.technique.product import Factors, ProductOperation
from fp4graph.technique.site import BlockPosition, SiteView
from fp4graph.technique.technique import (
    Technique,
    acts_at,
    draws,
    gemms_at,
    hooks_of,
    operands_at,
    parts_of,
)
from fp4graph.technique.updates import OptimizerStep, WeightUpdate

#: The modules of fp4graph that a plugin may import; docs/techniques.md says what is there. Everything else may change
#: without notice.
IMPORTABLE = (
    "fp4graph", "fp4graph.technique", "fp4graph.kernels.measures", "fp4graph.kernels.rotation",
    "fp4graph.kernels.statistics", "fp4graph.numerics.blocking", "fp4graph.numerics.exact", "fp4graph.numerics.formats",
    "fp4graph.numerics.initial", "fp4graph.numerics.quantize", "fp4graph.numerics.rounding",
    "fp4graph.numerics.scaling", "fp4graph.numerics.spec", "fp4graph.numerics.surrogates", "fp4graph.policy.checks",
    "fp4graph.training.conditioning", "fp4graph.training.held_state", "fp4graph.training.oscillation",
    "fp4graph.training.stable_spam",
)  # fmt: skip

__all__ = [
    "ADDRESSES", "GRADIENT_STAGES", "GROUPS", "IMPORTABLE", "OPTIMIZER_STAGES", "QUANTIZER_STAGES", "STAGES",
    "TENSOR_STAGES", "BackwardOperands", "BlockPosition", "BlockScale", "ChannelSplit", "Context", "Factors",
    "ForwardOperands", "Gemm", "Gradient", "GroupScale", "Mixes", "Operand", "OperandList", "OperandSpecs", "Operands",
    "OptimizerHook", "OptimizerStep", "Overhead", "PairTransform", "Part", "Partition", "Positive", "ProductOperation",
    "Quantization", "Rounding", "Share", "SiteView", "StateEntry", "Technique", "WeightUpdate", "Wrapper", "acts_at",
    "check_kind", "draws", "gemms_at", "hookimpl", "hooks_of", "operands_at", "parts_of",
]  # fmt: skip
