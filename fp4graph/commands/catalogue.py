"""Techniques and policies as data, for the commands and the reference pages."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from inspect import get_annotations
from typing import Any, Literal, NamedTuple

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from fp4graph.errors import Error
from fp4graph.policy import Phase, Policy, Rule, load_policy, plan_specs
from fp4graph.policy.rule import DEFAULT, plans
from fp4graph.policy.validation import keys
from fp4graph.policy.words import spec_words
from fp4graph.technique import STAGES, OperandSpecs, Part, Technique
from fp4graph.technique.operands import Operand
from fp4graph.technique.options import OperandList
from fp4graph.technique.registry import GROUP, Registry
from fp4graph.technique.site import SiteView


@functools.lru_cache(maxsize=4)
def loadable_policies(registry: Registry) -> dict[str, Policy]:
    """Return every policy of ``registry`` that can be loaded, by name."""
    policies: dict[str, Policy] = {}
    for name, path in sorted(registry.policies.items()):
        with contextlib.suppress(Error):  # ``fp4graph policies`` reports it
            policies[name] = load_policy(path, registry)
    return policies


def shipped_registry() -> Registry:
    """Return a registry of only the techniques and policies of fp4graph."""
    points = sorted(point for point in entry_points(group=GROUP) if point.module.startswith("fp4graph_plugins."))
    return Registry([(point.name, point) for point in points], entry_point_group=None)


def technique_data(technique: type[Technique], registry: Registry) -> dict[str, Any]:
    """Return a technique as JSON data; ``complexity`` is None if it depends on a required option."""
    return technique_row(technique, registry) | {
        "doc": docstring(technique),
        "options": {key: _option_data(field) for key, field in option_fields(technique).items()},
        "stages": stages_of(technique),
        "conflicts": sorted(technique.conflicts),
        "requires": sorted(technique.requires),
    }


def stages_of(technique: type[Technique]) -> list[str]:
    """Return the stages at which a technique acts under some options: the stages of the parts in its module."""
    members = vars(sys.modules[technique.__module__]).values()
    classes = [each for each in members if isinstance(each, type) and issubclass(each, Part)]
    options_of = {each: get_annotations(each).get("options", technique) for each in classes}
    parts = [each for each, options in options_of.items() if options in (technique, technique.__name__)]
    stages = [stage for stage in STAGES if any(stage in part.acted for part in parts)]
    scales = ["loss_scaler"] if technique.loss_scaler is not Technique.loss_scaler else []
    return [*(["plan"] if plans(technique) else []), *stages, *scales]


def option_fields(technique: type[Technique]) -> dict[str, FieldInfo]:
    """Return the options of a technique by the keys that policies use."""
    return dict(zip(keys(technique), technique.model_fields.values(), strict=True))


def technique_row(technique: type[Technique], registry: Registry) -> dict[str, Any]:
    """Return the short form of :func:`technique_data` for a list."""
    return {
        "name": technique.name,
        "complexity": weight_of(technique, {}),
        "compute": technique.overhead.compute,
        "memory": technique.overhead.memory,
        "fusable": technique.overhead.fusable,
        "plugin": registry.origin(technique.name),
    }


def policy_data(policy: Policy) -> dict[str, Any]:
    """Return a policy and its resolved rules as JSON data."""
    return policy_row(policy) | {
        "weights": policy.weights,
        "fingerprint": policy.fingerprint,
        "quantizes": policy.ever_quantizes,
        **_rules_data(policy),
        "phases": [{"at": phase.at, **_rules_data(phase.policy)} for phase in policy.phases],
        "yaml": policy.to_yaml(),
    }


def _rules_data(policy: Policy) -> dict[str, Any]:
    return {"rules": [_rule_data(rule) for rule in policy.rules], "default": _rule_data(policy.default)}


def policy_row(policy: Policy) -> dict[str, Any]:
    """Return the short form of :func:`policy_data` for a list."""
    return {
        "name": policy.name,
        "description": policy.description,
        "file": policy.file,
        "complexity": policy.complexity,
        "techniques": [technique.name for technique in policy.used],
    }


def _rule_data(rule: Rule) -> dict[str, Any]:
    return {
        "name": rule.name,
        "file": rule.file,
        "line": rule.line,
        "required": rule.required,
        "match": str(rule.match),
        "keep": rule.keep,
        "operands": {operand.value: spec_words(spec) for operand, spec in planned(rule).items()},
        "reuses": sorted(operand.value for operand in rule.reuses),
        "techniques": [technique.name for technique in rule.techniques],
    }


def planned(rule: Rule) -> OperandSpecs:
    """Return the specs of a rule after the plans of its techniques."""
    site = SiteView(None, (rule.match.op or ("linear",))[0], None, None, None)
    return plan_specs(rule.techniques, site, rule.specs)


class Native(NamedTuple):
    """Whether a GEMM of a rule runs natively on a target.

    ``kind`` and ``why`` are those of a :class:`~fp4graph.graph.targets.Verdict`; if a technique refuses such products,
    they are "refused" and the error.
    """

    rule: str
    op: str
    gemm: str
    kind: str
    why: str


def native_on(target: str, policy: Policy) -> list[Native]:
    """Return a row for every GEMM of the rules that quantize, for products of any size, without later phases."""
    from fp4graph.graph import targets
    from fp4graph.graph.plan import plan_once

    rows: list[Native] = []
    for rule in (*policy.rules, policy.default):
        for op in (rule.match.op or ("linear", "grouped")) if rule.quantizes else ():
            try:
                program = plan_once(SiteView(None, op, None, None, None), rule).program
            except Error as error:  # the policy refuses such products
                rows.append(Native(rule.name, op, "all", "refused", str(error)))
                continue
            verdicts = targets.verdicts(target, program, op=op)
            rows += [Native(rule.name, op, str(gemm), *verdict) for gemm, verdict in verdicts.items()]
    return rows


def _option_data(field: FieldInfo) -> dict[str, Any]:
    required = field.is_required()
    return {
        "type": option_words(field.annotation, field.metadata),
        "required": required,
        **({} if required else {"default": default_of(field)}),
        "description": one_line(field.description or ""),
    }


def default_of(field: FieldInfo) -> Any:
    return to_jsonable_python(field.get_default(call_default_factory=True))


def weight_of(technique: type[Technique], options: Mapping[str, Any]) -> float | None:
    with contextlib.suppress(ValidationError):  # an option has no default, or options conflict
        return technique.model_validate(options).complexity
    with contextlib.suppress(AttributeError):  # the weight depends on that option
        return technique.model_construct(**options).complexity
    return None


#: Columns of a rule's operand table.
COLUMNS = ("", "operand", "element", "block", "scale", "rounding", "source")


def phase_heading(phase: Phase) -> str:
    """Return in words when a phase begins."""
    when = f"{phase.at} training forwards" if isinstance(phase.at, int) else f"{100 * phase.at:g} % of the training"
    return f"after {when}"


def rule_heading(rule: Rule) -> str:
    """Return a rule's name and match."""
    if (rule.name, rule.match) == (DEFAULT.name, DEFAULT.match):  # a rule of the user may have this name too
        return f"{rule.name}: every other site"
    return f"{rule.name}: {rule.match}{'' if rule.required else ', may match nothing'}"


def rule_rows(rule: Rule) -> list[tuple[str, ...]]:
    """Return a row for each operand of a rule; rows of high-precision operands are shorter than :data:`COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    specs = planned(rule)
    for number, operand in enumerate(Operand, start=1):
        exact = "high precision, of the dequantized fprop operand" if operand in rule.reuses else "high precision"
        words = spec_words(specs[operand]) or {"element": exact}
        rows.append((f"Q{number}", operand.value, *words.values()))
    return rows


def spelled(technique: Technique) -> str:
    """Return a technique with its options, written as a call."""
    options = technique.model_dump(mode="json", by_alias=True)
    return f"{technique.name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"


def option_words(annotation: Any, metadata: Sequence[Any] = (), *, plural: bool = False) -> str:
    """Return in words the values that an option of this type takes in a policy."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        nested = (item.metadata if isinstance(item, FieldInfo) else [item] for item in arguments[1:])
        return option_words(arguments[0], [item for items in nested for item in items], plural=plural)
    if origin in (typing.Union, types.UnionType):
        words = [option_words(part, metadata, plural=plural) for part in arguments if part is not types.NoneType]
        return ", or ".join([*words, *(["null"] if types.NoneType in arguments else [])])
    if origin is Literal or (isinstance(annotation, type) and issubclass(annotation, enum.Enum)):
        return " | ".join(str(to_jsonable_python(value)) for value in arguments or annotation)
    if origin is tuple:
        items = set(arguments) - {...}
        item = option_words(items.pop(), (), plural=True) if len(items) == 1 else "values"
        if any(isinstance(mark, OperandList) for mark in metadata):
            item = "operands"
        if ... in arguments:
            return f"{'lists' if plural else 'list'} of {item}"
        count = {2: "pair"}.get(len(arguments), f"list of {len(arguments)}")
        return f"{count}{'s' if plural and len(arguments) == 2 else ''} of {item}"
    if annotation in (int, float):
        noun = ("whole number" if annotation is int else "number") + ("s" if plural else "")
        return noun + _bounds(metadata)
    words_of = {bool: "true or false", str: "names" if plural else "text"}
    return words_of.get(annotation) or getattr(annotation, "__name__", None) or str(annotation).replace("typing.", "")


def _bounds(metadata: Iterable[Any]) -> str:
    """Return the range of a number, in words."""
    words = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = {
        name: getattr(item, name)
        for name in words
        for item in metadata
        if isinstance(item, getattr(annotated_types, name.capitalize()))
    }
    if set(bounds) == {"ge", "le"}:
        return f" from {bounds['ge']:g} to {bounds['le']:g}"
    return " and".join(f" {words[name]} {bound:g}" for name, bound in bounds.items())


def docstring(technique: type[Technique]) -> str:
    # inspect.getdoc would return the docstring of Technique for a class without a docstring.
    return inspect.cleandoc(technique.__dict__.get("__doc__") or "")


def one_line(text: str) -> str:
    return " ".join(text.split())
