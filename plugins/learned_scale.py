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
_EDGE = 1 + 2.0**-20  # the largest u and a/6γ of a tensor are 6 and 448, but for rounding


class LearnedScale(Technique):
    """Learns the amax a of each block of an NVFP4 weight, in place of the block's largest magnitude.

    With W [N, K] in blocks of 16 along K, γ = max abs(W)/2688 of ``tensor_scaling``, u = w/s and G = dL/dŵ:

        s = γ·E4M3(a/6γ),   ŵ = s·E2M1(u),
        dW = G·1[abs(u) ≤ 6],   da = 1/6·Σ_block G·(E2M1(u) − u·1[abs(u) ≤ 6]).

    The gradient passes straight through the rounding of s, and is 0 where a/6γ is out of E4M3's range. Before each
    step of the optimizer, a takes a step of Adam with ``lr_factor`` times the learning rate of its weight, without
    weight decay, and the gradient of W is masked. a starts at the block's largest magnitude (``init: amax``), or at
    the E4M3 scale with the least squared error of the block (``mse``).

    ``clip_grad_norm_`` before the step sees G without the mask, and does not count da, which is computed from the
    clipped G. Loss scaling does not matter: the gradient is unscaled by then.

    Source: Esser et al. 2020, "Learned Step Size Quantization" (without its factor 1/√(N·Qmax), which Adam undoes), as
    NVIDIA ModelOpt's recipe ``nvfp4_lsq-mse_init-fp8_kv`` has it for NVFP4: E4M3 scales, a sweep of the 126 positive
    E4M3 values for the start, and a learning rate of 1e-4 beside 1e-5 of weights. ModelOpt keeps the first γ; ours
    follows the weight, and where siblings share γ, the start is rounded once more. ModelOpt keeps a in the weight's
    dtype and scales at 0.875γ or more; ours are fp32 and underflow below 2⁻¹⁰γ. Its Dual-LSQ, which divides by one
    scale and multiplies by another, is left out: one set of scales is stored.

    Stages: scale of fprop.weight; optimizer, before the step.

    Cost: the amax at every element, two moments for each block; the weight's quantizer once at each step, 126 times at
    the start for ``mse``. The complexity weight is ours: 2.0, Table 2's least for unfusable work with O(n) memory.

    Use it to distil a model into NVFP4 weights (quantization-aware distillation), for which ModelOpt has it.
    """

    name: ClassVar[str] = "learned_scale"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(n)", fusable=False)
    complexity: ClassVar[float] = 2.0
    on_weight: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"tensor_scaling"})

    init: Literal["mse", "amax"] = Field("mse", description="Scales at the start: of least squared error, or by amax.")
    lr_factor: float = Field(10.0, gt=0, description="Learning rate of a, in multiples of its weight's.")
    beta1: float = Field(0.9, gt=0, lt=1, description="β1 of a's Adam.")
    beta2: float = Field(0.999, gt=0, lt=1, description="β2 of a's Adam.")
    eps: float = Field(1e-8, gt=0, description="ε of a's Adam.")

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
            raise ValueError(f"{other} changes fprop.weight too, which gradients of scales do not count; drop it")
        given = scaling.model_dump(include={"granularity", "headroom", "target"})
        if scaling.name not in acting or tuple(given.values()) not in (("tensor", 1, None), ("tensor", 1, 448)):
            raise ValueError("give tensor_scaling operands with fprop.weight, granularity: tensor and a target of 448")

    def parts(self, site: SiteView) -> tuple[ScaleOfLearned, LearnMaximum]:
        init = _by_error if self.init == "mse" else _by_maximum
        amax = StateEntry("amax", Operand.FPROP_WEIGHT, init, canonical=True)  # a, fp32, at each element of its block
        return ScaleOfLearned(options=self, state=(amax,)), LearnMaximum(options=self)


class ScaleOfLearned(BlockScale):
    """Takes scales from the state."""

    mixes = "block"
    options: LearnedScale

    def scale(self, values: Tensor, z: Tensor, context: Context) -> Tensor:
        """Return E4M3(a/6γ), the least E4M3 value for a below it."""
        assert context.spec is not None
        return statistics.block_scale(context.state["amax"][..., :1].clamp(min=0), context.spec)  # a/γ


class LearnMaximum(OptimizerHook):
    """Moves a, and masks the gradient of W."""

    options: LearnedScale

    def before_step(self, update: WeightUpdate) -> None:
        """Take a step of Adam with da."""
        options, memory, grad, q = self.options, update.memory, update.parameter.grad, update.quantization()
        assert grad is not None
        assert q.group_scale is not None
        qmax, number, split = q.spec.element.max, q.spec.scale.format, q.blocking.split
        amax = split(update.canonical(update.state["amax"]))[..., :1]
        inside, ideal = q.ratio.abs() <= qmax * _EDGE, amax / q.group_scale / qmax
        slopes = split(update.canonical(grad).to(torch.float32)) * (q.elements - torch.where(inside, q.ratio, 0.0))
        within = (ideal >= number.min / 2) & (ideal <= number.max * _EDGE)
        slope = torch.where(within, slopes.sum(-1, keepdim=True) / qmax, 0.0)
        steps = memory.setdefault("steps", torch.zeros((), dtype=torch.int64))  # on the CPU: reading it does not wait
        steps += 1
        unbiased = []
        for name, beta, value in (("mean", options.beta1, slope), ("square", options.beta2, slope * slope)):
            moment = memory.setdefault(name, torch.zeros_like(slope)).lerp_(value, 1 - beta)
            unbiased.append(moment / (1 - beta ** int(steps)))
        step = unbiased[0] / (unbiased[1].sqrt() + options.eps) * (options.lr_factor * update.group["lr"])
        update.state["amax"].copy_(update.stored(q.blocking.join((amax - step).expand_as(q.values).contiguous())))
        grad.mul_(update.stored(q.blocking.join(inside)).to(grad.dtype))


def _by_maximum(weight: Tensor) -> Tensor:
    """Return the largest magnitude of the block of each element of ``weight [..., N, K]``, fp32."""
    blocking = Blocking(tuple(weight.shape), 16)
    values = blocking.split(weight.to(torch.float32))
    return blocking.join(values.abs().amax(-1, keepdim=True).expand_as(values).contiguous())


def _by_error(weight: Tensor) -> Tensor:
    """Return 6γ times the positive E4M3 value with the least squared error of the block, at each element, fp32."""
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
