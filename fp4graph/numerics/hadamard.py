"""Block Hadamard rotation: spreads an outlier over its block, and cancels between the two operands of a GEMM.

H is symmetric and orthonormal, so ``(A·S·H)(B·S·H)ᵀ = A·Bᵀ`` for the same signs S. Signs precede H: after H they would
change no magnitude.

H = H₂ ⊗ ... ⊗ H₂ / √size. On a CPU the factors are applied one after the other: each pair (a, b) of neighbours becomes
(a + b, a - b), then each pair at a distance of two, four and so on; last, all elements are multiplied by 1/√size. So
every CPU gives the same bits. On a GPU a product with H is faster, and a BLAS library chooses the order of its sums.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp4graph.numerics import target
from fp4graph.numerics.blocking import Blocking


class BlockRotation(NamedTuple):
    """A rotation of an operand: a product with S and H on blocks of the contraction axis, in fp32.

    Attributes:
        block: the number of elements of a block, a power of two that divides the block length of the quantizer.
        signs: the diagonal of S, contiguous fp32 ``[block]``; None for the identity.
    """

    block: int
    signs: Tensor | None = None

    def padded(self, length: int) -> int:
        """Return the length of a rotated line of ``length`` elements: it is padded to whole blocks."""
        return (length + self.block - 1) // self.block * self.block


def hadamard_matrix(size: int, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return H, the orthonormal Sylvester matrix, ``[size, size]``: entry (i, j) is (-1)^popcount(i & j) / √size.

    Raises:
        ValueError: ``size`` is not a power of two.
    """
    _check(size)
    index = torch.arange(size, dtype=torch.int32, device=device)
    parity = index[:, None] & index[None, :]
    for shift in (16, 8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    signs = (1 - 2 * (parity & 1)).to(torch.float64)
    return (signs / math.sqrt(size)).to(dtype)


def rotate(x: Tensor, block: int, signs: Tensor | None = None) -> Tensor:
    """Return ``x · S · H`` on blocks of the last axis of ``x [..., n]``, zero-padded: ``[..., ceil(n/block)·block]``.

    The computation is in the dtype of ``x``: pass fp32 where the rounding of 1/√block in a shorter dtype matters.

    Args:
        block: the number of elements of a block, a power of two.
        signs: ±1, broadcastable to ``[..., ceil(n/block), block]``: ``[block]`` for the same signs in every block.
    """
    _check(block)
    blocking = Blocking(tuple(x.shape), block, -1)
    blocks = blocking.split(x)
    if signs is not None:
        blocks = blocks * signs.to(x.dtype)
    return _transformed(blocks).reshape(blocking.padded_shape)


def _check(size: int) -> None:
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard block is a power of two; got {size}")


def _transformed(blocks: Tensor) -> Tensor:
    """Return ``blocks [..., size]`` times H."""
    size, step = blocks.shape[-1], 1
    if target.kind(blocks.device) == "cuda":
        return blocks @ hadamard_matrix(size, blocks.device, blocks.dtype)
    while step < size:
        left, right = blocks.reshape(*blocks.shape[:-1], size // (2 * step), 2, step).unbind(-2)
        blocks = torch.stack((left + right, left - right), -2).flatten(-3)
        step *= 2
    return blocks * (1 / math.sqrt(size))


def rotate_in_fp32(x: Tensor, block: int, signs: Tensor | None = None) -> Tensor:
    """Return :func:`rotate` of ``x [..., n]`` in fp32.

    On a GPU the signs multiply the rows of H, which saves a pass over ``x``. If 1/√block is a power of two, a 16-bit
    ``x`` is multiplied exactly without a cast. If ``x`` is a transposed matrix, Hᵀ multiplies that matrix, not a copy.

    Args:
        signs: ±1, ``[block]``.
    """
    if target.kind(x.device) != "cuda":
        return rotate(x.to(torch.float32), block, signs)
    short = x.dtype in (torch.bfloat16, torch.float16) and math.isqrt(block) * math.isqrt(block) == block
    x = x if short else x.to(torch.float32)
    h = hadamard_matrix(block, x.device, x.dtype)
    h = h if signs is None else signs.to(x.dtype)[:, None] * h
    transposed = x.dim() == 2 and statically_known_true(x.stride(-1) != 1)
    blocking = Blocking(tuple(x.mT.shape if transposed else x.shape), block, -2 if transposed else -1)
    blocks = blocking.split(x.mT if transposed else x)
    if transposed:
        left = h.mT.expand(blocks.shape[0], block, block)
        rotated = torch.bmm(left, blocks, out_dtype=torch.float32) if short else torch.bmm(left, blocks)
        return rotated.reshape(blocking.padded_shape).mT
    rows = blocks.reshape(-1, block)
    rotated = torch.mm(rows, h, out_dtype=torch.float32) if short else torch.mm(rows, h)
    return rotated.reshape(blocking.padded_shape)


def unrotate(x: Tensor, block: int, signs: Tensor | None = None, length: int | None = None) -> Tensor:
    """Return ``x · H · S``, the inverse of :func:`rotate`, cut to ``length`` elements of the last axis (None: all)."""
    _check(block)
    blocking = Blocking((*x.shape[:-1], x.shape[-1] if length is None else length), block, -1)
    blocks = _transformed(x.reshape(blocking.layout))
    if signs is not None:
        blocks = blocks * signs.to(x.dtype)
    return blocking.join(blocks)
