"""Tensor scaling: puts a full-precision scale of a tensor, row or macro block above the block scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field, field_validator

from fp4graph import Context, Operand, Overhead, StateEntry, Technique, hookimpl
from fp4graph.numerics.blocking import Granularity, block_length
from fp4graph.numerics.scaling import group_scale
from fp4graph.numerics.spec import QuantSpec
from fp4graph.technique import GROUPS, BlockScale, Operands, OperandSpecs, Part, Positive, Quantization, SiteView

if TYPE_CHECKING:
    from torch import Tensor

_SHARED = "largest_of_siblings"
_UNBOUNDED = -126  # exponents of formats with the range of fp32 reach down to it


class TensorScaling(Technique):
    """Divides X by the group scale γ = g/κ before its block scales are chosen, and multiplies the result by γ.

    h(X) = γ·f(X/γ) (Eq. 2, which has κ = 1) with g = max_p Z_p over the blocks p of a group, taken from the block
    statistics and not by a second pass over X. κ = Qmax·T·headroom, where T is ``target`` or else the scale format's
    maximum: 6·448·headroom for E2M1 and E4M3. The largest block's decode scale is then T·headroom, S_b = q(amax_b/6 ·
    2688/amax), and an element q stands for q·S_b·amax/2688, as NVFP4 hardware computes it. Encode scales are the
    reciprocals: s_b = q(6/amax_b · amax/2688), from 1/(T·headroom) for the largest block up (sec. 3.1: from 2/448 with
    headroom 0.5). E4M3 then represents blocks down to 1/10^5 of the largest block, whose own scale is among the coarse
    subnormals. For scales of either convention in formats with fp32's exponents (E8M0, E8M3, FP32, BF16), which have
    range to spare, κ = 1 unless ``target`` is given. ``gradient_target`` replaces ``target`` for dY, if forward
    operands leave room for four_over_six. A tensor scale, γ of a whole tensor, is applied after the GEMM: the fp32
    accumulator is multiplied by γ_a·γ_b before the result is rounded, as in hardware. γ is fp32, at least 2^-126, and 1
    for a group of zeros.

    With ``input_granularity: row`` each token of fprop.input has a γ, whatever ``granularity`` gives W. The tokens of a
    batch then do not change each other's numbers, as a training and a server that batches otherwise need.

    With ``hold_steps`` h > 1 γ is refreshed at every h-th training forward and kept in between. It is a sample, not a
    running maximum; values that outgrow it saturate. γ is kept only for products with a weight, and a backward must
    follow its own forward, because the backward refreshes γ of gradients.

    With ``share: siblings`` g of fprop.weight is the largest of the weights that servers fuse into one matrix with one
    tensor scale: q, k and v; gate and up; ``groups`` adds names. Training then multiplies with the weights that are
    served. Siblings read the same X, so γ of X is equal already. Experts share theirs expert by expert.

    Source: "Elucidating the design space of FP4 training", Eq. 2 and sec. 3.1, which also gives headroom 0.5 (after
    Chmiel et al. 2025, "FP4 All the Way"); NVIDIA 2025, "Pretraining LLMs with NVFP4"; held scales: Graphcore's UE5M3
    training code.

    Stages: scale (group scale), observe (the held γ).

    Cost: a maximum over n/l block statistics, and a multiplication of the accumulator. The complexity weight is that of
    the paper's Table 9.

    Use it whenever scales have few exponents: E4M3 scales underflow on gradients without it.
    """

    name: ClassVar[str] = "tensor_scaling"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=True)
    complexity: ClassVar[float] = 0.5

    granularity: Literal["tensor", "all", "row"] | int = Field(
        "tensor",
        description="Elements that share γ: the tensor (of one expert; all: of all experts), a line along the "
        "contraction axis (row), or this many of a line.",
    )
    input_granularity: Literal["row"] | None = Field(
        None, description="The granularity of X, if different: row, which is a token in fprop and a channel in wgrad."
    )
    headroom: float = Field(1.0, gt=0, le=1, description="Share of the scale format's range that decode scales use.")
    target: Positive | None = Field(None, description="Largest block's decode scale, instead of the format's maximum.")
    gradient_target: Positive | None = Field(None, description="The target of dY in dgrad and wgrad, if different.")
    share: Literal["siblings"] | None = Field(
        None, description="Whose weights share γ of fprop.weight: siblings, which servers fuse (q, k, v; gate, up)."
    )
    groups: tuple[tuple[str, ...], ...] = Field(
        (), description="With share: lists of last names of modules that are siblings too, such as [[wq, wk, wv]]."
    )
    hold_steps: int = Field(1, ge=1, description="Training forwards for which γ is kept; 1 computes it every time.")
    operands: Operands = Field(("forward", "backward"), description="Operands, or groups of them, that are normalized.")

    @field_validator("granularity")
    @classmethod
    def _positive(cls, value: Granularity) -> Granularity:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"a group holds at least one element; got {value}")
        return value

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse targets out of range, groups that are not whole blocks, and a held γ of other groups than tensors."""
        for operand, spec in self.specs_listed(specs).items():
            number, target = spec.scale.format, self.target_of(operand)
            if target is not None and target > number.max:
                raise ValueError(f"target {target:g} is above the largest scale of {operand}, {number.max:g}")
            largest = 1 / (self.headroom * (number.max if target is None else target))
            if target is not None and spec.scale.convention == "encode" and largest > number.max:
                raise ValueError(
                    f"target {target:g} makes the encode scale of the largest block of {operand} {largest:g}, and "
                    f"{number.name} ends at {number.max:g}; give a larger target"
                )
            if self.headroom != 1 and target is None and number.min_exponent <= _UNBOUNDED:
                raise ValueError(
                    f"headroom is a share of a format's range, and {number.name} scales of {operand} have range to "
                    "spare; give a target with it, or leave it out"
                )
            if isinstance(self.granularity, int) and self.granularity % (length := block_length(spec.block)):
                raise ValueError(
                    f"granularity {self.granularity} is not a multiple of the block of {operand}, {length} elements"
                )
        if self.gradient_target is not None and not self.operands_listed & {*GROUPS["gradients"]}:
            raise ValueError("gradient_target is for dY, and operands lists no dY; leave it out")
        if self.input_granularity and not self.operands_listed & {*GROUPS["inputs"]}:
            raise ValueError("input_granularity is for X, and operands lists no X; leave it out")
        if self.hold_steps > 1 and (self.input_granularity or self.granularity not in ("tensor", "all")):
            raise ValueError("hold_steps keeps one γ per operand; use granularity: tensor for all of them")
        if self.share and self.granularity not in ("tensor", "all"):
            raise ValueError("share gives the weights of siblings one γ; use granularity: tensor with it")
        if self.share and Operand.FPROP_WEIGHT not in self.operands_listed:
            raise ValueError(
                "share is about γ of fprop.weight, which operands does not list; list it, or leave share out"
            )
        if self.groups and not self.share:
            raise ValueError("groups names siblings; give share: siblings too")

    def plan(self, site: SiteView, specs: OperandSpecs) -> OperandSpecs:
        """Refuse to hold γ for a product without a weight, with which γ is kept, or if each expert has its own γ."""
        if self.hold_steps > 1 and site.op == "grouped" and self.granularity != "all":
            raise ValueError(
                "hold_steps keeps one γ, and every expert has its own; use granularity: all or hold_steps: 1"
            )
        if self.hold_steps > 1 and not site.multiplies_weight:
            raise ValueError("hold_steps keeps γ beside a weight, and this product has none; use hold_steps: 1")
        return specs

    def target_of(self, operand: Operand) -> float | None:
        """Return the target of an operand."""
        differs = self.gradient_target is not None and operand in GROUPS["gradients"]
        return self.gradient_target if differs else self.target

    def granularity_of(self, operand: Operand) -> Granularity:
        """Return the granularity of an operand's γ."""
        return self.input_granularity if self.input_granularity and operand in GROUPS["inputs"] else self.granularity

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        listed, held = [operand for operand in Operand if operand in self.operands_listed], self.hold_steps > 1
        kind, parts = HeldTensorScale if held else TensorScale, list[Part]()
        groups = {operand: (self.target_of(operand), self.granularity_of(operand)) for operand in listed}
        for target, granularity in dict.fromkeys(groups.values()):
            operands = [operand for operand in listed if groups[operand] == (target, granularity)]
            state = tuple(StateEntry("gamma", o, _one, writer="graph", weight_like=False) for o in operands if held)
            if self.share and Operand.FPROP_WEIGHT in operands and site.op in ("linear", "grouped"):
                state += (_largest_of_siblings(self.groups),)
            acting = frozenset(operands)
            parts.append(kind(options=self, operands=acting, target=target, group_granularity=granularity, state=state))
        return tuple(parts)

    def kappa(self, spec: QuantSpec, target: float | None) -> float:
        """Return κ for operands of ``spec``."""
        number = spec.scale.format
        if target is None and number.min_exponent <= _UNBOUNDED:
            return 1.0
        return spec.element.max * (number.max if target is None else target) * self.headroom


class TensorScale(BlockScale):
    """Divides by γ = g/κ of each group."""

    mixes = "none"
    normalizes = True
    options: TensorScaling
    target: float | None  # that of the operands, on which κ depends

    def group_scale(self, z: Tensor, group: Callable[[Granularity], Tensor], context: Context) -> Tensor:
        """Return γ of each group, fp32, broadcastable to ``z``."""
        assert context.spec is not None
        assert self.group_granularity is not None
        g = group(self.group_granularity)
        if _SHARED in context.state:
            shared = context.state[_SHARED]  # 0-d, or [E]
            shared = shared.amax() if self.group_granularity == "all" else shared
            g = torch.maximum(g, shared.reshape(*shared.shape, *([1] * (z.dim() - shared.dim()))))
        return group_scale(g, self.options.kappa(context.spec, self.target))


class HeldTensorScale(TensorScale):
    """Keeps γ, fp32, 0-d, from one refresh to the next."""

    mixes = "none"
    draws = True  # it counts forwards

    def group_scale(self, z: Tensor, group: Callable[[Granularity], Tensor], context: Context) -> Tensor:
        """Return the current or the held γ."""
        assert context.count is not None
        gamma = super().group_scale(z, group, context)
        return torch.where(context.count % self.options.hold_steps == 0, gamma, context.state["gamma"])

    def observe(self, quantization: Quantization, context: Context) -> dict[str, Tensor]:
        """Return the current γ, to be held."""
        (part,) = (part for part in quantization.group_scales if part.technique == self.name)
        return {"gamma": part.scale.reshape(())}


def _largest_of_siblings(families: tuple[tuple[str, ...], ...]) -> StateEntry:
    return StateEntry(_SHARED, Operand.FPROP_WEIGHT, _largest, writer="siblings", weight_like=False, families=families)


def _largest(weight: Tensor) -> Tensor:
    """Return the largest magnitude of a weight, fp32, 0-d; of each expert, ``[E]``, for a weight of three axes."""
    magnitudes = weight.abs().to(torch.float32)
    return magnitudes.flatten(1).amax(-1) if weight.dim() == 3 else magnitudes.amax()


def _one(weight: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=weight.device)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [TensorScaling]
