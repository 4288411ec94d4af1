"""Merges one policy document over another, for ``extends`` and phases."""

from __future__ import annotations

from fp4graph.policy.document import Node


def merge(parent: Node, child: Node) -> Node:
    """Merge ``child`` over ``parent``: its keys win, its techniques replace their namesakes or follow the parent's.

    The parent's name is not inherited, and neither is ``extends``, which has been followed.
    """
    items = {key: (child.where(key), node) for key, node in child.value.items() if key != "extends"}
    if "techniques" in items and "techniques" in parent.value:
        items["techniques"] = (items["techniques"][0], _append(parent.get("techniques"), items["techniques"][1]))
    inherited = {key: node for key, node in parent.value.items() if key not in ("name", "extends")}
    return Node(inherited, child.place, parent.keys).replacing(items)


def _append(parent: Node, child: Node) -> Node:
    """Join two lists of techniques; a child's technique takes the place of the parent's namesake."""
    inherited = {_technique_name(node) for node in parent.value}
    replacing: dict[str, Node] = {}
    for node in child.value:
        replacing.setdefault(_technique_name(node), node)
    merged = [replacing.get(_technique_name(node), node) for node in parent.value]
    added = [n for n in child.value if _technique_name(n) not in inherited or n is not replacing[_technique_name(n)]]
    return Node([*merged, *added], child.place)


def _technique_name(node: Node) -> str:
    return node.value if isinstance(node.value, str) else str(next(iter(node.value)))
