"""Tensor-scale gradient: lets the gradient flow through the maximum of a tensor scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from fp4graph import Context, Gemm, Operand, Overhead, Technique, hookimpl
from fp4graph.numerics.blocking import Groups
from fp4graph.numerics.rounding import round_nearest
from fp4graph.numerics.scaling import block_scale, dequantize, kappa, ratio
from fp4graph.numerics.spec import QuantSpec
from fp4graph.numerics.surrogates import absmax_gradient, log_sum_exp, maximum, relative_beta, softmax_gradient
from fp4graph.technique import QUANTIZER_STAGES, BlockScale, Gradient, OperandSpecs, Part, SiteView, acts_at, check_kind

if TYPE_CHECKING:
    from torch import Tensor


class TensorScalingGradient(Technique):
    """Differentiates the tensor scale too: h'(X) = f'(U) + dg/dX / κ · (f(U) - U·f'(U)), U = X/γ, γ = g/κ.

    κ is that of ``tensor_scaling``. f' is the derivative of the block quantizer with the policy's other techniques,
    where γ of macro blocks is a constant. ``kind`` chooses g and dg/dX over the elements that share γ (Table 1):
    ``absmax`` g = max abs(x), dg/dx = sign(x) at the first maximum; ``softmax`` g = log(Σ exp(β·abs(x)))/β, in dgrad
    and wgrad too, dg/dx = softmax(β·abs(x))·sign(x); ``hybrid`` the maximum with the softmax's gradient; ``ste`` the
    maximum with dg/dx = 1; ``ignore``, the default, treats γ as a constant and costs nothing. β is absolute unless
    ``relative`` divides it by max abs(x) of the group.

    Source: "Elucidating the design space of FP4 training", Corollary 1 and Eq. 3, Table 1. Its search space tries
    ignore, absmax and STE.

    Stages: group statistic (softmax only), gradient of fprop.input and fprop.weight.

    Cost: O(3n) work and memory, unfusable: it needs X, f(U) and the reduction over the tensor in the backward.

    ``absmax`` has a gradient only at the maximum of the group, where U = κ. If the block scale of κ is a value of the
    scale format and the surrogate there is straight-through, f(U) = U and nothing changes. Loading such a policy warns:
    NVFP4 with decode scales, S = 448·headroom, and a headroom of 1 or 0.5. With encode scales the largest block's scale
    1/(448·headroom) is rounded, and the technique acts.

    Use it to study the tensor scale's gradient. In the paper absmax tends to help image classification in some cases
    (A.2); otherwise no gradient adjustment was significantly better than straight-through (sec. 7.1).
    """

    name: ClassVar[str] = "tensor_scaling_gradient"
    overhead: ClassVar[Overhead] = Overhead("O(3n)", "O(3n)", fusable=False)
    requires: ClassVar[frozenset[str]] = frozenset({"tensor_scaling"})

    kind: Literal["ignore", "absmax", "softmax", "hybrid", "ste"] = Field("ignore", description="g and its gradient.")
    beta: float = Field(40.0, gt=0, description="β, the inverse temperature of the softmax.")
    relative: bool = Field(False, description="Whether β is in units of 1/max abs(x) of the group.")

    @model_validator(mode="after")
    def _options_fit_kind(self) -> TensorScalingGradient:
        check_kind(self, dict.fromkeys(("beta", "relative"), ("softmax", "hybrid")))
        return self

    @property
    def complexity(self) -> float:
        """3.0, for ``ignore`` 0 (design-space paper, Table 9)."""
        return 0.0 if self.kind == "ignore" else 3.0

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse a held γ, which does not depend on X."""
        if self.kind != "ignore" and getattr(techniques["tensor_scaling"], "hold_steps", 1) > 1:
            raise ValueError("a held tensor scale has no gradient; use kind: ignore, or tensor_scaling's hold_steps: 1")

    def inert(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> str | None:
        """Return a reason for ``absmax`` if the quantizer returns a group's maximum unchanged."""
        if self.kind != "absmax" or any(_changes_the_maximum(technique) for technique in techniques.values()):
            return None
        scaling: Any = techniques["tensor_scaling"]
        acting = [spec for o, spec in scaling.specs_listed(specs).items() if o in Gemm.FPROP.operands]
        limits = [kappa(spec, scaling.target, scaling.headroom) for spec in acting]
        if not acting or not all(map(_returns_its_maximum, acting, limits)):
            return None
        return (
            "absmax has a gradient only at the largest element of a group, which the quantizer returns unchanged, so "
            "that the term f(U) - U·f'(U) is 0"
        )

    def beta_of(self, m: Tensor) -> Tensor:
        return relative_beta(self.beta, m) if self.relative else torch.full_like(m, self.beta)

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        gradient = GroupGradient(options=self, operands=frozenset(Gemm.FPROP.operands))
        if self.kind == "softmax":
            return SmoothGroupStatistic(options=self, operands=frozenset(Operand)), gradient
        return () if self.kind == "ignore" else (gradient,)


class SmoothGroupStatistic(BlockScale):
    """Replaces the group maximum by LogSumExp."""

    mixes = "tensor"
    options: TensorScalingGradient

    def group_statistic(self, values: Tensor, g: Tensor, groups: Groups, context: Context) -> Tensor:
        """Return LogSumExp in place of the maximum."""
        m = maximum(values, groups)
        return log_sum_exp(values, m, self.options.beta_of(m), groups)


class GroupGradient(Gradient):
    """Differentiates the group statistic."""

    mixes = "tensor"
    options: TensorScalingGradient

    def group_gradient(self, values: Tensor, g: Tensor, groups: Groups, context: Context) -> Tensor | None:
        """Return dg/dX of Table 1."""
        if self.options.kind == "ste":
            return torch.ones_like(values)
        m = maximum(values, groups)
        if self.options.kind == "absmax":
            return absmax_gradient(values, m, groups)
        return softmax_gradient(values, m, self.options.beta_of(m), groups)


def _changes_the_maximum(technique: Technique) -> bool:
    """Return whether a technique changes the quantizer or its surrogate at the largest element of a group."""
    match technique.name:
        case "tensor_scaling" | "tensor_scaling_gradient" | "hadamard" | "smooth_swiglu":
            return False
        case "step_gradient":
            return getattr(technique, "kind", None) not in ("ste", "clip")
        case "smooth_max":
            return getattr(technique, "kind", None) == "softmax"
        case "stochastic_rounding":
            return getattr(technique, "range_guard", None) is not None
    return acts_at(technique, *QUANTIZER_STAGES, *Gradient.stages)


def _returns_its_maximum(spec: QuantSpec, u: float) -> bool:
    """Return whether ``spec`` returns ``u``, the largest element of its block, unchanged up to roundoff."""
    if spec.scale.rounding == "stochastic":
        return False
    z = torch.tensor([u], dtype=torch.float32)
    scale = block_scale(z, spec.scale, spec.element)
    back = dequantize(round_nearest(ratio(z, scale, spec), spec.element, spec.ties), scale, spec)
    return bool((back - z).abs() <= 2.0**-20 * z)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [TensorScalingGradient]
