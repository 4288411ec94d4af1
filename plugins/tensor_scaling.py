"""Tensor scaling: puts a full-precision scale of a tensor, row or macro block above the block scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch
from pydantic import Field

from fp4graph import Context, Operand, Overhead, StateEntry, Technique, hookimpl
from fp4graph.numerics import initial
from fp4graph.numerics.blocking import Granularity
from fp4graph.numerics.scaling import group_scale, kappa
from fp4graph.policy import checks
from fp4graph.technique import ADDRESSES, BlockScale, Operands, OperandSpecs, Part, Positive, Quantization, SiteView

if TYPE_CHECKING:
    from torch import Tensor


class TensorScaling(Technique):
    """Divides X by the group scale γ = g/κ before the block scales are chosen, and multiplies the result by γ.

    h(X) = γ·f(X/γ) (Eq. 2, where κ = 1). g = max_p Z_p over the blocks p of a group, from the block statistics and not
    from X. κ = Qmax·T·headroom, where T is ``target`` or else the scale format's maximum: 6·448·headroom for E2M1 and
    E4M3. The largest block's decode scale is then T·headroom, S_b = q(amax_b/6 · 2688/amax), and an element e stands
    for e·S_b·amax/2688, as in NVFP4 hardware. Encode scales are the reciprocals s_b = q(6/amax_b · amax/2688), and the
    largest block has the least scale, 1/(T·headroom) (sec. 3.1: 2/448 with headroom 0.5). E4M3 then represents blocks
    down to 1/10^5 of the largest, with a coarse subnormal as scale. Scales with fp32's exponents (E8M0, E8M3, FP32,
    BF16) have range to spare: κ = 1 without ``target``. ``gradient_target`` replaces ``target`` for dY, where
    ``target`` leaves room for four_over_six in the forward. γ of a whole tensor is applied after the GEMM, as in
    hardware: the fp32 accumulator times γ_a·γ_b is rounded. γ is fp32, at least 2^-126, and 1 for zeros.

    With ``input_granularity: row`` each token of fprop.input has a γ. The numbers of a token then do not depend on the
    other tokens of its batch, as needed if servers batch otherwise. With ``hold_steps`` h > 1 γ is refreshed at every
    h-th training forward and kept in between. γ is then a sample, not a running maximum; larger values saturate. γ is
    kept only for products with a weight. Each backward must follow its forward, because the backward refreshes γ of dY.

    With ``share: siblings`` g of fprop.weight is the largest g of the weights that servers fuse under one tensor scale:
    q, k and v; gate and up. Families of ``groups`` come first. γ of X is equal in any case. Each expert has a shared γ.

    Source: "Elucidating the design space of FP4 training", Eq. 2 and sec. 3.1, also for headroom 0.5 (after Chmiel et
    al. 2025, "FP4 All the Way"); NVIDIA 2025, "Pretraining LLMs with NVFP4"; Graphcore's UE5M3 code (held γ).

    Stages: scale (group scale), observe (the held γ).

    Cost: a maximum over n/l block statistics, and a product with the accumulator. The complexity weight is Table 9's.

    Use it whenever scales have few exponents: without γ, E4M3 scales underflow on gradients.
    """

    name: ClassVar[str] = "tensor_scaling"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=True)
    complexity: ClassVar[float] = 0.5

    granularity: Literal["tensor", "all", "row"] | Annotated[int, Field(ge=1)] = Field(
        "tensor", description="Elements that share γ: tensor (of an expert), all, row (a line), or a number."
    )
    input_granularity: Literal["row"] | None = Field(None, description="X: γ per token in fprop, per channel in wgrad.")
    headroom: float = Field(1.0, gt=0, le=1, description="Share of the scale format's range that decode scales use.")
    target: Positive | None = Field(None, description="Largest block's decode scale, instead of the format's maximum.")
    gradient_target: Positive | None = Field(None, description="The target of dY in dgrad and wgrad, if different.")
    share: Literal["siblings"] | None = Field(None, description="Weights with one γ: siblings (q, k, v; gate, up).")
    groups: tuple[tuple[str, ...], ...] = Field((), description="With share: more families, such as [[wq, wk, wv]].")
    hold_steps: int = Field(1, ge=1, lt=2**31, description="Training forwards that share one γ.")
    operands: Operands = Field(("forward", "backward"), description="Operands, or groups of them, that are normalized.")

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse targets out of range, groups that are not whole blocks, and holding γ of parts of a tensor."""
        for operand, spec in self.specs_listed(specs).items():
            checks.check_target(self.settings(operand)[0], operand, spec.scale, self.headroom)
            checks.check_groups("granularity", self.granularity, operand, spec.block)
        acts = {"gradient_target": "gradients", "input_granularity": "inputs", "share": "fprop.weight"}
        for option, group in acts.items():
            if getattr(self, option) and not self.operands_listed & {*ADDRESSES[group]}:
                raise ValueError(f"{option} is for {group}, which operands does not list; list it, or drop {option}")
        rows, held = self.granularity not in ("tensor", "all"), self.operands_listed if self.hold_steps > 1 else ()
        if (held and (rows or self.input_granularity)) or (self.share and rows):
            also = ", no input_granularity" if held else ""
            raise ValueError(f"with {'hold_steps' if held else 'share'} use granularity: tensor{also}")
        checks.refuse_wrappers(techniques, "around", held, "quantizes twice, and hold_steps keeps one γ")
        if self.groups and not self.share:
            raise ValueError("groups adds families of siblings; give share: siblings too")

    def plan(self, site: SiteView, specs: OperandSpecs) -> None:
        """Refuse to hold γ if the product has no weight with which to keep γ, or if each expert has a γ."""
        if self.hold_steps > 1 and not site.multiplies_weight:
            raise ValueError("hold_steps keeps γ beside a weight, but this product has no weight; use hold_steps: 1")
        if self.hold_steps > 1 and site.op == "grouped" and self.granularity != "all":
            raise ValueError("hold_steps keeps one γ, but every expert has a γ; use granularity: all or hold_steps: 1")

    def settings(self, operand: Operand) -> tuple[float | None, Granularity]:
        """Return the target and the granularity of an operand."""
        gradient, row = operand in ADDRESSES["gradients"], operand in ADDRESSES["inputs"] and self.input_granularity
        return (gradient and self.gradient_target) or self.target, row or self.granularity

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        listed = [operand for operand in Operand if operand in self.operands_listed]
        held, w = listed if self.hold_steps > 1 else [], Operand.FPROP_WEIGHT
        state = tuple(StateEntry("gamma", o, initial.Constant(value=1.0), "graph", False) for o in held)
        if self.share and site.op in ("linear", "grouped"):
            state += (StateEntry("largest_of_siblings", w, initial.largest, "siblings", False, families=self.groups),)
        kind = HeldTensorScale if held else TensorScale
        parts = list[Part]()
        for target, groups in dict.fromkeys(map(self.settings, listed)):
            acting = frozenset(o for o in listed if self.settings(o) == (target, groups))
            parts.append(kind(options=self, operands=acting, target=target, group_granularity=groups, state=state))
        return tuple(parts)


class TensorScale(BlockScale):
    """Divides by γ = g/κ of each group."""

    mixes = "none"
    normalizes = True
    options: TensorScaling
    target: float | None  # the target of the operands, on which κ depends

    def group_scale(self, z: Tensor, group: Callable[[Granularity], Tensor], context: Context) -> Tensor:
        """Return γ of each group, fp32, broadcastable to ``z``."""
        assert context.spec is not None
        assert self.group_granularity is not None
        g = group(self.group_granularity)
        if (shared := context.state.get("largest_of_siblings")) is not None:  # 0-d, or [E]
            shared = shared.amax() if self.group_granularity == "all" else shared
            g = torch.maximum(g, shared.reshape(*shared.shape, *([1] * (z.dim() - shared.dim()))))
        return group_scale(g, kappa(context.spec, self.target, self.options.headroom))


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
        """Return the current γ as state, to be kept."""
        return {"gamma": next(p.scale for p in quantization.group_scales if p.technique == self.name).reshape(())}


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [TensorScaling]
