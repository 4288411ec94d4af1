"""Sites that play another part in the model than a layer of it: adapters, routers and heads.

A *router* is a linear layer whose output chooses by top-k, as in a mixture of experts. A *head* is the layer that makes
the model's output. Modules tell some of them by their names and methods, before anything runs; a captured graph shows
the routers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from fp4graph.graph.blocks import ModuleInfo, upwards
from fp4graph.graph.operations import operation_of
from fp4graph.graph.products import name_of, view_source
from fp4graph.policy.adapters import is_adapter

#: Classes of modules that route, and names of modules that route where ``experts`` stand beside them.
_ROUTER_CLASS = re.compile(r"router|moe_?gat|top_?k_?gat", re.IGNORECASE)
_ROUTER_NAME = re.compile(r"(router|gate|gating|wg|w_g)", re.IGNORECASE)
#: The methods by which Hugging Face's and timm's models show their heads.
_SHOWS_HEAD = ("get_output_embeddings", "get_classifier")
#: Operations that choose; :func:`chosen_from` follows what they choose from.
CHOICES: frozenset[Any] = frozenset({torch.topk, "topk", torch.argmax, "argmax"})
#: Operations between a router's product and the choice, beside views and casts.
_BETWEEN = frozenset({
    "softmax", "log_softmax", "sigmoid", "add", "iadd", "add_", "sub", "mul", "imul", "mul_", "truediv", "div", "tanh",
    "masked_fill", "where", "clamp", "dropout",
})  # fmt: skip


def role_of(name: str, modules: Mapping[str, ModuleInfo], heads: Collection[str] = ()) -> str | None:
    """Return the role of ``name``, a module or a parameter, among the ``modules`` of a model; ``heads`` are known."""
    if is_adapter(name, modules):
        return "adapter"
    inside = list(upwards(name))[:-1]
    if any(_routes(module, modules) for module in inside if module in modules):
        return "router"
    return "head" if any(module in heads for module in inside) else None


def _routes(name: str, modules: Mapping[str, ModuleInfo]) -> bool:
    """Return whether module ``name`` is a router: a class called so that holds no experts, or a name beside experts."""
    parent, _, leaf = name.rpartition(".")
    if _ROUTER_NAME.fullmatch(leaf) and f"{parent}.experts".lstrip(".") in modules:
        return True
    if _ROUTER_CLASS.search(modules[name].cls.__name__) is None:
        return False
    return not any(other.startswith(f"{name}.") and "expert" in other.removeprefix(name) for other in modules)


def find_heads(root: nn.Module) -> set[str]:
    """Return the names of the modules that ``root`` or a model in it calls its head, or that share an embedding's
    weight."""
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
            except NotImplementedError:  # some of Hugging Face's base classes
                continue
            yield from (head for head in (shown if isinstance(shown, tuple) else (shown,)) if head is not None)


def routers(nodes: Iterable[Node]) -> set[Node]:
    """Return the products among ``nodes`` whose output chooses by top-k; one of activations is no router."""
    return {product for node in nodes if node.target in CHOICES for product in chosen_from(node)}


def chosen_from(choice: Node) -> set[Node]:
    """Return the products between which and ``choice`` there are only views, softmax, sigmoid and arithmetic.

    An argmax chooses only among probabilities: greedy decoding takes one of a head's output.
    """
    found: set[Node] = set()
    seen: set[tuple[Node, bool]] = set()
    pending = [(source, name_of(choice) == "topk") for source in choice.all_input_nodes]
    while pending:
        node, chooses = pending.pop()
        if (node, chooses) in seen:
            continue
        seen.add((node, chooses))
        if (source := view_source(node)) is not None:
            pending.append((source, chooses))
        elif (operation := operation_of(node)) is not None and operation.read is not None:
            found |= {node} if chooses else set()
        elif node.op in ("call_function", "call_method") and (name := name_of(node)) in _BETWEEN:
            chooses = chooses or name in ("softmax", "log_softmax", "sigmoid")
            pending += [(source, chooses) for source in node.all_input_nodes]
    return found
