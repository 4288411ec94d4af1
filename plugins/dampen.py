"""Oscillation dampening: pulls weights towards their quantized values by a term of the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field, model_validator

from fp4graph import Operand, Overhead, Technique, hookimpl
from fp4graph.technique import OperandSpecs, OptimizerHook, Part, Positive, SiteView, WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor


class Dampen(Technique):
    """Adds λ·‖W − Q(W)‖² to the loss, to draw each weight away from the rounding thresholds of its quantizer.

    W [N, K] is a quantized weight, Q(W) its quantized value, taken as a constant, and ‖·‖ the Frobenius norm. The
    gradient of the term is added before the optimizer's step: dW ← dW + 2λ·(W − Q(W)). λ is ``strength``; with
    ``total_steps`` T and ``start`` s it rises to ``strength`` along half a cosine:
    λ_t = λ/2·(1 − cos(π·p)), p = (t − s·T)/(T − s·T) clipped to [0, 1], at the weight's t-th step, counted from 1.
    The term is added once per step however many gradients are accumulated, and enters the moments of the optimizer like
    the gradient of the loss. It is added inside ``optimizer.step()``: after the gradient is unscaled, so that loss
    scaling does not affect it, and after clipping, so that clipping neither counts nor changes it.

    Source: Nagel et al. 2022, "Overcoming Oscillations in Quantization-Aware Training", sec. 4.2, in the form of Chen
    et al. 2025, "Oscillation-Reduced MXFP4 Training for Vision Transformers". Nagel et al. clip W to the range of Q
    first, so that the term spares weights outside the range. If scales clip no weight, as in TetraJet, clipping changes
    nothing. The code of Nagel et al. lets λ rise from 0 to 0.1 after a quarter of the training (``start: 0.25``) and
    divides the term by K, unlike sec. 4.2; to do the same, write a rule for each K, with ``strength`` divided by K.

    Stage: optimizer, before the step.

    Cost: the weight's quantizer once more at each step, and one addition per element.

    The complexity weight is ours: 0.5, by Table 2 of the design-space paper for unfusable O(n) work with O(1) memory.

    Use it to compare remedies for oscillation. In pre-training it hardly reduces oscillation (Chen et al., Table 4 and
    Figure 6); ``q_ema`` and ``q_ramping`` do.
    """

    name: ClassVar[str] = "dampen"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=False)
    complexity: ClassVar[float] = 0.5
    on_weight: ClassVar[bool] = True

    strength: Positive = Field(0.01, description="λ, or the final λ if total_steps is set.")
    total_steps: int | None = Field(None, ge=1, description="T, steps in which λ rises; null for a constant λ.")
    start: float = Field(0.0, ge=0, lt=1, description="s, the share of total_steps before which λ is 0.")

    @model_validator(mode="after")
    def _schedule(self) -> Dampen:
        if self.start > 0 and self.total_steps is None:
            raise ValueError("start is a share of total_steps; set total_steps")
        return self

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse a stochastic weight quantizer, whose error is noise of mean zero and pulls nowhere."""
        spec = specs.get(Operand.FPROP_WEIGHT)
        if spec is not None and spec.rounding == "stochastic":
            raise ValueError(
                "fprop.weight rounds stochastically, so W − Q(W) is noise of mean zero and dampens nothing; round it "
                "to nearest"
            )

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return (PullToGrid(options=self),)


class PullToGrid(OptimizerHook):
    """Adds the gradient of the dampening term."""

    options: Dampen

    def before_step(self, update: WeightUpdate) -> None:
        """Add the term's gradient, computed in fp32."""
        options = self.options
        weight, grad = update.parameter, update.parameter.grad
        assert grad is not None
        error = weight.to(torch.float32) - update.quantize(weight).to(torch.float32)
        strength: Tensor | float = options.strength
        if options.total_steps is not None:
            progress = update.count_progress(options.total_steps, options.start).clamp(0, 1)
            strength = options.strength / 2 * (1 - torch.cos(math.pi * progress))
        grad.add_(error * (2 * strength))


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [Dampen]
