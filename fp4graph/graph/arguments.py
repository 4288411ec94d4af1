"""Puts the arguments of a call in the order of the operation's parameters, so that readers find each at its place."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.operator_schemas import get_signature_for_torch_op

from fp4graph.torch_internals import pytree

#: The names of parameters that a signature does not show: an operator's first, and NumPy's, which torch takes too.
_FURTHER = {"self": "input", "a": "input", "x": "input", "x1": "input", "x2": "other", "axis": "dim"}


def in_order(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, those by keyword at their positions if a tensor is among them.

    Keyword-only arguments, ``out`` and arguments after a missing one stay keywords, as do all if ``target`` is not
    torch's.

    Args:
        target: a node's target, or a function that torch hands to a ``TorchFunctionMode``.
        args, kwargs: the arguments, with tensors or with nodes.
    """
    if not kwargs or not any(isinstance(leaf, Node | Tensor) for leaf in pytree.tree_leaves(dict(kwargs))):
        return args, dict(kwargs)
    for signature in _signatures(target):
        parameters = signature.parameters
        named = {key if key in parameters else _FURTHER.get(key, key): value for key, value in kwargs.items()}
        try:
            signature.bind(*args, **named)
        except TypeError:
            continue
        placed = list(args)
        for name, parameter in list(parameters.items())[len(args) :]:
            if name not in named or name == "out" or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                break
            placed.append(named.pop(name))
        return tuple(placed), named
    return args, dict(kwargs)


@cache
def _signatures(target: Any) -> list[inspect.Signature]:
    """Return the signatures of an operation of torch, or of an operator of any library; none of other functions."""
    if inspect.ismethoddescriptor(target):
        target = target.__name__
    if isinstance(target, str):  # a method, perhaps __matmul__
        operator = target.removeprefix("__").removesuffix("__")
        target = getattr(torch.ops.aten, operator, getattr(Tensor, target, None))
    if inspect.isfunction(target):
        return [inspect.signature(target)] if target.__module__.partition(".")[0] == "torch" else []
    return get_signature_for_torch_op(target) or []
