"""Low-rank residual: multiplies the strongest directions of an operand separately and quantizes the remainder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from fp4graph import Context, Operand, Overhead, Technique, hookimpl
from fp4graph.numerics.blocking import is_known
from fp4graph.numerics.quantize import fake_quantize
from fp4graph.numerics.rounding import power_of_two
from fp4graph.numerics.spec import QuantSpec
from fp4graph.technique import Operands, OperandSpecs, Part, SiteView, Wrapper

if TYPE_CHECKING:
    from torch import Tensor


class LowRankResidual(Technique):
    """Multiplies a rank-k approximation of the operand separately, and quantizes only the remainder.

    Y = X̂·Lᵀ + X̂·Q(W − L)ᵀ, where W is [N, K], L = A·B is its approximation of rank k with A [N, k] and B [k, K], and
    X̂ is the other operand of the GEMM, quantized. Subspace iteration brings L near the best approximation, the first k
    terms of the singular value decomposition: Y_0 = W·Ω, Y_i = W·orth(Wᵀ·orth(Y_(i−1))), A = orth(Y_q), B = Aᵀ·W, where
    q is ``iterations``, k is ``rank``, orth is the Q of a QR decomposition, and Ω [K, k] is Gaussian, drawn once per
    operand from the run's seed. So L depends only on W and the seed. L absorbs outliers that lie in few directions, so
    magnitudes in W − L are smaller and more even. If k is at least N or K, L is W and nothing is left to quantize.

    ``quantize_components: false`` keeps L in the GEMM's precision. With ``true`` L = Q(A)·Q(B), so that all three
    products are in FP4: (X̂·Q(B)ᵀ)·Q(A)ᵀ contracts over K, then over k, and A has blocks along k, B along K. A and B
    are rounded to nearest by the operand's spec, and their rounding errors are part of W − L. W is first divided by the
    power of two that brings its largest magnitude into [1, 2), and L is multiplied by that power, so that the scales of
    A and B do not depend on the size of W. The simulation multiplies by L as one matrix either way.

    L is computed in fp32 from W with zeros in place of NaN and Inf, so that NaN and Inf poison only their blocks. L is
    rounded to the dtype of W before it is subtracted, so that the quantizer's input plus L is W to half a unit in the
    last place. Leading axes of W are a batch of matrices, and each matrix has an L; the tokens of a linear layer are
    one axis. If W is transformed first, as by hadamard, L approximates the transformed W (W·R has the singular values
    of W, so only the remainder differs). Gradients pass straight through.

    Source: "Elucidating the design space of FP4 training", Table 2 and sec. 6 (spectral decomposition), which quantizes
    the factors A and B (``true``) but does not simulate the method; Li et al. 2025, "SVDQuant", which keeps the factors
    in 16 bits (``false``), with k = 16 or 32. Both papers decompose by SVD. The subspace iteration (Halko et al. 2011,
    Algorithm 4.4) is our choice, because an SVD at every forward is too slow.

    Stage: split.

    Cost: 2q + 2 products of W with k vectors and 2q + 1 QR decompositions at every forward, and on hardware two thin
    GEMMs. The paper's Table 2 gives O(nk) compute and O(k²) memory, unfusable. Here the factors of L take k·(N + K)
    elements, and the remainder takes n elements, stored before its first block is quantized. The complexity weight is
    ours: 3.0, the most that the paper's Table 9 gives to unfusable techniques (2 to 3).

    Use it on weights, and on activations whose outliers sit in few channels, where the cost grows with the tokens.
    """

    name: ClassVar[str] = "low_rank_residual"
    overhead: ClassVar[Overhead] = Overhead("O(nk)", "O(k^2)", fusable=False)
    complexity: ClassVar[float] = 3.0

    rank: int = Field(16, ge=1, description="k, the rank of the part that is multiplied separately.")
    iterations: int = Field(2, ge=0, le=100, description="q, the steps of subspace iteration towards the best L.")
    quantize_components: bool = Field(
        False, description="Whether the two factors of L are quantized too, instead of kept in high precision."
    )
    operands: Operands = Field(("fprop.weight",), description="Operands, or groups of them, that are decomposed.")

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse q_ema on a decomposed weight: q_ema averages W, but W − L is rounded."""
        if "q_ema" in techniques and Operand.FPROP_WEIGHT in self.operands_listed:
            raise ValueError(
                "q_ema rounds fprop.weight by the weight's moving average, and low_rank_residual leaves only a "
                "remainder of the weight to round; drop one, or name other operands"
            )

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return (SplitLowRank(options=self),)


class SplitLowRank(Wrapper):
    """Splits the operand into L and the remainder."""

    mixes = "tensor"
    draws = True  # the Gaussian Ω
    options: LowRankResidual

    def split(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Return W − L and L."""
        if is_known(math.prod(x.shape) == 0):
            return x, None
        w = x.to(torch.float32)
        finite = torch.where(w.abs() < math.inf, w, 0.0)
        # Dividing by the power of two at or below the largest magnitude is exact, and no product over- or underflows.
        unit = power_of_two(finite.abs().amax((-2, -1), keepdim=True))
        unit = torch.where(unit == 0, 1.0, unit)
        a, b = self.factors(finite / unit, context)
        if self.options.quantize_components:
            assert context.spec is not None
            spec = _nearest(context.spec)
            a, b = fake_quantize(a, spec), fake_quantize(b, spec)
        low_rank = _rounded(a @ b * unit, x.dtype)
        return _rounded(w - low_rank, x.dtype).to(x.dtype), low_rank.to(x.dtype)

    def factors(self, w: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return A ``[..., N, k]`` with orthonormal columns, and B = Aᵀ·W ``[..., k, K]``; k is at most N."""
        y = w @ context.gaussian(w.shape[-1] * self.options.rank, constant=True).reshape(w.shape[-1], self.options.rank)
        for _ in range(self.options.iterations):
            y = w @ _orthonormal(w.mT @ _orthonormal(y))
        a = _orthonormal(y)
        return a, a.mT @ w


def _orthonormal(y: Tensor) -> Tensor:
    """Return an orthonormal basis that spans the columns of ``y``, with no more columns than ``y`` has rows."""
    q: Tensor = torch.linalg.qr(y).Q
    return q


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 ``x`` to the mantissa of ``dtype``, ties to even. Inductor would drop a cast to ``dtype`` and back."""
    dropped = 24 - math.frexp(1 / torch.finfo(dtype).eps)[1]
    if dropped <= 0:
        return x
    bits = x.view(torch.int32)
    below_half = (1 << (dropped - 1)) - 1
    rounded = ((bits + below_half + ((bits >> dropped) & 1)) & -(1 << dropped)).view(torch.float32)
    return torch.where(x == x, rounded, x)


def _nearest(spec: QuantSpec) -> QuantSpec:
    """Return ``spec`` with elements and scales rounded to nearest instead of stochastically."""
    scale = replace(spec.scale, rounding="nearest_even") if spec.scale.rounding == "stochastic" else spec.scale
    return replace(spec, rounding="nearest", scale=scale)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [LowRankResidual]
