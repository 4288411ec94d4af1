"""Nodes without a graph for the tensors of a forward that no compiler captured."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.utils.weak import WeakTensorKeyDictionary

from fp4graph.graph import experts
from fp4graph.graph.names import Names
from fp4graph.graph.products import PRODUCER, producer_of
from fp4graph.torch_internals import pytree


@dataclass(frozen=True)
class _Given:
    """A tensor that the pass was given, as Dynamo describes the input of a graph."""

    example: Tensor


class Nodes:
    """The nodes that stand for the tensors of one forward, each with what the passes read in its meta data.

    Args:
        names: of the model's modules and parameters.
        produced: the operation that made a tensor, by the tensor; of tensors that earlier forwards returned.
    """

    def __init__(self, names: Names, produced: MutableMapping[Tensor, str | None]) -> None:
        self._names, self._produced = names, produced
        self._graph = Graph()  # nodes name it as theirs, and none is in it
        self._nodes: MutableMapping[Tensor, Node] = WeakTensorKeyDictionary()

    def call(self, op: str, target: Any, args: Any, kwargs: Any) -> Node:
        """Return a new node, of the call of an operation."""
        return Node(self._graph, "", op, target, args, kwargs)

    def of(self, x: Tensor) -> Node:
        """Return the node of a tensor: of the operation that returned it, or that of an input."""
        node = self._nodes.get(x)
        if node is None:
            self._nodes[x] = node = self.call("placeholder", "input", (), {})
            if isinstance(x, nn.Parameter):
                node.meta |= {"grapharg": _Given(x), "example_value": x, experts.AXES: x.dim()}
            elif self._names.is_buffer(x):
                node.meta["grapharg"] = _Given(x)
            elif x in self._produced:
                node.meta[PRODUCER] = self._produced[x]
        return node

    def own(self, x: Tensor) -> Node:
        """Return the node of a tensor that the model holds."""
        node = self.of(x)
        node.meta["example_value"] = x
        return node

    def remember(self, result: Any, node: Node, *, written: bool) -> None:
        """Name what ``node`` returned; copies of experts' matrices that it has ``written`` into keep their name."""

        def name(x: Tensor, own: Node) -> None:
            old = self._nodes.get(x)
            if not (written and old is not None and experts.COPIES in old.meta):
                self._nodes[x] = own

        if isinstance(result, Tensor):
            if not isinstance(result, nn.Parameter):
                name(result, node)
        elif isinstance(result, tuple | list):
            for index, item in enumerate(result):
                if isinstance(item, Tensor):
                    part = self.call("call_method", "__getitem__", (node, index), {})
                    part.meta |= {key: node.meta[key] for key in (experts.AXES, experts.COPIES) if key in node.meta}
                    name(item, part)

    def finish(self, result: Any) -> None:
        """Remember which operations made the tensors of ``result``, for the forwards after this one."""
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and (node := self._nodes.get(leaf)) is not None and node.op != "placeholder":
                self._produced[leaf] = producer_of(node)
