"""Nodes without a graph for the tensors of a forward that no compiler captured."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.utils.weak import WeakTensorKeyDictionary

from fp4graph import torch_internals
from fp4graph.graph import experts
from fp4graph.graph.names import Names
from fp4graph.graph.nested import nested
from fp4graph.graph.products import PRODUCER, SHAPE, producer_of
from fp4graph.torch_internals import pytree

#: Attributes that are views of the tensor; the pass does not see reads of other attributes.
_VIEW_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data"})
#: Operations that pick one matrix of a stack by its number.
_SELECTS = frozenset({"__getitem__", "select", torch.select})
#: Views that take only a dtype or a shape from a tensor: the method that takes these themselves.
_LIKE: Mapping[str, tuple[str, Callable[[Tensor], tuple[Any, ...]]]] = {
    "type_as": ("to", lambda other: (other.device, other.dtype)),
    "view_as": ("view", lambda other: (other.shape,)),
    "reshape_as": ("reshape", lambda other: (other.shape,)),
    "expand_as": ("expand", lambda other: (other.shape,)),
}
_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType)


@dataclass(frozen=True)
class _Input:
    """An input tensor of the pass, in the form in which Dynamo describes the input of a graph."""

    example: Tensor


class Nodes:
    """The nodes that stand for the tensors of one forward, each with the meta data that the passes read.

    Args:
        names: the names of the model's modules and parameters.
        produced: maps tensors that earlier forwards returned to the operations that made them.
    """

    def __init__(self, names: Names, produced: MutableMapping[Tensor, str | None]) -> None:
        self._names, self._produced = names, produced
        self._graph = Graph()  # a node must name a graph; this one stays empty
        self._nodes: MutableMapping[Tensor, Node] = WeakTensorKeyDictionary()

    def call(self, op: str, target: Any, args: Any, kwargs: Any) -> Node:
        """Return a new node for the call of an operation."""
        return Node(self._graph, "", op, target, args, kwargs)

    def of_call(self, call: partial[Any], inputs: dict[Node, Tensor]) -> Node | None:
        """Return a new node for the call of a function of torch, as Dynamo makes it; None if the call makes no tensor.

        Add the tensors that the call reads to ``inputs``, by their nodes.
        """

        def node_of(x: Tensor) -> Node:
            node = self.of(x)
            inputs[node] = x
            return node

        op, target = _operation(call.func)
        if op is None:
            return None
        args, kwargs = pytree.tree_map_only(Tensor, node_of, (call.args, call.keywords))
        if op == "getattr":
            op, target, args = "call_function", getattr, (*args, target)
        if target in _LIKE:  # a later read of the view must not need a node whose value is gone
            target, read = _LIKE[target]
            args, kwargs = (args[0], *read(*call.args[1:], *call.keywords.values())), {}
        if target in _SELECTS:
            args, kwargs = _selected(args, kwargs, inputs)
        return self.call(op, target, args, kwargs)

    def of(self, x: Tensor) -> Node:
        """Return the node of a tensor: the operation that returned it, or an input."""
        node = self._nodes.get(x)
        if node is None:
            self._nodes[x] = node = self.call("placeholder", "input", (), {})
            if isinstance(x, nn.Parameter):
                node.meta |= {"grapharg": _Input(x), "example_value": x, experts.AXES: x.dim()}
            elif self._names.is_buffer(x):
                node.meta["grapharg"] = _Input(x)
            elif x in self._produced:
                node.meta[PRODUCER] = self._produced[x]
            elif torch_internals.backward_id() >= 0 and (parameter := self._names.detached_from(x)) is not None:
                # A recomputation gets the arguments of its region detached.
                self._nodes[x] = node = self.call("call_method", "detach", (self.of(parameter),), {})
        return node

    def held(self, x: Tensor) -> Node:
        """Return the node of a tensor that the model holds."""
        node = self.of(x)
        node.meta["example_value"] = x
        return node

    def remember(self, result: Any, node: Node, *, written: bool) -> None:
        """Map ``result`` to ``node``; copies of experts' matrices keep their node if they were ``written`` into."""

        def assign(x: Tensor, new: Node) -> None:
            new.meta[SHAPE] = tuple(x.shape)
            old = self._nodes.get(x)
            if not (written and old is not None and experts.COPIES in old.meta):
                self._nodes[x] = new

        if isinstance(result, Tensor):
            if not isinstance(result, nn.Parameter):
                assign(result, node)
        elif isinstance(result, tuple | list):
            for index, item in enumerate(result):
                if isinstance(item, Tensor):
                    part = self.call("call_method", "__getitem__", (node, index), {})
                    part.meta |= {key: node.meta[key] for key in (experts.AXES, experts.COPIES) if key in node.meta}
                    assign(item, part)

    def finish(self, result: Any) -> None:
        """Remember which operations made the tensors of ``result``, for the forwards after this one."""
        for leaf in nested(result, Tensor):
            if (node := self._nodes.get(leaf)) is not None and node.op != "placeholder":
                self._produced[leaf] = producer_of(node)


def _selected(args: Any, kwargs: Any, inputs: Mapping[Node, Tensor]) -> tuple[Any, Any]:
    """Return the arguments of a pick; in a pick from three or more axes 0-d tensors of integers become numbers.

    A loop over experts picks ``W[e]`` with such a tensor. The node must keep its value, because the state of the weight
    is picked by the same node. A pick of rows of a weight, ``W[ids]``, keeps the indices themselves.
    """
    stack = inputs.get(args[0]) if args and isinstance(args[0], Node) else None
    if stack is None or stack.dim() < 2 or (stack.dim() == 2 and experts.AXES not in args[0].meta):
        return args, kwargs

    def kept(node: Node) -> Any:
        index = inputs[node]
        if stack.dim() == 2:
            return index
        return node if index.dim() or index.dtype.is_floating_point or index.dtype is torch.bool else int(index)

    indices, kwargs = pytree.tree_map_only(Node, kept, (args[1:], kwargs))
    return (args[0], *indices), kwargs


@cache
def _operation(func: Callable[..., Any]) -> tuple[str | None, Any]:
    """Return the op and the target of Dynamo's node for a call of ``func``; None twice if the call makes no tensor."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        attribute = getattr(func, "__self__", None)
        name = getattr(attribute, "__name__", "")
        return ("getattr", name) if name in _VIEW_ATTRIBUTES else (None, None)
    if name in ("__set__", "__delete__"):
        return None, None
    if isinstance(func, _METHODS) or getattr(Tensor, name, None) is func:
        return "call_method", name
    return "call_function", func
