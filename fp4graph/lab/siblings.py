"""The linears of a model that take one format together: tied weights, projections of one tensor, experts of a layer."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fp4graph.errors import Error
from fp4graph.exports.siblings import SIBLINGS

Loss = Callable[[nn.Module, Any], torch.Tensor]


@dataclass
class Call:
    """The first call of a model in a loss: its arguments, and the tensor that each module reads first, by its name."""

    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the call of a module, as a hook before its forward."""
        if not name and self.args is None:
            self.args, self.kwargs = args, dict(kwargs)
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        if tensors:
            self.inputs.setdefault(name, tensors[0])


def call_of(model: nn.Module, loss: Loss, batch: Any) -> Call:
    """Run ``loss(model, batch)`` once, in eval mode and without gradients, and return the model's first call.

    Raises:
        Error: the loss does not call the model.
    """
    call = Call()
    with torch.no_grad(), torch.random.fork_rng(), ExitStack() as after:
        for name, module in model.named_modules():
            hook = functools.partial(call.take, name)
            after.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            after.callback(setattr, module, "training", module.training)
        loss(model.eval(), batch)  # so that no running statistic changes
    if call.args is None:
        raise Error(f"loss(model, batch) does not call the {type(model).__name__}; call model(...) in it")
    return call


def groups_of(
    model: nn.Module, names: Iterable[str], inputs: Mapping[str, torch.Tensor]
) -> tuple[tuple[str, ...], ...]:
    """Partition the modules ``names`` into groups of siblings, in the order of ``names``.

    Two modules are siblings if they share a weight, if they stand in one module and read one tensor or bear names that
    servers fuse (:data:`fp4graph.exports.siblings.SIBLINGS`), or if their names differ in the number of an expert only.
    Siblings of siblings are siblings.

    Args:
        inputs: the tensor that each module reads, as in :class:`Call`.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    group_of: dict[str, list[str]] = {}
    first_with: dict[Hashable, str] = {}
    for name in names:
        group_of[name] = [name]
        for key in _keys(name, modules[name], inputs.get(name)):
            other = group_of[first_with.setdefault(key, name)]
            if other is not group_of[name]:
                joined = [*other, *group_of[name]]
                group_of.update(dict.fromkeys(joined, joined))
    order = {name: place for place, name in enumerate(group_of)}
    groups = {id(group): group for group in group_of.values()}
    return tuple(tuple(sorted(group, key=order.__getitem__)) for group in groups.values())


def _keys(name: str, module: nn.Module, read: torch.Tensor | None) -> Iterator[Hashable]:
    """Yield keys of which siblings have one in common."""
    yield from (("weight", id(weight)) for weight in weights_of(module))
    parent, _, leaf = name.rpartition(".")
    if read is not None:
        yield "input", parent, id(read)
    yield from (("family", parent, family) for family in SIBLINGS if leaf in family)
    yield "experts", re.sub(r"(?<![^.])experts\.\d+(?![^.])", "experts.*", name)


def weights_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the matrices, and the stacks of experts' matrices, among a module's parameters."""
    holders = (module, *getattr(module, "parametrizations", {}).values())
    return [weight for holder in holders for weight in holder.parameters(recurse=False) if weight.ndim >= 2]
