"""MS-EDEN: rounds to nearest and makes the block scales unbiased, in place of stochastic rounding of elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import Field

from fp4graph import Context, Overhead, Technique, hookimpl
from fp4graph.kernels import measures, statistics
from fp4graph.numerics.blocking import Granularity, Groups
from fp4graph.numerics.quantize import round_elements
from fp4graph.numerics.scaling import group_scale, round_stochastically
from fp4graph.policy import checks
from fp4graph.technique import BackwardOperands, BlockScale, OperandSpecs, Part, Quantization, Rounding, SiteView

if TYPE_CHECKING:
    from torch import Tensor

_SQUARE_BOUND = 128.0  # bound of (x/S)²: abs(x/S) < 6/0.93·3/2 = 9.7; a subnormal S rounds down by at most 3/2
_FILL_DIVISOR = 4  # a group is rounded stochastically if an expert's tokens fill less than 1/4 of it (32 of 128)


class MSEden(Technique):
    """Rounds elements to nearest and corrects the bias by a factor per rotated group, folded into its block scales.

    An operand is rotated at random in groups of ``block`` elements (``hadamard``), normalized by γ = g·fill/(6·target)
    with g its absolute maximum, and cut into blocks with S = q(fill·Z/6). Its elements are q_i = nearest(u_i), u_i =
    x_i/(γ·S). Then c = Σ u_i² / Σ u_i·q_i for each group, 1 where every q_i is 0, and the stored scale of each of its
    blocks is S' = SR(c·S), rounded stochastically to the scale format. So the component of c·q along u is u, whatever
    the rounding, and the random rotation turns all other errors into noise: the expected product of two such operands
    is close to the exact product. (The sums weigh all blocks of a group alike, as in the authors' code; after the
    rotation their scales are nearly equal.) ``fill`` below 1 lets a block's largest values exceed 6 and be clipped,
    which lowers the squared error; the factor makes up for the bias.

    For errors orthogonal to u the paper needs a uniformly random rotation. Random signs and a Hadamard matrix come near
    it if most of a group is filled. In wgrad, zeros pad an expert's tokens to whole groups. A group that tokens fill
    to less than a quarter would be biased by up to 7 % (docs/experts.md). It is rounded stochastically, without bias:
    S is Z/6 rounded up, so that nothing is clipped, and S' = S. If 128 does not divide the tokens or outputs of
    an ordinary layer, the last group keeps its bias.

    Source: Panferov et al. 2026, "Quartet II: Accurate LLM Pre-Training in NVFP4 by Improved Unbiased Gradient
    Estimation", and their code (groups of 128, fill 17/16·0.93, scales to 255.99; one rotation per backward, here two).

    Stages: scale (group scale and block scale), element rounding, rescale.

    Cost: two sums and one random number per block, where stochastic rounding has one per element. The complexity
    weight is ours: 0.5, tensor scale included, by Table 2 of the design-space paper for fusable O(n) work.

    Use it in place of ``stochastic_rounding`` and ``tensor_scaling`` on backward operands of NVFP4.
    """

    name: ClassVar[str] = "ms_eden"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=True)
    complexity: ClassVar[float] = 0.5
    requires: ClassVar[frozenset[str]] = frozenset({"hadamard"})

    block: int = Field(128, ge=2, description="Elements that share a factor: those that are rotated together.")
    fill: float = Field(17 / 16 * 0.93, gt=0.93, le=1, description="A block's maximum is scaled to 6 divided by fill.")
    target: float = Field(255.99, gt=0, description="Largest block scale before c multiplies it.")
    operands: BackwardOperands = Field(("backward",), description="Operands, or groups of them, of dgrad and wgrad.")

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse operands that are not rotated in the same groups, and specs whose rounding or scales do not fit."""
        rotation: Any = techniques["hadamard"]
        if rotation.block != self.block:
            raise ValueError(f"its groups must be hadamard's: hadamard has block {rotation.block}, not {self.block}")
        if rotation.kind == "deterministic":
            raise ValueError("it is unbiased only under a random rotation; hadamard needs a kind that draws signs")
        if rotation.resample == "never":
            raise ValueError("it is unbiased only if hadamard draws new signs; leave out hadamard's option resample")
        for operand, spec in self.specs_listed(specs).items():
            if operand.gemm not in rotation.rotated:
                raise ValueError(f"{operand} is not rotated; add {operand.gemm} to the scope of hadamard")
            if not isinstance(spec.block, int) or self.block % spec.block:
                raise ValueError(f"block {self.block} is not a multiple of the block of {operand}, {spec.block}")
            if "stochastic" in (spec.rounding, spec.scale.rounding):
                raise ValueError(f"{operand} rounds stochastically already; drop that, or this technique")
            scales, kind = spec.scale.format, spec.scale.convention
            if kind != "decode" or not scales.mantissa_bits or not scales.has_zero:
                raise ValueError(f"it needs decode scales such as e4m3; {operand} has {kind} {scales.name} scales")
            checks.check_target(self.target, operand, spec.scale)
        for name in ("tensor_scaling", "four_over_six", "macro_block_scaling"):
            if name in techniques and (both := techniques[name].operands_listed & self.operands_listed):
                raise ValueError(f"it scales {min(both)} itself; take its operands out of {name}'s")

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
        spec, groups = context.spec, Groups(context.blocking, self.options.block)
        chosen = statistics.block_scale(z * self.options.fill, spec)
        if (sparse := groups.sparse(_FILL_DIVISOR)) is None:
            return chosen
        rounded_up = statistics.block_scale(z, replace(spec, scale=replace(spec.scale, rounding="toward_positive")))
        return torch.where(sparse, rounded_up, chosen)

    def rescale(self, quantization: Quantization, context: Context) -> Tensor:
        """Return S' = SR(c·S)."""
        q, length = quantization, self.options.block
        arguments = q.spec, q.blocking, _SQUARE_BOUND, length, q.quotient
        squares, products = measures.group_moments(q.values, q.scale, *arguments)
        factor = torch.where(products == 0, 1.0, squares / products)
        corrected = (q.scale.double() * factor).to(torch.float32).clamp(max=q.spec.scale.format.max)
        scale = round_stochastically(corrected, q.spec.scale.format, context.noise.block_bits())
        sparse = Groups(q.blocking, length).sparse(_FILL_DIVISOR)
        return scale if sparse is None else torch.where(sparse, q.scale, scale)


class StochasticWhereSparse(Rounding):
    """Rounds sparse groups stochastically: those that an expert's tokens fill to less than a quarter."""

    mixes = "expert"
    draws = True
    options: MSEden

    def round(self, ratio: Tensor, scale: Tensor, context: Context) -> Tensor | None:
        """Round elements of sparse groups stochastically, others to nearest; return None if no group can be sparse."""
        assert context.spec is not None
        if (sparse := Groups(context.blocking, self.options.block).sparse(_FILL_DIVISOR)) is None:
            return None
        drawn = round_elements(ratio, replace(context.spec, rounding="stochastic"), context.noise)
        nearest = round_elements(ratio, replace(context.spec, rounding="nearest"), context.noise)
        return torch.where(sparse, drawn, nearest)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [MSEden]
