"""Writes rules, specs and techniques as the shortest data of a policy file that loads as equal objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from fp4graph.numerics.formats import ScaleFormat
from fp4graph.numerics.spec import QuantSpec, ScaleRounding, ScaleSpec
from fp4graph.policy.match import Range
from fp4graph.policy.rule import Rule
from fp4graph.technique import Technique
from fp4graph.technique.operands import GROUPS, Operand

#: Maps each scale format that was made with ``max`` to the name of the format that it was made from.
BaseFormats = dict[ScaleFormat, str]
#: Fields that define how a scale is rounded: a block that writes one of them does not inherit ``ties``.
REPLACES_TIES = frozenset({"format", "rounding", "convention"})


def default_data(rule: Rule, bases: BaseFormats) -> str | dict[str, Any]:
    """Return a policy's ``default`` as a policy file writes it."""
    if not rule.quantizes:
        return "keep"
    data = _action(rule, bases)
    return {**data.pop("quantize"), **data}


def rule_data(rule: Rule, shared: Collection[Technique], bases: BaseFormats) -> dict[str, Any]:
    """Return a rule as a policy file writes it, without the policy's techniques (``shared``)."""
    match = {name: _predicate(value) for name, value in rule.match.predicates.items()}
    data: dict[str, Any] = {"name": rule.name, "match": match}
    if rule.keep is not None:
        data["keep"] = rule.keep
    else:
        data.update(_action(rule, bases))
    techniques = [technique_data(each) for each in rule.techniques if each not in shared]
    if techniques:
        data["techniques"] = techniques
    if not rule.required:
        data["required"] = False
    return data


def _predicate(value: object) -> object:
    if isinstance(value, Range):
        return range_data(value)
    if isinstance(value, tuple):
        return value[0] if len(value) == 1 else list(value)
    return value


def range_data(value: Range) -> int | dict[str, int]:
    """Return a range as a policy file writes it."""
    if value.min is not None and value.min == value.max and value.multiple_of is None:
        return value.min
    return value.model_dump(exclude_none=True)


def _action(rule: Rule, bases: BaseFormats) -> dict[str, Any]:
    """Return the ``quantize`` block that most operands share, and ``operands`` with the exceptions."""
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


def _changed(spec: Any, base: Any) -> dict[str, Any]:
    """Return the values of the fields in which ``spec`` differs from ``base``."""
    values = {item.name: getattr(spec, item.name) for item in fields(spec)}
    return {name: value for name, value in values.items() if value != getattr(base, name)}


def _difference(spec: QuantSpec, base: QuantSpec, bases: BaseFormats) -> dict[str, Any]:
    """Return the fields in which ``spec`` differs from ``base``, as a policy file writes them."""
    data = _changed(spec, base)
    if "element" in data or "others" in data:  # a selector is written with the list that it selects from
        data["element"] = [each.name for each in spec.elements] if spec.others else spec.element.name
        data.pop("selector", None)
        if spec.selector not in (None, "mse"):
            data["selector"] = spec.selector
    data.pop("others", None)
    if "block" in data and isinstance(spec.block, tuple):
        data["block"] = list(spec.block)
    if "scale" in data:
        data["scale"] = _scale_difference(spec.scale, base.scale, bases)
    return data


def _scale_difference(scale: ScaleSpec, base: ScaleSpec, bases: BaseFormats) -> dict[str, Any]:
    """Return the fields to write for ``scale`` beside the fields written for ``base`` (``ScaleSpec()`` has none)."""
    data = _changed(scale, base)
    # If the base does not write its rounding, a scale that writes none has the default of its own format.
    written = base.rounding != _default_rounding(base)
    data.pop("rounding", None)
    if scale.rounding != (base.rounding if written else _default_rounding(scale)):
        data["rounding"] = scale.rounding
    if "format" in data:
        data["format"] = bases.get(scale.format, scale.format.name)
        if scale.format in bases:
            data["max"] = scale.format.max
    inherited = None if data.keys() & REPLACES_TIES else base.ties
    data.pop("ties", None)
    if scale.ties != inherited:
        data["ties"] = scale.ties or "up"
    return data


def _default_rounding(scale: ScaleSpec) -> ScaleRounding:
    """Return the rounding that the format and convention of ``scale`` imply if a file writes no rounding."""
    return ScaleSpec(scale.format, convention=scale.convention).rounding


def technique_data(technique: Technique) -> str | dict[str, Any]:
    """Return a technique as a policy file writes it, without options at their default."""
    options = technique.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {technique.name: options} if options else technique.name
