"""Stochastic rounding: rounds elements to either neighbour without bias, unlike rounding to nearest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch
from pydantic import Field, field_validator

from fp4graph import Context, Operand, Overhead, Technique, hookimpl
from fp4graph.numerics.blocking import Granularity
from fp4graph.numerics.spec import QuantSpec
from fp4graph.technique import BlockScale, OperandList, OperandSpecs, Part, SiteView

if TYPE_CHECKING:
    from torch import Tensor

#: dY in dgrad and wgrad, and X in wgrad, as in Chmiel et al. 2025 ("IntelFP4" in the design-space paper's tables).
_BACKWARD = (Operand.DGRAD_GRAD_OUTPUT, Operand.WGRAD_GRAD_OUTPUT, Operand.WGRAD_INPUT)
_SCOPES = OperandList(scopes=(("backward", _BACKWARD), ("all_activation", (Operand.FPROP_INPUT, *_BACKWARD))))


class StochasticRounding(Technique):
    """Rounds an element to the neighbour above with probability equal to the fraction of the way to it: E[SR(u)] = u.

    For element values q1 <= u < q2 around u = x/S: P(q2) = (u - q1)/(q2 - q1). If ``bits`` is b < 24, the fraction
    is compared with (k + 1/2)·2^-b, where k is a random b-bit integer. Elements beyond ±Qmax are clipped, which adds a
    bias; a ``range_guard`` f keeps elements inside. If f < 1 (3/4), x·f is rounded with the scale of x and the result
    is divided by f; this is for scales rounded down, under which u reaches 8. If f > 1 (17/16), the scale is computed
    from f·Z instead of Z, so that a scale rounded to E4M3, at most 1/16 too small, clips nothing.

    Source: "Elucidating the design space of FP4 training", sec. 3.1 and Table 9. ``backward`` (dY in dgrad and wgrad,
    X in wgrad) is from Chmiel et al. 2025, "FP4 All the Way"; the former paper calls it IntelFP4. ``all_activation``
    adds X in fprop.
    Few bits: Fitzgibbon & Felix 2025, "On Stochastic Rounding with Few Random Bits". Range guards: Tseng et al. 2025,
    "Training LLMs with MXFP4" (3/4), and Castro et al. 2025, Quartet's NVFP4 variant (17/16).

    Stages: plan; with a guard also scale (group scale or block statistic).

    Cost: one hash and one comparison per element, fused into the rounding. The complexity weight is from Table 9 of the
    design-space paper.

    Use it on gradients: rounding to nearest biases them, and the bias does not average out over steps.
    """

    name: ClassVar[str] = "stochastic_rounding"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=True)
    complexity: ClassVar[float] = 0.5

    operands: Annotated[Literal["backward", "all_activation"] | tuple[str, ...], _SCOPES] = Field(
        "backward", description="Operands that round stochastically: backward, all_activation, or operands and groups."
    )
    bits: int = Field(24, ge=1, le=24, description="Random bits per element.")
    range_guard: float | None = Field(
        None, gt=0, le=2, description="Factor that keeps elements from being clipped, such as 0.75 or 1.0625."
    )

    @field_validator("range_guard")
    @classmethod
    def _factor_not_one(cls, value: float | None) -> float | None:
        if value == 1:
            raise ValueError("a factor of 1 changes nothing; leave range_guard out")
        return value

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse a guard beside a differentiated block scale, because it would change the gradient."""
        smooth = techniques.get("smooth_max")
        differentiated = smooth is not None and getattr(smooth, "kind", "ste") != "ste"
        in_fprop = self.operands_listed & {Operand.FPROP_INPUT, Operand.FPROP_WEIGHT}
        if self.range_guard is not None and differentiated and in_fprop:
            raise ValueError("range_guard on an operand of fprop cannot be combined with smooth_max; drop one of them")

    @classmethod
    def implied_by(cls, spec: QuantSpec) -> StochasticRounding | None:
        """Return the technique of a spec with ``rounding: stochastic``."""
        return cls(bits=spec.random_bits) if spec.rounding == "stochastic" else None

    def plan(self, site: SiteView, specs: OperandSpecs) -> OperandSpecs:
        """Let all listed and quantized operands round stochastically."""
        return {**specs} | {
            operand: replace(spec, rounding="stochastic", random_bits=self.bits)
            for operand, spec in self.specs_listed(specs).items()
        }

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return () if self.range_guard is None else (RangeGuard(options=self, guard=self.range_guard),)


class RangeGuard(BlockScale):
    """Scales elements by the factor f that keeps them from being clipped.

    Attributes:
        guard: the factor f.
    """

    mixes = "block"
    constant = True
    guard: float

    def block_statistic(self, values: Tensor, z: Tensor, context: Context) -> Tensor | None:
        """Return f·Z for f > 1."""
        return z * self.guard if self.guard > 1 else None

    def group_scale(
        self, z: Tensor, group: Callable[[Granularity], Tensor], context: Context
    ) -> tuple[Tensor, Tensor] | None:
        """Return γ = 1/f with an unchanged Z for f < 1."""
        if self.guard > 1:
            return None
        return torch.full([1] * z.dim(), 1 / self.guard, dtype=torch.float32, device=z.device), z


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [StochasticRounding]
