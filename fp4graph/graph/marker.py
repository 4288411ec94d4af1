"""The marker that carries a module's key and weight state into a captured graph.

A forward pre-hook of every module with planned sites (:mod:`fp4graph.model.hooks`) calls ``fp4graph::mark`` while
Dynamo traces. Dynamo lifts the tensors it is given to graph inputs, into checkpointed bodies and shared graphs too,
where object identities do not reach. The pass reads and removes the node; a graph that another backend compiles still
has it, and fails instead of running in silent high precision.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from fp4graph.errors import UncompiledError

_FOREIGN = (
    "a module that fp4graph.apply prepared was compiled by another torch.compile backend, which would run it in high "
    "precision; call the applied model, or fp4graph.remove(model) first"
)

_library: Any = torch.library.Library("fp4graph", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("mark(str tag, Tensor key, Tensor step, Tensor[] weights, Tensor[] state, bool training) -> ()")


def _refuse(*args: object) -> None:
    raise UncompiledError(_FOREIGN)


_library.impl("mark", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake("fp4graph::mark", lambda *args: None, lib=_library)
MARK = torch.ops.fp4graph.mark
# The fake implementation also runs while Dynamo itself traces; only a later trace (AOTAutograd's) has this mode.
MARK.default.py_impl(ProxyTorchDispatchMode)(_refuse)


@dataclass(frozen=True)
class Tag:
    """The static part of a marker. Dynamo guards on it: modules with equal tags may share one graph.

    Attributes:
        rules: indices of the policy's rules that the module's name and place allow; -1 is the default action.
        weights: attribute paths of the weights the marker carries, e.g. "weight" or "out_proj.weight".
        state: per state tensor, (index of its weight, technique, entry name).
        plans: per weight, a number that tells its plan from the other plans of the model, for a technique may plan by
            the name or the place of a module.
    """

    rules: tuple[int, ...]
    weights: tuple[str, ...]
    state: tuple[tuple[int, str, str], ...]
    plans: tuple[int, ...] = ()

    def encode(self) -> str:
        """As the string that the marker takes."""
        return json.dumps([self.rules, self.weights, self.state, self.plans])

    @staticmethod
    def decode(text: str) -> Tag:
        """The inverse of :meth:`encode`."""
        rules, weights, state, plans = json.loads(text)
        entries = tuple((i, technique, entry) for i, technique, entry in state)
        return Tag(tuple(rules), tuple(weights), entries, tuple(plans))


@dataclass(frozen=True)
class Marker:
    """A marker node, read."""

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
        """The marker at ``node``, or None for any other node."""
        if node.op != "call_function" or node.target not in (MARK, MARK.default):
            return None
        tag, key, step, weights, state, training = node.args
        stack = module_stack(node)
        innermost = stack[-1][0] if stack else None
        carried: list[Any] = [key, step, weights, state, training]
        return Marker(Tag.decode(str(tag)), carried[0], carried[1], carried[2], carried[3], carried[4], innermost)


def module_stack(node: torch.fx.Node) -> list[tuple[int, str, type]]:
    """(id, source, class) of the modules ``node`` was called in, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return [(int(str(key).partition("@")[0]), source, cls) for key, (source, cls) in stack.items()]
