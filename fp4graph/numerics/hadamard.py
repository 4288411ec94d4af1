"""Block Hadamard rotation: spreads an outlier over its block, and cancels between the two operands of a GEMM.

H is symmetric and orthonormal, so ``(A·S·H)(B·S·H)ᵀ = A·Bᵀ`` for the same signs S. Signs go first: after H they would
leave every magnitude as it is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp4graph.numerics.blocking import Blocking


def hadamard_matrix(size: int, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the orthonormal Sylvester matrix H/√size, ``[size, size]``: entry (i, j) is (-1)^popcount(i & j) / √size.

    Raises:
        ValueError: ``size`` is not a power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard block is a power of two; got {size}")
    index = torch.arange(size, dtype=torch.int32, device=device)
    parity = index[:, None] & index[None, :]
    for shift in (16, 8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    signs = (1 - 2 * (parity & 1)).to(torch.float64)
    return (signs / math.sqrt(size)).to(dtype)


def rotate(x: Tensor, block: int, signs: Tensor | None = None) -> Tensor:
    """Return ``x · S · H`` on blocks of the last axis of ``x [..., n]``, zero-padded: ``[..., ceil(n/block)·block]``.

    Computed in the dtype of ``x``; pass fp32 where the rounding of 1/√block in a shorter dtype matters.

    Args:
        block: elements of a block, a power of two.
        signs: ±1, ``[block]``, the same in every block.
    """
    matrix = _matrix(x, block, signs, dim=-2)
    blocking = Blocking(tuple(x.shape), block, -1)
    return _times(blocking.split(x), matrix).reshape(blocking.padded_shape)


def unrotate(x: Tensor, block: int, signs: Tensor | None = None, length: int | None = None) -> Tensor:
    """Return ``x · H · S``, the inverse of :func:`rotate`, cut to ``length`` elements of the last axis (None: all)."""
    matrix = _matrix(x, block, signs, dim=-1)
    blocking = Blocking((*x.shape[:-1], x.shape[-1] if length is None else length), block, -1)
    return blocking.join(_times(x.reshape(blocking.layout), matrix))


def _matrix(x: Tensor, block: int, signs: Tensor | None, dim: int) -> Tensor:
    """Return H in the dtype of ``x``, with its rows (``dim`` -2) or columns (-1) times the signs.

    A product with it has the bits of a product with H before or after which ``x`` is multiplied by the signs.
    """
    h = hadamard_matrix(block, x.device, x.dtype)
    if signs is None:
        return h
    # as_strided makes Inductor write H once for a graph; inlined, its parities would be computed in each product here.
    return h.as_strided((block, block), (block, 1)) * signs.to(x.dtype).unsqueeze(-3 - dim)


def _times(blocks: Tensor, matrix: Tensor) -> Tensor:
    """Return ``blocks [..., n, block] @ matrix``, to the bits that torch.matmul gives."""
    if blocks.dim() < 3 or blocks.stride(-3) != 1 or blocks.stride(-1) == 1:
        return blocks @ matrix
    # Of a transposed operand torch.matmul makes a product for every line, whose blocks lie far apart. Read in order
    # they take a quarter to all of the time.
    lines = blocks.contiguous().flatten(0, -3)
    return torch.bmm(lines, matrix.expand(lines.shape[0], -1, -1)).reshape(blocks.shape)
