"""Stochastic rounding of elements: unbiased where nearest rounding is not."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from fp4graph.hookspecs import hookimpl
from fp4graph.numerics.spec import QuantSpec
from fp4graph.operands import ADDRESSES, Operand
from fp4graph.site import SiteView
from fp4graph.technique import OperandSpecs, Overhead, Technique

_SCOPES = {
    # dY in dgrad and wgrad, X in wgrad: Chmiel et al. 2025, "IntelFP4" in the design-space paper's tables.
    "backward": (Operand.DGRAD_GRAD_OUTPUT, Operand.WGRAD_GRAD_OUTPUT, Operand.WGRAD_INPUT),
    "all_activation": (
        Operand.FPROP_INPUT,
        Operand.DGRAD_GRAD_OUTPUT,
        Operand.WGRAD_GRAD_OUTPUT,
        Operand.WGRAD_INPUT,
    ),
}


class StochasticRounding(Technique):
    """Round up with probability equal to the fraction: for q1 <= u < q2, P(q2) = (u - q1)/(q2 - q1), so E[SR(u)] = u.

    ``operands``: ``backward`` (dY in both backward GEMMs and X in wgrad), ``all_activation`` (X and dY in every GEMM),
    or a list of operands or groups. ``bits``: random bits per element; with fewer than 24 the fraction is compared to
    the midpoint of its interval of 2^-bits (Fitzgibbon & Felix 2025).

    Stage: plan. Source: Courbariaux et al. 2015; "Elucidating the design space of FP4 training", sec. 3.1.
    Use it on gradients: nearest rounding biases them, and the bias does not average out over steps.
    """

    name: ClassVar[str] = "stochastic_rounding"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=True)

    operands: Literal["backward", "all_activation"] | tuple[str, ...] = "backward"
    bits: int = Field(24, ge=1, le=24)

    @field_validator("operands")
    @classmethod
    def _known(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not isinstance(value, str):
            unknown = [name for name in value if name not in ADDRESSES]
            if unknown or not value:
                raise ValueError(f"unknown operands {unknown}; known: {', '.join(ADDRESSES)}")
        return value

    @property
    def complexity(self) -> float:
        """0.5 (design-space paper, Table 9)."""
        return 0.5

    @classmethod
    def implied_by(cls, spec: QuantSpec) -> StochasticRounding | None:
        """Any operand whose spec says ``rounding: stochastic``."""
        return cls(bits=spec.random_bits) if spec.rounding == "stochastic" else None

    def plan(self, site: SiteView, specs: OperandSpecs) -> OperandSpecs:
        """The chosen operands, as far as they are quantized, round stochastically."""
        scope = self.operands
        chosen = _SCOPES[scope] if isinstance(scope, str) else {o for name in scope for o in ADDRESSES[name]}
        return {
            operand: dataclasses.replace(spec, rounding="stochastic", random_bits=self.bits)
            if spec is not None and operand in chosen
            else spec
            for operand, spec in specs.items()
        }


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [StochasticRounding]
