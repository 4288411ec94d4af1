"""The gradient through a tensor scale's maximum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator

from fp4graph.hookspecs import hookimpl
from fp4graph.numerics.blocking import Groups
from fp4graph.numerics.surrogates import absmax_gradient, log_sum_exp, softmax_gradient
from fp4graph.operands import GROUPS, Operand
from fp4graph.site import SiteView
from fp4graph.technique import Context, OperandSpecs, Overhead, Technique


class TensorScalingGradient(Technique):
    """The tensor scale is differentiated too: h'(X) = f'(U) + dg/dX / κ · (f(U) - U·f'(U)), U = X/γ, γ = g/κ.

    f' is the block quantizer's derivative as the policy's other techniques make it. ``kind`` says what g and dg/dX
    are, over the elements that share γ (Table 1): ``absmax`` g = max abs(x), dg/dx = sign(x) at its first maximum;
    ``softmax`` g = log(Σ exp(β·abs(x)))/β in the forward of all six operands, dg/dx = softmax(β·abs(x))·sign(x);
    ``hybrid`` the maximum with the softmax's gradient; ``ste`` the maximum with dg/dx = 1; ``ignore``, the default,
    treats γ as a constant and costs nothing. β is absolute unless ``relative`` divides it by g's maximum.

    Source: "Elucidating the design space of FP4 training", Corollary 1 and Eq. 3, Table 1. Its search space tries
    ignore, absmax and STE.

    Stages: group statistic (softmax only), gradient of fprop.input and fprop.weight.

    Cost: O(3n) work and memory, unfusable: it needs X, f(U) and the reduction over the tensor in the backward.

    Use it to study the tensor scale's gradient; ignoring it was never worse in the paper's tables.
    """

    name: ClassVar[str] = "tensor_scaling_gradient"
    overhead: ClassVar[Overhead] = Overhead("O(3n)", "O(3n)", fusable=False)
    requires: ClassVar[frozenset[str]] = frozenset({"tensor_scaling"})

    kind: Literal["ignore", "absmax", "softmax", "hybrid", "ste"] = Field("ignore", description="What g and dg/dX are.")
    beta: float = Field(40.0, gt=0, allow_inf_nan=False, description="β, the inverse temperature of the softmax.")
    relative: bool = Field(False, description="Whether β is in units of 1/max abs(x) of the group.")

    @model_validator(mode="after")
    def _of_its_kind(self) -> TensorScalingGradient:
        if self.kind not in ("softmax", "hybrid") and (self.beta != 40 or self.relative):
            raise ValueError(f"kind: {self.kind} has no β; leave beta and relative out")
        return self

    @property
    def complexity(self) -> float:
        """3.0, for ``ignore`` 0 (design-space paper, Table 9)."""
        return 0.0 if self.kind == "ignore" else 3.0

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """A held γ does not depend on X."""
        if self.kind != "ignore" and getattr(techniques["tensor_scaling"], "hold_steps", 1) > 1:
            raise ValueError("a held tensor scale has no gradient; use tensor_scaling with hold_steps: 1, or ignore")

    def acts_on(self, site: SiteView) -> frozenset[Operand]:
        """The operands of fprop; all six where the forward changes."""
        if self.kind == "ignore":
            return frozenset()
        return frozenset(Operand) if self.kind == "softmax" else frozenset(GROUPS["forward"])

    def group_statistic(self, values: torch.Tensor, g: torch.Tensor, groups: Groups, context: Context) -> torch.Tensor:
        """LogSumExp in place of the maximum, for ``softmax``."""
        if self.kind != "softmax":
            return g
        m = _maximum(values, groups)
        valid = context.blocking.valid(values.device)
        return log_sum_exp(values, m, self._beta(m), valid, lambda x: _total(x, groups))

    def group_gradient(
        self, values: torch.Tensor, g: torch.Tensor, groups: Groups, context: Context
    ) -> torch.Tensor | None:
        """dg/dX of Table 1."""
        if self.kind == "ignore":
            return None
        if self.kind == "ste":
            return torch.ones_like(values)
        m = _maximum(values, groups)
        if self.kind == "absmax":
            index = context.blocking.index(values.device).expand(values.shape)
            return absmax_gradient(values, m, index, lambda x: _lowest(x, groups))
        valid = context.blocking.valid(values.device)
        return softmax_gradient(values, m, self._beta(m), valid, lambda x: _total(x, groups))

    def _beta(self, m: torch.Tensor) -> torch.Tensor:
        beta = torch.full_like(m, self.beta)
        return torch.where(m > 0, beta / torch.where(m > 0, m, 1.0), beta) if self.relative else beta


def _maximum(values: torch.Tensor, groups: Groups) -> torch.Tensor:
    return groups.reduce(values.abs().amax(groups.blocking.axes, keepdim=True), "amax")


def _total(values: torch.Tensor, groups: Groups) -> torch.Tensor:
    return groups.reduce(values.sum(groups.blocking.axes, keepdim=True), "sum")


def _lowest(index: torch.Tensor, groups: Groups) -> torch.Tensor:
    lowest = index.amin(groups.blocking.axes, keepdim=True)
    return -groups.reduce(-lowest, "amax", fill=-(2**31 - 1))


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [TensorScalingGradient]
