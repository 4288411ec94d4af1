"""QuEST's forward scale: takes the scale from a block's standard deviation, for data that a rotation made Gaussian."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from fp4graph import Context, Overhead, Technique, hookimpl
from fp4graph.numerics.exact import root, total
from fp4graph.technique import BlockScale, ForwardOperands, OperandSpecs, Part, Positive, SiteView

if TYPE_CHECKING:
    from torch import Tensor

_LEAST = 1e-8  # from the authors' code: without it a constant block has no logarithm


class QuestScale(Technique):
    """Sets the block scale S = 2^⌊log2(c·σ/Qmax + 10⁻⁸)⌋ from the standard deviation σ of the block about its mean.

    The block statistic is Z = 2^Emax·(c·σ/Qmax + 10⁻⁸), from which the rule ``floor`` computes S. c·σ is the largest
    value that elements represent under the unrounded scale; c = 2.92247856 minimizes the squared error of Gaussian
    numbers in E2M1. Values above 6·S are clipped, and ``step_gradient`` with ``kind: clip`` gives them no gradient. The
    padding of a last block counts as zeros.

    Source: Panferov et al. 2025, "QuEST"; the forward of Castro et al. 2025, "Quartet", and its released quantizer,
    which has these constants. Rounding the scale down loses what c gains: averaged over σ, the squared error of
    Gaussian blocks is 2.24 % of their square sum, but 1.34 % under OCP's rule, ``floor`` of the amax.

    Stage: block statistic.

    Cost: two sums over each block. The complexity weight is ours: 0.5, by Table 2 of the design-space paper for fusable
    O(n) work with O(1) memory.

    Use it to reproduce Quartet's released forward: add it to the techniques of a policy that extends ``quartet``.
    """

    name: ClassVar[str] = "quest_scale"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=True)
    complexity: ClassVar[float] = 0.5
    conflicts: ClassVar[frozenset[str]] = frozenset({"smooth_max"})

    c: Positive = Field(2.92247856, description="Largest representable value over σ, before S is rounded.")
    operands: ForwardOperands = Field(("forward",), description="Operands whose scales follow the deviation.")

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse scales that are not rounded by the rule ``floor``, and blocks without a fixed length."""
        for operand, spec in self.specs_listed(specs).items():
            if spec.scale.rounding != "floor":
                raise ValueError(
                    f"its scale is rounded down to a power of two; {operand} has {spec.scale.format.name} scales by "
                    f"{spec.scale.rounding}. Write scale: {{format: e8m0, rounding: floor}}"
                )
            if not isinstance(spec.block, int):
                raise ValueError(f"it takes deviations of blocks of a fixed length; {operand} has block {spec.block}")

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return (DeviationScale(options=self),)


class DeviationScale(BlockScale):
    """Takes Z from the deviation of a block."""

    mixes = "block"
    options: QuestScale

    def block_statistic(self, values: Tensor, z: Tensor, context: Context) -> Tensor:
        """Return Z, fp32, shape of ``z``."""
        spec = context.spec
        assert spec is not None
        assert isinstance(spec.block, int)
        # Sums of values divided by their amax do not depend on the order of addition, which differs in compiled code.
        unit = torch.where(z == 0, 1.0, z).double()
        centred = values.double() - unit * (total(values / unit, context.axes, spec.block) / spec.block)
        largest = centred.abs().amax(context.axes, keepdim=True)
        share = centred / torch.where(largest == 0, 1.0, largest)
        variance = total(share * share, context.axes, spec.block) / spec.block
        sigma = largest * root(variance.to(torch.float32))
        return ((sigma * (self.options.c / spec.element.max) + _LEAST) * 2.0**spec.element.emax).to(torch.float32)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [QuestScale]
