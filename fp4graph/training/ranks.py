"""A checkpoint's part in several processes: gathers what is sharded, and keeps what differs from rank to rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp4graph.errors import Error
from fp4graph.model import state
from fp4graph.model.distributed import is_distributed
from fp4graph.numerics.sharding import is_sharded, like, whole


def rank() -> int:
    """Return this process's rank in the process group; 0 without a group."""
    return torch.distributed.get_rank() if is_distributed() else 0


def gathered(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the values of all ranks on rank 0; on other ranks the list is undefined."""
    if not is_distributed():
        return [own]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.gather_object(own, everyone if rank() == 0 else None, 0)
    return everyone


def gathered_whole(value: Any) -> Any:
    """Return ``value``, nested, with every sharded tensor gathered on the CPU of rank 0; elsewhere these are None."""
    if isinstance(value, Mapping):
        return {key: gathered_whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [gathered_whole(item) for item in value]
    if is_sharded(value):
        full = whole(value)  # every rank takes part
        return full.cpu() if rank() == 0 else None
    return value


@contextmanager
def together() -> Iterator[None]:
    """Raise on every rank where the block raises an Error on one: the others would go on, and wait for it in vain."""
    problem: Error | None = None
    try:
        yield
    except Error as error:
        problem = error
    if is_distributed():
        problems: list[str | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(problems, None if problem is None else str(problem))
        first = next((number for number, text in enumerate(problems) if text is not None), None)
        if problem is None and first is not None:
            problem = Error(f"rank {first}: {problems[first]}")
    if problem is not None:
        raise problem


def placed(value: Any, reference: Any) -> Any:
    """Return ``value``, sharded as ``reference`` is where both have the same shape."""
    if is_sharded(reference) and isinstance(value, Tensor) and value.shape == reference.shape:
        return like(value.to(reference.device), reference)
    return value


def own_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the entries of our state in which this rank differs from rank 0: those that its own backward wrote."""
    own: dict[str, Tensor] = {}
    if is_distributed():
        for name, value in module.state_dict().items():
            if state.is_ours(name) and isinstance(value, Tensor) and not is_sharded(value):
                mine = value.detach().reshape(-1).view(torch.uint8)
                first = mine.clone()
                torch.distributed.broadcast(first, 0)
                if not torch.equal(mine, first):
                    own[name] = value.cpu()
    return own
