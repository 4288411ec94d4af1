"""Replaces planned sites by calls of their programs: the third pass of :mod:`fp4graph.graph.rewrite`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from fp4graph.errors import CaptureError
from fp4graph.graph.found import FoundProduct
from fp4graph.graph.functions import site_function
from fp4graph.graph.operations import read_product
from fp4graph.graph.plan import PlannedSite
from fp4graph.graph.products import Product, value_of
from fp4graph.graph.refusals import rule_that_keeps
from fp4graph.numerics.sharding import is_sharded
from fp4graph.ops.state import StateSlot
from fp4graph.technique.operands import Gemm


class UnmarkedWeight(CaptureError):
    """A product needs the key or the state of its weight, and no marker at the product carries them.

    The product reads a weight whose module is not called in the graph, or a matrix that no layer owns. ``owner`` is the
    weight's owner or None, ``caller`` the name of the multiplying module or None. ``all`` lists the graph's errors of
    this class, this error first.
    """

    def __init__(self, message: str, found: FoundProduct) -> None:
        super().__init__(message, site=str(found.view))
        self.owner, self.caller = found.owner, found.caller
        self.all: list[UnmarkedWeight] = [self]


@dataclass(frozen=True)
class SiteCall:
    """The call that replaces a planned site: ``function(*inputs, salt, *state, site=site, **keywords)``.

    Attributes:
        inputs: nodes of the two factors, the addend, the key and the step; None for a node that is not needed.
        keywords: ``ends``, the node of the cumulative numbers of tokens, and ``autocast``; only for a grouped product.
        state: nodes of the weight's state, each with the views that lead from the weight to the product's factor.
    """

    function: Callable[..., Tensor]
    inputs: tuple[Node | None, ...]
    salt: int
    state: tuple[tuple[Node, tuple[Node, ...]], ...]
    site: str
    keywords: Mapping[str, Any]


def call_of(site: PlannedSite, product: Product) -> SiteCall:
    """Return the call for ``site``. ``product`` is read anew from the site's node, because its factors may have been
    replaced since the site was found.

    Raises:
        CaptureError: the operands are sharded, or the graph lacks what the program needs: a marker with the key, or the
            state of the weight.
    """
    found, program = site.found, site.plan.program
    assert program is not None
    marked = found.marked
    if any(map(is_sharded, product.values)):
        raise CaptureError(
            "its operands are DTensors (tensor parallelism), and quantizers do not reach across shards; keep this "
            "site in high precision, or use fully_shard or DistributedDataParallel instead",
            site=str(found.view),
        )
    key = step = None
    if program.draws and not (program.state and _of_no_layer(found)):
        if marked is None:
            keep = rule_that_keeps(found.view.op, found.view.module)
            raise UnmarkedWeight(
                "its quantizers draw noise, whose key the module hands over when it is called, and a graph break parts "
                "that call from this product (a backward hook, a print, or a loop that torch.compile does not "
                "trace); remove the break, or leave out strict=True of fp4graph.apply, so that the module runs "
                "uncompiled. Under fully_shard each call of a sharded child is such a break, and strict cannot be left "
                f"out: move the product into a module of its own. Or {keep}",
                found,
            )
        key, step = marked.marker.key, marked.marker.step
    state = tuple((_entry(slot, found), found.views if slot.entry.weight_like else ()) for slot in program.state)
    function = site_function(program, product.form, float(product.alpha), float(product.beta))
    inputs = (product.a, product.b, product.addend, key, step)
    keywords = {} if product.ends is None else {"ends": product.ends, "autocast": product.autocast}
    return SiteCall(function, inputs, _salt(site), state, found.view.name, keywords)


def replace(site: PlannedSite) -> set[Node]:
    """Replace the node of ``site`` by a call of its program's function; return the state nodes that the forward writes.

    Raises:
        CaptureError: as :func:`call_of`.
    """
    product = read_product(site.found.product.node)
    assert isinstance(product, Product)
    call = call_of(site, product.turned() if site.found.product.form == "turned" else product)
    graph = product.node.graph
    with graph.inserting_before(product.node):
        state = [_same_view(node, views) for node, views in call.state]
        keywords = {"site": call.site, **call.keywords}
        new = graph.call_function(call.function, (*call.inputs, call.salt, *state), keywords)
        new.meta = dict(product.node.meta)
    product.node.replace_all_uses_with(new)
    graph.erase_node(product.node)
    program = site.plan.program
    assert program is not None
    slots = zip(program.state, call.state, strict=True)
    return {node for slot, (node, _) in slots if slot.written and slot.entry.operand.gemm is Gemm.FPROP}


def _entry(slot: StateSlot, found: FoundProduct) -> Node:
    """Return the node of a technique's state for the weight of ``found``."""
    if found.marked is not None and found.marked.weight is not None:
        marker, wanted = found.marked.marker, (found.marked.weight, slot.technique, slot.label)
        for tagged, node in zip(marker.tag.state, marker.state, strict=True):
            if tagged == wanted:
                return node
    owner = found.owner
    if owner is not None and owner.parameter.endswith("weight"):
        factor = f"the weight of {owner.module or '(root)'!r}, and that module was not called in this graph"
    else:
        computed = "a tensor that the forward computes (as weight_norm, pruning or a hypernetwork do)"
        factor = f"{computed if owner is None else f'parameter {owner.parameter!r}'}, the weight of no layer"
    raise UnmarkedWeight(
        f"technique {slot.technique} keeps state for each weight, but this product multiplies with {factor}. Drop the "
        f"technique, or {rule_that_keeps(found.view.op, found.view.module)}",
        found,
    )


def _of_no_layer(found: FoundProduct) -> bool:
    """Return whether the weight of ``found`` is computed, or a matrix that no layer and no stack of experts owns."""
    parameter: Any = found.views[0].args[0] if found.views else found.product.b
    value = value_of(parameter)
    matrix = value is not None and value.dim() == 2
    return found.owner is None or (matrix and not found.owner.parameter.endswith("weight"))


def _same_view(node: Node, views: tuple[Node, ...]) -> Node:
    """Return ``node`` seen through the same chain of views as the weight that it belongs to."""
    for view in views:
        node = node.graph.create_node(view.op, view.target, (node, *view.args[1:]), dict(view.kwargs))
    return node


def _salt(site: PlannedSite) -> int:
    """Return the salt that makes the noise of two products under one key independent.

    The salt is a hash of the occurrence and of the weight's path, or, if the marker does not carry the weight, of the
    product's kind, parameter and module. The first weight of a marker has salt 0 at its first occurrence.
    """
    marked, view, owner = site.found.marked, site.found.view, site.found.owner
    if marked is None or (marked.weight == 0 and site.occurrence == 0):
        return 0
    path = marked.path
    if path is None:
        path = f"{view.op}:{owner.parameter if owner else ''}:{(view.module or '').rpartition('.')[2]}"
    return zlib.crc32(f"{path}#{site.occurrence}".encode()) & 0x3FFFFFFF | 1
