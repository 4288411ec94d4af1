"""Finds the matrix work of a captured graph: the first pass of :mod:`fp4graph.graph.rewrite`.

The pass opens nodes that hide products, takes the markers out of the graph, and describes every matrix operation as
the table of :mod:`fp4graph.graph.operations` has it: a :class:`FoundProduct` may become a site, a :class:`FoundWork`
cannot. The policy is asked about nothing but operations that are opened only for a rule that wants their products.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fp4graph import torch_internals
from fp4graph.graph import flops, operations, products
from fp4graph.graph.expand import inline
from fp4graph.graph.marker import Marker, module_stack
from fp4graph.graph.names import Names, Owner
from fp4graph.graph.operations import Sizes, operation_of, read_product, tag_of
from fp4graph.graph.products import NoProduct, Product, name_of, value_of, view_source
from fp4graph.graph.roles import routers
from fp4graph.technique.site import SiteView

_GATHERED = (
    "it multiplies each token with a copy of its expert's matrix; to quantize it expert by expert, pick the copies as "
    "w[ids] from a parameter w [E, K, N] and multiply with them as they are, or write it as a grouped product"
)
_OF_WEIGHTS = "it multiplies the model's own tensors alone, as spectral_norm does to compute a weight"
#: Higher-order ops whose bodies run once, as written, on the operands at the end of their arguments.
_TRANSPARENT = frozenset({
    "tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint", "wrap_with_set_grad_enabled",
    "wrap_with_autocast", "invoke_subgraph", "hints_wrapper",
})  # fmt: skip


@dataclass(frozen=True)
class Marked:
    """The marker that belongs to a product.

    It is the one that carries the product's weight, with the index of that weight, or else the one of the innermost
    module around the product.
    """

    marker: Marker
    weight: int | None = None

    @property
    def path(self) -> str | None:
        """The attribute path of the weight, from the marker's module."""
        return None if self.weight is None else self.marker.tag.weights[self.weight]

    @property
    def owner(self) -> Owner | None:
        """The owner of the weight, where the marker's own module is known."""
        if self.path is None or self.marker.module is None:
            return None
        path, _, name = self.path.rpartition(".")
        return Owner(f"{self.marker.module}.{path}".strip("."), name)


@dataclass(frozen=True)
class FoundWork:
    """Matrix work that cannot be quantized.

    Attributes:
        module: the module that the node was called in, or None.
        view: the work as the policy sees it, without sizes.
        places: indices of the rules whose predicates on the place hold, where only a marker knows the module.
        reason: why it cannot be quantized.
        like_linear: whether a linear layer could have been written in its place. Such work is kept as the policy keeps
            a linear layer, and is an error where the policy would quantize one.
        like_grouped: whether a grouped product could have been written in its place, too. Such work is an error also
            where the policy would quantize that.
        unknown: whether the table of operations lacks the operation. Such work is an error under every policy that
            quantizes anything, until a rule keeps it.
        formula: counts the FLOPs where torch's counter cannot, as ``Operation.flops``.
        supported: whether a rule could have the work quantized.
    """

    node: Node
    module: str | None
    view: SiteView
    places: tuple[int, ...] | None = None
    reason: str = ""
    like_linear: bool = False
    like_grouped: bool = False
    unknown: bool = False
    formula: Callable[..., int] | None = None
    supported: bool = False


@dataclass(frozen=True)
class FoundProduct:
    """A product of two matrices, which may become a site.

    Attributes:
        view: the product as policies and techniques see it.
        owner: owner of the parameter that is the second factor, or None.
        views: the chain of views from the parameter to the second factor, the first one applied first.
        has_weight: whether the second factor is a parameter.
        weight_first: the product as work that cannot be quantized, where the first factor is a parameter and the second
            is none; None elsewhere.
        newcomer: name of the module, if it joined the model after the names were taken.
        caller: name of the module that the product was called in, or None.
    """

    product: Product
    view: SiteView
    marked: Marked | None
    owner: Owner | None
    views: tuple[Node, ...]
    has_weight: bool
    weight_first: FoundWork | None
    newcomer: str | None
    caller: str | None

    @property
    def places(self) -> tuple[int, ...] | None:
        """Indices of the rules whose predicates on the place hold, where the marker knows it; None asks the policy."""
        return None if self.owner is not None or self.marked is None else self.marked.marker.tag.rules


@dataclass
class Found:
    """The content of a captured graph, and of the bodies inside it.

    Attributes:
        work: the matrix work, in the order of the graph.
        read: the parameters that the graph takes for more than to mark them.
        marked: the modules whose markers were found; None is a module that cannot be known.
        bodies: the graph and the bodies in it whose nodes may be replaced.
        keys: the graph's inputs that are noise keys, with the modules of the markers that carry them.
        steps: the graph's inputs that are the step of the forward.
    """

    work: list[FoundProduct | FoundWork] = field(default_factory=list)
    read: set[Owner] = field(default_factory=set)
    marked: set[str | None] = field(default_factory=set)
    bodies: list[GraphModule] = field(default_factory=list)
    keys: dict[Node, str] = field(default_factory=dict)
    steps: set[Node] = field(default_factory=set)


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


class Markers:
    """The markers found so far in a captured graph, or in the body of a higher-order op in it.

    Args:
        outer: the node of the captured graph that a placeholder of the body stands for.
    """

    def __init__(self, outer: Mapping[Node, Node] | None = None) -> None:
        self._outer = outer or {}
        self._by_weight: dict[Node, Marked] = {}
        self._by_module: dict[int | None, Marker] = {}  # None: the module whose forward the graph is

    def outside(self, node: Node) -> Node:
        """Return the node of the captured graph that ``node`` stands for."""
        return self._outer.get(node, node)

    def add(self, marker: Marker) -> None:
        """Record a marker, which belongs to the nodes after it."""
        for index, weight in enumerate(marker.weights):
            self._by_weight[weight] = Marked(marker, index)
        if not marker.tag.carried:
            self._by_module[marker.module_id] = marker

    def marker_of(self, node: Node, weight: Node | None = None) -> Marked | None:
        """Return the marker that carries ``weight``, else that of the innermost module around ``node`` that has one."""
        if weight is not None and weight in self._by_weight:
            return self._by_weight[weight]
        for identity in (*(caller.id for caller in reversed(module_stack(node))), None):
            if identity in self._by_module:
                return Marked(self._by_module[identity])
        return None


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

    def walk(self, gm: GraphModule, markers: Markers) -> None:
        """Describe the matrix work of ``gm`` and of the bodies inside it."""
        self.found.bodies.append(gm)
        self._open_all(gm, markers)
        self._routers |= routers(gm.graph.nodes)
        for node in list(gm.graph.nodes):
            if (marker := Marker.read(node)) is not None:
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
                gm.graph.erase_node(node)
            elif isinstance(node.target, torch_internals.HigherOrderOperator) and operation_of(node) is None:
                self._higher_order(node, gm, markers)
            elif (work := self.describe(node, markers)) is not None:
                self.found.work.append(work)
            else:
                self._follow_copies(node, markers)

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
                    self.found.work.append(self._work(inside, op, f"inside {name}, which is not rewritten"))
                    multiplies |= isinstance(read, Product)
            inner.recompile()
        if multiplies and self._multiplies_parameter(node, markers):
            reason = "the operation has a backward of its own"
            self.found.work.append(self._like_linear(node, name, reason, markers, lambda *_, **__: 0))

    def describe(self, node: Node, markers: Markers) -> FoundProduct | FoundWork | None:
        """Return what ``node`` is, or None where it does no matrix work."""
        read, operation = read_product(node), operation_of(node)
        if isinstance(read, Product):
            for factor, weight_first in ((read.b, False), (read.a, True)):
                if weight_first and read.form != "matmul":
                    continue  # what a linear layer or experts are given, say learned tokens
                changed = self._is_changed(factor, markers)
                if changed and self._is_matrix_parameter(read.b if weight_first else read.a, markers):
                    continue
                if changed or self._is_gathered_parameter(factor, markers):
                    gathered = products.gathered(read, weight_first=weight_first)
                    if gathered is None:
                        work = self._like_linear(node, name_of(node), _GATHERED, markers)
                        return dataclasses.replace(work, like_grouped=True)
                    return self._product(gathered, markers)
            return self._product(read, markers)
        if read is not None and operation is not None:
            weighs = read.weighs or self._multiplies_parameter(node, markers)
            if weighs and not operation.kept and self._computes_weight(node, markers):
                work = self._work(node, read.op, _OF_WEIGHTS, operation.flops)
            elif weighs and not operation.kept:
                work = self._like_linear(node, read.op, read.reason, markers, operation.flops)
            else:
                work = self._work(node, read.op, read.reason, operation.flops)
            return dataclasses.replace(work, supported=operations.opens_on_request(node))
        if node.op not in ("call_function", "call_method") or view_source(node) is not None:
            return None
        if operations.is_foreign(node) and self._multiplies_parameter(node, markers):
            return self._like_linear(node, name_of(node), "an operation of another library", markers)
        if self._counts(node):
            work = self._like_linear(node, name_of(node), "fp4graph does not know this operation", markers)
            return dataclasses.replace(work, like_linear=False, unknown=True)
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

    def _work(self, node: Node, op: str, reason: str, formula: Callable[..., int] | None = None) -> FoundWork:
        module = self._names.module(node)
        return FoundWork(node, module, self._view(module, op), reason=reason, formula=formula)

    def _like_linear(
        self, node: Node, op: str, reason: str, markers: Markers, formula: Callable[..., int] | None = None
    ) -> FoundWork:
        module = self._names.module(node)
        marked = markers.marker_of(node) if module is None else None
        view = self._view(module if marked is None else marked.marker.module, op)
        places = None if marked is None else marked.marker.tag.rules
        return FoundWork(node, module, view, places, reason, like_linear=True, formula=formula)

    def _product(self, product: Product, markers: Markers) -> FoundProduct:
        node = product.node
        weight, views = _origin(product.b)
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
        grouped = product.form in ("grouped", "gathered")
        form = "grouped" if grouped else "linear" if has_weight else "matmul"
        op = node.meta.get("fp4graph_op") or form
        sizes = _static(a[-1]), _static(b[0 if product.form == "linear" else -1]), _static(math.prod(b))
        parameter = None if owner is None else owner.parameter
        view = self._names.view(module, op, sizes, products.producer_of(product.a), parameter)
        if has_weight and view.role is None and node in self._routers:
            view = dataclasses.replace(view, role="router")
        reason = "its first factor is the parameter; write it as F.linear to quantize it"
        work = self._like_linear(node, name_of(node), reason, markers) if weight_first else None
        newcomer, caller = self._names.newcomer(node), self._names.module(node)
        return FoundProduct(product, view, marked, owner, views, has_weight, work, newcomer, caller)

    def _view(self, module: str | None, op: str) -> SiteView:
        return self._names.view(module, op)

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

    def _is_gathered_parameter(self, node: Node, markers: Markers) -> bool:
        # A body may be given copies that were picked outside of it.
        stacks = map(products.gathered_from, (node, markers.outside(_origin(node)[0])))
        return any(stack is not None and self._names.is_parameter(markers.outside(stack)) for stack in stacks)

    def _is_changed(self, node: Node, markers: Markers) -> bool:
        """Return whether ``node`` is made of copies of experts' matrices that an operation changed."""
        value = value_of(node)
        origin = markers.outside(_origin(node)[0])
        return value is not None and value.dim() >= 3 and products.CHANGED in origin.meta

    def _follow_copies(self, node: Node, markers: Markers) -> None:
        """Mark ``node``, which is no product, where it changes copies of experts' matrices."""
        if node.op not in ("call_function", "call_method") or view_source(node) is not None:
            return
        inputs = {n: value for n in node.all_input_nodes if (value := value_of(n)) is not None and value.dim() >= 3}
        copies = {n for n in inputs if self._is_changed(n, markers) or self._is_gathered_parameter(n, markers)}
        if copies and products.gathered_source(node) is None:
            everything = {n: value for n in node.all_input_nodes if (value := value_of(n)) is not None}
            if products.changes_copies(node, value_of(node), everything, copies):
                node.meta[products.CHANGED] = True

    def _is_matrix_parameter(self, node: Node, markers: Markers) -> bool:
        value = value_of(node)
        return value is not None and value.dim() >= 2 and self._names.is_parameter(markers.outside(_origin(node)[0]))


def _placeholders(node: Node, inner: GraphModule, markers: Markers) -> dict[Node, Node]:
    """Map each placeholder of ``inner``, the body of the higher-order op ``node``, to the node that it stands for."""
    places = [n for n in inner.graph.nodes if n.op == "placeholder"]
    given = [argument for argument in node.args if isinstance(argument, Node) or argument is None]
    operands = given[-len(places) :] if places else []
    pairs = zip(places, operands, strict=True)
    return {place: markers.outside(operand) for place, operand in pairs if isinstance(operand, Node)}


def _origin(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """Return the node that ``node`` is a chain of views of, and the chain from there, the first view first."""
    chain: list[Node] = []
    while (source := view_source(node)) is not None:
        chain.append(node)
        node = source
    return node, tuple(reversed(chain))


def _static(size: int | torch.SymInt) -> int | None:
    return size if isinstance(size, int) else None
