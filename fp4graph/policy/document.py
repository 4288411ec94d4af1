"""Reads YAML into plain data that remembers its lines, so that every error of a policy names a line.

The data is that of ``yaml.safe_load``, aliases and merge keys included, with these exceptions. A key (also ``<<``) that
is given twice is an error, as in YAML; PyYAML accepts it. In a list under ``<<`` earlier mappings override later ones,
as YAML defines it (https://yaml.org/type/merge.html); PyYAML 6.0.4 does the opposite. Every key is text. Tags are
errors. Dates, numbers to the base 60 (``1:20:30``) and numbers with a leading 0, octal in YAML 1.1, are text.

Files and data are checked against size limits before aliases and merge keys are expanded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import yaml

from fp4graph.errors import PolicyError
from fp4graph.policy.words import dotted

#: Limits of a document: the bytes of a file, the levels of mappings and lists inside each other, and the number of
#: values with aliases and merge keys expanded.
MOST_BYTES = 2**20
DEEPEST = 32
MOST_VALUES = 100_000
#: The longest text, the longest key, and the most decimal digits of a whole number.
LONGEST_TEXT = 4096
LONGEST_KEY = 200
MOST_DIGITS = 18


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
    """A value with its place: a scalar, a list of nodes, or a dict of nodes, of which ``keys`` has the keys' places."""

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
        """Return the place that an error about ``path`` names: of a mapping or list the key's, else the value's."""
        node = self.get(*path)
        return self.where(*path) if path and isinstance(node.value, dict | list) else node.place

    def error(self, path: Iterable[object], message: str) -> PolicyError:
        """Return an error about the value at ``path``."""
        return self.blame(*path).error(message)

    def replacing(self, items: Mapping[str, tuple[Place, Node]]) -> Node:
        """Return this mapping, overridden by ``items`` and the places of their keys."""
        values = {key: node for key, (_, node) in items.items()}
        places = {key: place for key, (place, _) in items.items()}
        return Node({**self.value, **values}, self.place, {**self.keys, **places})

    def without(self, *dropped: str) -> Node:
        """Return this mapping without the keys ``dropped``."""
        values = {key: node for key, node in self.value.items() if key not in dropped}
        return Node(values, self.place, {key: place for key, place in self.keys.items() if key not in dropped})

    def plain(self) -> Any:
        """Return the data alone: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


def parse(text: str, file: str) -> Node:
    """Return the only document in ``text``."""
    loader: _Loader | None = None
    try:
        loader = _Loader(text, file)
        root = loader.get_single_node()
        if root is None:
            raise Place(file).error("the file is empty; a policy begins with 'version: 1'")
        return _Reader(loader, file).read(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if mark and error.context_mark and mark.index >= len(text.rstrip()):  # not closed: name where it opens
            mark = error.context_mark
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise Place(file, mark.line + 1 if mark else None).error(
            f"not valid YAML: {problem}{_hint(text, mark)}"
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise Place(file, line).error(f"not valid YAML: {error.reason}; remove the character") from None
    except (ValueError, OverflowError) as error:  # an escape such as "\UFFFFFFFF", or a %YAML version of many digits
        line = loader.line + 1 if loader else 1
        raise Place(file, line).error(f"not valid YAML: {error}; correct the escape or the number") from None


def _hint(text: str, mark: yaml.Mark | None) -> str:
    """Return what to do about a syntax error."""
    lines = text.splitlines()
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    if "\t" in line:
        return "; indent with spaces, not tabs"
    if line.lstrip().startswith(("*", "&", "%", "@", "`")) or ": *" in line:
        return "; quote text that begins with a special character of YAML, such as '*'"
    return "; check indentation, colons, quotes and brackets around here"


_WHOLE = r"[-+]?(?:0b_*[01][01_]*|0x_*[0-9a-fA-F][0-9a-fA-F_]*|0|[1-9][0-9_]*)"
_FRACTION = (
    r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_TAG = "tag:yaml.org,2002:"
#: Tags that SafeLoader resolves, and that this loader resolves differently or not at all.
_REPLACED = {f"{_TAG}{kind}" for kind in ("int", "float", "timestamp", "value")}


class _Loader(yaml.SafeLoader):
    """Composes the nodes of a document; refuses tags, and documents beyond the limits above."""

    yaml_implicit_resolvers: ClassVar = {  # type: ignore[misc]
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str, file: str) -> None:
        super().__init__(text)
        self._file = file
        self._depth = 0
        self._values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        place = Place(self._file, event.start_mark.line + 1)
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise place.error(f"tag {tag[:80]!r} is not allowed: a policy runs no code; write a plain value")
        self._values += 1
        self._depth += 1
        _check_size(place, self._depth, self._values)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(f"^(?:{_WHOLE})$"), list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}float", re.compile(f"^(?:{_FRACTION})$"), list("-+0123456789."))


class _Reader:
    """Converts PyYAML's composed nodes to :class:`Node`."""

    def __init__(self, loader: _Loader, file: str) -> None:
        self._loader = loader
        self._file = file
        self._open: set[int] = set()
        self._done: dict[int, Node] = {}
        self._size: dict[int, int] = {}  # values of each Node, with aliases and merge keys expanded
        self._merged = 0

    def read(self, node: yaml.Node) -> Node:
        place = self._place(node)
        if id(node) in self._open:
            raise place.error("an alias contains itself; write the block out")
        if id(node) not in self._done:
            self._open.add(id(node))
            built = self._build(node, place)
            self._open.remove(id(node))
            self._size[id(built)] = 1 + sum(self._size[id(item)] for item in _items(built))
            _check_size(place, 0, self._size[id(built)])
            self._done[id(node)] = built
        return self._done[id(node)]

    def _build(self, node: yaml.Node, place: Place) -> Node:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.read(item) for item in node.value], place)
        _check_scalar(node.value, place)  # before it is parsed as a number
        value = self._loader.construct_object(node)
        _check_scalar(value, place)
        return Node(value, place)

    def _mapping(self, node: yaml.MappingNode, place: Place) -> Node:
        merged: dict[str, tuple[Place, Node]] = {}
        written: dict[str, tuple[Place, Node]] = {}
        merge: Place | None = None
        for key, value in node.value:
            if key.tag == f"{_TAG}merge":
                if merge:
                    raise self._place(key).error(f"key '<<' is given twice, first on line {merge.line}; merge one list")
                merge = self._place(key)
                for source in reversed(self._sources(value)):  # the first one in a list wins
                    merged |= {name: (source.where(name), item) for name, item in source.value.items()}
                continue
            name, where = self._key(key)
            if name in written:
                line = written[name][0].line
                raise where.error(f"key {name!r} is given twice, first on line {line}; remove one of them")
            written[name] = (where, self.read(value))
        return Node({}, place).replacing(merged | written)

    def _sources(self, node: yaml.Node) -> list[Node]:
        """Return the mappings that a merge key names."""
        sources = [self.read(item) for item in (node.value if isinstance(node, yaml.SequenceNode) else [node])]
        for source in sources:
            if not isinstance(source.value, dict):
                raise self._place(node).error("'<<' merges a mapping or a list of mappings; correct it or quote it")
            self._merged += len(source.value)
            _check_size(self._place(node), 0, self._merged)
        return sources

    def _key(self, node: yaml.Node) -> tuple[str, Place]:
        read = self.read(node)
        _check_key(read.plain(), read.place)
        return read.value, read.place

    def _place(self, node: yaml.Node) -> Place:
        return Place(self._file, node.start_mark.line + 1)


def _items(node: Node) -> Iterable[Node]:
    if isinstance(node.value, dict):
        return node.value.values()
    return node.value if isinstance(node.value, list) else ()


def from_data(data: object) -> Node:
    """Return data given in Python as nodes without places."""
    return _Data().read(data, ())


class _Data:
    """Converts data to :class:`Node`; errors name keys and indices instead of lines."""

    def __init__(self) -> None:
        self._values = 0

    def read(self, data: object, path: tuple[str | int, ...]) -> Node:
        place = Place()
        self._values += 1
        _check_size(place, len(path), self._values, f"{dotted(path[:4])}...: ")
        if isinstance(data, Mapping):
            items: dict[str, Node] = {}
            for key, item in data.items():
                _check_key(key, place, _at(path))
                items[str(key)] = self.read(item, (*path, key))
            return Node(items, place)
        if isinstance(data, list | tuple):
            return Node([self.read(item, (*path, index)) for index, item in enumerate(data)], place)
        _check_scalar(data, place, _at(path))
        return Node(data, place)


def _at(path: tuple[str | int, ...]) -> str:
    return f"{dotted(path)}: " if path else ""


def _check_size(place: Place, depth: int, values: int, at: str = "") -> None:
    """Raise PolicyError if a document is nested too deeply or has too many values."""
    if depth > DEEPEST:
        raise place.error(f"{at}nested too deeply: a policy has at most {DEEPEST} levels, and no block contains itself")
    if values > MOST_VALUES:
        raise place.error(
            f"{at}too large: a policy has at most {MOST_VALUES:,} values, with aliases and merge keys written out; "
            "shorten it"
        )


def _check_scalar(value: object, place: Place, at: str = "") -> None:
    """Raise PolicyError for a value that a policy cannot hold."""
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            raise place.error(f"{at}the text has {len(value):,} characters; shorten it to at most {LONGEST_TEXT:,}")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise place.error(f"{at}half of a surrogate pair is not a character; write the character itself")
    elif isinstance(value, int):
        if abs(value) >= 10**MOST_DIGITS:
            raise place.error(f"{at}a whole number has at most {MOST_DIGITS} digits; write a smaller one")
    elif value is not None and not isinstance(value, float):
        kind = type(value).__name__
        raise place.error(f"{at}a policy holds mappings, lists, text, numbers, true and false; got {kind}")


def _check_key(value: object, place: Place, at: str = "") -> None:
    """Raise PolicyError for a key that a policy cannot have."""
    if not isinstance(value, str):
        raise place.error(f"{at}a key is text; got {str(value)[:80]}, quote it or correct it")
    if len(value) > LONGEST_KEY:
        raise place.error(f"{at}the key has {len(value):,} characters; shorten it to at most {LONGEST_KEY}")
    _check_scalar(value, place, at)


def merge(parent: Node, child: Node) -> Node:
    """Merge policy ``child`` over ``parent``, for ``extends`` and phases.

    The child's keys win. A technique of the child replaces the parent's technique of the same name; without a namesake
    it follows the parent's techniques. Rules under ``before`` in the child precede the parent's rules, and those of the
    parent's phases. The parent's ``name`` and ``extends`` are not inherited.
    """
    written = {key: node for key, node in child.value.items() if key != "extends"}
    if "techniques" in written and "techniques" in parent.value:
        written["techniques"] = _append(parent.get("techniques"), written["techniques"])
    inherited = {key: node for key, node in parent.value.items() if key not in ("name", "extends")}
    if "rules" in written and (ahead := written["rules"].child("before")):
        after = parent.value["rules"].value if "rules" in parent.value else []
        written["rules"] = Node([*ahead.value, *after], ahead.place)
        if "phases" in inherited:
            phases = inherited["phases"]
            changed = [_put_ahead(phase, ahead.value, after) for phase in phases.value]
            inherited["phases"] = Node(changed, phases.place)
    return Node({**inherited, **written}, child.place, {**parent.keys, **{key: child.where(key) for key in written}})


def _put_ahead(phase: Node, ahead: Sequence[Node], inherited: Sequence[Node]) -> Node:
    """Put rules ``ahead`` of a phase's own; ``inherited`` are the rules that follow the phase's rules ``before``."""
    rules = phase.child("rules")
    if rules is None:  # the phase has the rules of the policy
        return phase
    before = rules.child("before")
    own = rules.value if before is None else [*before.value, *inherited]
    return phase.replacing({"rules": (phase.where("rules"), Node([*ahead, *own], rules.place))})


def _append(parent: Node, child: Node) -> Node:
    """Join two lists of techniques; a child's technique replaces the parent's technique of the same name."""
    by_name: dict[str, Node] = {}
    for node in child.value:
        by_name.setdefault(_technique_name(node), node)
    merged = [by_name.get(_technique_name(node), node) for node in parent.value]
    added = (node for node in child.value if all(node is not present for present in merged))
    return Node([*merged, *added], child.place)


def _technique_name(node: Node) -> str:
    return node.value if isinstance(node.value, str) else str(next(iter(node.value)))
