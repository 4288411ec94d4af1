"""Describes the matrix work of single nodes, of a graph or of a forward without a graph."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fp4graph.graph import experts, flops, products
from fp4graph.graph.experts import WrittenOut
from fp4graph.graph.found import Formula, FoundProduct, FoundWork, Markers
from fp4graph.graph.names import Names
from fp4graph.graph.operations import COLLECTIVE, LIBRARIES, Verdict, library_of, operation_of, read_product
from fp4graph.graph.products import Product, name_of, origin, value_of, view_source
from fp4graph.technique.site import SiteView

_GATHERED = (
    "it multiplies each token with a copy of its expert's matrix; to quantize it expert by expert, pick the copies as "
    "w[ids] from a parameter w [E, K, N] and multiply with them as they are, or write it as a grouped product, in "
    "transformers with experts_implementation='grouped_mm'"
)
_OF_WEIGHTS = "it multiplies only parameters and buffers, as spectral_norm does to compute a weight"


class Describer:
    """Describes nodes by the table of :mod:`fp4graph.graph.operations`.

    Args:
        names: the names of the model's modules and parameters.
        wants: returns whether a rule may quantize a site of this kind at this place; if so, an operation is opened.

    Attributes:
        writes: the number of operations so far that wrote into a tensor.
        routers: the products whose output chooses by top-k, as far as the graph shows them.
    """

    def __init__(self, names: Names, wants: Callable[[SiteView], bool]) -> None:
        self.writes = 0
        self.routers: set[Node] = set()
        self._names, self._wants = names, wants
        self._counted: dict[Any, bool] = {}

    def enter(self, node: Node, outside: Node) -> None:
        """Mark an input of a graph, or of a body in it, which stands for the node ``outside``."""
        value = value_of(node)
        if value is not None and self._names.is_parameter(outside):
            node.meta[experts.AXES] = value.dim()
        if experts.COPIES in outside.meta and outside is not node:
            node.meta[experts.COPIES] = experts.OTHERWISE  # inputs of a body may have been written into

    def opening(self, node: Node, markers: Markers) -> Callable[..., Any] | None:
        """Return a function that computes ``node`` with its products written out; None leaves the node."""
        operation = operation_of(node)
        if operation is None or operation.opened is None:
            return None
        if kind := operation.asks(node):
            weight = kind != "sdpa" and self.multiplies_parameter(node, markers)
            if kind == "product":
                kind = "linear" if weight else "matmul"
            module = self._owner_of_factor(node, markers) if weight else self._names.module(node)
            if not self._wants(self._names.view(module, kind, operation.sizes(node))):
                return None
        return operation.opened(node)

    def describe(self, node: Node, markers: Markers) -> FoundProduct | FoundWork | None:
        """Return the matrix work of ``node``, or None."""
        read, operation = read_product(node), operation_of(node)
        if isinstance(read, Product):
            if self._weight_first(read, markers) is not None:
                return self.work(node, name_of(node), _GATHERED, Verdict.LIKE_EXPERTS, markers)
            return self._product(read, markers)
        if read is not None and operation is not None:
            verdict, reason = read.verdict, read.reason
            if verdict is None:
                verdict = operation.like if self.multiplies_parameter(node, markers) else Verdict.KEEP
            if verdict is not Verdict.KEEP and self._computes_weight(node, markers):
                verdict, reason = Verdict.KEEP, _OF_WEIGHTS
            work = self.work(node, read.op, reason, verdict, markers, operation.flops)
            opened = operation.opened if operation.asks(node) else None
            return dataclasses.replace(work, supported=opened is not None and opened(node) is not None)
        if node.op not in ("call_function", "call_method") or view_source(node) is not None:
            return None
        if library_of(node) not in (None, *LIBRARIES) and self.multiplies_parameter(node, markers):
            return self.work(node, name_of(node), "an operation of another library", Verdict.LIKE_LINEAR, markers)
        if self._counts(node):
            return self.work(node, name_of(node), "fp4graph does not know this operation", Verdict.UNKNOWN, markers)
        return None

    def written_out(self, node: Node, markers: Markers) -> WrittenOut | None:
        """Return the grouped product that replaces a product with copies of experts' matrices; None for other nodes,
        and where no grouped product is known to be equal."""
        copied = any(experts.COPIES in source.meta for source in node.all_input_nodes)
        read = read_product(node) if copied else None
        if not isinstance(read, Product) or (weight_first := self._weight_first(read, markers)) is None:
            return None
        return experts.written_out(read, self.writes, weight_first=weight_first)

    def _weight_first(self, product: Product, markers: Markers) -> bool | None:
        """Return whether the first factor, not the second, holds copies of experts' matrices; None if neither does."""
        pairs = ((product.b, product.a, False), (product.a, product.b, True))
        for factor, other, first in pairs[: 2 if product.form == "matmul" else 1]:  # else `a` may be learned tokens
            copies, value = factor.meta.get(experts.COPIES), value_of(factor)
            if copies is None or value is None or value.dim() < 3:
                continue
            if copies != experts.CHANGED or not self._is_matrix_parameter(other, markers):
                return first
        return None

    def _counts(self, node: Node) -> bool:
        """Return whether torch's FLOP counter finds products in an operation that the table does not know.

        One result holds for all nodes of the same operation, options, and numbers of axes and dtypes of tensors.
        """
        values = [value for source in node.all_input_nodes if (value := value_of(source)) is not None]
        if not values or library_of(node) in COLLECTIVE:
            return False
        options = (arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, str | bool))
        kind = (node.target, *((value.dim(), value.dtype) for value in values), *options)
        if kind not in self._counted:
            self._counted[kind] = bool(flops.of_node(node))
        return self._counted[kind]

    def work(
        self, node: Node, op: str, reason: str, verdict: Verdict, markers: Markers, formula: Formula = None
    ) -> FoundWork:
        """Return matrix work that cannot be quantized."""
        module = self._names.module(node)
        marked = markers.marker_of(node) if module is None and verdict is not Verdict.KEEP else None
        if module is None and marked is None:  # a root whose products no rule quantizes has no marker
            module = self._owner_of_factor(node, markers)
        view = self._names.view(module if marked is None else marked.marker.module, op)
        places = None if marked is None else marked.marker.tag.rules
        return FoundWork(node, module, view, places, reason, verdict, formula)

    def _owner_of_factor(self, node: Node, markers: Markers) -> str:
        """Return the module that owns the first matrix parameter among the inputs of ``node``, or else the root."""
        for argument in node.all_input_nodes:
            if self._is_matrix_parameter(argument, markers):
                owner = self._names.owner(markers.outside(origin(argument)[0]), node)
                return "" if owner is None else owner.module
        return ""

    def _product(self, product: Product, markers: Markers) -> FoundProduct:
        if (
            product.form == "matmul"
            and self._is_matrix_parameter(product.a, markers)
            and not self._is_matrix_parameter(product.b, markers)
        ):
            product = product.turned()
        node = product.node
        weight, views = origin(product.b)
        placeholder = markers.outside(weight)
        is_parameter = self._names.is_parameter(placeholder)
        marked = markers.marker_of(node, weight)
        owner = marked.owner if marked is not None else None
        if owner is not None and (tied := self._names.tied_to(owner, placeholder, node)) is not None:
            marked, owner = markers.marker_of(node), tied  # the weight is marked by a module that shares it
        if owner is None and is_parameter:
            owner = self._names.owner(placeholder, node)
        module = owner.module if owner is not None else self._names.module(node)
        if module is None and marked is not None:
            module = marked.marker.module
        has_weight = product.form == "linear" or is_parameter
        a, b = product.shapes
        form = "grouped" if product.form == "grouped" else "linear" if has_weight else "matmul"
        op = node.meta.get("fp4graph_op") or form
        sizes = _static(a[-1]), _static(product.outputs), _static(math.prod(b))
        parameter = None if owner is None else owner.parameter
        view = self._names.view(module, op, sizes, products.producer_of(product.a), parameter)
        if has_weight and view.role is None and node in self.routers:
            view = dataclasses.replace(view, role="router")
        newcomer = self._names.newcomer(node, placeholder if is_parameter and owner is None else None)
        return FoundProduct(product, view, marked, owner, views, has_weight, newcomer, self._names.caller(node))

    def multiplies_parameter(self, node: Node, markers: Markers) -> bool:
        """Return whether an input of ``node`` is a parameter of two or more axes, or a view of one."""
        return any(self._is_matrix_parameter(argument, markers) for argument in node.all_input_nodes)

    def _computes_weight(self, node: Node, markers: Markers) -> bool:
        """Return whether ``node`` is made of the model's parameters and buffers alone."""
        seen, pending = {node}, [node]
        while pending:
            ancestor = markers.outside(pending.pop())
            if ancestor.op == "placeholder" and not self._names.is_of_model(ancestor):
                return False
            pending += [source for source in ancestor.all_input_nodes if source not in seen]
            seen.update(ancestor.all_input_nodes)
        return True

    def _is_matrix_parameter(self, node: Node, markers: Markers) -> bool:
        value = value_of(node)
        return value is not None and value.dim() >= 2 and self._names.is_parameter(markers.outside(origin(node)[0]))


def _static(size: int | torch.SymInt) -> int | None:
    return size if isinstance(size, int) else None
