"""Copies a parameter's state in an optimizer, so that a technique can undo a step for all elements or for some.

The copies are in the technique's memory, under :data:`~fp4graph.training.conditioning.HELD`, so that a reset of the
moments reaches them. New copies replace any that are left over from a step that raised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fp4graph.errors import Error
from fp4graph.numerics import sharding
from fp4graph.technique import WeightUpdate
from fp4graph.training.conditioning import HELD
from fp4graph.training.memory import is_ours

if TYPE_CHECKING:
    from torch import Tensor


def entries(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return the optimizer's state of a parameter, by name, without entries of techniques."""
    state = optimizer.state.get(parameter, {})
    return {name: value for name, value in state.items() if not is_ours(name)}


def hold(optimizer: torch.optim.Optimizer, parameter: Tensor, memory: dict[str, Tensor], remedy: str) -> None:
    """Copy a parameter, as ``memory["saved"]``, and its state, for :func:`restore`.

    Raises:
        Error: an entry is neither a plain tensor nor a number and cannot be restored; ``remedy`` says what to do.
    """
    memory["saved"] = parameter.detach().clone()
    _released(memory)
    for name, value in entries(optimizer, parameter).items():
        if isinstance(value, bool | int | float):
            memory[HELD + name] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
        elif value is not None:
            memory[HELD + name] = _copied(name, value, remedy)


def restore(optimizer: torch.optim.Optimizer, parameter: Tensor, memory: dict[str, Tensor]) -> bool:
    """Restore a parameter and its state. Drop entries that the step created; return whether one has the parameter's
    shape."""
    parameter.copy_(memory.pop("saved"))
    state, held, begins = optimizer.state[parameter], _released(memory), False
    for name, value in entries(optimizer, parameter).items():
        if name not in held:
            del state[name]
            begins |= isinstance(value, torch.Tensor) and value.shape == parameter.shape
        elif isinstance(value, torch.Tensor):
            value.copy_(held[name])
        else:
            state[name] = type(value)(held[name])
    return begins


def refuse_group_counts(optimizer: torch.optim.Optimizer, remedy: str) -> None:
    """Raise Error if the optimizer counts steps for a group of parameters, where :func:`restore` does not reach."""
    if any("step" in group for group in optimizer.param_groups):
        name = type(optimizer).__name__
        raise Error(f"{name} counts its steps for a whole group of parameters, which cannot be undone; {remedy}")


def hold_elements(update: WeightUpdate) -> None:
    """Copy a weight, as ``update.scratch["old"]``, and its state of the same shape, for :func:`restore_elements`."""
    memory, weight = update.memory, update.parameter
    update.scratch["old"] = weight.clone()
    _released(memory)
    for name, value in entries(update.optimizer, weight).items():
        if isinstance(value, torch.Tensor) and value.shape == weight.shape:
            memory[HELD + name] = _copied(name, value, "use an optimizer whose state is not quantized")


def restore_elements(update: WeightUpdate, stepped: Tensor) -> None:
    """Restore the elements where ``stepped`` is False; entries that the step created keep their values."""
    update.parameter.copy_(torch.where(stepped, update.parameter, update.scratch["old"]))
    held = _released(update.memory)
    for name, value in entries(update.optimizer, update.parameter).items():
        if name in held:
            value.copy_(torch.where(stepped, value, held[name]))


def _copied(name: str, value: Any, remedy: str) -> Tensor:
    """Return a copy of an entry; raise Error unless it is a tensor with elements that can be copied one by one."""
    part = value.to_local() if sharding.is_sharded(value) else value
    if type(part) is not torch.Tensor:  # blocks of a quantized state, as of torchao's 8-bit optimizers, share scales
        kind = type(part).__name__
        raise Error(f"the optimizer keeps {name!r}, a {kind}, for a parameter, which cannot be restored; {remedy}")
    copied: Tensor = value.clone()
    return copied


def _released(memory: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the copies from ``memory``, and return them under their names in the optimizer's state."""
    names = [name for name in memory if name.startswith(HELD)]
    return {name.removeprefix(HELD): memory.pop(name) for name in names}
