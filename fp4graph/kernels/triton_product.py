"""A product of matrices whose fp32 accumulator is multiplied by a scalar on the card, and rounded once.

cuBLAS takes that scalar from the host, where torch would wait for the card. Instead torch writes the accumulator in
fp32, and another kernel reads it, multiplies it and writes it again: for a GEMM of few multiplications an element that
is a good part of its time. :func:`fp4graph.kernels.gpu.multiplies` says for which products this kernel is taken, which
``products=`` of ``FP4GRAPH_KERNELS`` changes.

**No GPU has run this kernel.** It is tested in Triton's interpreter, and compiled to machine code for compute
capability 9.0 and 10.0.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fp4graph.kernels.triton_kernels import product_kernel

#: Tiles of the result, and the length of what is multiplied at a time: two tiles of the accumulator's 128 x 128 to a
#: warp group, and three stages of 2 x 16 KiB of 16-bit operands in shared memory.
TILES = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP": 8}
OPTIONS = {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": False}


def scaled_product(left: Tensor, right: Tensor, scale: Tensor, addend: Tensor | None, beta: float) -> Tensor:
    """Return ``scale · left [..., M, K] @ right [..., N, K]ᵀ + beta · addend``, in the dtype of ``left``.

    Args:
        left, right: of 16 bits. scale: fp32, one number. addend: contiguous ``[N]`` or None.
    """
    result = left.new_empty((*left.shape[:-1], right.shape[-2]))
    if not result.numel():
        return result
    left, right = ((x.unsqueeze(0) if x.dim() == 2 else x.flatten(0, -3)) for x in (left, right))
    (batch, m, k), n = left.shape, right.shape[1]
    grid = (batch * triton.cdiv(m, TILES["BLOCK_M"]) * triton.cdiv(n, TILES["BLOCK_N"]),)
    strides = *left.stride(), *right.stride()
    with torch.cuda.device_of(left):  # type: ignore[no-untyped-call]
        product_kernel[grid](left, right, scale, addend, result, m, n, k, *strides, BETA=beta, **TILES, **OPTIONS)
    return result
