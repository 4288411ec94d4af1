"""Adaptive quantization noise: adds Gaussian noise to quantized weights, per input channel; it decays over stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from fp4graph import Context, Overhead, Technique, hookimpl
from fp4graph.technique import Part, Positive, SiteView, Wrapper

if TYPE_CHECKING:
    from torch import Tensor


class AdaptiveQuantizationNoise(Technique):
    """Adds Gaussian noise to the quantized weight: one value per input channel, drawn anew at every forward.

    Ŵ = Q(W) + 1·zᵀ with W [N, K] and z [K], the same for all N rows, z ~ N(0, σ_k²). σ decays exponentially over the
    stages k = 0 ... K_s − 1: σ_k = σ_start·(σ_end/σ_start)^(k/(K_s − 1)), k = min(⌊t/T⌋, K_s − 1), where t is the
    number of training forwards so far, T is ``steps_per_stage`` and K_s is ``stages``. ``kind: multiplicative`` is
    Ŵ = Q(W)·diag(1 + z). This form merges into the weight of a norm in front of the layer, because scaling channel k of
    X by 1 + z_k equals scaling column k of W. Here the noise acts on W, and norms do not change: z is relative to the
    norm's weight, and each layer behind a norm draws a separate z. The experts of one grouped product share z, because
    they are behind one norm. The normal variates are sums of integers, cut off at 6 standard deviations
    (fp4graph.numerics.noise.gaussian). If W is transformed, as by hadamard, z has the channels of the new basis.

    Source: Huang et al. 2026, "QeRL: Beyond Efficiency", Eq. 7 and 8 (additive), Eq. 10 and appendix G
    (multiplicative); one of the corrections of "Decomposing MXFP4 quantization error for LLM reinforcement learning".
    Huang et al. let σ fall from 5e-2 or 1e-2 to 5e-4 in about 10 stages. Their runs begin with a stage without noise,
    which this schedule does not have, and Eq. 8 counts stages from 1.

    A model in evaluation mode has no noise unless ``rollout`` is set: reinforcement learning generates responses in
    evaluation mode, where the noise makes the policy explore. All rollouts between two training forwards share the draw
    of the next training forward, so that the policy does not change while it generates. With ``rollout`` a validation
    has the noise too, because the engine cannot tell it from a rollout.

    Stage: after dequantization, of fprop.weight. dgrad sees the noise if its weight is requantized from the fprop
    weight (``source: fprop``).

    Cost: K variates per weight and one addition per element. The complexity weight is ours: 0.5, by Table 2 of the
    design-space paper for fusable O(n) work.

    Use it in reinforcement learning, to control the entropy of the policy. The sources differ in direction: Huang et
    al. add noise to raise the entropy, so that the policy explores. According to the abstract and a review of the
    decomposition paper (we have not read its text), the noise limits the rise of entropy that rounding to the grid
    causes. The noise does not help to fit data.
    """

    name: ClassVar[str] = "adaptive_quantization_noise"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=True)
    complexity: ClassVar[float] = 0.5
    on_weight: ClassVar[bool] = True

    sigma_start: Positive = Field(description="σ of the first stage.")
    sigma_end: Positive = Field(description="σ of the last stage, at most sigma_start.")
    stages: int = Field(ge=2, description="Number of stages, K_s.")
    steps_per_stage: int = Field(
        ge=1, lt=2**31, description="Training forwards per stage, T; the last stage has no end."
    )
    kind: Literal["additive", "multiplicative"] = Field(
        "additive", description="How z acts: z is added to Q(W), or 1 + z multiplies Q(W)."
    )
    rollout: bool = Field(False, description="Whether evaluation mode, in which rollouts run, has noise too.")

    @model_validator(mode="after")
    def _decays(self) -> AdaptiveQuantizationNoise:
        if self.sigma_end > self.sigma_start:
            raise ValueError(
                f"the noise decays; sigma_end {self.sigma_end:g} is above sigma_start {self.sigma_start:g}"
            )
        return self

    @property
    def sigmas(self) -> tuple[float, ...]:
        """σ of every stage."""
        ratio, last = self.sigma_end / self.sigma_start, self.stages - 1
        return tuple(self.sigma_start * ratio ** (stage / last) for stage in range(self.stages))

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return (NormNoise(options=self, draws_in_evaluation=self.rollout),)


class NormNoise(Wrapper):
    """Adds the noise to Q(W)."""

    mixes = "none"
    draws = True
    options: AdaptiveQuantizationNoise

    def after(self, x: Tensor, context: Context) -> Tensor:
        """Return Ŵ, computed in fp32."""
        options = self.options
        assert context.count is not None
        stage = (context.count // options.steps_per_stage).clamp(max=options.stages - 1)
        # Powers differ between compiled and eager code, so σ comes from a table; gather reads no tensor, which indexing
        # by a tensor would.
        sigma = torch.tensor(options.sigmas, dtype=torch.float32, device=x.device).gather(0, stage.reshape(1).long())
        z = context.gaussian(x.shape[-1]) * sigma
        weight = x.to(torch.float32)
        return (weight + z if options.kind == "additive" else weight * (1 + z)).to(x.dtype)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [AdaptiveQuantizationNoise]
