"""Laying a search space's fragment over a policy's document."""

from __future__ import annotations

import functools

from fp4graph.policy.document import Node, merge


def overlaid(document: Node, fragment: Node) -> Node:
    """Return ``document`` with a fragment's quantization and techniques."""
    given = fragment.value
    if "quantize" in given or "operands" in given:
        document = _each_rule(document, given.get("quantize"), given.get("operands"))
    if "techniques" in given:
        added = Node({"techniques": given["techniques"]}, fragment.place, fragment.keys)
        document = merge(document, added)
    return document


def _each_rule(document: Node, quantize: Node | None, operands: Node | None) -> Node:
    """Lay both over every rule that quantizes, the default and the rules of phases included."""
    exceptions = None if operands is None else _nested("operands", operands)

    def rule_over(rule: Node) -> Node:
        if not (isinstance(rule.value, dict) and "quantize" in rule.value):
            return rule
        return _over(rule, None if quantize is None else _nested("quantize", quantize), exceptions)

    changed: dict[str, Node] = {}
    rules, default, phases = (document.value.get(key) for key in ("rules", "default", "phases"))
    if rules is not None:
        changed["rules"] = Node([rule_over(rule) for rule in rules.value], rules.place)
    if default is not None and isinstance(default.value, dict):
        changed["default"] = _over(default, quantize, exceptions)
    if phases is not None:
        changed["phases"] = Node([_each_rule(phase, quantize, operands) for phase in phases.value], phases.place)
    return document.replacing({key: (document.where(key), node) for key, node in changed.items()})


def _over(under: Node, *several: Node | None) -> Node:
    return functools.reduce(_deep, (over for over in several if over is not None), under)


def _nested(key: str, node: Node) -> Node:
    return Node({key: node}, node.place, {key: node.place})


def _deep(under: Node, over: Node) -> Node:
    """Lay mapping over mapping, key by key at every depth; a new scale format drops the old format's ``max``."""
    if not (isinstance(under.value, dict) and isinstance(over.value, dict)):
        return over
    if "format" in over.value and "max" in under.value:
        kept = {key: item for key, item in under.value.items() if key != "max"}
        under = Node(kept, under.place, under.keys)
    items = {
        key: (over.where(key), _deep(under.value[key], item) if key in under.value else item)
        for key, item in over.value.items()
    }
    return under.replacing(items)
