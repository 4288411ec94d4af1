"""Smooth-SwiGLU: divides the channels of silu(gate)·up by their amax, and multiplies the next weight by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field

from fp4graph import Context, Gemm, Overhead, Technique, hookimpl
from fp4graph.numerics.blocking import maximum
from fp4graph.technique import PairTransform, Part, SiteView

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_POWER = 2.0**127  # of fp32


class SmoothSwiglu(Technique):
    """Divides channel k of a SwiGLU's output by its largest magnitude, and multiplies column k of the next weight.

    Y = Q(X·S⁻¹)·Q(W·S)ᵀ with X [tokens, K] = silu(gate)·up, W [N, K] the down-projection, S = diag(s) and
    s_k = max over all tokens t of abs(X[t, k]). Without quantization S cancels. A SwiGLU multiplies two projections of
    the same input, which training can align so that a few channels grow far beyond the others; these channels would set
    the scale of every block they lie in. s_k is 1 for a channel that is zero or holds NaN or Inf. ``power_of_two``
    rounds s_k up to a power of two, so that S cancels exactly.

    Source: Fishman et al. 2025, "Scaling FP8 training to trillion-token LLMs" (Smooth-SwiGLU), there with a scale per
    channel before a per-tensor quantizer; "Elucidating the design space of FP4 training", A.3, tried it with FP4. The
    leading axes of a linear's input, batch and sequence, are one axis of tokens. Each expert has its own s, over its
    own tokens.

    Stage: pair transform of fprop, only at sites whose input is silu(x)·y (``producer: swiglu``). GPT-OSS's activation,
    gate·σ(1.702·gate)·(up + 1) of clamped gate and up, is excluded: by the clamps its channels stay below 7·8 = 56 in
    magnitude. If the technique acts nowhere in a model, the model's first forward warns. dgrad and wgrad are
    not scaled; with ``source: fprop`` they quantize fprop's dequantized operands after S is undone.

    Cost: a maximum over the tokens of X, which no block-wise kernel sees, and a multiplication of X and of W. The
    complexity weight is ours: 0.5, by Table 2 of the design-space paper for unfusable O(n) with O(1) memory (K values).

    Use it for models with SwiGLU trained long enough to grow such channels. The spread moves into W, whose blocks run
    along the same channels, so it pays where activations are quantized more coarsely than weights. A rule with
    ``match: {producer: swiglu}`` makes a model without a SwiGLU an error.
    """

    name: ClassVar[str] = "smooth_swiglu"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=False)
    complexity: ClassVar[float] = 0.5

    power_of_two: bool = Field(False, description="Whether s is rounded up to a power of two.")

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return (ChannelScales(options=self, gemms=frozenset({Gemm.FPROP})),) if site.producer == "swiglu" else ()


class ChannelScales(PairTransform):
    """Moves the magnitudes of channels from X to W."""

    mixes = "expert"
    options: SmoothSwiglu

    def pair_context(self, left: Tensor, right: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return s, fp32 ``[..., 1, K]``; with experts s of each token ``[T, K]`` and of each expert ``[E, 1, K]``."""
        if (segments := context.blocking.segments) is not None:
            experts = segments.unpadded  # padding belongs to no expert
            assert experts.ids is not None, "the left operand of experts holds tokens"
            s = self._rounded(experts.table(left.to(torch.float32).abs(), 0, 1))
            of_tokens = torch.where((experts.ids == experts.count)[:, None], 1.0, s[experts.ids])
            return of_tokens, s[: experts.count, None]
        return (self._rounded(maximum(left.to(torch.float32).abs(), (left.dim() - 2,))),)

    def _rounded(self, amax: Tensor) -> Tensor:
        """Return s, in the shape of ``amax``."""
        ordinary, s = (amax > 0) & (amax < torch.inf), amax
        if self.options.power_of_two:
            # Adding the largest mantissa and then clearing the mantissa rounds up.
            bits = (amax.clamp(max=_LARGEST_POWER).view(torch.int32) + 0x7FFFFF) & 0x7F800000
            s = bits.view(torch.float32)
        return torch.where(ordinary, s, 1.0)

    def transform(self, x: Tensor, side: Literal["left", "right"], shared: tuple[Tensor, ...]) -> Tensor:
        """Return X/s or W·s, fp32."""
        s = shared[1] if len(shared) == 2 and x.dim() == 3 else shared[0]  # experts' weights have an axis of experts
        return x.to(torch.float32) / s if side == "left" else x.to(torch.float32) * s

    def inverse(self, x: Tensor, side: Literal["left", "right"], shared: tuple[Tensor, ...]) -> Tensor:
        """Return X·s or W/s, fp32."""
        return self.transform(x, "right" if side == "left" else "left", shared)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [SmoothSwiglu]
