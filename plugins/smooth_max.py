"""Max relaxation: lets the gradient flow through block scales, and smooths the maximum from which they are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from fp4graph import Context, Operand, Overhead, Technique, hookimpl
from fp4graph.numerics.blocking import Groups
from fp4graph.numerics.surrogates import absmax_gradient, log_sum_exp, maximum, relative_beta, softmax_gradient
from fp4graph.technique import GROUPS, BlockScale, Gradient, Part, Positive, SiteView, check_kind

if TYPE_CHECKING:
    from torch import Tensor


class SmoothMax(Technique):
    """Differentiates the block scale through its statistic Z: dX ← dX ⊙ f'(X), f' from Eq. 1 of the design-space paper.

    ``kind`` chooses Z and its gradient dZ/dX (the paper's Table 1):
    ``absmax`` Z = max abs(x), dZ/dx = sign(x) at its first maximum, 0 elsewhere (Eq. 4);
    ``softmax`` Z = log(Σ exp(β·abs(x)))/β in the forward of all six operands, dZ/dx = softmax(β·abs(x))·sign(x)
    (Eq. 5); ``hybrid`` Z of ``absmax`` with the gradient of ``softmax``; ``ste`` drops the term, the straight-through
    default of every policy. (The paper sets the term "to be equal to 1", sec. 5.1, in order to omit its computation;
    a term of 1, added to Q' = 1, would double every gradient.) Sums run over the elements of a block without padding.

    β multiplies the tensor that is quantized. With ``tensor_scaling`` this is U = X/g (sec. 3, Eq. 2), where g is the
    largest abs(x) of the tensor, or of the group that shares its scale: g·Z(X/g) = log(Σ exp(β·abs(x)/g))·g/β replaces
    the maximum in X, with dZ/dx = softmax(β·abs(x)/g)·sign(x) and g a constant (``tensor_scaling_gradient``
    differentiates g). Without a tensor scale, or with ``of: original``, β multiplies X itself. At amax 0.01 a β of 40
    then makes Z nine times as large as the maximum, and small tensors become zero. With ``relative`` β is divided by
    the amax of each block instead.

    Source: "Elucidating the design space of FP4 training", sec. 5.1, Eq. 1, 4 and 5, Table 1; β = 40 in A.12. The
    paper's search space probably means softmax by softsoftmax, and hybrid by hardsoftmax. If the decode scale is
    rounded, the term has the decode form (fp4graph.ops.gradient).

    Stages: block statistic (softmax only), gradient of fprop.input and fprop.weight.

    Cost: O(4n) work and O(3n) (absmax) to O(4n) memory, unfusable. The last bits of exp and log differ between compiled
    and eager code, so the forward of softmax differs too.

    Use it to study the scale's gradient. All 118 result rows of the paper have STE instead. The paper says that no max
    relaxation had an effect on image classification (A.2), and that differentiable absmax gradients helped on smaller
    classification tasks (conclusion).
    """

    name: ClassVar[str] = "smooth_max"
    overhead: ClassVar[Overhead] = Overhead("O(4n)", "O(4n)", fusable=False)

    kind: Literal["absmax", "softmax", "hybrid", "ste"] = Field("absmax", description="Z and its gradient dZ/dX.")
    beta: Positive = Field(40.0, description="β, the inverse temperature of the softmax.")
    relative: bool = Field(False, description="Whether β is in units of 1/amax of the block.")
    of: Literal["normalized", "original"] = Field(
        "normalized", description="The tensor that β multiplies beside tensor_scaling: U = X/g, or X itself."
    )

    @model_validator(mode="after")
    def _options_fit_kind(self) -> SmoothMax:
        check_kind(self, dict.fromkeys(("beta", "relative", "of"), ("softmax", "hybrid")))
        if self.relative and self.of != "normalized":
            raise ValueError("relative already divides β by the amax of each block; leave out relative or of")
        return self

    @property
    def complexity(self) -> float:
        """3.0; 0 for ``ste`` (design-space paper, Table 9)."""
        return 0.0 if self.kind == "ste" else 3.0

    def beta_of(self, m: Tensor, context: Context) -> Tensor:
        """Return the β that multiplies X itself, in the shape of ``m``, the maximum of each block."""
        if self.relative:
            return relative_beta(self.beta, m)
        if self.of == "normalized" and context.normalized is not None:
            return relative_beta(self.beta, Groups(context.blocking, context.normalized).reduce(m, "amax").expand_as(m))
        return torch.full_like(m, self.beta)

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        if self.kind == "ste":
            return ()
        gradient = StatisticGradient(options=self, operands=frozenset(GROUPS["forward"]))
        if self.kind != "softmax":
            return (gradient,)
        return SmoothStatistic(options=self, operands=frozenset(Operand)), gradient


class SmoothStatistic(BlockScale):
    """Replaces the block maximum by LogSumExp."""

    mixes = "block"
    options: SmoothMax

    def block_statistic(self, values: Tensor, z: Tensor, context: Context) -> Tensor:
        """Return LogSumExp in place of the maximum."""
        return log_sum_exp(values, z, self.options.beta_of(z, context), Groups(context.blocking))


class StatisticGradient(Gradient):
    """The derivative dZ/dX."""

    mixes = "block"
    options: SmoothMax

    def statistic_gradient(self, values: Tensor, z: Tensor, context: Context) -> Tensor:
        """Return dZ/dX by Eq. 4 or Eq. 5."""
        blocks = Groups(context.blocking)
        m = maximum(values, blocks)
        if self.options.kind == "absmax":
            return absmax_gradient(values, m, blocks)
        return softmax_gradient(values, m, self.options.beta_of(m, context), blocks)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [SmoothMax]
