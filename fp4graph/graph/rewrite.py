"""The graph pass: finds every site of a captured graph, asks the policy, and rewrites it.

Precondition: a graph as Dynamo hands it to a backend (torch-level nodes with ``example_value`` and
``nn_module_stack``). Postcondition: no marker is left; every site that a rule quantizes is one call of a function
around :func:`fp4graph.ops.matmul.quantized_matmul`; everything else is as it was.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fp4graph.errors import CaptureError, PolicyError
from fp4graph.graph import flops
from fp4graph.graph.blocks import pattern_of
from fp4graph.graph.expand import expand_all
from fp4graph.graph.functions import site_function
from fp4graph.graph.marker import Marker, module_stack
from fp4graph.graph.names import Names
from fp4graph.graph.plan import Plan, plan_site
from fp4graph.graph.products import (
    Product,
    is_foreign,
    is_sdpa,
    is_uncounted_product,
    name_of,
    producer_of,
    read_product,
    value_of,
    view_source,
)
from fp4graph.numerics.sharding import is_sharded
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.gemm import MatmulProgram
from fp4graph.policy import Decision, Policy
from fp4graph.technique.operands import Operand
from fp4graph.technique.site import SiteView

#: Higher-order ops whose bodies run once, as written, on the operands at the end of their arguments.
_TRANSPARENT = frozenset(
    [
        "tag_activation_checkpoint",
        "wrap",
        "wrap_activation_checkpoint",
        "wrap_with_set_grad_enabled",
        "wrap_with_autocast",
        "invoke_subgraph",
        "hints_wrapper",
    ]
)


@dataclass(frozen=True)
class Site:
    """One place of matrix work in a captured graph, and what the policy made of it.

    Attributes:
        module: fully qualified name of the owner ("" the root), or None where it cannot be known.
        op: "linear", "matmul", "sdpa", or the name of an operation that cannot be a site.
        shapes: of the two factors as the graph has them (symbolic sizes as text).
        rule: name of the rule that decided, or None.
        reason: why it is not quantized; "" where it is.
        operands: the six specs, None for high precision.
        quantized: whether any operand is.
        occurrence: how many sites of the same module came before in the graph.
        rule_index: position of the rule in the policy, -1 for the default, None where nothing decided.
        flops: of its forward, with the sizes of the capture; None where they cannot be told.
    """

    module: str | None
    op: str
    shapes: tuple[tuple[int | str, ...], ...]
    rule: str | None
    reason: str
    operands: Mapping[Operand, QuantSpec | None]
    quantized: bool
    occurrence: int = 0
    rule_index: int | None = None
    flops: int | None = None


@dataclass(frozen=True)
class WeightUse:
    """A captured product whose second factor is a parameter, for whoever quantizes that parameter outside the graph.

    Attributes:
        module, parameter: the owner's fully qualified name and the parameter's name.
        site: as the graph shows it. decision: of the policy.
        transposed: whether the parameter is stored ``[K, N]`` rather than ``[N, K]``.
    """

    module: str
    parameter: str
    site: SiteView
    decision: Decision
    transposed: bool


class Rewriter:
    """Applies one policy to captured graphs.

    Args:
        policy: what to do.
        names: of the model's modules and parameters.
        first_occurrence: how many sites of a module earlier graphs of the model held (by FQN); graph breaks may
            split a module's calls over several graphs, and noise must not repeat between them.
        keys: FQN of the module that a marker's key belongs to, by the key's id.
        stateless: whether there are no markers to expect (explain without hooks, the torch.compile entry point).
    """

    def __init__(
        self,
        policy: Policy,
        names: Names,
        *,
        first_occurrence: Mapping[str, int] | None = None,
        stateless: bool = False,
        keys: Mapping[int, str] | None = None,
    ) -> None:
        self.policy = policy
        self.names = names
        self.sites: list[Site] = []
        self.uses: list[WeightUse] = []
        self.read: set[tuple[str, str]] = set()  # parameters that the graphs take: module, name
        self.refused: CaptureError | None = None  # the first of the matrix work that would run unquantized unsaid
        self.marked: set[str | None] = set()  # modules whose call was seen
        self._occurrences: Counter[str] = Counter(first_occurrence or {})
        self._stateless = stateless
        self._keys = keys or {}
        self._bodies: set[int] = set()

    def run(self, gm: GraphModule) -> None:
        """Rewrite ``gm`` and the bodies inside it, in place; what was found is in ``sites``."""
        self.names.learn([node for module in _graphs(gm) for node in module.graph.nodes])
        for node in gm.graph.find_nodes(op="placeholder"):
            self.read.update(self.names.owners(node))
        self._run(gm, {})

    def _run(self, gm: GraphModule, outer: Mapping[Node, Node]) -> None:
        markers = _Markers()
        expand_all(gm, self._wants_sdpa)
        for node in list(gm.graph.nodes):
            if (marker := Marker.read(node)) is not None:
                key = outer.get(marker.key, marker.key).meta.get("grapharg")
                marker = dataclasses.replace(marker, module=self._keys.get(id(getattr(key, "example", None))))
                markers.add(marker)
                self.marked.add(marker.module)
                gm.graph.erase_node(node)
            elif node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
                self._enter(gm, node, outer, markers)
            else:
                found = read_product(node)
                if isinstance(found, Product):
                    self._site(found, markers, outer)
                elif found is not None and not self._is_unwritten(node, found, outer):
                    self._list(node, *found)
                elif found is not None or self._is_unknown_contraction(node, outer):
                    self._keep_or_refuse(node, name_of(node), markers)
        gm.recompile()

    def _enter(self, gm: GraphModule, node: Node, outer: Mapping[Node, Node], markers: _Markers) -> None:
        """A higher-order op: rewrite its body where that is sound, else list the products inside.

        One that is given a matrix parameter and holds products, such as an ``autograd.Function``, is itself a product
        that cannot be quantized.
        """
        multiplies = False
        for argument in node.args:
            if not isinstance(argument, Node) or argument.op != "get_attr":
                continue
            body = getattr(gm, str(argument.target), None)
            if not isinstance(body, GraphModule) or id(body) in self._bodies:
                continue
            self._bodies.add(id(body))
            name = getattr(node.target, "_name", str(node.target))
            if name in _TRANSPARENT:
                inner = [n for n in body.graph.nodes if n.op == "placeholder"]
                given_all = [arg for arg in node.args if isinstance(arg, Node) or arg is None]
                operands = given_all[-len(inner) :] if inner else []
                resolved = {
                    place: outer.get(given, given)
                    for place, given in zip(inner, operands, strict=True)
                    if isinstance(given, Node)
                }
                self._run(body, resolved)
                continue
            for inside in list(body.graph.nodes):
                if Marker.read(inside) is not None:
                    body.graph.erase_node(inside)
                elif (found := read_product(inside)) is not None:
                    op = "matmul" if isinstance(found, Product) else found[0]
                    self._list(inside, op, f"inside {name}, which is not rewritten")
                    multiplies |= isinstance(found, Product)
            body.recompile()
        if multiplies and self._matrix_parameters(node, outer):
            self._keep_or_refuse(node, getattr(node.target, "_name", str(node.target)), markers)

    def _list(self, node: Node, op: str, reason: str, decision: Decision | None = None) -> None:
        """Record matrix work that stays as it is."""
        module = self.names.module(node)
        shapes = tuple(_shape(v) for arg in node.all_input_nodes if (v := value_of(arg)) is not None)
        rule, index = (None, None) if decision is None else (decision.rule.name, decision.index)
        count = flops.of_node(node)
        kept = dict.fromkeys(Operand)
        self.sites.append(Site(module, op, shapes[:2], rule, reason, kept, False, rule_index=index, flops=count))

    def _is_unknown_contraction(self, node: Node, outer: Mapping[Node, Node]) -> bool:
        """Whether ``node``, for which there is no reader, multiplies with a parameter, or may."""
        if node.op not in ("call_function", "call_method") or view_source(node) is not None:
            return False
        if is_uncounted_product(node):
            return True
        return bool(self._matrix_parameters(node, outer)) and (is_foreign(node) or bool(flops.of_node(node)))

    def _is_unwritten(self, node: Node, found: tuple[str, str], outer: Mapping[Node, Node]) -> bool:
        """Whether ``node`` could have been written as a linear layer: matrix work with a parameter, but no convolution,
        recurrent layer or attention, which every policy keeps."""
        known = found[0] in ("conv", "recurrent", "sdpa", "attention")
        return not known and bool(self._matrix_parameters(node, outer))

    def _matrix_parameters(self, node: Node, outer: Mapping[Node, Node]) -> list[Node]:
        """The inputs of ``node`` that are parameters of two or more axes, or views of such."""
        return [arg for arg in node.all_input_nodes if self._is_matrix_parameter(arg, outer)]

    def _is_matrix_parameter(self, node: Node, outer: Mapping[Node, Node]) -> bool:
        origin = _origin(node)[0]
        value = value_of(node)
        return value is not None and value.dim() >= 2 and self.names.is_parameter(outer.get(origin, origin))

    def _keep_or_refuse(self, node: Node, op: str, markers: _Markers) -> None:
        """A product with a parameter that cannot be quantized, where a linear layer would be: an error, unless a rule
        keeps it by name. Elsewhere it is kept as a linear layer is."""
        module = self.names.module(node)
        marked = markers.of_call(node) if module is None else None
        if marked is not None:
            module = marked[0].module
        block, places = self.names.block(module), _places(marked)
        decision = self.policy.decide(SiteView(module, op, None, None, None, block), places)
        if decision.index >= 0 or not self.policy.may_quantize("linear", module, block, places):
            self._list(node, op, decision.rule.keep or "", decision)
            return
        self._list(node, op, "not supported: it multiplies matrices in a way that cannot be quantized yet")
        glob = pattern_of(module or "")
        self._refuse(
            f"{op} multiplies with a parameter in a way that cannot be quantized yet, and would run in high precision "
            "without a word. To keep it, put a rule before the policy's others (in a policy that extends another, "
            f"repeat those): {{name: {op}, match: {{module: {glob!r}}}, keep: not quantized yet}}",
            module,
        )

    def _decides_by_default(self, node: Node) -> bool:
        """Whether no rule speaks of a product of activations at ``node``."""
        module = self.names.module(node)
        view = SiteView(module, "matmul", None, None, None, self.names.block(module))
        decision = self.policy.decide(view)
        return decision.index < 0 and not decision.rule.quantizes

    def _refuse(self, message: str, module: str | None) -> None:
        if self.refused is None:
            self.refused = CaptureError(message, site=module or "(root)")

    def _wants_sdpa(self, node: Node) -> bool:
        if not is_sdpa(node):
            return False
        module = self.names.module(node)
        view = SiteView(module, "sdpa", None, None, None, self.names.block(module))
        return self.policy.decide(view).rule.quantizes

    def _site(self, product: Product, markers: _Markers, outer: Mapping[Node, Node]) -> None:
        """Decide on one product, and rewrite it if it is to be quantized."""
        node = product.node
        if (
            product.form == "matmul"
            and self._is_matrix_parameter(product.a, outer)
            and not self._is_matrix_parameter(product.b, outer)
            and self._decides_by_default(node)
        ):
            self._keep_or_refuse(node, name_of(node), markers)
            return
        if self.policy.quantizes and (newcomer := self.names.newcomer(node)) is not None:
            self._list(node, name_of(node), "its module was added after fp4graph.apply()")
            self._refuse(
                "this module was added to the model after fp4graph.apply(), which has not planned it; call "
                "fp4graph.apply(model, policy) again, which keeps state where it fits, and prepare_optimizer again",
                newcomer,
            )
            return
        weight, views = _origin(product.b)
        placeholder = outer.get(weight, weight)
        is_weight = product.form == "linear" or self.names.is_parameter(placeholder)
        marked = markers.of_weight(weight) or markers.of_call(node)
        owner = _marked_owner(marked)
        if owner is None and self.names.is_parameter(placeholder):
            owner = self.names.owner(placeholder, node)
        module = owner[0] if owner is not None else self.names.module(node)
        if module is None and marked is not None:
            module = marked[0].module
        a, b = value_of(product.a), value_of(product.b)
        assert a is not None, "read_product checked it"
        assert b is not None, "read_product checked it"
        view = SiteView(
            module=module,
            op=node.meta.get("fp4graph_op") or ("linear" if is_weight else "matmul"),
            in_features=_static(a.shape[-1]),
            out_features=_static(b.shape[0 if product.form == "linear" else -1]),
            numel=_static(b.numel()),
            block=self.names.block(module),
            producer=producer_of(product.a),
        )
        occurrence = self._occurrences[str(module)]
        self._occurrences[str(module)] += 1
        shapes = (_shape(a), _shape(b))
        decision = self.policy.decide(view, None if owner is not None else _places(marked))
        rule, index = decision.rule, decision.index
        if is_weight and owner is not None:
            transposed = (product.form == "matmul") != _transposes(views)
            self.uses.append(WeightUse(*owner, view, decision, transposed))
        name = rule.name if index >= 0 or rule.quantizes else None
        plan = plan_site(view, rule, training=marked is None or marked[0].training) if rule.quantizes else None
        count = flops.of_product(product)
        if plan is None or plan.program is None:
            reason = rule.keep or "every operand is kept in high precision"
            kept = dict.fromkeys(Operand)
            self.sites.append(Site(module, view.op, shapes, name, reason, kept, False, occurrence, index, count))
            return
        self.sites.append(Site(module, view.op, shapes, name, "", dict(plan.specs), True, occurrence, index, count))
        self._replace(product, plan, view, marked, owner, views, occurrence)

    def _replace(
        self,
        product: Product,
        plan: Plan,
        view: SiteView,
        marked: tuple[Marker, int | None] | None,
        owner: tuple[str, str] | None,
        views: tuple[Node, ...],
        occurrence: int,
    ) -> None:
        node, program = product.node, plan.program
        assert program is not None
        graph = node.graph
        if is_sharded(value_of(product.a)) or is_sharded(value_of(product.b)):
            raise CaptureError(
                "its operands are DTensors (tensor parallelism), and quantizers do not reach across shards; keep this "
                "site in high precision, or use fully_shard or DistributedDataParallel instead",
                site=str(view),
            )
        if self._stateless and (program.draws or program.state):
            raise PolicyError(
                f"policy {self.policy.name!r} draws noise or keeps state at {view}, which torch.compile's "
                "backend='fp4graph' cannot carry; use fp4graph.apply(model, policy)",
                file=self.policy.file,
            )
        key = step = None
        if program.draws:
            if marked is None:
                raise CaptureError(
                    "its quantizers draw noise, but no module that fp4graph prepared was called in its graph (a graph "
                    "break inside the module's forward?); remove the break, or keep this site in high precision",
                    site=str(view),
                )
            key, step = marked[0].key, marked[0].step
        state: list[Node] = []
        if program.state:
            state = self._state_nodes(program, view, marked)
        salt = _salt(view, marked, owner, occurrence)
        with graph.inserting_before(node):
            slots = zip(program.state, state, strict=True)
            state = [_same_view(entry, views) if slot.entry.weight_like else entry for slot, entry in slots]
            function = site_function(program, product.form, float(product.alpha), float(product.beta))
            args = (product.a, product.b, product.addend, key, step, salt, *state)
            new = graph.call_function(function, args, {"site": str(view)})
            new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)

    def _state_nodes(
        self, program: MatmulProgram, view: SiteView, marked: tuple[Marker, int | None] | None
    ) -> list[Node]:
        nodes: list[Node] = []
        for slot in program.state:
            found = None
            if marked is not None and marked[1] is not None:
                wanted = (marked[1], slot.technique, slot.label)
                found = next(
                    (n for t, n in zip(marked[0].tag.state, marked[0].state, strict=True) if t == wanted), None
                )
            if found is None:
                raise CaptureError(
                    f"technique {slot.technique} keeps state for its weight, which is not known as one: make it the "
                    "weight of an nn.Linear or call the parameter '...weight', or drop the technique for it",
                    site=str(view),
                )
            nodes.append(found)
        return nodes


class _Markers:
    """The markers seen so far in one graph body."""

    def __init__(self) -> None:
        self._by_weight: dict[Node, tuple[Marker, int]] = {}
        self._by_module: dict[int | None, Marker] = {}  # None: the module whose forward the graph is

    def add(self, marker: Marker) -> None:
        for index, weight in enumerate(marker.weights):
            self._by_weight[weight] = (marker, index)
        self._by_module[marker.module_id] = marker

    def of_weight(self, weight: Node) -> tuple[Marker, int | None] | None:
        return self._by_weight.get(weight)

    def of_call(self, node: Node) -> tuple[Marker, int | None] | None:
        """The marker of the innermost module around ``node`` that has one."""
        for identity in (*(identity for identity, _, _ in reversed(module_stack(node))), None):
            if identity in self._by_module:
                return self._by_module[identity], None
        return None


def _places(marked: tuple[Marker, int | None] | None) -> tuple[int, ...] | None:
    """The rules whose predicates on the place hold, as far as the marker knows it."""
    return None if marked is None else marked[0].tag.rules


#: Views that may exchange the axes of a matrix.
_TRANSPOSITIONS = frozenset({"t", "transpose", "numpy_T", "mT", "T", "adjoint", "swapaxes", "swapdims", "permute"})


def _transposes(views: tuple[Node, ...]) -> bool:
    """Whether a chain of views shows a matrix transposed."""
    odd = False
    for view in views:
        name = str(view.args[1]) if name_of(view) == "getattr" else name_of(view)
        if name == "permute":
            order = [axis for axis in view.args[1:] if isinstance(axis, int)] or list(view.args[1])  # type: ignore[arg-type]
            odd ^= [axis % 2 for axis in order] == [1, 0] if len(order) == 2 else False
        else:
            odd ^= name in _TRANSPOSITIONS
    return odd


def _graphs(gm: GraphModule) -> list[GraphModule]:
    return [module for module in gm.modules() if isinstance(module, GraphModule)]


def _origin(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """The node that ``node`` is a chain of views of, and the chain from there, outermost last."""
    chain: list[Node] = []
    while (source := view_source(node)) is not None:
        chain.append(node)
        node = source
    return node, tuple(reversed(chain))


def _same_view(node: Node, views: tuple[Node, ...]) -> Node:
    """``node`` seen through the same chain of views as the weight it belongs to."""
    for view in views:
        node = node.graph.create_node(view.op, view.target, (node, *view.args[1:]), dict(view.kwargs))
    return node


def _marked_owner(marked: tuple[Marker, int | None] | None) -> tuple[str, str] | None:
    """(module, parameter name) of the weight that a marker carries, where the marker's own module is known."""
    if marked is None or marked[1] is None or marked[0].module is None:
        return None
    path, _, name = marked[0].tag.weights[marked[1]].rpartition(".")
    return f"{marked[0].module}.{path}".strip("."), name


def _salt(
    view: SiteView, marked: tuple[Marker, int | None] | None, owner: tuple[str, str] | None, occurrence: int
) -> int:
    """What tells the sites under one key apart: which weight of the marker, or which product, and which call."""
    if marked is None:
        return 0
    marker, weight = marked
    if weight is not None:
        path = marker.tag.weights[weight]
        if occurrence == 0 and weight == 0:
            return 0
    else:
        path = f"{view.op}:{owner[1] if owner else ''}:{(view.module or '').rpartition('.')[2]}"
    return zlib.crc32(f"{path}#{occurrence}".encode()) & 0x3FFFFFFF | 1


def _static(size: int | torch.SymInt) -> int | None:
    return size if isinstance(size, int) else None


def _shape(x: Tensor) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in x.shape)
