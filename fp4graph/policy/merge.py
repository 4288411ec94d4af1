"""One policy document over another: what ``extends`` and phases do."""

from __future__ import annotations

from fp4graph.policy.document import Node


def merge(parent: Node, child: Node) -> Node:
    """``child`` over ``parent``: its keys win, its techniques come after the parent's or replace their namesakes.

    The parent's name is not inherited, nor is its ``extends``, which is done.
    """
    items = {key: (child.where(key), node) for key, node in child.value.items() if key != "extends"}
    if "techniques" in items and "techniques" in parent.value:
        items["techniques"] = (items["techniques"][0], _append(parent.get("techniques"), items["techniques"][1]))
    inherited = {key: node for key, node in parent.value.items() if key not in ("name", "extends")}
    return Node(inherited, child.place, parent.keys).replacing(items)


def _append(parent: Node, child: Node) -> Node:
    """Two lists of techniques as one, in which the child's entry stands where the parent has its namesake."""
    own = {_technique_name(entry) for entry in child.value}
    replaced = {_technique_name(entry) for entry in parent.value} & own
    child_entries = list(child.value)
    merged: list[Node] = []
    for entry in parent.value:
        name = _technique_name(entry)
        merged.append(next(e for e in child_entries if _technique_name(e) == name) if name in replaced else entry)
    placed = {id(entry) for entry in merged}
    return Node([*merged, *(entry for entry in child_entries if id(entry) not in placed)], child.place)


def _technique_name(entry: Node) -> str:
    return entry.value if isinstance(entry.value, str) else str(next(iter(entry.value)))
