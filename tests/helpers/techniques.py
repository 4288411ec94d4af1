"""Makes techniques from the members of their parts, and plugins that offer techniques."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import fp4graph
from fp4graph.technique import Gemm, Operand, OptimizerHook, Overhead, PairTransform, Part, StateEntry, Technique
from fp4graph.technique.parts import KINDS

FREE = Overhead("O(1)", "O(1)", fusable=True)
FPROP = frozenset({Operand.FPROP_INPUT, Operand.FPROP_WEIGHT})
_KINDS = {stage: kind for kind in KINDS for stage in kind.stages} | {"observe": Part}


def technique(
    called: str, operands: frozenset[Operand] = FPROP, state: Iterable[StateEntry] = (), **members: Any
) -> type[Technique]:
    """Return a technique of that name; ``members`` are methods and fields of its parts, which act on ``operands``."""
    kinds: dict[type[Part], dict[str, Any]] = {}
    for stage in _KINDS.keys() & members.keys():
        kinds.setdefault(_KINDS[stage], {})[stage] = members.pop(stage)
    declared = ("mixes", "normalizes", "group_granularity", "draws", "counts")
    fields: dict[str, Any] = {name: members.pop(name) for name in declared if name in members}
    made = [_part(kind, methods, fields) for kind, methods in kinds.items()]

    def parts(self: Technique, site: Any) -> tuple[Part, ...]:
        kept = tuple(state)
        everywhere = (cls(options=self, operands=operands & cls.among, state=kept) for cls in made)
        return (*everywhere, OptimizerHook(options=self, operands=operands, state=kept))

    members = {"name": called, "overhead": FREE, "complexity": property(lambda self: 0.0), "parts": parts, **members}
    namespace = {key: value for key, value in members.items() if value is not None}
    annotations = {key: ClassVar for key in ("name", "overhead") if key in namespace}
    return type("Made", (Technique,), {"__module__": __name__, "__annotations__": annotations, **namespace})


def _part(kind: type[Part], methods: dict[str, Any], fields: dict[str, Any]) -> type[Part]:
    """Return a part of ``kind`` with these methods; by default it mixes the elements of a block."""
    declared = {"mixes": "block"} | {name: value for name, value in fields.items() if hasattr(kind, name)}
    if kind is PairTransform:
        declared = {"gemms": frozenset({Gemm.FPROP})} | declared
        methods = {"transform": lambda self, x, side, shared: x, "inverse": lambda self, x, side, shared: x} | methods
    return type(f"Made{kind.__name__}", (kind,), {"__module__": __name__, **declared, **methods})


class Offers:
    """A plugin that offers one technique."""

    def __init__(self, cls: type[Technique]) -> None:
        self.cls = cls

    @fp4graph.hookimpl
    def fp4graph_techniques(self) -> list[type[Technique]]:
        return [self.cls]


class Broken:
    """A plugin that cannot be loaded."""

    @fp4graph.hookimpl
    def fp4graph_techniques(self) -> list[type[Technique]]:
        raise RuntimeError("out of order")


def offering(**offered: Any) -> object:
    """Return a plugin that offers lists of ``techniques``, ``formats``, ``policies`` or ``products``."""
    hooks = {f"fp4graph_{kind}": fp4graph.hookimpl(lambda self, items=items: items) for kind, items in offered.items()}
    return type("Plugin", (), hooks)()
