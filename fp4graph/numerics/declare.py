"""Declares a torch operator in one call: schema, fake implementation, and an implementation for each kind of device.

Compilers see flat parameters: tensors, numbers and texts, which graphs and their caches can hold. Python code passes
related parameters as one object; its class names the flat parameters (:class:`Structure`). Callers flatten the object,
and implementations receive it rebuilt.
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
    """Flat parameters of an operator that Python code passes as one object.

    Attributes:
        parameters: the types and names of the flat parameters, such as ``"Tensor? key"``.
        build: takes the values of the flat parameters in order, and returns the object.
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
        fake: returns empty results. It takes the same arguments as ``runs``.
        flops: a formula for torch's FLOP counter. It takes the shapes of the flat parameters.
        structures: more types for ``schema``. A parameter ``draw`` of such a type becomes flat, as ``draw_key``, ...
        runs: the implementation for each of torch's dispatch keys, such as ``CPU``. It takes rebuilt objects.
    """
    match = re.fullmatch(r"(\w+)\((.*)\)( -> .*)", schema)
    assert match is not None, schema
    name, flat, groups = match[1], list[str](), list[_Group]()
    for parameter in match[2].split(", "):
        kind, prefix = parameter.split(" ", 1)
        structure = (structures or {}).get(kind)
        parts = [parameter] if structure is None else [_prefixed(part, prefix) for part in structure.parameters]
        groups.append(_Group(len(flat), len(flat) + len(parts), None if structure is None else structure.build))
        flat += parts
    _groups[name] = groups
    _library.define(f"{name}({', '.join(flat)}){match[3]}", tags=tags)
    torch.library.register_fake(f"fp4graph::{name}", of_flat(name, fake), lib=_library)
    for key, run in runs.items():
        _library.impl(name, of_flat(name, run), key)
    packet = getattr(torch.ops.fp4graph, name)
    if flops is not None:
        register_flop_formula(packet)(flops)
    return packet


class _Group(NamedTuple):
    """The flat parameters [first, end), of which ``build`` makes one object; None for a parameter of torch's types."""

    first: int
    end: int
    build: Callable[..., Any] | None


def _prefixed(parameter: str, prefix: str) -> str:
    kind, name = parameter.split(" ", 1)
    return f"{kind} {prefix}_{name}"


def of_flat(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, an implementation of the declared operator ``name``, as a function of the flat parameters.

    torch omits trailing arguments that equal their defaults; ``function`` is then called without them too.
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
