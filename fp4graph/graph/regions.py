"""Moves writes of state out of checkpointed regions, which the backward runs again.

The second run must not read what the first run wrote, so the graph passes the region a copy of the state, which both
runs read. The region writes to a second copy and returns it. The graph writes the copy that the first run returned to
the state, and drops the copy that the second run returned.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fp4graph.graph.products import value_of
from fp4graph.numerics import declare

#: Higher-order ops whose body the backward runs again.
_RECOMPUTED = frozenset({"tag_activation_checkpoint", "wrap_activation_checkpoint"})

# Not `clone`, which Inductor removes from a graph: the backward would then start from the state after the write.
COPY = declare.operator("copy(Tensor x) -> Tensor", Tensor.clone, CompositeExplicitAutograd=Tensor.clone)


def separate_writes(bodies: Iterable[GraphModule], written: set[Node]) -> None:
    """Change checkpointed regions, in place, to return the state that their forward writes.

    Args:
        bodies: a graph and the bodies inside it, each before the bodies that it holds.
        written: the nodes of state that forwards write; the placeholders of regions are among them.
    """
    returned: dict[GraphModule, list[int]] = {}  # regions may share a body
    for graph in reversed(list(bodies)):
        for region in list(graph.graph.nodes):
            if getattr(region.target, "_name", None) in _RECOMPUTED:
                body = getattr(graph, region.args[0].target)
                if body not in returned:
                    returned[body] = _return_writes(body, written)
                written |= _write_after(region, returned[body])


def _return_writes(body: GraphModule, written: set[Node]) -> list[int]:
    """Change ``body`` to write to copies of its inputs and to return them last; return the places of these inputs."""
    inputs = body.graph.find_nodes(op="placeholder")
    places = [place for place, node in enumerate(inputs) if node in written]
    (results,) = body.graph.find_nodes(op="output")
    for place in places:
        with body.graph.inserting_after(inputs[-1]):
            copy = _copy(inputs[place])
        inputs[place].replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
        results.args = ((*results.args[0], copy),)
    return places


def _write_after(region: Node, places: list[int]) -> set[Node]:
    """Pass ``region`` copies of its inputs at ``places``, and write its last results to the inputs; return these."""
    graph, values = region.graph, region.meta["example_value"]
    arguments, following, written = list(region.args), region.next, set()
    for place in places:
        state: Any = arguments[place + 1]
        with graph.inserting_before(region):
            arguments[place + 1] = copy = _copy(state)
        # A recomputed copy would be one of the state after the write.
        copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        with graph.inserting_before(following):
            result = graph.call_function(operator.getitem, (region, len(values)))
            graph.call_method("copy_", (state, result))
        values = (*values, value_of(state))
        written.add(state)
    region.args, region.meta["example_value"] = tuple(arguments), values
    return written


def _copy(node: Node) -> Node:
    copy = node.graph.call_function(COPY, (node,))
    copy.meta["example_value"] = value_of(node)
    return copy
