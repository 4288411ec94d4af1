"""Laying a search space's fragment over a policy's document."""

from __future__ import annotations

from fp4graph.policy.document import Node, merge


def overlaid(document: Node, fragment: Node) -> Node:
    """Return ``document`` with a fragment's quantization and techniques."""
    given = fragment.value
    over = {key: (given[key].place, given[key]) for key in ("quantize", "operands") if key in given}
    if over:
        document = _each_rule(document, Node({}, fragment.place).replacing(over))
    if "techniques" in given:
        added = Node({"techniques": given["techniques"]}, fragment.place, fragment.keys)
        document = merge(document, added)
    return document


def _each_rule(document: Node, over: Node) -> Node:
    """Lay ``quantize`` and ``operands`` over all that quantizes: rules, those of phases, and the default."""
    changed: dict[str, Node] = {}
    rules, default, phases = (document.value.get(key) for key in ("rules", "default", "phases"))
    if rules is not None:
        changed["rules"] = _laid(rules, over)
    if default is not None and isinstance(default.value, dict):  # a quantize block, with the exceptions among its keys
        flat = over.child("quantize") or Node({}, over.place)
        exceptions = {key: (item.place, item) for key, item in over.value.items() if key == "operands"}
        changed["default"] = _deep(default, flat.replacing(exceptions))
    if phases is not None:
        changed["phases"] = Node([_each_rule(phase, over) for phase in phases.value], phases.place)
    return document.replacing({key: (document.where(key), node) for key, node in changed.items()})


def _laid(rules: Node, over: Node) -> Node:
    if ahead := rules.child("before"):  # of a phase
        return rules.replacing({"before": (rules.where("before"), _laid(ahead, over))})
    return Node([_deep(rule, over) if rule.child("quantize") else rule for rule in rules.value], rules.place)


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
