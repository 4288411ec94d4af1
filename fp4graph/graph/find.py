"""Finds the matrix work of a captured graph: the first pass of :mod:`fp4graph.graph.rewrite`.

The pass opens nodes that hide products, takes the markers out of the graph, and describes every matrix operation as
the table of :mod:`fp4graph.graph.operations` has it: a :class:`FoundProduct` may become a site, a :class:`FoundWork`
cannot. The policy is asked about nothing but operations that are opened only for a rule that wants their products.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fp4graph import torch_internals
from fp4graph.graph import experts, flops, operations, products
from fp4graph.graph.expand import inline, write_out
from fp4graph.graph.experts import WrittenOut
from fp4graph.graph.found import Formula, Found, FoundProduct, FoundWork, Markers
from fp4graph.graph.marker import Marker
from fp4graph.graph.names import Names
from fp4graph.graph.operations import NoProduct, Sizes, Verdict, operation_of, read_product, tag_of
from fp4graph.graph.products import Product, name_of, origin, value_of, view_source
from fp4graph.graph.roles import routers
from fp4graph.graph.writes import writes
from fp4graph.technique.site import SiteView

_GATHERED = (
    "it multiplies each token with a copy of its expert's matrix; to quantize it expert by expert, pick the copies as "
    "w[ids] from a parameter w [E, K, N] and multiply with them as they are, or write it as a grouped product, in "
    "transformers with experts_implementation='grouped_mm'"
)
_OF_WEIGHTS = "it multiplies the model's own tensors alone, as spectral_norm does to compute a weight"
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
        names: of the model's modules and parameters.
        wants: whether a rule wants a site of this kind at this place, for which an operation has to be opened.
        keys: fully qualified name of the module that a marker's key belongs to, by the key's id.
    """
    finder = Finder(names, wants, keys or {})
    graphs = [module for module in gm.modules() if isinstance(module, GraphModule)]
    names.learn([node for module in graphs for node in module.graph.nodes])
    for node in gm.graph.find_nodes(op="placeholder"):
        if any(Marker.read(user) is None for user in node.users):
            finder.found.read.update(names.owners(node))
    finder.walk(gm, Markers())
    return finder.found


class Finder:
    """Describes matrix work, node by node; the arguments are those of :func:`find`."""

    def __init__(self, names: Names, wants: Callable[[SiteView], bool], keys: Mapping[int, str]) -> None:
        self.found = Found()
        self._names = names
        self._wants = wants
        self._keys = keys
        self._visited: set[int] = set()  # a body may be shared
        self._routers: set[Node] = set()
        self._counted: dict[Any, bool] = {}
        self.writes = 0  # operations so far that wrote into a tensor

    def walk(self, gm: GraphModule, markers: Markers) -> None:
        """Describe the matrix work of ``gm`` and of the bodies inside it."""
        self.found.bodies.append(gm)
        self._open_all(gm, markers)
        self._routers |= routers(gm.graph.nodes)
        for node in list(gm.graph.nodes):
            self._visit(node, gm, markers)

    def _visit(self, node: Node, gm: GraphModule, markers: Markers) -> None:
        if (marker := Marker.read(node)) is not None:
            self._take(marker, markers)
            gm.graph.erase_node(node)
            return
        self.writes += writes(node)
        if node.op == "placeholder":
            self._enter(node, markers.outside(node))
        elif isinstance(node.target, torch_internals.HigherOrderOperator) and operation_of(node) is None:
            self._higher_order(node, gm, markers)
        elif (written := self.written_out(node, markers)) is not None:
            replacement = write_out(gm, node, written.function, written.nodes)
            self.found.replacements.append(replacement)
            for new in replacement.nodes:
                self._visit(new, gm, markers)
        else:
            if (work := self.describe(node, markers)) is not None:
                self.found.work.append(work)
            values = ((n, value_of(n)) for n in node.all_input_nodes)
            inputs = {n: value for n, value in values if value is not None}
            experts.follow(node, value_of(node), inputs, self.writes)

    def _take(self, marker: Marker, markers: Markers) -> None:
        """Record a marker of the captured graph."""
        key, step = markers.outside(marker.key), markers.outside(marker.step)
        example = getattr(key.meta.get("grapharg"), "example", None)
        marker = dataclasses.replace(marker, module=self._keys.get(id(example)))
        markers.add(marker)
        if marker.module is not None:
            self.found.keys[key] = marker.module
        self.found.steps.add(step)
        # Another tensor in each forward, because the backward of one may come after the next forward. A CUDA
        # graph that took it for static would be recorded at every step; this one copies the five numbers.
        torch_internals.unmark_static(step)
        self.found.marked.add(marker.module)

    def _enter(self, node: Node, outside: Node) -> None:
        """Mark an input of a graph, or of a body in it, which stands for the node ``outside``."""
        value = value_of(node)
        if value is not None and self._names.is_parameter(outside):
            node.meta[experts.AXES] = value.dim()
        if experts.COPIES in outside.meta and outside is not node:
            node.meta[experts.COPIES] = experts.OTHERWISE  # what a body is given may have been written into

    def opening(self, node: Node, markers: Markers) -> Callable[..., Any] | None:
        """Return the function that is to take the place of ``node``, its products in sight; None leaves the node."""
        module = self._names.module(node)

        def wanted(kind: str, sizes: Sizes) -> bool:
            if kind == "product":
                kind = "linear" if self._multiplies_parameter(node, markers) else "matmul"
            return self._wants(self._names.view(module, kind, sizes))

        return operations.opening(node, wanted)

    def _open_all(self, gm: GraphModule, markers: Markers) -> None:
        """Replace the nodes of ``gm`` (not of its submodules) that hide products by what they consist of.

        What an opened node consists of may hide products too. The products of one that was opened because a rule asks
        for it are tagged with what it is: ``meta["fp4graph_op"] = "sdpa"``.
        """
        opened = True
        while opened:
            opened = False
            for node in list(gm.graph.nodes):
                if (function := self.opening(node, markers)) is not None:
                    inline(gm, node, function, tag=tag_of(node))
                    opened = True

    def _higher_order(self, node: Node, gm: GraphModule, markers: Markers) -> None:
        """Walk the bodies of a higher-order op where rewriting them is sound, else list the products inside.

        An op that is given a matrix parameter and holds products, such as an ``autograd.Function``, is itself a product
        that cannot be quantized.
        """
        name = getattr(node.target, "_name", str(node.target))
        multiplies = False
        for place, argument in enumerate(node.args):
            if not (isinstance(argument, Node) and argument.op == "get_attr"):
                continue
            inner = getattr(gm, str(argument.target), None)
            if not isinstance(inner, GraphModule) or id(inner) in self._visited:
                continue
            self._visited.add(id(inner))
            if name in _TRANSPARENT:
                self.walk(inner, Markers(_placeholders(node, inner, markers)))
                continue
            for inside in list(inner.graph.nodes):
                if Marker.read(inside) is not None:
                    inner.graph.erase_node(inside)
                elif (read := read_product(inside)) is not None:
                    if name == "autograd_function_apply" and place > 0:
                        continue  # the body of its backward
                    op = read.op if isinstance(read, NoProduct) else "matmul"
                    reason = f"inside {name}, which is not rewritten"
                    self.found.work.append(self._work(inside, op, reason, Verdict.KEEP, markers))
                    multiplies |= isinstance(read, Product)
            inner.recompile()
        if multiplies and self._multiplies_parameter(node, markers):
            reason = "the operation has a backward of its own"
            self.found.work.append(self._work(node, name, reason, Verdict.LIKE_LINEAR, markers, lambda *_, **__: 0))

    def describe(self, node: Node, markers: Markers) -> FoundProduct | FoundWork | None:
        """Return what ``node`` is, or None where it does no matrix work."""
        read, operation = read_product(node), operation_of(node)
        if isinstance(read, Product):
            if self._weight_first(read, markers) is not None:
                return self._work(node, name_of(node), _GATHERED, Verdict.LIKE_EXPERTS, markers)
            return self._product(read, markers)
        if read is not None and operation is not None:
            verdict, reason = read.verdict, read.reason
            if verdict is None:
                verdict = Verdict.LIKE_LINEAR if self._multiplies_parameter(node, markers) else Verdict.KEEP
            if verdict is Verdict.LIKE_LINEAR and self._computes_weight(node, markers):
                verdict, reason = Verdict.KEEP, _OF_WEIGHTS
            work = self._work(node, read.op, reason, verdict, markers, operation.flops)
            return dataclasses.replace(work, supported=operations.opens_on_request(node))
        if node.op not in ("call_function", "call_method") or view_source(node) is not None:
            return None
        if operations.is_foreign(node) and self._multiplies_parameter(node, markers):
            return self._work(node, name_of(node), "an operation of another library", Verdict.LIKE_LINEAR, markers)
        if self._counts(node):
            return self._work(node, name_of(node), "fp4graph does not know this operation", Verdict.UNKNOWN, markers)
        return None

    def written_out(self, node: Node, markers: Markers) -> WrittenOut | None:
        """Return what takes the place of a product with copies of experts' matrices; None for any other node, and for
        a product that cannot be written out."""
        read = read_product(node)
        if not isinstance(read, Product) or (weight_first := self._weight_first(read, markers)) is None:
            return None
        return experts.written_out(read, self.writes, weight_first=weight_first)

    def _weight_first(self, product: Product, markers: Markers) -> bool | None:
        """Return whether it is the first factor that is copies of experts' matrices; None where neither is."""
        pairs = ((product.b, product.a, False), (product.a, product.b, True))
        for factor, other, first in pairs[: 2 if product.form == "matmul" else 1]:  # others may be given learned tokens
            copies, value = factor.meta.get(experts.COPIES), value_of(factor)
            if copies is None or value is None or value.dim() < 3:
                continue
            if copies != experts.CHANGED or not self._is_matrix_parameter(other, markers):
                return first
        return None

    def _counts(self, node: Node) -> bool:
        """Return whether torch's FLOP counter finds products in an operation that the table does not know.

        One node of each operation, and of each number of axes of its tensors, is counted for all.
        """
        values = [value for given in node.all_input_nodes if (value := value_of(given)) is not None]
        if not values or operations.is_collective(node):
            return False
        options = (arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, str | bool))
        kind = (node.target, *((value.dim(), value.dtype) for value in values), *options)
        if kind not in self._counted:
            self._counted[kind] = bool(flops.of_node(node))
        return self._counted[kind]

    def _work(
        self, node: Node, op: str, reason: str, verdict: Verdict, markers: Markers, formula: Formula = None
    ) -> FoundWork:
        module = self._names.module(node)
        marked = markers.marker_of(node) if module is None and verdict is not Verdict.KEEP else None
        view = self._names.view(module if marked is None else marked.marker.module, op)
        places = None if marked is None else marked.marker.tag.rules
        return FoundWork(node, module, view, places, reason, verdict, formula)

    def _product(self, product: Product, markers: Markers) -> FoundProduct:
        node = product.node
        weight, views = origin(product.b)
        placeholder = markers.outside(weight)
        is_parameter = self._names.is_parameter(placeholder)
        marked = markers.marker_of(node, weight)
        owner = marked.owner if marked is not None else None
        if owner is None and is_parameter:
            owner = self._names.owner(placeholder, node)
        module = owner.module if owner is not None else self._names.module(node)
        if module is None and marked is not None:
            module = marked.marker.module
        has_weight = product.form == "linear" or is_parameter
        a, b = product.shapes
        weight_first = (
            product.form == "matmul"
            and self._is_matrix_parameter(product.a, markers)
            and not self._is_matrix_parameter(product.b, markers)
        )
        form = "grouped" if product.form == "grouped" else "linear" if has_weight else "matmul"
        op = node.meta.get("fp4graph_op") or form
        sizes = _static(a[-1]), _static(b[0 if product.form == "linear" else -1]), _static(math.prod(b))
        parameter = None if owner is None else owner.parameter
        view = self._names.view(module, op, sizes, products.producer_of(product.a), parameter)
        if has_weight and view.role is None and node in self._routers:
            view = dataclasses.replace(view, role="router")
        reason = "its first factor is the parameter; write it as F.linear to quantize it"
        work = self._work(node, name_of(node), reason, Verdict.LIKE_LINEAR, markers) if weight_first else None
        newcomer, caller = self._names.newcomer(node), self._names.module(node)
        return FoundProduct(product, view, marked, owner, views, has_weight, work, newcomer, caller)

    def _multiplies_parameter(self, node: Node, markers: Markers) -> bool:
        """Return whether an input of ``node`` is a parameter of two or more axes, or a view of one."""
        return any(self._is_matrix_parameter(argument, markers) for argument in node.all_input_nodes)

    def _computes_weight(self, node: Node, markers: Markers) -> bool:
        """Return whether ``node`` is made of the model's parameters and buffers alone."""
        seen, pending = {node}, [node]
        while pending:
            one = markers.outside(pending.pop())
            if one.op == "placeholder" and not self._names.is_of_model(one):
                return False
            pending += [source for source in one.all_input_nodes if source not in seen]
            seen.update(one.all_input_nodes)
        return True

    def _is_matrix_parameter(self, node: Node, markers: Markers) -> bool:
        value = value_of(node)
        return value is not None and value.dim() >= 2 and self._names.is_parameter(markers.outside(origin(node)[0]))


def _placeholders(node: Node, inner: GraphModule, markers: Markers) -> dict[Node, Node]:
    """Map each placeholder of ``inner``, the body of the higher-order op ``node``, to the node that it stands for."""
    places = [n for n in inner.graph.nodes if n.op == "placeholder"]
    given = [argument for argument in node.args if isinstance(argument, Node) or argument is None]
    operands = given[-len(places) :] if places else []
    pairs = zip(places, operands, strict=True)
    return {place: markers.outside(operand) for place, operand in pairs if isinstance(operand, Node)}


def _static(size: int | torch.SymInt) -> int | None:
    return size if isinstance(size, int) else None
