"""Laying a search space's fragment over a policy's document."""

from __future__ import annotations

from fp4graph.policy.document import Node, Place, merge


def _quantizing(rule: Node) -> bool:
    return isinstance(rule.value, dict) and "quantize" in rule.value


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
    changed: dict[str, tuple[Place, Node]] = {}

    def change(key: str, node: Node) -> None:
        changed[key] = (document.where(key), node)

    rules = document.value.get("rules")
    if rules is not None:
        items = [_rule(rule, quantize, operands) if _quantizing(rule) else rule for rule in rules.value]
        change("rules", Node(items, rules.place))
    default = document.value.get("default")
    if default is not None and isinstance(default.value, dict):
        whole = default if quantize is None else _deep(default, quantize)
        change("default", whole if operands is None else _deep(whole, _nested("operands", operands)))
    phases = document.value.get("phases")
    if phases is not None:
        change("phases", Node([_each_rule(phase, quantize, operands) for phase in phases.value], phases.place))
    return document.replacing(changed)


def _rule(rule: Node, quantize: Node | None, operands: Node | None) -> Node:
    for key, over in (("quantize", quantize), ("operands", operands)):
        if over is not None:
            rule = _deep(rule, _nested(key, over))
    return rule


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
