"""Data that the passes share: the matrix work of a captured graph, and the markers that belong to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch.fx import Graph, GraphModule, Node

from fp4graph.graph.expand import Replacement
from fp4graph.graph.marker import Marker, module_stack
from fp4graph.graph.names import Owner
from fp4graph.graph.operations import Verdict
from fp4graph.graph.products import Product, value_of
from fp4graph.technique.site import SiteView

#: Counts the FLOPs of a call where torch's counter cannot, like ``Operation.flops``; None stands for torch's counter.
Formula = Callable[..., int] | None


@dataclass(frozen=True)
class Marked:
    """The marker that belongs to a product.

    This is the marker that carries the product's weight, with the index of that weight, or else the marker of the
    innermost module around the product.
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
        places: indices of the rules whose predicates on module and place hold, if only a marker knows the module.
        reason: why the work cannot be quantized.
        verdict: how the planner treats the work.
        formula: counts the FLOPs where torch's counter cannot.
        supported: whether another rule could have the work quantized.
    """

    node: Node
    module: str | None
    view: SiteView
    places: tuple[int, ...] | None = None
    reason: str = ""
    verdict: Verdict = Verdict.KEEP
    formula: Formula = None
    supported: bool = False


@dataclass(frozen=True)
class FoundProduct:
    """A product of two matrices, which may become a site.

    Attributes:
        view: the product as policies and techniques see it.
        owner: owner of the parameter that is the second factor, or None.
        views: the chain of views from the parameter to the second factor, the first one applied first.
        has_weight: whether the second factor is a parameter.
        newcomer: name of the calling module or of the weight's, if it joined the model after the names were taken; else
            None.
        caller: name of the module that the product was called in, or None.
    """

    product: Product
    view: SiteView
    marked: Marked | None
    owner: Owner | None
    views: tuple[Node, ...]
    has_weight: bool
    newcomer: str | None
    caller: str | None

    @property
    def places(self) -> tuple[int, ...] | None:
        """Indices of the rules whose predicates on module and place hold, if only a marker knows them; else None."""
        return None if self.owner is not None or self.marked is None else self.marked.marker.tag.rules


@dataclass
class Found:
    """The matrix work and the inputs that were found in a captured graph and in the bodies inside it.

    Attributes:
        work: the matrix work, in the order of the graph.
        read: the parameters that the graph uses outside of markers.
        marked: the modules whose markers were found; None is a module that cannot be known.
        bodies: the graph and the bodies in it whose nodes may be replaced.
        keys: the graph's inputs that are noise keys, with the modules of the markers that carry them.
        steps: the graph's inputs that are the step of the forward.
        replacements: the products that were written out.
    """

    work: list[FoundProduct | FoundWork] = field(default_factory=list)
    read: set[Owner] = field(default_factory=set)
    marked: set[str | None] = field(default_factory=set)
    bodies: list[GraphModule] = field(default_factory=list)
    keys: dict[Node, str] = field(default_factory=dict)
    steps: set[Node] = field(default_factory=set)
    replacements: list[Replacement] = field(default_factory=list)


@dataclass(frozen=True)
class Body:
    """The body of a higher-order op, such as a checkpointed region, in the graph around it.

    Attributes:
        call: the node of the op.
        graph: the body.
        operands: maps the body's placeholders to the operands of the call.
        around: the markers of the graph around the body.
        grows: whether the call can take further operands.
    """

    call: Node
    graph: Graph
    operands: dict[Node, Node]
    around: Markers
    grows: bool

    def carry(self, marked: Marked | None) -> Marked | None:
        """Return a marker from around the body with its tensors as inputs of the body, or None.

        A region may start inside of the module whose products it holds, after the module's marker.
        """
        if marked is None or not self.grows:
            return None
        marker = marked.marker
        key, step, *state = (self._input(node) for node in (marker.key, marker.step, *marker.state))
        return replace(marked, marker=replace(marker, key=key, step=step, state=state))

    def _input(self, node: Node) -> Node:
        for place, operand in self.operands.items():
            if operand is node:
                return place
        with self.graph.inserting_after(self.graph.find_nodes(op="placeholder")[-1]):
            place = self.graph.placeholder(node.name)
        place.meta = {"example_value": value_of(node)}
        self.call.args = (*self.call.args, node)
        self.operands[place] = node
        return place


class Markers:
    """The markers found so far in a captured graph, or in the body of a higher-order op in it.

    Args:
        body: the body, or None for the captured graph.
    """

    def __init__(self, body: Body | None = None) -> None:
        self._body = body
        self._by_weight: dict[Node, dict[int | None, Marked]] = {}  # and by the marker's module, the latest one last
        self._by_module: dict[int | None, Marker] = {}  # None: the module whose forward the graph is

    def copy(self) -> Markers:
        """Return the markers found so far; markers found later are not added to them."""
        same = Markers(self._body)
        same._by_weight = {weight: dict(marked) for weight, marked in self._by_weight.items()}
        same._by_module = dict(self._by_module)
        return same

    def outside(self, node: Node) -> Node:
        """Return the node of the captured graph that ``node`` stands for."""
        body = self._body
        return node if body is None or node not in body.operands else body.around.outside(body.operands[node])

    def add(self, marker: Marker) -> None:
        """Record a marker, which belongs to the nodes after it."""
        for index, weight in enumerate(marker.weights):
            marked = self._by_weight.setdefault(weight, {})
            marked.pop(marker.module_id, None)
            marked[marker.module_id] = Marked(marker, index)
        if not marker.tag.carried:
            self._by_module[marker.module_id] = marker

    def marker_of(self, node: Node, weight: Node | None = None) -> Marked | None:
        """Return the marker that carries ``weight``, else the marker of the innermost marked module around ``node``.

        Of the markers of modules that share the weight, it is that of the module around ``node``, else the latest.
        """
        around = [*(caller.id for caller in reversed(module_stack(node))), None]
        of_weight = None if weight is None else self._of_weight(weight, around[0])
        return of_weight or self._of_module(around)

    def _of_weight(self, weight: Node, module: int | None) -> Marked | None:
        marked, body = self._by_weight.get(weight), self._body
        if marked is not None:
            return marked.get(module, next(reversed(marked.values())))
        if body is None or weight not in body.operands:
            return None
        return body.carry(body.around._of_weight(body.operands[weight], module))

    def _of_module(self, identities: list[int | None]) -> Marked | None:
        for identity in identities:
            if identity in self._by_module:
                return Marked(self._by_module[identity])
        return None if self._body is None else self._body.carry(self._body.around._of_module(identities))
