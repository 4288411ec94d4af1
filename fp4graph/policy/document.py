"""YAML as plain data that remembers its lines, so that every error of a policy names one.

The data is that of ``yaml.safe_load`` (merge keys and aliases included, no tag that runs code), with two exceptions: a
key given twice, which YAML forbids and PyYAML accepts, is an error, and every key is text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from fp4graph.errors import PolicyError


@dataclass(frozen=True)
class Place:
    """A file and a 1-based line in it; both are None in a policy given as data."""

    file: str | None = None
    line: int | None = None

    def error(self, message: str) -> PolicyError:
        """Return an error about this place."""
        return PolicyError(message, file=self.file, line=self.line)


@dataclass(frozen=True)
class Node:
    """A value with its place: a scalar, a list of nodes, or a dict of nodes with ``keys``, the places of its keys."""

    value: Any
    place: Place
    keys: Mapping[str, Place] = field(default_factory=dict)

    def child(self, part: object) -> Node | None:
        """Return the item under one key or index, or None."""
        items: dict[Any, Node] = self.value if isinstance(self.value, dict) else {}
        if isinstance(self.value, list) and isinstance(part, int):
            items = dict(enumerate(self.value))
        return items.get(part)

    def get(self, *path: object) -> Node:
        """Return the deepest node along ``path``; parts that lead nowhere are skipped."""
        node = self
        for part in path:
            node = node.child(part) or node
        return node

    def where(self, *path: object) -> Place:
        """Return the place of the key at the end of ``path``, or the nearest place that exists."""
        *parents, last = path
        parent = self.get(*parents)
        return parent.keys.get(str(last), parent.get(last).place)

    def blame(self, *path: object) -> Place:
        """Return the place that an error about ``path`` names. A mapping or list begins at the line of its key."""
        node = self.get(*path)
        return self.where(*path) if path and isinstance(node.value, dict | list) else node.place

    def error(self, path: Iterable[object], message: str) -> PolicyError:
        """Return an error about what is at ``path``."""
        return self.blame(*path).error(message)

    def replacing(self, items: Mapping[str, tuple[Place, Node]]) -> Node:
        """Return this mapping with ``items``, and the places of their keys, over its own."""
        values = {key: node for key, (_, node) in items.items()}
        places = {key: place for key, (place, _) in items.items()}
        return Node({**self.value, **values}, self.place, {**self.keys, **places})

    def plain(self) -> Any:
        """Return the data alone: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


def parse(text: str, file: str) -> Node:
    """Return the one document in ``text``."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise Place(file).error("the file is empty; a policy begins with 'version: 1'")
        return _Reader(loader, file).read(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if mark and error.context_mark and mark.index >= len(text.rstrip()):  # never closed: name where it was opened
            mark = error.context_mark
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise Place(file, mark.line + 1 if mark else None).error(
            f"not valid YAML: {problem}{_hint(text, mark)}"
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise Place(file, line).error(f"not valid YAML: {error.reason}; remove the character") from None
    except RecursionError:
        raise Place(file).error("not a policy: nested too deeply") from None


def _hint(text: str, mark: yaml.Mark | None) -> str:
    """Return what to do about a syntax error."""
    lines = text.splitlines()
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    if "\t" in line:
        return "; indent with spaces, not tabs"
    if line.lstrip().startswith(("*", "&", "%", "@", "`")) or ": *" in line:
        return "; quote text that begins with a character YAML gives a meaning to, such as '*'"
    return "; check indentation, colons, quotes and brackets around here"


#: The most values of a document with its aliases written out; a few lines of aliases to aliases could make any number.
_MOST_VALUES = 100_000


class _Reader:
    """Converts PyYAML's composed nodes to :class:`Node`."""

    def __init__(self, loader: yaml.SafeLoader, file: str) -> None:
        self._loader = loader
        self._file = file
        self._open: set[int] = set()
        self._done: dict[int, Node] = {}
        self._size: dict[int, int] = {}

    def read(self, node: yaml.Node) -> Node:
        place = self._place(node)
        if id(node) in self._open:
            raise place.error("an alias contains itself; write the block out")
        if id(node) not in self._done:
            self._open.add(id(node))
            self._done[id(node)] = self._build(node, place)
            self._open.remove(id(node))
            self._size[id(node)] = 1 + sum(self._size[id(item)] for item in _items(node))
            if self._size[id(node)] > _MOST_VALUES:
                raise place.error("aliases make this too large; use fewer of them")
        return self._done[id(node)]

    def _build(self, node: yaml.Node, place: Place) -> Node:
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return Node([self.read(item) for item in node.value], place)
        if not isinstance(node, yaml.ScalarNode):
            raise place.error(f"tag {node.tag!r} is not allowed; a policy is plain mappings, lists and values")
        try:
            return Node(self._loader.construct_object(node), place)
        except yaml.constructor.ConstructorError:
            raise place.error(f"tag {node.tag!r} is not allowed; a policy runs no code, write a plain value") from None
        except ValueError as error:
            raise place.error(f"{node.value!r} is not a value: {error}; quote it to make it text") from None

    def _mapping(self, node: yaml.MappingNode, place: Place) -> Node:
        written = [self._key(key) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        first: dict[str, Place] = {}
        for key, where in written:
            if key in first:
                raise where.error(f"key {key!r} is given twice, first on line {first[key].line}; remove one of them")
            first[key] = where
        self._loader.flatten_mapping(node)
        items = [(*self._key(key), self.read(value)) for key, value in node.value]  # merged ones first: own keys win
        return Node({key: item for key, _, item in items}, place, {key: where for key, where, _ in items})

    def _key(self, node: yaml.Node) -> tuple[str, Place]:
        place = self._place(node)
        value = self._loader.construct_object(node) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(value, str):
            raise place.error(f"a key is text, and YAML reads this one as {value!r}; quote it or correct it")
        return value, place

    def _place(self, node: yaml.Node) -> Place:
        return Place(self._file, node.start_mark.line + 1)


def _items(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [value for _, value in node.value]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def from_data(data: object) -> Node:
    """Return data given in Python as nodes without places."""
    nowhere = Place()
    if isinstance(data, Mapping):
        for key in data:
            if not isinstance(key, str):
                raise nowhere.error(f"a key is text; got {key!r}")
        return Node({str(key): from_data(item) for key, item in data.items()}, nowhere)
    if isinstance(data, list | tuple):
        return Node([from_data(item) for item in data], nowhere)
    return Node(data, nowhere)


def merge(parent: Node, child: Node) -> Node:
    """Merge policy ``child`` over ``parent``, for ``extends`` and phases.

    The child's keys win; its techniques replace their namesakes or follow the parent's. The parent's name is not
    inherited, and neither is ``extends``, which has been followed.
    """
    own = {key: node for key, node in child.value.items() if key != "extends"}
    if "techniques" in own and "techniques" in parent.value:
        own["techniques"] = _append(parent.get("techniques"), own["techniques"])
    inherited = {key: node for key, node in parent.value.items() if key not in ("name", "extends")}
    return Node({**inherited, **own}, child.place, {**parent.keys, **{key: child.where(key) for key in own}})


def _append(parent: Node, child: Node) -> Node:
    """Join two lists of techniques; a child's technique takes the place of the parent's namesake."""
    by_name: dict[str, Node] = {}
    for node in child.value:
        by_name.setdefault(_technique_name(node), node)
    merged = [by_name.get(_technique_name(node), node) for node in parent.value]
    return Node([*merged, *(node for node in child.value if all(node is not one for one in merged))], child.place)


def _technique_name(node: Node) -> str:
    return node.value if isinstance(node.value, str) else str(next(iter(node.value)))
