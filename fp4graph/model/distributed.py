"""Runs an applied model on several processes: sends state over the ranks of DDP, compiles the modules of FSDP."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fp4graph import torch_internals
from fp4graph.errors import CaptureError, Error
from fp4graph.graph.backend import Backend, with_own_code
from fp4graph.model import hooks, state
from fp4graph.model.prepare import PhasePlan
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


def leave_to_ranks(model: nn.Module) -> None:
    """Have ``model``, if it is a DDP, leave the buffers of fp4graph to each rank, those too that joined after it was
    constructed. At every forward it would send rank 0's count and held scales, and ``join`` ends by sending buffers,
    which a rank in an earlier phase does not have."""
    if isinstance(model, DistributedDataParallel):
        buffers = dict(model.module.named_buffers())
        model.parameters_to_ignore |= {name for name in buffers if state.is_ours(name)}
        # DDP lists the buffers anew before it sends them, but decides by the former list whether there are any.
        model.modules_buffers = [buffers[name] for name in buffers if name not in model.parameters_to_ignore]


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


class FromRankZero:
    """What each rank of a DDP takes from rank 0 before its first training forward in that DDP, as DDP's constructor
    sends weights: rank 0 may be the only rank that loaded a checkpoint.

    The count comes first, because the phase follows from it, and the entries of a phase from the phase. Later phases
    take nothing: a rank may enter them alone, as under ``join``, and their entries follow from what all ranks share.

    Attributes:
        wrapper: the DDP from whose rank 0 the count was taken last, or None.
    """

    def __init__(self) -> None:
        self._wrapper: weakref.ref[DistributedDataParallel] | None = None
        self._due, self._behind = False, False  # whether entries are still to be taken, and all of them

    @property
    def wrapper(self) -> DistributedDataParallel | None:
        return None if self._wrapper is None else self._wrapper()

    @torch.no_grad()
    def take_count(self, wrapper: DistributedDataParallel, root_state: state.RootState) -> None:
        """Take the count of forwards, unless it was taken in this ``wrapper`` already."""
        if wrapper is self.wrapper:
            return
        count = root_state.count
        _broadcast(root_state.forwards, wrapper)
        root_state.recount()
        self._wrapper, self._due, self._behind = weakref.ref(wrapper), True, count != root_state.count

    @torch.no_grad()
    def take_entries(self, weights: Iterable[Weight]) -> None:
        """Take the entries of techniques for ``weights``, once after each count. A rank keeps the entries that its own
        backward wrote, unless its count differed from that of rank 0."""
        if not self._due or (wrapper := self.wrapper) is None:
            return
        for weight in weights:
            for slot in weight.slots:
                entry = weight.entry(slot)
                received = entry.clone()
                _broadcast(received, wrapper)
                if self._behind or slot.entry.writer == "optimizer":
                    entry.copy_(received)
        self._due = False


def _broadcast(x: Tensor, wrapper: DistributedDataParallel) -> None:
    group = wrapper.process_group
    torch.distributed.broadcast(x, torch.distributed.get_global_rank(group, 0), group=group)


def compile_sharded(plan: PhasePlan, backend: Backend, dynamic: bool | None) -> None:
    """Compile every module that ``fully_shard`` was called on as a graph of its own.

    Raises:
        Error: the model is under FSDP1, or FSDP casts the parameters beside packed weights.
        CaptureError: a weight is sharded, but FSDP does not gather it.
    """
    if not is_distributed():
        return
    root, weights, names = plan.root, plan.weights, plan.names
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
            module.forward = hooks.ShardedForward(module, compiled[cls], names)


def _require_dtype_of_sources(module: Any) -> None:
    """Raise Error if FSDP casts parameters of a module to another dtype than the dtype of a packed weight."""
    dtype = torch_internals.fsdp_dtype(module)
    for _, source in sources_below(module):
        if dtype is not None and dtype is not source.stand_in.dtype:
            raise Error(
                f"{source.path} was packed in {source.stand_in.dtype}, and MixedPrecisionPolicy computes in {dtype}; "
                f"call model.to({dtype}) before fp4graph.pack_frozen(model), or leave out param_dtype"
            )
