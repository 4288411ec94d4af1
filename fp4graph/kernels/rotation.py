"""The operator for Hadamard rotations on a CPU. It reads the operand in its dtype and layout once, and writes fp32.

Rotations as products with a matrix took more time than the quantizers: a product casts the operand, copies it if it is
transposed, multiplies it by the signs, and multiplies each element by 32 numbers where five additions suffice. Tensor
code (:mod:`fp4graph.numerics.hadamard`) gives the same bits. On a GPU the product with H is faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4graph.kernels import cpu
from fp4graph.kernels.library import rows_of
from fp4graph.kernels.machine import Machine
from fp4graph.numerics import hadamard
from fp4graph.numerics.declare import operator

_LONGEST = 1024  # the longest block that the C++ code rotates


def rotate(x: Tensor, block: int, signs: Tensor | None = None) -> Tensor:
    """Return ``x · S · H`` for each block of the last axis of ``x [..., n]``, zero-padded to whole blocks, in fp32.

    Args:
        block: elements of a block, a power of two.
        signs: the diagonal of S, ±1, ``[block]``.

    Raises:
        ValueError: ``block`` is not a power of two, or ``signs`` has another shape.
    """
    signs = _checked(signs, block)
    if not _serves(x, block):
        return hadamard.rotate_in_fp32(x, block, signs)
    y: Tensor = torch.ops.fp4graph.rotate(x, block, signs, False, (x.shape[-1] + block - 1) // block * block)
    return y


def unrotate(x: Tensor, block: int, signs: Tensor | None = None) -> Tensor:
    """Return ``x · H · S``, the inverse of :func:`rotate`, in fp32 and with the padding."""
    signs = _checked(signs, block)
    if not _serves(x, block):
        return hadamard.unrotate(x.to(torch.float32), block, signs)
    y: Tensor = torch.ops.fp4graph.rotate(x, block, signs, True, x.shape[-1])
    return y


def _checked(signs: Tensor | None, block: int) -> Tensor | None:
    if signs is not None and signs.shape != (block,):
        raise ValueError(f"signs must be one for each element of a block, [{block}]; got {list(signs.shape)}")
    return None if signs is None else signs.to(torch.float32)


def _serves(x: Tensor, block: int) -> bool:
    # The operator has no derivative; tensor code has one.
    if x.requires_grad and torch.is_grad_enabled():
        return False
    known = 1 <= block <= _LONGEST and block & (block - 1) == 0
    return known and x.dtype in cpu.DTYPES and Machine.of(x.device).has_cpu_kernels


def _fake_rotate(x: Tensor, block: int, signs: Tensor | None, back: bool, length: int) -> Tensor:
    if _is_transposed(x):
        return x.new_empty((*x.shape[:-2], length, x.shape[-2]), dtype=torch.float32).mT
    return x.new_empty((*x.shape[:-1], length), dtype=torch.float32)


def _rotate(x: Tensor, block: int, signs: Tensor | None, back: bool, length: int) -> Tensor:
    y = _fake_rotate(x, block, signs, back, length)
    if y.numel():
        by = hadamard.BlockRotation(block, None if signs is None else signs.contiguous())
        if _is_transposed(x):
            source, target = x.mT.contiguous(), y.mT
            cpu.rotate(rows_of(source).mT, rows_of(target).mT, by, back)
        else:
            cpu.rotate(rows_of(x.contiguous()), rows_of(y), by, back)
    return y


def _is_transposed(x: Tensor) -> bool:
    """Return whether ``x`` is contiguous along its second to last axis, and not along its last."""
    return x.dim() > 1 and x.stride(-1) != 1 and x.stride(-2) == 1


operator(
    "rotate(Tensor x, int block, Tensor? signs, bool back, SymInt length) -> Tensor",
    _fake_rotate,
    tags=[torch.Tag.needs_exact_strides],
    CPU=_rotate,
)
