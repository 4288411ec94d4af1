"""Runs an applied model on several processes: sends state over the ranks of DDP, compiles the modules of FSDP."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fp4graph import torch_internals
from fp4graph.errors import CaptureError, Error
from fp4graph.graph.backend import Backend, with_own_code
from fp4graph.model import hooks, state
from fp4graph.model.source import sources_below
from fp4graph.model.weight import Weight
from fp4graph.numerics.sharding import fsdp_modules, is_sharded


def is_distributed() -> bool:
    """Return whether this process is in a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank() -> int:
    """Return this process's rank, also before the process group is made."""
    return torch.distributed.get_rank() if is_distributed() else int(os.environ.get("RANK", 0))


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and ``torch.compile``, to which policies are applied, so that
    names and noise are the same with and without such a wrapper."""
    if isinstance(model, DistributedDataParallel):
        return unwrapped(model.module)
    inside = torch_internals.compiled_module(model)
    return model if inside is None else unwrapped(inside)


@torch.no_grad()
def over_ranks(x: Tensor, parameter: Tensor, wrapper: DistributedDataParallel | None) -> Tensor:
    """Return the sum of ``x`` over the ranks that ``parameter`` is sharded over, or over the ranks of ``wrapper`` if it
    is not sharded."""
    if is_sharded(parameter):
        mesh = parameter.device_mesh
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    else:
        groups = [] if wrapper is None else [wrapper.process_group]
    total = x.clone()
    for group in groups:
        torch.distributed.all_reduce(total, group=group)
    return total


@torch.no_grad()
def synchronize(wrapper: DistributedDataParallel, root_state: state.RootState, weights: Iterable[Weight]) -> None:
    """Give every rank of a DDP the state of rank 0, as DDP's constructor does for weights.

    Rank 0 may be the only rank that loaded a checkpoint. A rank keeps the state that its own backward wrote,
    unless its count differs from that of rank 0.
    """
    group = wrapper.process_group
    source = torch.distributed.get_global_rank(group, 0)
    count = root_state.count
    torch.distributed.broadcast(root_state.forwards, source, group=group)
    root_state.recount()
    behind = count != root_state.count
    for weight in weights:
        for slot in weight.slots:
            entry = weight.entry(slot)
            received = entry.clone()
            torch.distributed.broadcast(received, source, group=group)
            if behind or slot.entry.writer == "optimizer":
                entry.copy_(received)


def compile_sharded(root: nn.Module, weights: Iterable[Weight], backend: Backend, dynamic: bool | None) -> None:
    """Compile every module that ``fully_shard`` was called on as a graph of its own.

    Raises:
        Error: the model is under FSDP1, or FSDP casts the parameters beside packed weights.
        CaptureError: a weight is sharded, but FSDP does not gather it.
    """
    if not is_distributed():
        return
    # FSDP1 puts views in the place of parameters, or marks the flattened ones.
    parameters = [p for module in root.modules() for p in module._parameters.values() if p is not None]
    if any(not isinstance(p, nn.Parameter) or hasattr(p, "_fsdp_flattened") for p in parameters):
        raise Error(
            "FullyShardedDataParallel (FSDP1) makes flat vectors of weights, which have no blocks; use fully_shard"
        )
    sharded = fsdp_modules(root)
    for module in sharded:
        module.reshard()  # an evaluation may have left the weights gathered
    for module in sharded:
        _require_dtype_of_sources(module)
    gathered = {id(inner) for module in sharded for inner in module.modules()}
    for weight in weights:
        if is_sharded(weight.parameter) and id(weight.module) not in gathered:
            raise CaptureError(
                "its weight is a DTensor that nothing gathers for the forward (tensor parallelism), and quantizers "
                "do not reach across shards; use fully_shard or DistributedDataParallel",
                site=weight.place,
            )
    compiled: dict[type, Callable[..., Any]] = {}
    for module in sharded:
        forward = module.__dict__.get("forward")
        replaced = forward.previous if isinstance(forward, hooks.GuardedForward) else forward
        if replaced is None and hooks.mark_hooks(module):
            cls = type(module)
            if cls not in compiled:
                compiled[cls] = torch.compile(with_own_code(hooks.run_sharded, cls), backend=backend, dynamic=dynamic)
            module.forward = hooks.ShardedForward(module, compiled[cls])


def _require_dtype_of_sources(module: Any) -> None:
    """Raise Error if FSDP casts parameters of a module to another dtype than the dtype of a packed weight."""
    dtype = torch_internals.fsdp_dtype(module)
    for _, source in sources_below(module):
        if dtype is not None and dtype is not source.stand_in.dtype:
            raise Error(
                f"{source.path} was packed in {source.stand_in.dtype}, and MixedPrecisionPolicy computes in {dtype}; "
                f"call model.to({dtype}) before fp4graph.pack_frozen(model), or leave out param_dtype"
            )
