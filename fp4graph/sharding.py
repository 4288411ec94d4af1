"""State of weights that ``fully_shard`` has spread over processes: its shards, and the whole where it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(x: object) -> TypeGuard[DTensor]:
    """Whether ``x`` is a DTensor. (By what it can do: importing the class takes a second.)"""
    return hasattr(x, "full_tensor")


def whole(x: Tensor) -> Tensor:
    """``x`` on one process, gathered from all of them where it is sharded."""
    return x.full_tensor() if is_sharded(x) else x


def like(x: Tensor, reference: Tensor) -> Tensor:
    """``x``, the same on every process, sharded as ``reference`` is. Each process keeps its part; nothing is sent."""
    if not is_sharded(reference) or is_sharded(x):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, reference.device_mesh, reference.placements, src_data_rank=None)
