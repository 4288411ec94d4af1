"""Declares operators of torch: schema, fake implementation, and what runs on each kind of device, in one call.

Compilers see an operator's parameters flat: tensors, numbers and texts, which graphs and their caches can hold. Python
takes what belongs together as one object, whose class says which parameters stand for it (:class:`Structure`). Callers
flatten it, and implementations get it built again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

_library: Any = torch.library.Library("fp4graph", "FRAGMENT")  # type: ignore[no-untyped-call]
_groups: dict[str, list[_Group]] = {}


class Structure(NamedTuple):
    """Parameters that are one object in Python.

    Attributes:
        parameters: their types and names, such as ``"Tensor? key"``.
        build: returns the object, given their values in order.
    """

    parameters: tuple[str, ...]
    build: Callable[..., Any]


def operator(
    schema: str,
    fake: Callable[..., Any],
    *,
    tags: Sequence[torch.Tag] = (),
    flops: Callable[..., int] | None = None,
    structures: dict[str, Structure] | None = None,
    **runs: Callable[..., Any],
) -> Any:
    """Declare ``torch.ops.fp4graph.NAME`` and return it.

    Args:
        schema: ``"NAME(type parameter, ...) -> ..."`` with torch's types and with those of ``structures``.
        fake: returns empty results; called like ``runs``.
        flops: a formula for torch's FLOP counter, of the shapes of the flat parameters.
        structures: further types of parameters. A parameter ``how`` of such a type is flat parameters ``how_key``, ...
        runs: by torch's dispatch keys, such as ``CPU``; called with the parameters, structures built.
    """
    found = re.fullmatch(r"(\w+)\((.*)\)( -> .*)", schema)
    assert found is not None, schema
    name, flat, groups = found[1], list[str](), list[_Group]()
    for parameter in found[2].split(", "):
        kind, own = parameter.split(" ", 1)
        structure = (structures or {}).get(kind)
        parts = [parameter] if structure is None else [_prefixed(part, own) for part in structure.parameters]
        groups.append(_Group(len(flat), len(flat) + len(parts), None if structure is None else structure.build))
        flat += parts
    _groups[name] = groups
    _library.define(f"{name}({', '.join(flat)}){found[3]}", tags=tags)
    torch.library.register_fake(f"fp4graph::{name}", of_flat(name, fake), lib=_library)
    for key, run in runs.items():
        _library.impl(name, of_flat(name, run), key)
    packet = getattr(torch.ops.fp4graph, name)
    if flops is not None:
        register_flop_formula(packet)(flops)
    return packet


class _Group(NamedTuple):
    """The flat parameters ``first`` to ``end``, which ``build`` makes one object; None for a parameter of its own."""

    first: int
    end: int
    build: Callable[..., Any] | None


def _prefixed(parameter: str, prefix: str) -> str:
    kind, name = parameter.split(" ", 1)
    return f"{kind} {prefix}_{name}"


def of_flat(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which takes the parameters of the declared operator ``name``, as one of the flat parameters.

    torch leaves out trailing ones that have their default.
    """
    groups = _groups[name]
    if all(group.build is None for group in groups):
        return function

    def run(*flat: Any) -> Any:
        count = len(flat)
        return function(
            *[
                flat[first] if build is None else build(*flat[first:end])
                for first, end, build in groups
                if first < count
            ]
        )

    return run
