"""Writes a resolved policy down again, as little of it as means the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import yaml

from fp4graph.numerics.formats import ScaleFormat
from fp4graph.numerics.spec import QuantSpec, ScaleRounding, ScaleSpec
from fp4graph.policy.match import Range
from fp4graph.technique import Technique
from fp4graph.technique.operands import GROUPS, Operand

if TYPE_CHECKING:
    from fp4graph.policy.policy import Policy, Rule

_BaseFormats = dict[ScaleFormat, str]


def to_yaml(policy: Policy) -> str:
    """The YAML text of :func:`to_data`."""
    return yaml.safe_dump(to_data(policy), sort_keys=False, allow_unicode=True, width=120)


def to_data(policy: Policy) -> dict[str, Any]:
    """A policy as mappings, lists and values that load as an equal policy."""
    bases = dict(policy.base_formats)
    default = "keep" if policy.default.keep is not None else _action(policy.default, bases)
    if isinstance(default, dict):
        default = {**default.pop("quantize"), **default}
    data = {
        "version": 1,
        "name": policy.name,
        "description": policy.description,
        "default": default,
        "rules": [_rule(rule, policy, bases) for rule in policy.rules],
        "techniques": [_technique(technique) for technique in policy.techniques],
        "phases": [{"at": phase.at, **_changed(phase.policy)} for phase in policy.phases],
        "expect": {
            name: _range(count)
            for name, count in (("quantized", policy.expect.quantized), ("kept", policy.expect.kept))
            if count is not None
        },
    }
    return {key: value for key, value in data.items() if value not in ("", [], {}) or key == "default"}


def _changed(policy: Policy) -> dict[str, Any]:
    """A phase: all that it may say, its rules though there be none, which then replaces those before."""
    data = to_data(policy)
    return {"rules": [], **{key: data[key] for key in ("default", "rules", "techniques") if key in data}}


def _rule(rule: Rule, policy: Policy, bases: _BaseFormats) -> dict[str, Any]:
    match = {
        predicate.name: _predicate(value)
        for predicate in fields(rule.match)
        if (value := getattr(rule.match, predicate.name)) is not None
    }
    data: dict[str, Any] = {"name": rule.name, "match": match}
    if rule.keep is not None:
        data["keep"] = rule.keep
    else:
        data.update(_action(rule, bases))
    own = [technique for technique in rule.techniques if technique not in policy.techniques]
    if own:
        data["techniques"] = [_technique(technique) for technique in own]
    if not rule.required:
        data["required"] = False
    return data


def _predicate(value: object) -> object:
    if isinstance(value, Range):
        return _range(value)
    if isinstance(value, tuple):
        return value[0] if len(value) == 1 else list(value)
    return value


def _range(value: Range) -> int | dict[str, int]:
    if value.min is not None and value.min == value.max and value.multiple_of is None:
        return value.min
    return {bound.name: size for bound in fields(value) if (size := getattr(value, bound.name)) is not None}


def _action(rule: Rule, bases: _BaseFormats) -> dict[str, Any]:
    """The ``quantize`` block that most operands share, and ``operands`` with the exceptions."""
    common = Counter(spec for spec in rule.specs.values() if spec is not None).most_common(1)[0][0]
    exceptions: dict[Operand, object] = {
        operand: ("fprop" if operand in rule.reuses else "keep") if spec is None else _difference(spec, common, bases)
        for operand, spec in rule.specs.items()
        if spec != common
    }
    data: dict[str, Any] = {"quantize": _difference(common, QuantSpec(), bases)}
    written: dict[str, object] = {}
    for group, operands in sorted(GROUPS.items(), key=lambda item: -len(item[1])):
        alike = [exceptions.get(operand) for operand in operands]
        if alike[0] is not None and all(exception == alike[0] for exception in alike):
            written[group] = alike[0]
            for operand in operands:
                del exceptions[operand]
    written.update((operand.value, exception) for operand, exception in exceptions.items())
    return {**data, "operands": written} if written else data


def _difference(spec: QuantSpec, base: QuantSpec, bases: _BaseFormats) -> dict[str, Any]:
    """The fields in which ``spec`` departs from ``base``."""
    data: dict[str, Any] = {
        item.name: value for item in fields(spec) if (value := getattr(spec, item.name)) != getattr(base, item.name)
    }
    if "element" in data:
        data["element"] = spec.element.name
    if "block" in data and isinstance(spec.block, tuple):
        data["block"] = list(spec.block)
    if "scale" in data:
        data["scale"] = _scale_difference(spec.scale, base.scale, bases)
    return data


def _scale_difference(scale: ScaleSpec, base: ScaleSpec, bases: _BaseFormats) -> dict[str, Any]:
    """The fields of ``scale`` to write beside those written for ``base``; none is written for ``ScaleSpec()``."""
    data = {
        item.name: value for item in fields(scale) if (value := getattr(scale, item.name)) != getattr(base, item.name)
    }
    # A rounding that the base does not write is not inherited: the format's own takes its place.
    own = _own_rounding(base)
    data.pop("rounding", None)
    if scale.rounding != (base.rounding if base.rounding != own else _own_rounding(scale)):
        data["rounding"] = scale.rounding
    if "format" in data:
        data["format"] = bases.get(scale.format, scale.format.name)
        if scale.format in bases:
            data["max"] = scale.format.max
    return data


def _own_rounding(scale: ScaleSpec) -> ScaleRounding:
    """The rounding of ``scale`` if it were left out."""
    return ScaleSpec(scale.format, convention=scale.convention).rounding


def _technique(technique: Technique) -> str | dict[str, Any]:
    options = technique.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {technique.name: options} if options else technique.name
