"""A matrix product that multiplies its fp32 accumulator by a scalar on the card, and rounds once.

With cuBLAS the scalar must be on the host, so torch would have to wait for the card. Instead torch writes the
accumulator in fp32, and a second kernel reads, multiplies and writes it again. For a GEMM of a short contraction that
takes much of the time. :func:`fp4graph.kernels.gpu.multiplies` chooses the products for this kernel, and ``products=``
of ``FP4GRAPH_KERNELS`` sets the longest contraction.

**No GPU has run this kernel.** It is tested in Triton's interpreter, and compiled to machine code for compute
capability 9.0 and 10.0.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fp4graph.kernels.triton_kernels import product_kernel

#: The tile of the result, BLOCK_M x BLOCK_N, and the contraction length of one step, BLOCK_K. Shared memory holds three
#: stages of 2 x 16 KiB of 16-bit operands, and two warp groups share the accumulator of 128 x 128.
TILES = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP": 8}
OPTIONS = {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": False}


def scaled_product(left: Tensor, right: Tensor, scale: Tensor, addend: Tensor | None, beta: float) -> Tensor:
    """Return ``scale · left [..., M, K] @ right [..., N, K]ᵀ + beta · addend``, in the dtype of ``left``.

    Args:
        left, right: of a 16-bit dtype. scale: fp32, one number. addend: contiguous ``[N]``, or None.
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
