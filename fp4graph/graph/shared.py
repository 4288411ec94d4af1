"""Gives each call of a shared body, as of ``torch.compiler.nested_compile_region``, a body of its own.

Each call multiplies with its own weights, at its own place in the model, and draws its own noise: it has its own sites.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch.fx import GraphModule, Node

from fp4graph import torch_internals
from fp4graph.graph.names import Names

_STACK = "nn_module_stack"


def bodies_of(node: Node, gm: GraphModule) -> list[tuple[int, Node, GraphModule]]:
    """Return each body of the higher-order op ``node`` of ``gm``, after the position and the node of its argument."""
    arguments = [(i, arg) for i, arg in enumerate(node.args) if isinstance(arg, Node) and arg.op == "get_attr"]
    found = [(i, arg, getattr(gm, str(arg.target), None)) for i, arg in arguments]
    return [(i, arg, body) for i, arg, body in found if isinstance(body, GraphModule)]


def separate(gm: GraphModule, names: Names, calls: dict[int, Node] | None = None) -> None:
    """Copy each body that several calls in ``gm`` and in the bodies inside it share.

    Args:
        calls: the call that keeps each body, by the body's id.
    """
    calls = {} if calls is None else calls
    for node in list(gm.graph.nodes):
        if not isinstance(node.target, torch_internals.HigherOrderOperator):
            continue
        for place, argument, body in bodies_of(node, gm):
            first = calls.setdefault(id(body), node)
            if first is node:
                separate(body, names, calls)
                continue
            own, name = copy.deepcopy(body), f"{argument.target}_call_{len(calls)}"
            calls[id(own)] = node
            setattr(gm, name, own)
            with gm.graph.inserting_before(node):
                node.update_arg(place, gm.graph.get_attr(name))
            if not argument.users:
                gm.graph.erase_node(argument)
            inside = [
                each for module in own.modules() if isinstance(module, GraphModule) for each in module.graph.nodes
            ]
            for each in (node, *inside):
                _rename(each, name)
            _move(inside, first.meta.get(_STACK) or {}, node.meta.get(_STACK) or {}, names)


def _rename(node: Node, name: str) -> None:
    """Change the identifier by which torch knows a body that it has traced, if ``node`` calls one."""
    identified = isinstance(node.target, torch_internals.HigherOrderOperator) and len(node.args) > 1
    if identified and isinstance(identifier := node.args[1], str):
        node.update_arg(1, f"{identifier}_{name}")


def _move(nodes: Iterable[Node], old: dict[str, Any], new: dict[str, Any], names: Names) -> None:
    """Let the ``nodes`` of a copied body name the modules of their own call, whose stack is ``new``."""
    for node in nodes if old and new else ():
        stack = list((node.meta.get(_STACK) or {}).items())
        if stack[: len(old)] != list(old.items()):
            continue
        (before, (outer, _)), (after, (source, _)) = list(old.items())[-1], list(new.items())[-1]
        node.meta[_STACK] = new | {
            names.counterpart(key, before, after): (source + path.removeprefix(outer), cls)
            for key, (path, cls) in stack[len(old) :]
        }
