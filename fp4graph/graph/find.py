"""Finds the matrix work of a captured graph: the first pass of :mod:`fp4graph.graph.rewrite`.

The pass opens nodes that hide products, removes the markers from the graph, and describes every matrix operation by the
table of :mod:`fp4graph.graph.operations`: a :class:`FoundProduct` may become a site, a :class:`FoundWork` cannot. It
asks the policy only about operations that are opened where a rule wants their products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from torch.fx import GraphModule, Node

from fp4graph import torch_internals
from fp4graph.graph.arguments import in_order
from fp4graph.graph.describe import Describer
from fp4graph.graph.expand import inline, write_out
from fp4graph.graph.experts import follow
from fp4graph.graph.found import Body, Found, Markers
from fp4graph.graph.marker import Marker
from fp4graph.graph.names import Names
from fp4graph.graph.operations import NoProduct, Verdict, operation_of, read_product, tag_of
from fp4graph.graph.products import Product, value_of
from fp4graph.graph.roles import routers
from fp4graph.graph.shared import bodies_of, separate
from fp4graph.graph.writes import writes
from fp4graph.technique.site import SiteView

#: Higher-order ops whose bodies run once, as written, on the operands at the end of their arguments.
_TRANSPARENT = frozenset({
    "tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint", "wrap_with_set_grad_enabled",
    "wrap_with_autocast", "invoke_subgraph", "hints_wrapper",
})  # fmt: skip


def find(
    gm: GraphModule, names: Names, wants: Callable[[SiteView], bool], keys: Mapping[int, str] | None = None
) -> Found:
    """Find the matrix work of ``gm`` and of the bodies inside it, and take their markers out.

    Args:
        gm: a graph as Dynamo hands it to a backend.
        names: the names of the model's modules and parameters.
        wants: returns whether a rule may quantize a site of this kind at this place; if so, an operation is opened.
        keys: fully qualified name of the module that a marker's key belongs to, by the key's id.
    """
    separate(gm, names)
    finder = _Finder(Describer(names, wants), keys or {})
    graphs = [module for module in gm.modules() if isinstance(module, GraphModule)]
    nodes = [node for module in graphs for node in module.graph.nodes]
    for node in nodes:
        if node.kwargs and node.op in ("call_function", "call_method"):
            node.args, node.kwargs = in_order(node.target, node.args, node.kwargs)
    names.learn(nodes)
    for node in gm.graph.find_nodes(op="placeholder"):
        if any(Marker.read(user) is None for user in node.users):
            finder.found.read.update(names.owners(node))
    finder.walk(gm, Markers())
    return finder.found


class _Finder:
    """Walks graphs node by node; ``keys`` is the argument of :func:`find`."""

    def __init__(self, describer: Describer, keys: Mapping[int, str]) -> None:
        self.found = Found()
        self._describer, self._keys = describer, keys
        self._visited: set[int] = set()  # an op may take a body twice

    def walk(self, gm: GraphModule, markers: Markers) -> None:
        """Describe the matrix work of ``gm`` and of the bodies inside it."""
        self.found.bodies.append(gm)
        self._open_all(gm, markers)
        self._describer.routers |= routers(gm.graph.nodes)
        for node in list(gm.graph.nodes):
            self._visit(node, gm, markers)

    def _visit(self, node: Node, gm: GraphModule, markers: Markers) -> None:
        if (marker := Marker.read(node)) is not None:
            self._take(marker, markers)
            gm.graph.erase_node(node)
            return
        describer = self._describer
        describer.writes += writes(node)
        if node.op == "placeholder":
            describer.enter(node, markers.outside(node))
        elif isinstance(node.target, torch_internals.HigherOrderOperator) and operation_of(node) is None:
            self._higher_order(node, gm, markers)
        elif (written := describer.written_out(node, markers)) is not None:
            replacement = write_out(gm, node, written.function, written.nodes)
            self.found.replacements.append(replacement)
            for new in replacement.nodes:
                self._visit(new, gm, markers)
        else:
            if (work := describer.describe(node, markers)) is not None:
                self.found.work.append(work)
            values = ((n, value_of(n)) for n in node.all_input_nodes)
            inputs = {n: value for n, value in values if value is not None}
            follow(node, value_of(node), inputs, describer.writes)

    def _take(self, marker: Marker, markers: Markers) -> None:
        """Record a marker of the captured graph."""
        key, step = markers.outside(marker.key), markers.outside(marker.step)
        example = getattr(key.meta.get("grapharg"), "example", None)
        marker = dataclasses.replace(marker, module=self._keys.get(id(example)))
        markers.add(marker)
        if marker.module is not None:
            self.found.keys[key] = marker.module
        self.found.steps.add(step)
        # The step is a new tensor in each forward, because a backward may run after the next forward. For a static
        # input that moves, a CUDA graph would be recorded at every step; otherwise the graph copies its five numbers.
        torch_internals.unmark_static(step)
        self.found.marked.add(marker.module)

    def _open_all(self, gm: GraphModule, markers: Markers) -> None:
        """Open the nodes of ``gm`` (not of its submodules) that hide products, until no such node is left.

        If a node is opened because a rule asks for its kind, its products are tagged with the kind:
        ``meta["fp4graph_op"] = "sdpa"``.
        """
        opened = True
        while opened:
            opened = False
            for node in list(gm.graph.nodes):
                if (function := self._describer.opening(node, markers)) is not None:
                    inline(gm, node, function, tag=tag_of(node))
                    opened = True

    def _higher_order(self, node: Node, gm: GraphModule, markers: Markers) -> None:
        """Walk the bodies of a higher-order op if rewriting them is sound, else list the products inside.

        An op with products inside that takes a matrix parameter, such as an ``autograd.Function``, is itself listed as
        work that cannot be quantized.
        """
        name = getattr(node.target, "_name", str(node.target))
        multiplies = False
        for place, _, inner in bodies_of(node, gm):
            if id(inner) in self._visited:
                continue
            self._visited.add(id(inner))
            if name in _TRANSPARENT:
                operands = _operands(node, inner)
                grows = bool(operands) and name != "hints_wrapper"  # that op takes its operands as a tuple
                self.walk(inner, Markers(Body(node, inner.graph, operands, markers, grows)))
                continue
            for inside in list(inner.graph.nodes):
                if Marker.read(inside) is not None:
                    inner.graph.erase_node(inside)
                elif (read := read_product(inside)) is not None:
                    if name == "autograd_function_apply" and place > 0:
                        continue  # the body of its backward
                    op = read.op if isinstance(read, NoProduct) else "matmul"
                    reason = f"inside {name}, which is not rewritten"
                    self.found.work.append(self._describer.work(inside, op, reason, Verdict.KEEP, markers))
                    multiplies |= isinstance(read, Product)
            inner.recompile()
        if multiplies and self._describer.multiplies_parameter(node, markers):
            reason = "the operation has a backward of its own"
            self.found.work.append(
                self._describer.work(node, name, reason, Verdict.LIKE_LINEAR, markers, lambda *_, **__: 0)
            )


def _operands(node: Node, inner: GraphModule) -> dict[Node, Node]:
    """Map each placeholder of ``inner``, the body of the higher-order op ``node``, to the operand of ``node``."""
    places = [n for n in inner.graph.nodes if n.op == "placeholder"]
    arguments = [argument for argument in node.args if isinstance(argument, Node) or argument is None]
    operands = arguments[-len(places) :] if places else []
    pairs = zip(places, operands, strict=True)
    return {place: operand for place, operand in pairs if isinstance(operand, Node)}
