"""Macro-block scaling: gives the blocks of a macro block a common factor that is finer than a power of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pydantic import Field

from fp4graph import Context, Overhead, Technique, hookimpl
from fp4graph.numerics.blocking import Granularity
from fp4graph.technique import BlockScale, Operands, OperandSpecs, Part, SiteView

if TYPE_CHECKING:
    from torch import Tensor


class MacroBlockScaling(Technique):
    """Gives the blocks of a macro block a group scale γ in [1, 2], the part of a scale that no power of two expresses.

    h(X) = γ·f(X/γ) for a macro block X of ``block`` elements along the contraction axis, where f is the quantizer in
    blocks of l elements. With g = max_p Z_p over the blocks p of X, γ is the mantissa γ' of g/Qmax = γ'·2^k,
    1 <= γ' < 2, rounded up to m = ``mantissa_bits`` stored bits. The ideal scale g/(γ·Qmax) of the largest block is
    then 2^k, or below 2^k by at most the fraction 2^-m. With m >= 2 and E2M1, the rules ``nearest_even``, ``ceil`` and
    ``floor`` (OCP's) then take 2^k and clip nothing of that block. The scales of other blocks still differ by their
    mantissas. γ is 1 for a macro block that is zero or holds NaN or Inf. With up to
    3 bits γ·S·q is exact in bf16, as S·q is.

    Source: "Decomposing MXFP4 quantization error for LLM reinforcement learning" names the method, a finer factor per
    macro block on top of E8M0 scales that reduces scale bias. No public text has its formula; this formula is ours.

    Stage: scale (group scale).

    Cost: a maximum over block/l statistics, and m more bits per macro block. The complexity weight is ours: 0.25, by
    Table 2 of the design-space paper for fusable O(n/l) work, since γ can be multiplied into the scales.

    Use it with E8M0 scales, also beside ``tensor_scaling`` with granularity ``tensor`` or ``row``, which extends the
    range of scales but does not fit their mantissas to powers of two; declare ``tensor_scaling`` first.
    """

    name: ClassVar[str] = "macro_block_scaling"
    overhead: ClassVar[Overhead] = Overhead("O(n/l)", "O(n/block)", fusable=True)
    complexity: ClassVar[float] = 0.25

    block: int = Field(128, ge=1, description="Elements along the contraction axis that share γ.")
    mantissa_bits: int = Field(3, ge=1, le=10, description="m, the stored mantissa bits of γ.")
    operands: Operands = Field(("forward", "backward"), description="Operands, or groups of them, that are normalized.")

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse macro blocks that do not consist of whole blocks, and a second factor for macro blocks."""
        for operand, spec in self.specs_listed(specs).items():
            length = spec.block[1] if isinstance(spec.block, tuple) else spec.block
            if isinstance(length, str):
                raise ValueError(
                    f"{operand} has one scale per {length}; a macro block is made of blocks of fixed length"
                )
            if self.block % length:
                raise ValueError(f"block {self.block} is not a multiple of the block of {operand}, {length} elements")
        order, scaling = list(techniques), cast("Any", techniques.get("tensor_scaling"))
        both = scaling.operands_listed & self.operands_listed if scaling else frozenset()
        if both and "tensor_scaling" in order[order.index(self.name) :]:
            raise ValueError(
                "it fits scales to powers of two, and the factor of tensor_scaling after it would undo this; declare "
                "tensor_scaling first"
            )
        if any(isinstance(scaling.settings(operand)[1], int) for operand in both):
            raise ValueError(
                "tensor_scaling with a granularity in elements already gives macro blocks a factor, without rounding "
                "it; drop one of the two, or use granularity: tensor there"
            )

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return (MacroBlockScale(options=self, group_granularity=self.block),)


class MacroBlockScale(BlockScale):
    """Divides macro blocks by the mantissa of their maximum."""

    mixes = "none"
    options: MacroBlockScaling

    def group_scale(self, z: Tensor, group: Callable[[Granularity], Tensor], context: Context) -> Tensor:
        """Return γ of each macro block, fp32, shape of ``z``."""
        assert context.spec is not None
        # Zeros, subnormals, Inf and NaN have no useful mantissa; their γ is 1.
        return context.mantissa(group(self.options.block), context.spec.element.max, self.options.mantissa_bits)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [MacroBlockScaling]
