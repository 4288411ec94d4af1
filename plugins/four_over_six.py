"""Four over six: scales the maximum of each E2M1 block to 6 or to 4, whichever errs less."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from fp4graph import Context, Overhead, Technique, hookimpl
from fp4graph.kernels import measures, statistics
from fp4graph.numerics.formats import E2M1
from fp4graph.numerics.spec import Selector
from fp4graph.technique import BlockScale, Operands, OperandSpecs, Part, SiteView

if TYPE_CHECKING:
    from torch import Tensor


class FourOverSix(Technique):
    """Scales each block's maximum to the value 6 or to the value 4, whichever makes the smaller error.

    E2M1 has no value between 4 and 6. If the maximum M is scaled to 6, an element of 5/6·M errs by M/6; if it is scaled
    to 4, no element errs by more than M/8, but small elements round more coarsely. The two scales are S_6 = q(Z/6) and
    S_4 = q(Z/4) = q(1.5·Z/6) (encode: q(6/Z) and q(4/Z)), where q rounds a scale as the spec says; x̂_6 and x̂_4 are
    the block rounded to nearest under each scale. S is S_4 where E(x̂_4 − x) < E(x̂_6 − x), and S_6 elsewhere, also for
    ties. ``measure`` is E: ``mse`` Σe², ``mae`` Σabs(e), ``amax`` max abs(e). A block whose scale for 4 lies above the
    scale format's maximum takes 6. The choice compares errors of RTN even if the spec rounds elements stochastically.

    Source: Cook et al. 2025, "Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling", for NVFP4
    and with mean squared error; the other measures are from the authors' code. E4M3 scales need a tensor scale that
    leaves room for 1.5 times the largest block scale. The authors scale to 256 instead of 448 (1.5·256 = 384); declare
    ``tensor_scaling: {target: 256}`` beside this technique to do the same.

    Stage: scale.

    Cost: every block is rounded twice to find its scale. The complexity weight is ours: 0.5, by Table 2 of the
    design-space paper for fusable O(n) work, since a block and its errors stay in registers.

    Use it with scales that have mantissa bits (NVFP4). With power-of-two scales S_4 is S_6 or 2·S_6, and the
    grid of 2·S_6 adds no value below 6·S_6: the technique can then only undo clipping (scales rounded down or to
    nearest), and changes nothing if scales are rounded up.
    """

    name: ClassVar[str] = "four_over_six"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=True)
    complexity: ClassVar[float] = 0.5
    #: smooth_max differentiates the block scale as Z/6 everywhere.
    conflicts: ClassVar[frozenset[str]] = frozenset({"smooth_max"})

    measure: Selector = Field("mse", description="Error that the chosen scale of a block minimizes.")
    operands: Operands = Field(("forward", "backward"), description="Operands, or groups of them, that are scaled.")

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse elements other than E2M1, and stochastic scales, under which errors cannot be compared."""
        for operand, spec in self.specs_listed(specs).items():
            if spec.elements != (E2M1,):
                raise ValueError(f"it chooses between the values 4 and 6 of e2m1, and {operand} is {spec.element_name}")
            if spec.scale.rounding == "stochastic":
                raise ValueError(f"it compares two rounded scales, and scales of {operand} are rounded stochastically")

    def inert(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> str | None:
        """Return a reason if all scales are powers of two that are rounded up."""
        acting = self.specs_listed(specs).values()
        if acting and all(not s.scale.format.has_zero and s.scale.rounds_up for s in acting):
            return "with power-of-two scales rounded up, the scale for 4 never errs less than that for 6"
        return None

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return (FourOrSix(options=self),)


class FourOrSix(BlockScale):
    """Chooses the scale of each block."""

    mixes = "block"
    options: FourOverSix

    def scale(self, values: Tensor, z: Tensor, context: Context) -> Tensor:
        """Return S_4 or S_6 for each block."""
        spec = context.spec
        assert spec is not None
        six, four = (statistics.block_scale(z * stretch, spec) for stretch in (1.0, 6 / 4))
        arguments = z, spec, self.options.measure, context.blocking, context.quotient
        chooses_four = measures.errs_less(values, (six, four), *arguments)
        if spec.scale.convention == "decode":
            chooses_four = chooses_four & (z <= 4 * spec.scale.format.max)
        return torch.where(chooses_four, four, six)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [FourOverSix]
