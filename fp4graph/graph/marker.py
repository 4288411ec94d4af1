"""The marker that carries a module's key and weight state into a captured graph.

While Dynamo traces, a forward pre-hook of every module with planned sites calls ``fp4graph::mark``. Dynamo lifts the
operator's tensors to graph inputs, also in checkpointed bodies and shared graphs, where identities of objects are
lost. The graph pass reads and removes the node. A graph that another backend compiles still has the node, and fails
instead of silently running in high precision.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from fp4graph.errors import UncompiledError
from fp4graph.numerics.declare import operator


def _refuse(*args: object) -> None:
    raise UncompiledError(
        "a module that fp4graph.apply prepared was compiled by another torch.compile backend, or called in a branch of "
        "torch.cond or the like, which is not rewritten; it would run in high precision. Call the applied model, or "
        "fp4graph.remove(model) first; in a branch, keep the module by a rule that names it"
    )


MARK = operator(
    "mark(str tag, Tensor key, Tensor step, Tensor[] weights, Tensor[] state, bool training) -> ()",
    lambda *args: None,
    CompositeExplicitAutograd=_refuse,
)
# The fake implementation also runs while Dynamo itself traces; only a later trace (AOTAutograd's) has this mode.
MARK.default.py_impl(ProxyTorchDispatchMode)(_refuse)


@dataclass(frozen=True)
class Tag:
    """The static part of a marker. Dynamo guards on it: modules with equal tags may share one graph.

    Attributes:
        rules: indices of the policy's rules that the module's name and place allow.
        weights: attribute paths of the weights that the marker carries, e.g. "weight" or "out_proj.weight".
        state: for each state tensor, (index of its weight, technique, entry name).
        plans: for each weight, a number that tells its plan from the model's other plans: a technique may plan by the
            name or the place of a module.
        carried: whether a module that does not own the weights makes the mark, for these weights alone.
    """

    rules: tuple[int, ...]
    weights: tuple[str, ...]
    state: tuple[tuple[int, str, str], ...]
    plans: tuple[int, ...] = ()
    carried: bool = False

    def encode(self) -> str:
        """Return the string that the marker takes."""
        return json.dumps(astuple(self))

    @staticmethod
    def decode(text: str) -> Tag:
        """Return the tag that :meth:`encode` wrote."""
        rules, weights, state, plans, carried = json.loads(text)
        entries = tuple((i, technique, entry) for i, technique, entry in state)
        return Tag(tuple(rules), tuple(weights), entries, tuple(plans), carried)


@dataclass(frozen=True)
class Marker:
    """The content of a marker node.

    Attributes:
        key, step: nodes of the module's noise key and of the step tensor.
        weights, state: nodes of the weights and state tensors that the tag lists.
        training: whether the module was in training mode.
        module_id, module: id and fully qualified name of the module that was called; None where unknown.
    """

    tag: Tag
    key: torch.fx.Node
    step: torch.fx.Node
    weights: Sequence[torch.fx.Node]
    state: Sequence[torch.fx.Node]
    training: bool
    module_id: int | None
    module: str | None = None

    @staticmethod
    def read(node: torch.fx.Node) -> Marker | None:
        """Return the marker at ``node``, or None for any other node."""
        if node.op != "call_function" or node.target not in (MARK, MARK.default):
            return None
        arguments: tuple[Any, ...] = node.args
        tag, key, step, weights, state, training = arguments
        callers = module_stack(node)
        innermost = callers[-1].id if callers else None
        return Marker(Tag.decode(tag), key, step, weights, state, training, innermost)


class Caller(NamedTuple):
    """A module that a node was called in: its id, Dynamo's source text for it, and its class."""

    id: int
    source: str
    cls: type


def module_stack(node: torch.fx.Node) -> list[Caller]:
    """Return the modules that ``node`` was called in, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return [Caller(int(str(key).partition("@")[0]), source, cls) for key, (source, cls) in stack.items()]
