"""The product of two matrices times a scalar known only when it runs, rounded once to its dtype.

Hardware multiplies the accumulator of a GEMM, fp32, by alpha = γ_a·γ_b and adds the addend before the result is
rounded. torch's own products return the rounded result, and their alpha is a Python number.

On CUDA ``mm`` and ``bmm`` return the accumulator where ``out_dtype`` asks for it. Elsewhere the operands are cast to
fp32, in which their product has the same sum. On a CPU that takes many times as long as a product in bf16; there an
operator reads the scalar and hands it to ``addmm`` and ``baddbmm``, whose kernels (oneDNN's and torch's own) multiply
their fp32 accumulator by it and round once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_library: Any = torch.library.Library("fp4graph", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("scaled_product(Tensor left, Tensor right, Tensor scale, Tensor? addend, float beta) -> Tensor")


def accumulated(left: Tensor, right: Tensor) -> Tensor:
    """``left [..., I, K] @ right [..., J, K]ᵀ`` in the dtype of the accumulator: fp32, of fp64 operands fp64."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if left.device.type != "cuda" or left.dtype is wide:
        return left.to(wide) @ right.to(wide).mT
    if left.dim() == 2:
        return torch.mm(left, right.mT, out_dtype=wide)
    batches = torch.bmm(left.flatten(0, -3), right.flatten(0, -3).mT, out_dtype=wide)
    return batches.reshape(*left.shape[:-1], right.shape[-2])


def scaled_product(left: Tensor, right: Tensor, scale: Tensor, addend: Tensor | None, beta: float) -> Tensor:
    """``scale · left [..., I, K] @ right [..., J, K]ᵀ + beta · addend``, rounded once to the operands' dtype.

    Args:
        scale: fp32, 0-d.
        addend: of the operands' dtype, broadcastable to ``[..., I, J]``.
    """
    if left.device.type == "cpu":
        result: Tensor = torch.ops.fp4graph.scaled_product(left, right, scale, addend, beta)
        return result
    return with_addend(accumulated(left, right) * scale, addend, beta).to(left.dtype)


def with_addend(x: Tensor, addend: Tensor | None, beta: float) -> Tensor:
    """``x + beta · addend``, computed in the dtype of ``x``."""
    return x if addend is None else x + beta * addend.to(x.dtype)


def _fake(left: Tensor, right: Tensor, scale: Tensor, addend: Tensor | None, beta: float) -> Tensor:
    return left.new_empty((*left.shape[:-1], right.shape[-2]))


def _on_cpu(left: Tensor, right: Tensor, scale: Tensor, addend: Tensor | None, beta: float) -> Tensor:
    alpha = scale.item()
    if addend is None or beta == 0:
        # baddbmm leaves its result unwritten where alpha and beta are both 0.
        addend, beta = left.new_zeros(()), float(alpha == 0)
    if left.dim() == 2:
        return torch.addmm(addend, left, right.mT, beta=beta, alpha=alpha)
    shape = (*left.shape[:-1], right.shape[-2])
    if addend.dim() > 2:
        addend = addend.expand(shape).flatten(0, -3)
    batches = torch.baddbmm(addend, left.flatten(0, -3), right.flatten(0, -3).mT, beta=beta, alpha=alpha)
    return batches.view(shape)


torch.library.register_fake("fp4graph::scaled_product", _fake, lib=_library)
_library.impl("scaled_product", _on_cpu, "CPU")


@register_flop_formula(torch.ops.fp4graph.scaled_product)
def _flops(left: torch.Size, right: torch.Size, *rest: Any, out_shape: torch.Size, **options: Any) -> int:
    return 2 * out_shape.numel() * left[-1]
