"""Gathers sharded tensors for a checkpoint of several processes, and finds state that differs between ranks."""

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


def gathered(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the values of all ranks on rank 0; on other ranks the list is undefined."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.gather_object(value, values if rank() == 0 else None, 0)
    return values


def gathered_whole(value: Any) -> Any:
    """Return nested ``value`` with every sharded tensor gathered on the CPU of rank 0, and None on other ranks."""
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
    """Raise an Error on all ranks if the ``with`` block raises one on any rank, lest the others wait for it forever."""
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
    """Return ``value``; if it has the shape of a sharded ``reference``, shard it in the same way."""
    if is_sharded(reference) and isinstance(value, Tensor) and value.shape == reference.shape:
        return like(value.to(reference.device), reference)
    return value


def differing_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the entries of techniques that differ from rank 0's, because each rank's backward writes its own."""
    differing: dict[str, Tensor] = {}
    if is_distributed():
        for name, value in module.state_dict().items():
            if state.is_ours(name) and isinstance(value, Tensor) and not is_sharded(value):
                local = value.detach().reshape(-1).view(torch.uint8)
                first = local.clone()
                torch.distributed.broadcast(first, 0)
                if not torch.equal(local, first):
                    differing[name] = value.cpu()
    return differing
