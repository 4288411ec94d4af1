"""Opens nodes that hide matrix products: replaces each by the trace of a Python function that computes the same.

:data:`fp4graph.graph.operations.TABLE` says which function belongs to which operation: a function of torch where there
is one, else one of :mod:`fp4graph.graph.attention` or :mod:`fp4graph.graph.contractions`. :func:`write_out` writes a
product with copies of experts' matrices beside its node, and the graph keeps the node if no rule quantizes the product.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fp4graph import torch_internals
from fp4graph.graph.products import name_of, value_of
from fp4graph.torch_internals import pytree


def inline(gm: GraphModule, node: Node, function: Callable[..., Any], tag: str | None = None) -> None:
    """Replace ``node`` by a trace of ``function`` on its arguments; the new nodes get the node's place in the model."""
    _replace(node, _traced(gm, node, function, (node.args, node.kwargs), tag))
    gm.graph.lint()


@dataclass(frozen=True)
class Replacement:
    """New nodes that compute the same as ``node``; :meth:`settle` decides which of the two a graph keeps.

    Attributes:
        nodes, result: the new nodes in order, and the one of them that stands for ``node``.
    """

    node: Node
    nodes: tuple[Node, ...]
    result: Node

    def settle(self, taken: Container[Node]) -> None:
        """Keep the new nodes if one of them is ``taken``, else ``node``; erase the others."""
        graph = self.node.graph
        if not any(node in taken for node in self.nodes):
            for node in reversed(self.nodes):
                graph.erase_node(node)
            return
        self.node.replace_all_uses_with(self.result)
        unread = [self.node]
        for node in unread:
            if not node.users and node.op in ("call_function", "call_method"):
                unread += [source for source in node.all_input_nodes if source not in unread]
                graph.erase_node(node)


def write_out(gm: GraphModule, node: Node, function: Callable[..., Any], arguments: Sequence[Node]) -> Replacement:
    """Put a trace of ``function`` on ``arguments`` before ``node``, and leave the users of ``node`` as they are."""
    last = node.prev
    result = _traced(gm, node, function, (tuple(arguments), {}), None)
    nodes: list[Node] = []
    while (last := last.next) is not node:
        nodes.append(last)
    return Replacement(node, tuple(nodes), result)


def _traced(gm: GraphModule, node: Node, function: Callable[..., Any], arguments: Any, tag: str | None) -> Any:
    """Put a trace of ``function`` on ``arguments``, a tuple and a mapping, before ``node``, and return its output."""
    flat, spec = pytree.tree_flatten(arguments)
    positions = [i for i, arg in enumerate(flat) if isinstance(arg, Node)]
    inputs: list[Node] = list(dict.fromkeys(flat[i] for i in positions))
    values = [n.meta.get("example_value", n.meta.get("val")) for n in inputs]

    def on_tensors(*tensors: Any) -> Any:
        tensor_of = dict(zip(inputs, tensors, strict=True))
        args, kwargs = pytree.tree_unflatten([tensor_of[x] if isinstance(x, Node) else x for x in flat], spec)
        return function(*args, **kwargs)

    fake_mode = next(value.fake_mode for value in values if isinstance(value, torch_internals.FakeTensor))
    # Trace before autograd and autocast, so that linear stays linear and the caller's autocast still decides dtypes.
    # The caller may itself run on fake tensors (explain), in another mode than Dynamo's.
    with torch_internals.without_dispatch_modes(), fake_mode:
        traced = make_fx(on_tensors, pre_dispatch=True)(*values)
    return _splice(gm, node, traced, inputs, tag)


def _splice(gm: GraphModule, node: Node, traced: GraphModule, inputs: list[Node], tag: str | None) -> Any:
    """Copy the nodes of ``traced`` before ``node``, and return its output as nodes of the graph."""
    graph: Graph = gm.graph
    keys = ("nn_module_stack", "stack_trace", "source_fn_stack")
    place: dict[str, Any] = {key: value for key, value in node.meta.items() if key in keys}
    if tag is not None:
        place["fp4graph_op"] = tag
    mapping: dict[Node, Node] = {}
    remaining = iter(inputs)
    output: Any = None
    with graph.inserting_before(node):
        for new in traced.graph.nodes:
            if new.op == "placeholder":
                mapping[new] = next(remaining)
            elif new.op == "output":
                output = torch.fx.map_arg(new.args[0], lambda n: mapping[n])
            elif new.op == "get_attr":
                name = f"_fp4graph_{node.name}_{new.target}".replace(".", "_")
                setattr(gm, name, getattr(traced, new.target))
                mapping[new] = graph.get_attr(name)
                mapping[new].meta.update(new.meta)
            else:
                mapping[new] = graph.node_copy(new, lambda n: mapping[n])
                mapping[new].meta = {**place, "example_value": _with_gradient(new.meta.get("val"), mapping[new])}
    return output


def _with_gradient(value: Any, node: Node) -> Any:
    """Return the ``value`` of a traced node, with ``requires_grad`` if an input has it, because traces lose it."""
    inputs = (value_of(source) for source in node.all_input_nodes)
    needs = name_of(node) != "detach" and any(x is not None and x.requires_grad for x in inputs)
    return value.requires_grad_() if needs and isinstance(value, Tensor) and value.is_floating_point() else value


def _replace(node: Node, value: Any) -> None:
    if isinstance(value, Node):
        node.replace_all_uses_with(value)
    else:
        for user in list(node.users):
            assert user.target.__name__ == "getitem", f"{node} returns a tuple that is used whole by {user}"  # type: ignore[union-attr]
            item = value[user.args[1]]
            if isinstance(item, Node):
                user.replace_all_uses_with(item)
            else:
                _replace_by_constant(user, item)
            user.graph.erase_node(user)
    node.graph.erase_node(node)


def _replace_by_constant(node: Node, value: Any) -> None:
    def swap(argument: Node) -> Any:
        return value if argument is node else argument

    for reader in list(node.users):
        reader.args = torch.fx.map_arg(reader.args, swap)
