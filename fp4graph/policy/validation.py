"""Validates nodes against pydantic models; errors are in plain words and name a line."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fp4graph.errors import suggest
from fp4graph.policy.document import Node
from fp4graph.policy.words import dotted, shortened
from fp4graph.technique.registry import Registry

#: Keys and indices that lead to a node of a document.
Path = tuple[str | int, ...]
_Model = TypeVar("_Model", bound=BaseModel)

#: Plain messages for pydantic's error types whose messages are too technical for a policy's author.
_WORDS = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a mapping"),
    **dict.fromkeys(("tuple_type", "list_type"), "must be a list"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
}


def validate(model: type[_Model], node: Node, path: Path = (), what: str = "key") -> _Model:
    """Return ``node``, found at ``path`` in the policy, as a ``model``; raise PolicyError at the first mistake.

    ``what`` is the word for a key in messages: "key", or "option" of a technique.
    """
    try:
        return model.model_validate(node.plain())
    except ValidationError as error:
        details = error.errors(include_url=False)
    located = [(_steps(node, detail), detail) for detail in details]
    # A union reports an error for each of its members. The deepest one is about the intended member.
    above = {steps[:depth] for steps, _ in located for depth in range(len(steps))}
    deepest = [(steps, detail) for steps, detail in located if steps not in above]
    steps, _ = min(deepest, key=lambda item: node.get(*item[0]).place.line or 0)
    chosen = [detail for s, detail in deepest if s == steps]
    missing = [str(detail["loc"][-1]) for detail in chosen if detail["type"] == "missing"]
    if len(missing) > 1 and len(missing) == len(chosen):
        *first, last = missing
        needs = f"{dotted([*path, *steps]) or 'the policy'} needs {what}s {', '.join(first)} and {last}; add them"
        raise node.blame(*steps).error(needs) from None
    messages = dict.fromkeys(_sentence(detail, [*path, *steps], model, what) for detail in chosen)
    on_key = any(detail["type"] in ("unknown", "extra_forbidden") for detail in chosen)
    place = node.where(*steps) if on_key else node.blame(*steps)
    raise place.error(" or ".join(messages)) from None


def refuse_contested(document: Node, registry: Registry, name: str, path: Path) -> None:
    """Raise PolicyError if two plugins offer the technique or format ``name``, which is written at ``path``."""
    if name in registry.contested:
        raise document.error(path, f"{registry.contested[name]}; uninstall or rename one of the two")


def _steps(node: Node, detail: ErrorDetails) -> Path:
    """Return the parts of pydantic's location that exist in ``node``; tags of unions do not."""
    steps: list[str | int] = []
    for part in detail["loc"]:
        child = node.child(part)
        if child is not None:
            steps.append(part)
            node = child
    return tuple(steps)


def _sentence(detail: ErrorDetails, path: list[str | int], model: type[BaseModel], what: str) -> str:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "missing":
        return f"{dotted(path) or 'the policy'} has no {what} {detail['loc'][-1]!r}; add it"
    if kind == "extra_forbidden":
        *path, key = path
        return f"unknown {what} {key!r} of {dotted(path)}; {suggest(str(key), keys(model))}"
    if kind == "unknown":
        *path, _ = path
        message, _, hint = detail["msg"].partition("; ")
        return f"{message} in {dotted(path) or 'the policy'}; {hint}"
    if kind in ("value_error", "assertion_error"):
        return f"{dotted(path) or 'the policy'}: {re.sub('^(Value|Assertion) error, ', '', detail['msg'])}"
    if kind == "too_long":
        return f"{dotted(path)} has {len(value)} items; at most {context['max_length']} are read"
    hint = ""
    if kind in ("literal_error", "enum"):
        message = f"must be {context['expected']}"
        near = suggest(str(value), re.findall(r"'([^']*)'", context["expected"]))
        hint = f"; {near}" if near.startswith("did you mean") else ""
    elif kind in _WORDS:
        message = _WORDS[kind].format(**context)
    else:
        message = re.sub("^Input should", "must", detail["msg"])
    return f"{dotted(path) or 'the policy'} {message}; got {shown(value)}{hint}"


def shown(value: Any) -> str:
    """Return a value that was written, for messages."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = f"a mapping of {', '.join(map(str, value))}" if isinstance(value, dict) and value else repr(value)
    return shortened(text)


def keys(model: type[BaseModel]) -> list[str]:
    """Return the names of ``model``'s fields as policies write them: the alias, if a field has one."""
    return [field.alias or name for name, field in model.model_fields.items()]
