"""Recognizes operations that write into a tensor."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from torch.fx import Node

from fp4graph import torch_internals
from fp4graph.graph.products import name_of

#: Python packages whose functions write into tensors only under names and arguments that :func:`writes` knows.
_KNOWN = frozenset({"torch", "fp4graph", "einops"})
_WRITES = re.compile(
    r".*[^_]_"  # add_, _foreach_add_
    r"|(__)?(setitem|delitem)(__)?"  # x[i] = y
    r"|(__)?i(add|sub|mul|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift|concat)(__)?"  # x += y
)


def writes(node: Node) -> bool:
    """Return whether ``node`` writes into a tensor, or may do so."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    target: Any = node.target
    if node.kwargs.get("out") is not None or _WRITES.fullmatch(name_of(node)) is not None:
        return True
    if (declared := torch_internals.operator_writes(target)) is not None:
        return declared
    if not inspect.isfunction(target):
        return False
    if target.__module__.partition(".")[0] not in _KNOWN:
        return True
    signature, switches = _switches(target)
    if not switches:
        return False
    try:
        arguments = signature.bind(*node.args, **node.kwargs).arguments
    except TypeError:
        return True
    return any(arguments.get(name, harmless) is not harmless for name, harmless in switches.items())


@cache
def _switches(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, object]]:
    """Return the signature of ``function``, and its parameters that make it write, each with the harmless value."""
    harmless_values = {"inplace": False, "max_norm": None}  # an embedding with max_norm scales its weight
    # Tensor.__pow__, as x ** 2 calls it, wraps a method of C, which has no signature.
    signature = inspect.signature(function, follow_wrapped=not inspect.ismethoddescriptor(inspect.unwrap(function)))
    return signature, {name: harmless for name, harmless in harmless_values.items() if name in signature.parameters}
