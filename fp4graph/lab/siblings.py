"""The linears of a model that take one format together: tied weights, projections of one tensor, experts of a layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)


def call_of(model: nn.Module, loss: Loss, batch: Any) -> Call:
    """Run ``loss(model, batch)`` once, in eval mode and without gradients, and return the model's first call.

    Raises:
        Error: the loss does not call the model.
    """
    call, calls = Call(), 0

    def hook_of(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal calls
            if not name:
                calls += 1
                if calls == 1:
                    call.args, call.kwargs = args, dict(kwargs)
            first = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
            if first is not None:
                call.inputs.setdefault(name, first)

        return hook

    hooks = [
        module.register_forward_pre_hook(hook_of(name), with_kwargs=True) for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad(), torch.random.fork_rng(), _evaluating(model):
            loss(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        raise Error(f"loss(model, batch) does not call the {type(model).__name__}; call model(...) in it")
    return call


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, so that no running statistic changes, and bring each back."""
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in training:
            module.training = flag


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
    groups: list[tuple[set[Hashable], list[str]]] = []
    for name in names:
        keys = set(_keys(name, modules[name], inputs.get(name)))
        joined = [group for group in groups if group[0] & keys]
        for group in joined:
            groups.remove(group)
        groups.append((keys.union(*(each for each, _ in joined)), [*(n for _, own in joined for n in own), name]))
    order = {name: place for place, name in enumerate(names)}
    return tuple(
        sorted((tuple(sorted(own, key=order.__getitem__)) for _, own in groups), key=lambda own: order[own[0]])
    )


def _keys(name: str, module: nn.Module, read: torch.Tensor | None) -> Iterator[Hashable]:
    """Yield keys of which siblings have one in common."""
    yield "name", name
    yield from (("weight", id(weight)) for weight in weights_of(module))
    parent, _, leaf = name.rpartition(".")
    if read is not None:
        yield "input", parent, id(read)
    yield from (("family", parent, family) for family in SIBLINGS if leaf in family)
    yield "experts", re.sub(r"(?<![^.])experts\.\d+(?![^.])", "experts.*", name)


def weights_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the matrices, and the stacks of experts' matrices, among a module's parameters."""
    parametrized = getattr(module, "parametrizations", {})
    holders = (module, *(parametrized[name] for name in parametrized))
    return [weight for holder in holders for weight in holder.parameters(recurse=False) if weight.ndim >= 2]
