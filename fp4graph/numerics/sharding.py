"""Gathers tensors that ``fully_shard`` has distributed over processes, and shards other tensors in the same way."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

if torch.distributed.is_available():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Partial, distribute_tensor


def is_sharded(x: object) -> TypeGuard[DTensor]:
    """Return whether ``x`` is a DTensor."""
    return torch.distributed.is_available() and isinstance(x, DTensor)


def whole(x: Tensor) -> Tensor:
    """Return all of ``x`` on this process, gathered from all processes if it is sharded."""
    return x.full_tensor() if is_sharded(x) else x


def peak(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest magnitude in all of ``x``, 0-d, in ``dtype``; NaN if ``x`` has NaN.

    The part of ``x`` on a process may be empty, as where a parameter has fewer rows than there are processes.
    """
    part = x.to_local() if is_sharded(x) else x
    low, high = part.aminmax() if part.numel() else part.new_zeros((2,))
    largest = torch.maximum(-low, high).to(dtype)
    if not is_sharded(x):
        return largest
    return DTensor.from_local(largest, x.device_mesh, [Partial("max")] * x.device_mesh.ndim).full_tensor()


def like(x: Tensor, reference: Tensor) -> Tensor:
    """Return ``x``, which is equal on every process, sharded as ``reference`` is; ``x`` itself if that is not sharded.

    Each process keeps its shard of ``x``, without gradient; nothing is sent.
    """
    if not is_sharded(reference) or is_sharded(x):
        return x
    return distribute_tensor(x.detach(), reference.device_mesh, reference.placements, src_data_rank=None)


def fsdp_modules(root: nn.Module) -> list[Any]:
    """Return the modules in ``root`` that ``fully_shard`` was called on; each is both a Module and an FSDPModule."""
    if not torch.distributed.is_available():
        return []
    return [module for module in root.modules() if isinstance(module, FSDPModule)]
