"""Matrix products on a CPU that multiply the accumulator by a scalar before they round it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def _scales_summands(dtype: torch.dtype) -> bool:
    """Return whether torch's own kernel multiplies matrices of ``dtype``, because oneDNN cannot on this processor.

    With two transposed operands, torch's kernel multiplies each summand by alpha, and not the accumulator.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{'bf16' if dtype is torch.bfloat16 else 'fp16'}_supported", None)
    return supported is None or not supported()


def scaled_product(
    left: Tensor, right: Tensor, scale: Tensor, addend: Tensor | None = None, beta: float = 0, y: Tensor | None = None
) -> Tensor:
    """Return ``scale · left [..., I, K] @ right [..., J, K]ᵀ + beta · addend``, rounded once to the operands' dtype.

    Args:
        scale: fp32, 0-d.
        addend: of the operands' dtype, broadcastable to ``[..., I, J]``.
        y: ``[I, J]``, receives the result if the operands are matrices.
    """
    alpha = scale.item()
    if addend is None or beta == 0:
        # baddbmm does not write its result if alpha and beta are both 0.
        addend, beta = left.new_zeros(()), float(alpha == 0)
    if left.stride(-1) != 1 and right.stride(-1) != 1 and _scales_summands(left.dtype):
        left = left.contiguous()
    if left.dim() == 2:
        return torch.addmm(addend, left, right.mT, beta=beta, alpha=alpha, out=y)
    shape = (*left.shape[:-1], right.shape[-2])
    if addend.dim() > 2:
        addend = addend.expand(shape).flatten(0, -3)
    batches = torch.baddbmm(addend, left.flatten(0, -3), right.flatten(0, -3).mT, beta=beta, alpha=alpha)
    return batches.view(shape)


def product_into(y: Tensor, left: Tensor, right: Tensor, scale: Tensor | None) -> None:
    """Write ``left [I, K] @ right [J, K]ᵀ`` into ``y [I, J]``, multiplied by ``scale`` unless it is None."""
    if scale is None:
        torch.mm(left, right.mT, out=y)
    else:
        scaled_product(left, right, scale, y=y)
