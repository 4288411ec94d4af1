"""Scale gradient: replaces the derivative of rounding block scales by a surrogate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from fp4graph import Context, Overhead, Technique, hookimpl
from fp4graph.numerics import surrogates
from fp4graph.numerics.formats import FP32
from fp4graph.technique import GROUPS, Gradient, OperandSpecs, Part, SiteView, check_kind

if TYPE_CHECKING:
    from torch import Tensor


class ScaleGradient(Technique):
    """Replaces the straight-through 1 by a surrogate derivative q'(s) of rounding the block scale s to its format.

    s1 <= s < s2 are neighbouring scales of the format, and t = (s - s1)/(s2 - s1).
    ``dge`` is (1/k)·abs(2t - 1)^(1/k - 1), capped at 3. ``spline`` is the slope of the polyline through the points
    (threshold, threshold rounded to nearest even): 0 around scales of even code and 2 around scales of odd code; for
    E8M0, if its ties go up, 4/3 everywhere. ``ste`` is 1. Above the format's maximum surrogates are 0. All surrogates
    are then clipped to [lower, upper]. The spec's convention decides what s is, Z/Qmax (``decode``) or Qmax/Z
    (``encode``), and so the surrogate. With ``range: low`` the surrogate acts below the format's smallest normal
    number, where the quotient of s and the rounded s deviates most from 1. Above that number the surrogate is 1.

    Source: "Elucidating the design space of FP4 training", sec. 5 and Eq. 1. The clip from below, 0.2, is our choice,
    as for step_gradient.

    Stage: gradient of fprop.input and fprop.weight. The surrogate acts only beside ``smooth_max``, which differentiates
    the scale; without it loading the policy warns.

    Cost: O(n) work and O(n/l) memory, unfusable.

    Use it with smooth_max, for E4M3 scales in their subnormal range.
    """

    name: ClassVar[str] = "scale_gradient"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(n/l)", fusable=False)

    kind: Literal["spline", "dge", "ste"] = Field("spline", description="The surrogate of the scale's rounding.")
    range: Literal["all", "low"] = Field("all", description="Scales with the surrogate: all, or only subnormal scales.")
    k: float = Field(5.0, gt=1, description="dge: the exponent is 1/k - 1.")
    lower: float | None = Field(None, ge=0, description="Least slope; by default 0.2 for spline, 0 for dge.")
    upper: float | None = Field(None, gt=0, description="Greatest slope; by default 3 for dge, else unlimited.")

    @model_validator(mode="after")
    def _options_fit_kind(self) -> ScaleGradient:
        check_kind(self, {"k": ("dge",)})
        lower, upper = self.bounds
        if upper is not None and lower > upper:
            raise ValueError(f"lower {lower:g} is above upper {upper:g}")
        return self

    @property
    def bounds(self) -> tuple[float, float | None]:
        lower, upper = (0.2, None) if self.kind == "spline" else (0.0, 3.0)
        return lower if self.lower is None else self.lower, upper if self.upper is None else self.upper

    @property
    def complexity(self) -> float:
        """1.5; 0 for ``ste`` (design-space paper, Table 9)."""
        return 0.0 if self.kind == "ste" else 1.5

    def inert(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> str | None:
        """Return a reason unless the scale is rounded and differentiated."""
        smooth = techniques.get("smooth_max")
        if self.kind == "ste":
            return "kind: ste is the derivative 1, which the block scale has without scale_gradient"
        if smooth is None or getattr(smooth, "kind", "ste") == "ste":
            return "the block scale is differentiated only beside smooth_max with a kind other than ste"
        acting = [spec.scale.format for o in GROUPS["forward"] if (spec := specs.get(o)) is not None]
        if acting and all(f == FP32 for f in acting):
            return "a scale in fp32 is not rounded"
        if acting and self.range == "low" and all(not f.has_zero or f == FP32 for f in acting):
            return "range: low is for scale formats with subnormals"
        return None

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        if self.kind == "ste":
            return ()
        return (ScaleSlope(options=self, operands=frozenset(GROUPS["forward"])),)


class ScaleSlope(Gradient):
    """The surrogate q'(s)."""

    mixes = "block"
    options: ScaleGradient

    def scale_surrogate(self, ideal: Tensor, context: Context) -> Tensor | None:
        """Return q'(s), shape of ``ideal``."""
        assert context.spec is not None
        scale_format, ties = context.spec.scale.format, context.spec.scale.ties
        if scale_format == FP32:
            return None
        part, odd = surrogates.scale_fraction(ideal, scale_format)
        if self.options.kind == "dge":
            slope = surrogates.dge(part, self.options.k)
        else:
            slope = 2 * odd if scale_format.has_zero or ties == "even" else torch.full_like(ideal, 4 / 3)
        slope = torch.where(ideal <= scale_format.max, slope, torch.zeros_like(slope))
        slope = slope.clamp(*self.options.bounds)
        if self.options.range == "low":
            slope = torch.where(ideal < 2.0**scale_format.min_exponent, slope, torch.ones_like(slope))
        return slope


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [ScaleGradient]
