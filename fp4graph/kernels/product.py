"""Products that multiply their fp32 accumulator by a scalar, and perhaps add to it, before they round it.

On CUDA ``mm`` and ``bmm`` return the accumulator with ``out_dtype=torch.float32``, and a kernel of this project runs
GEMMs of a short contraction without writing the accumulator. Elsewhere the operands are cast to fp32, whose product has
the same sum. On a CPU, where an fp32 product takes many times as long as a bf16 product, an operator reads the scalar
and passes it to ``addmm`` or ``baddbmm``. Their kernels, oneDNN's and torch's own, multiply the fp32 accumulator by it
and round once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4graph.kernels import cpu_product, operators
from fp4graph.numerics import target
from fp4graph.numerics.declare import operator


def accumulated(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left [..., I, K] @ right [..., J, K]ᵀ`` in the accumulator's dtype: fp64 for fp64, else fp32."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if target.kind(left.device) != "cuda" or left.dtype is wide:
        return left.to(wide) @ right.to(wide).mT
    if left.dim() == 2:
        return torch.mm(left, right.mT, out_dtype=wide)
    batches = torch.bmm(left.flatten(0, -3), right.flatten(0, -3).mT, out_dtype=wide)
    return batches.reshape(*left.shape[:-1], right.shape[-2])


def scaled_product(left: Tensor, right: Tensor, scale: Tensor, addend: Tensor | None, beta: float) -> Tensor:
    """Return ``scale · left [..., I, K] @ right [..., J, K]ᵀ + beta · addend``, rounded once to the operands' dtype.

    Args:
        scale: fp32, 0-d.
        addend: of the operands' dtype, broadcastable to ``[..., I, J]``.
    """
    if target.kind(left.device) == "cpu" or operators.multiplies(left, right, addend):
        result: Tensor = torch.ops.fp4graph.scaled_product(left, right, scale, addend, beta)
        return result
    return with_addend(accumulated(left, right) * scale, addend, beta).to(left.dtype)


def with_addend(x: Tensor, addend: Tensor | None, beta: float) -> Tensor:
    """Return ``x + beta · addend``, computed in the dtype of ``x``."""
    if addend is None:
        return x
    return x + (addend.to(x.dtype) if beta == 1 else beta * addend.to(x.dtype))


def _fake(left: Tensor, right: Tensor, scale: Tensor, addend: Tensor | None, beta: float) -> Tensor:
    return left.new_empty((*left.shape[:-1], right.shape[-2]))


def _on_gpu(*arguments: Any) -> Tensor:
    from fp4graph.kernels.triton_product import scaled_product  # imports Triton, which may be missing

    return scaled_product(*arguments)


def _flops(left: torch.Size, right: torch.Size, *_: Any, out_shape: torch.Size, **options: Any) -> int:
    return 2 * out_shape.numel() * left[-1]


OPERATOR = operator(
    "scaled_product(Tensor left, Tensor right, Tensor scale, Tensor? addend, float beta) -> Tensor",
    _fake,
    flops=_flops,
    CPU=cpu_product.scaled_product,
    CUDA=_on_gpu,
)
