"""Learned scales (LSQ): trains the block scales of a weight by gradient descent, beside the weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fp4graph import Context, Gemm, Operand, Overhead, QuantSpec, ScaleSpec, StateEntry, Technique, hookimpl
from fp4graph.kernels.measures import block_errors
from fp4graph.numerics.blocking import Blocking, Groups
from fp4graph.numerics.scaling import group_scale
from fp4graph.technique import (
    BlockScale,
    OperandSpecs,
    OptimizerHook,
    Part,
    Positive,
    Share,
    SiteView,
    WeightUpdate,
    gemms_at,
    operands_at,
)

_NVFP4 = QuantSpec(block=16, scale=ScaleSpec("e4m3", "nearest_even"))
_KAPPA = 6 * 448.0  # γ is the largest magnitude divided by it


class LearnedScale(Technique):
    """Learns the amax a of each block of an NVFP4 weight, in place of the block's largest magnitude.

    With W [N, K] in blocks of 16 along K, γ = max abs(W)/2688 of ``tensor_scaling``, u = w/s and G = dL/dŵ:
    s = γ·E4M3(a/6γ),  ŵ = s·E2M1(u),
    dW = G·1[abs(u) ≤ 6],  da = 1/6·Σ_block G·(E2M1(u) − u·1[abs(u) ≤ 6]).
    The gradient passes straight through the rounding of s, and is 0 where a/6γ is out of E4M3's range. Before each
    step of the optimizer, a takes a step of Adam with ``lr_factor`` times the learning rate of its weight, without
    weight decay, and the gradient of W is masked. a starts at the block's largest magnitude (``init: amax``), or at
    the E4M3 scale with the least squared error of the block (``mse``). Moments of a are in the optimizer's state.

    ``clip_grad_norm_`` before the step sees G without the mask, and does not count da; da is computed from the
    clipped G. Loss scaling does not matter: the gradient is unscaled by then.

    Source: Esser et al. 2020, "Learned Step Size Quantization" (its gradient; not its factor 1/√(N·Qmax), which Adam
    undoes), as NVIDIA ModelOpt's recipe ``nvfp4_lsq-mse_init-fp8_kv`` has it for NVFP4: one a for division and for
    multiplication, E4M3 scales, a start by sweep of all 126 positive E4M3 values, and a learning rate of 1e-4 for a
    beside 1e-5 for weights. ModelOpt keeps the γ that it starts with; ours follows the weight, and a γ that siblings
    share is not that of the sweep, so that the start is rounded once more. ModelOpt keeps a in the weight's dtype, ours
    is fp32. It raises block scales to 0.875γ; ours underflow below 2⁻¹⁰γ. Its Dual-LSQ divides by one scale and
    multiplies by another, unrounded one; that is left out.

    Stages: block and group statistic of fprop.weight; optimizer, before the step.

    Cost: a, fp32, at every element, and two moments for each block; at each step the weight's quantizer once more, and
    a sum over each block. ``mse`` quantizes each weight 126 times at the start. The complexity weight is ours: 2.0, the
    least that Table 2's rules give for unfusable work with O(n) memory.

    Use it to distil a model into NVFP4 weights (quantization-aware distillation), for which ModelOpt has it.
    """

    name: ClassVar[str] = "learned_scale"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(n)", fusable=False)
    complexity: ClassVar[float] = 2.0
    on_weight: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"tensor_scaling"})

    init: Literal["mse", "amax"] = Field("mse", description="Scales at the start: of least squared error, or by amax.")
    lr_factor: Positive = Field(10.0, description="Learning rate of a, in multiples of that of its weight.")
    beta1: Share = Field(0.9, description="β1 of a's Adam.")
    beta2: Share = Field(0.999, description="β2 of a's Adam.")
    eps: Positive = Field(1e-8, description="ε of a's Adam.")

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse weights in other formats than NVFP4 under a γ of 448, and techniques that change ŵ or dL/dŵ too."""
        spec = specs.get(Operand.FPROP_WEIGHT)
        if spec is None:
            return
        if (spec.elements, spec.block, spec.rounding) != (_NVFP4.elements, 16, "nearest") or (
            (spec.scale.format, spec.scale.convention, spec.scale.rounding)
            != (_NVFP4.scale.format, "decode", "nearest_even")
        ):
            raise ValueError(
                "it learns scales of NVFP4: write element: e2m1, block: 16, rounding: nearest, scale: {format: e4m3, "
                "rounding: nearest_even} for fprop.weight"
            )
        for name, technique in techniques.items():
            if name == "tensor_scaling":
                _check_group_scale(technique, spec)
            elif name != self.name and (
                Gemm.FPROP in gemms_at(technique) or Operand.FPROP_WEIGHT in operands_at(technique)
            ):
                raise ValueError(
                    f"{name} changes fprop.weight too, and the gradient of a learned scale does not count that; take "
                    f"fprop.weight out of {name}, or drop one of the two"
                )

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        if site.op == "conv":
            raise ValueError("learned scales are for linear layers and experts; keep convolutions out of the rule")
        init = _of_least_error if self.init == "mse" else _of_maximum
        amax = StateEntry("amax", Operand.FPROP_WEIGHT, init, canonical=True)  # a, fp32, at each element of its block
        return LearnedMaximum(options=self, state=(amax,)), LearnMaximum(options=self)


def _check_group_scale(scaling: Technique, spec: QuantSpec) -> None:
    """Raise a ValueError unless γ of the weight is max/2688 of the tensor."""
    options = scaling.model_dump()
    listed = Operand.FPROP_WEIGHT in operands_at(scaling)
    if (
        not listed
        or options["granularity"] != "tensor"
        or options["headroom"] != 1
        or options["target"] not in (None, 448)
    ):
        raise ValueError(
            "γ of fprop.weight is to be max abs(W)/2688: give tensor_scaling operands with fprop.weight, granularity: "
            "tensor, and neither headroom nor target"
        )


class LearnedMaximum(BlockScale):
    """Takes the statistic of a block from the state, and that of γ from the weight."""

    mixes = "expert"
    options: LearnedScale

    def block_statistic(self, values: Tensor, z: Tensor, context: Context) -> Tensor:
        """Return a, or 0 for a negative one."""
        return context.state["amax"][..., :1].clamp(min=0)

    def group_statistic(self, values: Tensor, g: Tensor, groups: Groups, context: Context) -> Tensor:
        """Return the largest magnitude."""
        return groups.reduce(values.abs().amax(context.axes, keepdim=True), "amax")


class LearnMaximum(OptimizerHook):
    """Moves a, and masks the gradient of W."""

    options: LearnedScale

    def before_step(self, update: WeightUpdate) -> None:
        """Take a step of Adam with da."""
        options, memory, grad = self.options, update.memory, update.parameter.grad
        assert grad is not None
        parts = update.quantization()
        blocking, qmax, number = parts.blocking, parts.spec.element.max, parts.spec.scale.format
        inside, ideal = parts.ratio.abs() <= qmax, parts.z / qmax
        terms = blocking.split(update.canonical(grad).to(torch.float32))
        terms = terms * (parts.elements - torch.where(inside, parts.ratio, 0.0))
        # The largest block's a/6γ is 448, but for the rounding of γ.
        within = (ideal >= number.min / 2) & (ideal <= number.max * (1 + 2.0**-20))
        slope = torch.where(within, terms.sum(-1, keepdim=True) / qmax, 0.0)
        steps = memory.setdefault("steps", torch.zeros((), dtype=torch.int64))  # on the CPU: reading it does not wait
        steps += 1
        mean, square = (memory.setdefault(name, torch.zeros_like(slope)) for name in ("mean", "square"))
        mean.lerp_(slope, 1 - options.beta1)
        square.lerp_(slope * slope, 1 - options.beta2)
        unbiased = (part / (1 - beta ** int(steps)) for part, beta in ((mean, options.beta1), (square, options.beta2)))
        moment, spread = unbiased
        amax = blocking.split(update.canonical(update.state["amax"]))[..., :1]
        amax = amax - update.group["lr"] * options.lr_factor * moment / (spread.sqrt() + options.eps)
        update.state["amax"].copy_(update.stored(_at_elements(amax, blocking)))
        grad.mul_(update.stored(blocking.join(inside)).to(grad.dtype))


def _at_elements(amax: Tensor, blocking: Blocking) -> Tensor:
    return blocking.join(amax.expand(blocking.layout).contiguous())


def _of_maximum(weight: Tensor) -> Tensor:
    """Return the largest magnitude of the block of each element of ``weight [..., N, K]``, fp32."""
    blocking = Blocking(tuple(weight.shape), 16)
    return _at_elements(blocking.split(weight.to(torch.float32)).abs().amax(-1, keepdim=True), blocking)


def _of_least_error(weight: Tensor) -> Tensor:
    """Return 6γ times the positive E4M3 value with the least squared error of each block, in the shape of ``weight``."""
    blocking = Blocking(tuple(weight.shape), 16)
    values = blocking.split(weight.to(torch.float32))
    largest = values.abs().amax(-1, keepdim=True)
    gamma = group_scale(largest.amax((-3, -2), keepdim=True), _KAPPA)
    values, largest = values / gamma, largest / gamma
    scale, least = torch.ones_like(largest), torch.full_like(largest, torch.inf, dtype=torch.float64)
    for candidate in torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist():
        trial = torch.full_like(scale, candidate)
        error = block_errors(values, trial, largest, _NVFP4, "mse", blocking)
        scale, least = torch.where(error < least, trial, scale), torch.minimum(error, least)
    return _at_elements(6 * gamma * scale, blocking)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [LearnedScale]
