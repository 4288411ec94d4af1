"""Step gradient: replaces the derivative of element rounding by a surrogate, in place of the straight-through 1."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field, field_validator, model_validator

from fp4graph import Context, Overhead, Technique, hookimpl
from fp4graph.numerics import surrogates
from fp4graph.numerics.formats import FP32
from fp4graph.technique import ForwardOperands, Gradient, OperandSpecs, Part, Positive, SiteView, check_kind

if TYPE_CHECKING:
    from torch import Tensor


class StepGradient(Technique):
    """Multiplies dX by a surrogate Q'(u), the slope of a smooth or linear stand-in for the rounding Q of u = X/S.

    v1 <= u < v2 are the neighbouring element values, and t = (u - v1)/(v2 - v1):
    ``dge`` Q' = (1/k)·abs(2t - 1)^(1/k - 1), infinite in the middle and therefore capped (``upper``, 3);
    ``sigmoid`` Q' = (12/T)·σ(z)(1 - σ(z)), z = 12(t - 1/2)/T;
    ``spline`` Q' is the slope of the polyline through ``knots`` at abs(u); default knots are (threshold, threshold
    rounded to nearest even). For E2M1 these slopes are 0 on [0, .25), 2 on [.25, .75), 0 on [.75, 1.25), 2 on
    [1.25, 1.75), 0 on [1.75, 2.5), 2 on [2.5, 3.5), 0 on [3.5, 5) and 2 on [5, 6];
    ``clip`` Q' = 1, so that only clipped elements get no gradient (QuEST's trust mask, in Quartet's forward);
    ``ste`` Q' = 1 everywhere, the default of every policy. Beyond ±Qmax the other surrogates are 0. The result is
    clipped to [``lower``, ``upper``]: by default spline to at least 0.2, so that no gradient is 0, and dge to [0, 3].

    Source: "Elucidating the design space of FP4 training", sec. 4 (spline, with clipping from below; the paper
    describes the knots without printing them, and we chose the bound 0.2) and A.13 (sigmoid); Wang et al. 2025,
    "Optimizing Large Language Model Training Using FP4 Quantization" (DGE, k = 5; the cap of 3 is from their code);
    Castro et al. 2025, "Quartet" (clip).

    Stage: gradient of fprop.input and fprop.weight.

    Cost: O(n) work; for ``spline`` O(n log k) with k knots (9 for E2M1) in the paper, and O(n·k) here, which compares
    with each knot. X in high precision is kept for the backward: O(n) memory, unfusable.

    Use it on weights to reproduce Wang et al. The conclusion of the design-space paper is that quantization gradients
    help on smaller classification tasks, but do not help, or harm, larger diffusion and language models.
    """

    name: ClassVar[str] = "step_gradient"
    overhead: ClassVar[Overhead] = Overhead("O(n log k)", "O(n)", fusable=False)

    kind: Literal["spline", "dge", "sigmoid", "clip", "ste"] = Field("spline", description="The surrogate Q'.")
    operands: ForwardOperands = Field(
        ("forward",), description="Operands whose gradient changes: fprop.input, fprop.weight, or both."
    )
    k: float = Field(5.0, gt=1, description="dge: the exponent is 1/k - 1.")
    temperature: Positive = Field(1.0, description="sigmoid: T; as T goes to 0, the sigmoid becomes the step.")
    knots: tuple[tuple[float, float], ...] = Field(
        (), description="spline: (abs(u), value) pairs from (0, 0) up; by default the thresholds of nearest even."
    )
    lower: float | None = Field(None, ge=0, description="Least slope; by default 0.2 for spline, else 0.")
    upper: float | None = Field(None, gt=0, description="Greatest slope; by default 3 for dge, else unlimited.")

    @field_validator("knots")
    @classmethod
    def _ascending(cls, value: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        if value and (len(value) < 2 or any(b[0] <= a[0] for a, b in itertools.pairwise(value))):
            raise ValueError("knots must be at least two pairs (abs(u), value) with ascending abs(u)")
        if value and value[0] != (0, 0):
            raise ValueError(f"knots begin at (0, 0); the first is {value[0]}")
        return value

    @model_validator(mode="after")
    def _options_fit_kind(self) -> StepGradient:
        check_kind(self, {"k": ("dge",), "temperature": ("sigmoid",), "knots": ("spline",)})
        lower, upper = self.bounds
        if upper is not None and lower > upper:
            raise ValueError(f"lower {lower:g} is above upper {upper:g}")
        return self

    @property
    def bounds(self) -> tuple[float, float | None]:
        lower = 0.2 if self.kind == "spline" else 0.0
        upper = 3.0 if self.kind == "dge" else None
        return lower if self.lower is None else self.lower, upper if self.upper is None else self.upper

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse knots that end below the element format's maximum."""
        for operand, spec in self.specs_listed(specs).items():
            if self.knots and self.knots[-1][0] < spec.element.max:
                raise ValueError(
                    f"knots end at {self.knots[-1][0]:g}, and {operand} has values up to {spec.element.max:g}"
                )

    def inert(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> str | None:
        """Return a reason if ``kind`` is ``clip`` and no scale lets elements be clipped."""
        acting = self.specs_listed(specs).values()
        if self.kind == "clip" and acting and all(s.scale.rounds_up for s in acting):
            return "scales that are rounded up clip nothing"
        if self.kind == "clip" and acting and all(s.scale.format == FP32 for s in acting):
            return "scales in fp32 are not rounded, and clip nothing"
        return None

    @property
    def complexity(self) -> float:
        """2.0; 0 for ``ste`` (design-space paper, Table 9)."""
        return 0.0 if self.kind == "ste" else 2.0

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return () if self.kind == "ste" else (ElementSlope(options=self),)


class ElementSlope(Gradient):
    """The surrogate Q'(u)."""

    mixes = "none"
    options: StepGradient

    def element_surrogate(self, ratio: Tensor, context: Context) -> Tensor | None:
        """Return Q'(u), shape of ``ratio``."""
        options = self.options
        assert context.spec is not None
        element = context.spec.element
        if options.kind == "clip":
            return surrogates.inside(ratio, element.max).clamp(*options.bounds)
        if options.kind == "spline":
            slope = surrogates.spline(ratio, options.knots or surrogates.ties_even_knots(element))
        else:
            part = surrogates.fraction(ratio, element)
            slope = (
                surrogates.dge(part, options.k)
                if options.kind == "dge"
                else surrogates.sigmoid(part, options.temperature)
            )
        slope = torch.where(ratio.abs() <= element.max, slope, torch.zeros_like(slope))
        return slope.clamp(*options.bounds)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [StepGradient]
