"""Runs a rewritten graph node by node, to find where a value or a gradient stops being finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.hooks import RemovableHandle

from fp4graph.errors import NonFiniteError
from fp4graph.graph.names import Names
from fp4graph.graph.nested import nested
from fp4graph.graph.writes import writes


class Watch:
    """A search for NaN and Inf over all graphs that are captured while it lasts."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._handles: list[RemovableHandle] = []

    def backend(self, gm: GraphModule, example_inputs: list[Any]) -> Watcher:
        """Return the watcher that runs a captured graph: the torch.compile backend."""
        return Watcher(gm, self._names, self._handles)

    def close(self) -> None:
        """Remove the hooks, which parameters would otherwise keep."""
        for handle in self._handles:
            handle.remove()


class Watcher(Interpreter):
    """Raises NonFiniteError if an output of the graph, or a gradient in it, is NaN or Inf.

    NaN and Inf that do not reach an output are ignored, because attention masks use infinities. The error names the
    first node that made NaN or Inf of finite values.

    ``handles`` is the list to which the hooks on gradients are added.
    """

    def __init__(self, gm: GraphModule, names: Names, handles: list[RemovableHandle]) -> None:
        super().__init__(gm)
        self._names = names
        self._handles = handles
        self._suspects: list[Node] = []
        self._tainted: set[Node] = set()
        self._writers: dict[Node, Node] = {}  # by node whose value became NaN or Inf by a write: the writing node
        self._repaired: set[Node] = set()

    def __call__(self, *args: Any) -> Any:
        """Run one forward."""
        self._suspects, self._tainted, self._writers, self._repaired = [], set(), {}, set()
        result = self.run(*args)
        self._check_result(self.graph.output_node())  # run() adds a traceback to the errors of nodes
        return result

    def run_node(self, n: Node) -> Any:
        """Run one node, check its result, and hook the gradient of the result."""
        result = super().run_node(n)
        if n.op == "output":
            return result
        from_finite = not any(map(self._is_tainted, n.all_input_nodes))
        changed = self._after_write() if writes(n) else set()
        if changed or not all(map(_finite, _floats(result))):
            if from_finite:
                self._suspects.append(n)
            self._tainted |= {n, *changed}
            self._writers |= dict.fromkeys(changed, n)
        for tensor in _floats(result):
            if tensor.requires_grad:
                self._handles.append(tensor.register_hook(self._gradient_hook(n)))  # type: ignore[no-untyped-call]
        return result

    def _is_tainted(self, node: Node) -> bool:
        return node in self._tainted and node not in self._repaired

    def _after_write(self) -> set[Node]:
        """Return the nodes whose values a write has made NaN or Inf; note those that it has made finite again."""
        finite = {node: all(map(_finite, _floats(value))) for node, value in self.env.items()}
        self._repaired = {node for node in self._tainted if finite.get(node, node in self._repaired)}
        return {node for node, is_finite in finite.items() if not is_finite and node not in self._tainted}

    def _check_result(self, output: Node) -> None:
        if not any(map(self._is_tainted, output.all_input_nodes)):
            return
        ancestors = self._tainted_ancestors(output)
        origin = next(node for node in self._suspects if node in ancestors)
        if origin.op == "placeholder":
            raise NonFiniteError("it was not finite before this forward", site=f"{self._described(origin)}, forward")
        raise NonFiniteError("it made NaN or Inf of finite values", site=f"{self._described(origin)}, forward")

    def _tainted_ancestors(self, node: Node) -> set[Node]:
        """Return the nodes from which NaN or Inf reached ``node`` without an operation that removed it in between."""
        ancestors: set[Node] = set()
        waiting = [node]
        while waiting:
            node = waiting.pop()
            sources = {*node.all_input_nodes, self._writers.get(node, node)}
            parents = (sources & self._tainted) - ancestors
            ancestors |= parents
            waiting += parents
        return ancestors

    def _gradient_hook(self, node: Node) -> Any:
        def check(grad: Tensor) -> None:
            if _finite(grad):
                return
            users = [user for user in node.users if user.op != "output"]
            if not users:
                raise NonFiniteError(
                    "the gradient that reaches the model's output is not finite: it arose in the loss, or in its scale",
                    site="the loss, backward",
                )
            where = " and ".join(dict.fromkeys(map(self._described, users)))
            raise NonFiniteError(
                f"it made a gradient of NaN or Inf for {self._described(node)}", site=f"{where}, backward"
            )

        return check

    def _described(self, node: Node) -> str:
        if "site" in node.kwargs:
            return str(node.kwargs["site"])
        if node.op == "placeholder":
            owner = self._names.owner(node, next(iter(node.users), node)) if self._names.is_parameter(node) else None
            return ".".join(filter(None, owner)) if owner is not None else f"input {node.name}"
        module = self._names.module(node)
        return f"{module or '(root)'} ({getattr(node.target, '__name__', node.target)})"


def _floats(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in nested(value, Tensor) if leaf.is_floating_point())


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x.detach()).all())
