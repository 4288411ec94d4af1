"""Operands that a forward keeps for its backward: as tensors, or as the bytes that stand for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4graph.kernels.direction import PackedOperand
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.operand import OperandProgram

#: The spec, length, dtype and direction of packed bytes.
Packing = tuple[QuantSpec, int, torch.dtype, bool]


def as_read(x: Tensor, dtype: torch.dtype, *readers: OperandProgram) -> Tensor:
    """Return ``x`` as the backward needs it: cast to ``dtype``, unless a reader starts from the master weight."""
    return x if any(reader.from_master for reader in readers) else x.to(dtype)


def is_ready(kept: Tensor | PackedOperand | None) -> bool:
    """Return whether the backward needs nothing but the bytes."""
    return isinstance(kept, PackedOperand) and kept.transposed


def tensors(kept: Tensor | PackedOperand | None) -> tuple[Tensor | None, ...]:
    """Return the four tensors to save of a kept operand, from which :func:`restored` makes it again."""
    if isinstance(kept, PackedOperand):
        return kept.codes, kept.scales, kept.factor, kept.multiplier
    return kept, None, None, None


def packing(kept: Tensor | PackedOperand | None) -> Packing | None:
    """Return the data beside the tensors that :func:`restored` needs of a kept operand; None for a tensor."""
    return (kept.spec, kept.length, kept.dtype, kept.transposed) if isinstance(kept, PackedOperand) else None


def restored(saved: Sequence[Tensor | None], packing: Packing | None) -> Tensor | PackedOperand | None:
    """Return the kept operand, from its four saved tensors and its packing."""
    codes, scales, factor, multiplier = saved
    if packing is None or codes is None or scales is None:
        return codes
    return PackedOperand(codes, scales, *packing, factor, multiplier)


def values(kept: Tensor | PackedOperand) -> Tensor:
    """Return a kept operand as a tensor."""
    return kept.unpack() if isinstance(kept, PackedOperand) else kept
