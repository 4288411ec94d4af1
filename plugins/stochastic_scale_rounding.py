"""Stochastic scale rounding: rounds block scales to either neighbour without bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from fp4graph import Overhead, Technique, hookimpl
from fp4graph.numerics.formats import FP32
from fp4graph.numerics.spec import QuantSpec
from fp4graph.technique import Operands, OperandSpecs, SiteView


class StochasticScaleRounding(Technique):
    """Rounds a block scale to the neighbour above with probability equal to the fraction of the way to it.

    For representable s1 <= s < s2 around the ideal scale s: P(s2) = (s - s1)/(s2 - s1), so that E[q(s)] = s. Each block
    draws once. The ideal scale is S = Z/Qmax, or s = Qmax/Z with the convention ``encode``, which the paper uses. A
    decode scale that is rounded down clips the block's largest elements.

    Source: "Elucidating the design space of FP4 training", sec. 3.1 (rounding of the scales), Table 9.

    Stage: plan.

    Cost: O(n/l) hashed bits, no memory. The complexity weight is from the paper's Table 9.

    Use it to see whether the bias of E8M0 scales matters to a run: neighbouring scales are a factor of two apart.
    """

    name: ClassVar[str] = "stochastic_scale_rounding"
    overhead: ClassVar[Overhead] = Overhead("O(n/l)", "O(1)", fusable=True)
    complexity: ClassVar[float] = 0.25

    operands: Operands = Field(
        ("forward", "backward"), description="Operands, or groups of them, whose scales round stochastically."
    )

    @classmethod
    def implied_by(cls, spec: QuantSpec) -> StochasticScaleRounding | None:
        """Return the technique of a spec whose scale has ``rounding: stochastic``."""
        return cls() if spec.scale.rounding == "stochastic" else None

    def inert(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> str | None:
        """Return a reason if scales are not rounded at all."""
        acting = self.specs_listed(specs).values()
        return "a scale in fp32 is not rounded" if acting and all(s.scale.format == FP32 for s in acting) else None

    def plan(self, site: SiteView, specs: OperandSpecs) -> OperandSpecs:
        """Let all listed and quantized operands round their scales stochastically."""
        return {**specs} | {
            operand: replace(spec, scale=replace(spec.scale, rounding="stochastic", ties=None))
            for operand, spec in self.specs_listed(specs).items()
        }


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [StochasticScaleRounding]
