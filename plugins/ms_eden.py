"""MS-EDEN: rounds to nearest and makes the block scales unbiased, in place of stochastic rounding of elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from fp4graph import Context, Overhead, Technique, hookimpl
from fp4graph.kernels import measures, statistics
from fp4graph.numerics.blocking import Blocking, Granularity, Groups
from fp4graph.numerics.quantize import round_elements
from fp4graph.numerics.rounding import spacing, stochastic_integer, uniform
from fp4graph.numerics.scaling import group_scale
from fp4graph.technique import BackwardOperands, BlockScale, OperandSpecs, Part, Quantization, Rounding, SiteView

if TYPE_CHECKING:
    from torch import Tensor

#: A bound on (x/S)²: abs(x/S) reaches Qmax/fill · 3/2 = 9.7 if a subnormal S of 3/2 units was rounded down to one.
_SQUARE_BOUND = 128.0
#: A group of which an expert's tokens fill less than 1/_FILL_DIVISOR (32 of 128) is rounded stochastically.
_FILL_DIVISOR = 4


class MSEden(Technique):
    """Rounds elements to nearest and corrects the bias by a factor per rotated group, folded into its block scales.

    An operand is rotated at random in groups of ``block`` elements (``hadamard``), normalized by
    γ = g·fill/(6·target) with g its absolute maximum, and cut into blocks with S = q(fill·Z/6). Its elements are
    q_i = nearest(u_i), u_i = x_i/(γ·S). Then for each group

        c = Σ u_i² / Σ u_i·q_i

    and the stored scale of each of its blocks is S' = SR(c·S), rounded stochastically to the scale format; c is 1 where
    every q_i is 0. So the component of c·q along u is u, whatever the rounding, and the random rotation turns all
    other errors into noise: the expectation of the product of two such operands comes near to the product. (The sums
    weigh all blocks of a group alike, as in the authors' code. Their scales are nearly equal after the rotation.)
    ``fill`` below 1 lets the largest values of a block exceed 6 and be clipped, which lowers the squared error; the
    factor makes up for the bias. ``target`` leaves room above the largest scale for the factor.

    Source: Panferov et al. 2026, "Quartet II: Accurate LLM Pre-Training in NVFP4 by Improved Unbiased Gradient
    Estimation", and the authors' code (groups of 128, fill 17/16·0.93, scales up to 255.99; one rotation per backward
    there, one per GEMM here).

    Stages: scale (group scale and block scale), element rounding, rescale.

    Cost: two sums over each block and one random number per block, where stochastic rounding has one per element. The
    complexity weight is ours: 0.5, Table 2's fusable O(n), the tensor scale included.

    The factor corrects the component along u. For other components the paper needs a uniformly random rotation; random
    signs and a Hadamard matrix come near to that if much of a group is filled. In wgrad zeros pad the tokens of an
    expert to whole groups. With T tokens of Gaussian data in a group of 128 the rms bias of dW was, of its own rms:
    5.3 % for T = 2, 6.8 % for 3, 6.3 % for 5, 2.7 % for 8, 1.9 % for 10, 0.4 % for 16, 0.1 % from 24 on, as for a full
    group (4,000 draws, whose noise is 0.2 %). A group that tokens fill to less than a quarter is therefore rounded
    stochastically, which is unbiased for every T: S = q(Z/6) rounded up, so that nothing is clipped, and S' = S. In
    an ordinary layer whose tokens or outputs 128 does not divide, the last group keeps the bias of its T.

    Use it in place of ``stochastic_rounding`` and ``tensor_scaling`` on backward operands of NVFP4.
    """

    name: ClassVar[str] = "ms_eden"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=True)
    complexity: ClassVar[float] = 0.5
    requires: ClassVar[frozenset[str]] = frozenset({"hadamard"})

    block: int = Field(128, ge=2, description="Elements that share a factor: those that are rotated together.")
    fill: float = Field(17 / 16 * 0.93, gt=0.93, le=1, description="A block's maximum is scaled to 6 divided by fill.")
    target: float = Field(255.99, gt=0, allow_inf_nan=False, description="Largest block's scale before the factor.")
    operands: BackwardOperands = Field(("backward",), description="Operands, or groups of them, of dgrad and wgrad.")

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse operands that are not rotated in the same groups, and specs whose rounding or scales do not fit."""
        rotation = techniques["hadamard"]
        rotated = getattr(rotation, "block", None)
        if rotated != self.block:
            raise ValueError(f"its groups must be those of hadamard: hadamard has block {rotated}, not {self.block}")
        if getattr(rotation, "kind", None) == "deterministic":
            raise ValueError("it is unbiased under a random rotation alone; hadamard needs a kind that draws signs")
        if getattr(rotation, "resample", None) == "never":
            raise ValueError(
                "it is unbiased over rotations alone, and hadamard keeps its signs; leave its option resample out"
            )
        for operand, spec in self.specs_listed(specs).items():
            if operand.gemm not in rotation.rotated:  # type: ignore[attr-defined]  # a public property of hadamard
                raise ValueError(f"{operand} is not rotated; add {operand.gemm} to the scope of hadamard")
            if not isinstance(spec.block, int) or self.block % spec.block:
                raise ValueError(f"block {self.block} is no multiple of the block of {operand}, {spec.block}")
            if spec.rounding == "stochastic" or spec.scale.rounding == "stochastic":
                raise ValueError(f"{operand} rounds stochastically already; drop that, or this technique")
            number = spec.scale.format
            if spec.scale.convention != "decode" or not number.mantissa_bits or not number.has_zero:
                raise ValueError(f"it rounds decode scales between neighbours; {operand} has {number.name} scales")
            if self.target > number.max:
                raise ValueError(f"target {self.target:g} is above the largest scale of {operand}, {number.max:g}")
        for name in ("tensor_scaling", "four_over_six", "macro_block_scaling"):
            both = techniques[name].operands_listed & self.operands_listed if name in techniques else ()
            if both:
                raise ValueError(f"it scales {min(both)} by itself; take its operands out of those of {name}")

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        scale = UnbiasedScale(options=self)
        return (scale, StochasticWhereSparse(options=self)) if site.op == "grouped" else (scale,)


class UnbiasedScale(BlockScale):
    """Normalizes the tensor, chooses S, and folds the factor into it."""

    mixes = "expert"
    draws = True
    group_granularity = "tensor"
    normalizes = True
    options: MSEden

    def group_scale(self, z: Tensor, group: Callable[[Granularity], Tensor], context: Context) -> Tensor:
        """Return γ of the tensor, fp32."""
        assert context.spec is not None
        return group_scale(group("tensor"), context.spec.element.max * self.options.target / self.options.fill)

    def scale(self, values: Tensor, z: Tensor, context: Context) -> Tensor:
        """Return S, under which elements are rounded."""
        assert context.spec is not None
        spec, sparse = context.spec, _sparse(context.blocking, self.options.block)
        chosen = statistics.block_scale(z * self.options.fill, spec)
        if sparse is None:
            return chosen
        above = statistics.block_scale(z, replace(spec, scale=replace(spec.scale, rounding="toward_positive")))
        return torch.where(sparse, above, chosen)

    def rescale(self, quantization: Quantization, context: Context) -> Tensor:
        """Return S' = SR(c·S)."""
        block, blocking, stored = self.options.block, quantization.blocking, quantization.scale
        groups, sparse = Groups(blocking, block), _sparse(blocking, block)
        # Fractions of _SQUARE_BOUND add exactly, so that compiled code, which adds in another order, has the same bits.
        moments = measures.block_moments(quantization.values, stored, quantization.spec, blocking, _SQUARE_BOUND, block)
        squares, products = (groups.reduce(sums, "sum") for sums in moments)
        factor = torch.where(products == 0, 1.0, squares / products)
        number = quantization.spec.scale.format
        corrected = (stored.double() * factor).to(torch.float32).clamp(max=number.max)
        step, inverse = spacing(corrected, number.min_exponent, number.mantissa_bits)
        scale = stochastic_integer(corrected * inverse, uniform(context.noise.block_bits())) * step
        return scale if sparse is None else torch.where(sparse, stored, scale)


class StochasticWhereSparse(Rounding):
    """Rounds stochastically those groups of an expert that tokens fill to less than a quarter."""

    mixes = "expert"
    draws = True
    options: MSEden

    def round(self, ratio: Tensor, scale: Tensor, context: Context) -> Tensor | None:
        """Return the elements of groups that are hardly filled rounded stochastically, the others to nearest."""
        assert context.spec is not None
        if (sparse := _sparse(context.blocking, self.options.block)) is None:
            return None
        drawn, nearest = (
            round_elements(ratio, replace(context.spec, rounding=rounding), context.noise)
            for rounding in ("stochastic", "nearest")
        )
        return torch.where(sparse, drawn, nearest)


def _sparse(blocking: Blocking, group: int) -> Tensor | None:
    """Return whether tokens fill less than a quarter of a block's group, broadcastable to a statistic; None if the
    operand's groups do not run along the tokens of experts."""
    segments = blocking.segments
    if segments is None or segments.own is None or segments.axis != len(blocking.shape) - 1:
        return None
    assert isinstance(blocking.block, int)
    filled = (segments.own < segments.count).reshape(-1, group).sum(1)
    few = filled * _FILL_DIVISOR < group
    return few[:, None].expand(-1, group // blocking.block).reshape(-1, 1)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [MSEden]
