"""Opens nodes that hide matrix products: replaces each by the trace of a Python function that computes the same.

:data:`fp4graph.graph.operations.TABLE` says which function belongs to which operation: torch's own where there is one,
else one of :mod:`fp4graph.graph.attention` or :mod:`fp4graph.graph.contractions`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fp4graph import torch_internals
from fp4graph.torch_internals import pytree


def inline(gm: GraphModule, node: Node, function: Callable[..., Any], tag: str | None = None) -> None:
    """Replace ``node`` by a trace of ``function`` on its arguments; the new nodes inherit its place in the model."""
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    positions = [i for i, arg in enumerate(flat) if isinstance(arg, Node)]
    inputs: list[Node] = list(dict.fromkeys(flat[i] for i in positions))
    values = [n.meta.get("example_value", n.meta.get("val")) for n in inputs]

    def on_tensors(*tensors: Any) -> Any:
        given = dict(zip(inputs, tensors, strict=True))
        args, kwargs = pytree.tree_unflatten([given[x] if isinstance(x, Node) else x for x in flat], spec)
        return function(*args, **kwargs)

    fake_mode = next(value.fake_mode for value in values if isinstance(value, torch_internals.FakeTensor))
    # Trace before autograd and autocast, so that linear stays linear and the caller's autocast still decides dtypes.
    # The caller may itself run on fake tensors (explain), in another mode than Dynamo's.
    with torch_internals.without_dispatch_modes(), fake_mode:
        traced = make_fx(on_tensors, pre_dispatch=True)(*values)
    _replace(node, _splice(gm, node, traced, inputs, tag))
    gm.graph.lint()


def _splice(gm: GraphModule, node: Node, traced: GraphModule, inputs: list[Node], tag: str | None) -> Any:
    """Copy the nodes of ``traced`` before ``node``, and return its output as nodes of the graph."""
    graph: Graph = gm.graph
    kept = ("nn_module_stack", "stack_trace", "source_fn_stack")
    place: dict[str, Any] = {key: value for key, value in node.meta.items() if key in kept}
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
                mapping[new].meta = {**place, "example_value": new.meta.get("val")}
    return output


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
