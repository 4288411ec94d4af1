"""Q-EMA: round weights to the neighbour that their moving average is nearer to, so that they stop oscillating."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from fp4graph.hookspecs import hookimpl
from fp4graph.numerics.rounding import bracket
from fp4graph.numerics.scaling import ratio as scaled
from fp4graph.operands import Operand
from fp4graph.site import SiteView
from fp4graph.technique import Context, OperandSpecs, Overhead, StateEntry, Technique

if TYPE_CHECKING:
    from fp4graph.training.optimizer import WeightUpdate


def _as_fp32(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.float32).clone()


class QEma(Technique):
    """The EMA quantizer of TetraJet (Chen et al. 2025, sec. 5 and Algorithm 1), on ``fprop.weight``.

    With S the scale of W's block and q1 <= w/S <= q2 the element values around w/S:
    Q(w) = q1 where abs(e/S - q1) < abs(e/S - q2), else q2; after each optimizer step e ← β·e + (1 - β)·w (Eq. 10).
    e has the weight's shape, starts at the weight, and is kept in fp32: in bf16 it stalls at 1 - β = 0.002.

    ``beta``: β, 0.998 in the paper. Stages: element rounding; optimizer, after the step. State: ``weight``.
    The complexity weight is ours: it reads and keeps n more values, which Table 2's rules put at 2.
    """

    name: ClassVar[str] = "q_ema"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(n)", fusable=True)
    conflicts: ClassVar[frozenset[str]] = frozenset({"q_ramping"})

    beta: float = Field(0.998, gt=0, lt=1)

    @property
    def complexity(self) -> float:
        """2.0, ours: fusable O(n) work, but O(n) persistent memory."""
        return 2.0

    def plan(self, site: SiteView, specs: OperandSpecs) -> OperandSpecs:
        """Refuses a stochastic weight quantizer: one operand has one rounding."""
        spec = specs.get(Operand.FPROP_WEIGHT)
        if spec is not None and spec.rounding == "stochastic":
            raise ValueError("fprop.weight already rounds stochastically; q_ema chooses its rounding, so drop one")
        return specs

    def acts_on(self, site: SiteView) -> frozenset[Operand]:
        """The forward weight; an activation has no moving average."""
        return frozenset({Operand.FPROP_WEIGHT}) if site.op == "linear" else frozenset()

    def state(self, site: SiteView) -> tuple[StateEntry, ...]:
        """e, fp32, shape of the weight."""
        return (StateEntry("weight", Operand.FPROP_WEIGHT, _as_fp32),)

    def round(self, ratio: torch.Tensor, scale: torch.Tensor, context: Context) -> torch.Tensor:
        """Algorithm 1, lines 4 to 11."""
        assert context.spec is not None
        lower, upper = bracket(ratio, context.spec.element)
        average = scaled(context.state["weight"], scale, context.spec)
        return torch.where((average - lower).abs() < (average - upper).abs(), lower, upper)

    def after_step(self, update: WeightUpdate) -> None:
        """Eq. 10."""
        update.state["weight"].lerp_(update.parameter.to(torch.float32), 1 - self.beta)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [QEma]
