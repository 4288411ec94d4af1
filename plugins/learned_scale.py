"""Learned scales (LSQ): trains the block scales of a weight by gradient descent, beside the weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field

from fp4graph import Context, Gemm, Operand, Overhead, QuantSpec, ScaleSpec, StateEntry, Technique, hookimpl
from fp4graph.kernels import measures, statistics
from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.formats import E4M3
from fp4graph.numerics.scaling import group_scale
from fp4graph.technique import BlockScale, OperandSpecs, OptimizerHook, SiteView, WeightUpdate, gemms_at, operands_at

if TYPE_CHECKING:
    from torch import Tensor

_NVFP4 = QuantSpec(block=16, scale=ScaleSpec(E4M3, "nearest_even"))
_EDGE = 1 + 2.0**-20  # fp32 roundoff may lift the largest u of a tensor above 6, and the largest a/6γ above 448


class LearnedScale(Technique):
    """Learns for each block of an NVFP4 weight a number ``a`` that replaces the block's amax.

    With W [N, K] in blocks of 16 along K, γ = max abs(W)/2688 of ``tensor_scaling``, u = w/s and G = dL/dŵ:

        s = γ·E4M3(a/6γ),   ŵ = s·E2M1(u),
        dW = G·1[abs(u) ≤ 6],   da = 1/6·Σ_block G·(E2M1(u) − u·1[abs(u) ≤ 6]).

    The rounding of s is differentiated straight-through, and da is 0 where a/6γ is out of E4M3's range. Before each
    step of the optimizer, Adam updates ``a`` with ``lr_factor`` times the learning rate of the weight, without weight
    decay, and the gradient of W is masked. ``a`` starts at the block's amax (``init: amax``), or so that s has the
    least squared error of the block (``mse``).

    ``clip_grad_norm_`` before the step sees G without the mask, and does not count da, which is computed from the
    clipped G. Loss scaling does not matter: the gradient is unscaled by then.

    Source: Esser et al. 2020, "Learned Step Size Quantization" (without its factor 1/√(N·Qmax), which Adam undoes), as
    NVIDIA ModelOpt's recipe ``nvfp4_lsq-mse_init-fp8_kv`` has it for NVFP4: E4M3 scales, a sweep of the 126 positive
    E4M3 values for the start, and learning rates of 1e-4 for scales and 1e-5 for weights. ModelOpt keeps the first γ;
    our γ follows the weight. If siblings share γ, the initial scales are rounded again under that γ. ModelOpt stores
    ``a`` in the weight's dtype and keeps s at 0.875γ or more; our ``a`` is fp32, and s is at least 2⁻⁹γ. ModelOpt's
    Dual-LSQ, which divides by one scale and multiplies by another, is left out: exports store one set of scales.

    Stages: scale of fprop.weight; optimizer, before the step.

    Cost: ``a`` in the shape of W, two moments per block; the weight's quantizer once at each step, 126 times at the
    start for ``mse``. The complexity weight is ours: 2.0, for unfusable O(n) memory (design-space paper, Table 2).

    Use it, as ModelOpt does, to distil a model into NVFP4 weights (quantization-aware distillation).
    """

    name: ClassVar[str] = "learned_scale"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(n)", fusable=False)
    complexity: ClassVar[float] = 2.0
    on_weight: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"tensor_scaling"})

    init: Literal["mse", "amax"] = Field("mse", description="Scales at the start: of least squared error, or by amax.")
    lr_factor: float = Field(10.0, gt=0, description="Learning rate of `a`, in multiples of the weight's.")
    beta1: float = Field(0.9, gt=0, lt=1, description="β1 of Adam for `a`.")
    beta2: float = Field(0.999, gt=0, lt=1, description="β2 of Adam for `a`.")
    eps: float = Field(1e-8, gt=0, description="ε of Adam for `a`.")

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse weights in other formats than NVFP4 under γ = max/2688, and techniques that change ŵ or dL/dŵ too."""
        spec, scaling = specs.get(Operand.FPROP_WEIGHT), techniques.get("tensor_scaling")
        if spec is None or scaling is None:
            return
        if spec != _NVFP4:
            raise ValueError("fprop.weight is not NVFP4 (e2m1 in blocks of 16, e4m3 scales, all to nearest even)")
        places = {name: operands_at(technique) | gemms_at(technique) for name, technique in techniques.items()}
        acting = [name for name, where in places.items() if where & {Operand.FPROP_WEIGHT, Gemm.FPROP}]
        if other := next((name for name in acting if name not in (self.name, scaling.name)), None):
            raise ValueError(f"{other} changes fprop.weight too, but the gradient of the scales ignores that; drop it")
        chosen = scaling.model_dump(include={"granularity", "headroom", "target"})
        if scaling.name not in acting or tuple(chosen.values()) not in (("tensor", 1, None), ("tensor", 1, 448)):
            raise ValueError("tensor_scaling needs fprop.weight, granularity: tensor, headroom: 1 and a target of 448")

    def parts(self, site: SiteView) -> tuple[ScaleFromState, LearnMaximum]:
        init = _by_error if self.init == "mse" else _by_maximum
        amax = StateEntry("amax", Operand.FPROP_WEIGHT, init, canonical=True)  # a, fp32, in the shape of W
        return ScaleFromState(options=self, state=(amax,)), LearnMaximum(options=self)


class ScaleFromState(BlockScale):
    """Computes scales from the ``a`` in the state."""

    mixes = "block"
    options: LearnedScale

    def scale(self, values: Tensor, z: Tensor, context: Context) -> Tensor:
        """Return E4M3(a/6γ), at least the smallest positive E4M3 value, also for ``a`` <= 0."""
        assert context.spec is not None
        return statistics.block_scale(context.state["amax"][..., :1].clamp(min=0), context.spec)  # state: divided by γ


class LearnMaximum(OptimizerHook):
    """Updates ``a``, and masks the gradient of W."""

    options: LearnedScale

    def before_step(self, update: WeightUpdate) -> None:
        """Take a step of Adam with da."""
        options, memory, grad, q = self.options, update.memory, update.parameter.grad, update.quantization()
        assert grad is not None
        assert q.group_scale is not None
        qmax, scales, split = q.spec.element.max, q.spec.scale.format, q.blocking.split
        amax = split(update.canonical(update.state["amax"]))[..., :1]
        inside, ideal = q.ratio.abs() <= qmax * _EDGE, amax / q.group_scale / qmax
        slopes = split(update.canonical(grad).to(torch.float32)) * (q.elements - torch.where(inside, q.ratio, 0.0))
        in_range = (ideal >= scales.min / 2) & (ideal <= scales.max * _EDGE)
        slope = torch.where(in_range, slopes.sum(-1, keepdim=True) / qmax, 0.0)
        steps = memory.setdefault("steps", torch.zeros((), dtype=torch.int64))  # on the CPU: reading it never waits
        steps += 1
        unbiased = []
        for name, beta, value in (("mean", options.beta1, slope), ("square", options.beta2, slope * slope)):
            moment = memory.setdefault(name, torch.zeros_like(slope)).lerp_(value, 1 - beta)
            unbiased.append(moment / (1 - beta ** int(steps)))
        step = unbiased[0] / (unbiased[1].sqrt() + options.eps) * (options.lr_factor * update.group["lr"])
        update.state["amax"].copy_(update.stored(q.blocking.join((amax - step).expand_as(q.values).contiguous())))
        grad.mul_(update.stored(q.blocking.join(inside)).to(grad.dtype))


def _by_maximum(weight: Tensor) -> Tensor:
    """Return for each element of ``weight [..., N, K]`` the amax of its block, fp32."""
    blocking = Blocking(tuple(weight.shape), 16)
    values = blocking.split(weight.to(torch.float32))
    return blocking.join(values.abs().amax(-1, keepdim=True).expand_as(values).contiguous())


def _by_error(weight: Tensor) -> Tensor:
    """Return for each element 6γ times the positive E4M3 value with the least squared error of its block, fp32."""
    blocking, z = Blocking(tuple(weight.shape), 16), _by_maximum(weight)
    gamma = group_scale(z.amax((-2, -1), keepdim=True), 6 * 448.0)
    values, z = blocking.split(weight.to(torch.float32) / gamma), blocking.split(z / gamma)[..., :1].contiguous()
    scale, least = torch.ones_like(z), torch.full_like(z, torch.inf, dtype=torch.float64)
    for value in _NVFP4.scale.format.values()[1:]:
        trial = torch.full_like(z, value)
        error = measures.block_errors(values, trial, z, _NVFP4, "mse", blocking)
        scale, least = torch.where(error < least, trial, scale), torch.minimum(error, least)
    return blocking.join(scale.expand_as(values).contiguous()) * (6 * gamma)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [LearnedScale]
