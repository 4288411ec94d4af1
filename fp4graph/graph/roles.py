"""The roles of sites that are not ordinary layers: adapters, routers and heads.

A *router* is a linear layer whose output chooses by top-k, as in a mixture of experts. A *head* is the layer that makes
the model's output. Names and methods of modules show some of them before anything runs; a captured graph shows the
routers whose top-k is in the same graph (and body of a checkpointed region) as the layer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from fp4graph.graph.blocks import ModuleInfo, upwards
from fp4graph.graph.operations import operation_of, read_product
from fp4graph.graph.products import Product, name_of, view_source
from fp4graph.policy.adapters import is_adapter

#: Classes of modules that route, and names of modules that route where ``experts`` stand beside them.
_ROUTER_CLASS = re.compile(r".*(router|moe_?gate|moe_?gating|top_?k_?gate|top_?k_?gating)", re.IGNORECASE)
_ROUTER_NAME = re.compile(r"(router|gate|gating|wg|w_g)", re.IGNORECASE)
#: The methods of Hugging Face's and timm's models that return their heads.
_SHOWS_HEAD = ("get_output_embeddings", "get_classifier")
#: Operations that choose; :func:`chosen_from` follows what they choose from.
CHOICES: frozenset[Any] = frozenset({torch.topk, "topk"})
#: Key in a node's meta data: whether its product has fewer outputs than inputs; set where the factors will be gone.
NARROWS = "fp4graph_narrows"
#: Operations between a router's product and the choice, beside views and casts: functions and arithmetic, of which each
#: operator has the names of Python, of torch and of its methods.
_BETWEEN = frozenset({
    "softmax", "log_softmax", "sigmoid", "softplus", "tanh", "sqrt", "masked_fill", "masked_fill_", "where", "clamp",
    "clamp_", "dropout", "add", "iadd", "add_", "sub", "isub", "sub_", "subtract", "rsub", "__rsub__", "mul", "imul",
    "mul_", "multiply", "truediv", "itruediv", "true_divide", "div", "div_", "divide", "__rdiv__", "neg", "negative",
    "pow",
})  # fmt: skip


def role_of(name: str, modules: Mapping[str, ModuleInfo], heads: Collection[str] = ()) -> str | None:
    """Return the role of ``name``, a module or a parameter, among the ``modules`` of a model with these ``heads``."""
    if is_adapter(name, modules):
        return "adapter"
    inside = list(upwards(name))[:-1]
    if any(_routes(module, modules) for module in inside if module in modules):
        return "router"
    return "head" if any(module in heads for module in inside) else None


def _routes(name: str, modules: Mapping[str, ModuleInfo]) -> bool:
    """Return whether module ``name`` routes: by its class if it holds no experts, or by its name beside experts."""
    parent, _, leaf = name.rpartition(".")
    if _ROUTER_NAME.fullmatch(leaf) and f"{parent}.experts".lstrip(".") in modules:
        return True
    if _ROUTER_CLASS.fullmatch(modules[name].cls.__name__) is None:
        return False
    return not any(other.startswith(f"{name}.") and "expert" in other.removeprefix(name) for other in modules)


def find_heads(root: nn.Module) -> set[str]:
    """Return the names of the modules that ``root`` or a model inside it returns as its heads, or that share the weight
    of an embedding."""
    modules = dict(root.named_modules(remove_duplicate=False))
    heads = [head for module in modules.values() for head in _heads_of(module)]
    embeddings = {id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding)}
    return {
        name
        for name, module in modules.items()
        if name and not isinstance(module, nn.Embedding)
        if any(module is head for head in heads) or id(module._parameters.get("weight")) in embeddings
    }


def _heads_of(module: nn.Module) -> Iterator[nn.Module]:
    for method in _SHOWS_HEAD:
        if callable(getattr(type(module), method, None)):
            try:
                shown = getattr(module, method)()
            except Exception:  # noqa: BLE001  # the user's method of the same name
                continue
            heads = shown if isinstance(shown, tuple) else (shown,)
            yield from (head for head in heads if isinstance(head, nn.Module))


def routers(nodes: Iterable[Node]) -> set[Node]:
    """Return the products among ``nodes`` whose output chooses by top-k: routers, if they multiply with a weight."""
    return {product for node in nodes if node.target in CHOICES for product in chosen_from(node)}


def chosen_from(choice: Node) -> set[Node]:
    """Return the products that reach ``choice`` through views, softmax, sigmoid and arithmetic alone.

    The set is empty unless all of them have fewer outputs than inputs, N < K: a choice among the elements of a residual
    stream, to which every layer adds, does not show a router. Nor does an argmax, which may be a prediction.
    """
    reached: set[Node] = set()
    seen: set[Node] = set()
    pending = choice.all_input_nodes
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if (source := view_source(node)) is not None:
            pending.append(source)
        elif (operation := operation_of(node)) is not None and operation.read is not None:
            reached.add(node)
        elif node.op in ("call_function", "call_method") and name_of(node) in _BETWEEN:
            pending += node.all_input_nodes
    return reached if all(map(_narrows, reached)) else set()


def _narrows(node: Node) -> bool:
    """Return whether a product has fewer outputs than inputs, N < K."""
    if NARROWS in node.meta:
        return bool(node.meta[NARROWS])
    if not isinstance(product := read_product(node), Product):
        return False
    outputs, inputs = product.outputs, product.shapes[0][-1]
    return isinstance(outputs, int) and isinstance(inputs, int) and outputs < inputs
