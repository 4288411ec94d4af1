"""How a rule is resolved: exceptions apply in order, formats are looked up, and techniques replace namesakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fp4graph.errors import PolicyWarning
from fp4graph.numerics.formats import E3M0, E4M3, E8M0, UE5M3, UE5M3_61440
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.policy import Policy, Specs, load_policy
from fp4graph.technique.operands import GROUPS, Operand
from fp4graph.technique.registry import Registry

Q1, Q2, Q3, Q4, Q5, Q6 = Operand


def specs(registry: Registry, operands: dict[str, Any], quantize: dict[str, Any]) -> Specs:
    rule = {"match": {}, "quantize": quantize, "operands": operands}
    return load_policy({"version": 1, "rules": [rule]}, registry).rules[0].specs


STOCHASTIC = {"rounding": "stochastic", "ties": "away", "random_bits": 8, "from_master": True}
EVERY_SCALE_FIELD = {"format": "e4m3", "rounding": "nearest_even", "convention": "encode", "zero": "to_one"}
NEAREST = {"format": "e4m3", "rounding": "nearest_even"}
UE5M3_61 = {"format": "ue5m3", "max": 61440}
FROM_FPROP = {"source": "fprop"}
BY_EIGHT = QuantSpec(block=8)
TO_ONE = ScaleSpec(E4M3, "nearest_even", zero="to_one")


#: A quantize block, exceptions by operand, and the expected specs of some operands.
SPECS: list[tuple[dict[str, Any], dict[str, Any], dict[Operand, QuantSpec | None]]] = [
    ({}, {}, dict.fromkeys(Operand, QuantSpec())),
    (
        {"element": "e3m0", "block": [16, 16], "scale": EVERY_SCALE_FIELD, **STOCHASTIC}, {},
        dict.fromkeys(
            Operand, QuantSpec(E3M0, (16, 16), ScaleSpec(E4M3, "nearest_even", "encode", "to_one"), **STOCHASTIC)
        ),
    ),
    *(({"block": block}, {}, {Q1: QuantSpec(block=block)}) for block in (1, 128, "row", "tensor")),
    (
        {}, {"dgrad.weight": FROM_FPROP, "wgrad.input": FROM_FPROP},
        {**dict.fromkeys(Operand, QuantSpec()), **dict.fromkeys((Q4, Q6), QuantSpec(source="fprop"))},
    ),
    ({}, {"fprop.weight": "keep", "dgrad.weight": FROM_FPROP}, {Q2: None, Q4: QuantSpec(source="fprop")}),
    ({}, {"dgrad.other": {"block": 8}}, {Q3: QuantSpec(), Q4: BY_EIGHT, Q5: QuantSpec()}),
    # An exception for a single operand applies after exceptions for groups, in whatever order they are written.
    (
        {}, {"dgrad.weight": {"block": 1}, "backward": {"block": 2, "ties": "up"}},
        {Q4: QuantSpec(block=1, ties="up"), Q3: QuantSpec(block=2, ties="up")},
    ),
    ({}, {"backward": "keep"}, {Q1: QuantSpec(), Q2: QuantSpec(), **dict.fromkeys((Q3, Q4, Q5, Q6))}),
    ({}, {"dgrad.weight": "keep", "backward": {"block": 8}}, {Q3: BY_EIGHT, Q4: None}),
    # Exceptions for groups apply in the order in which they are written.
    ({}, {"backward": {"block": 1}, "weights": {"block": 2}}, {Q4: QuantSpec(block=2)}),
    ({}, {"weights": {"block": 2}, "backward": {"block": 1}}, {Q4: QuantSpec(block=1)}),
    (
        {}, {"weights": {"block": 8}, "backward": "keep", "dgrad.weight": {"ties": "up"}},
        {Q4: QuantSpec(ties="up"), Q6: None},
    ),
    ({"block": 16}, {"backward": {}}, dict.fromkeys(Operand, QuantSpec(block=16))),
    # Scales are merged field by field; a scale of another format has the default rounding and maximum of that format.
    (
        {"scale": NEAREST},
        {"backward": {"scale": {"zero": "to_one"}}, "wgrad.input": {"scale": {"rounding": "toward_positive"}}},
        {Q5: QuantSpec(scale=TO_ONE), Q6: QuantSpec(scale=replace(TO_ONE, rounding="toward_positive"))},
    ),
    *(
        ({"scale": base}, {"weights": {"scale": exception}}, {Q2: QuantSpec(scale=scale)})
        for base, exception, scale in (
            ({"format": "fp32"}, {}, ScaleSpec("fp32", "nearest_even")),  # type: ignore[arg-type]
            ({}, {"format": "e4m3"}, ScaleSpec(E4M3, "nearest_even")),  # floor was e8m0's default, so it does not stay
            ({"format": "e4m3"}, {"format": "e8m0"}, ScaleSpec(E8M0, "floor")),
            ({"rounding": "stochastic"}, {"format": "e4m3"}, ScaleSpec(E4M3, "stochastic")),
            ({}, {"convention": "encode"}, ScaleSpec(E8M0, "nearest_even", "encode")),
            (UE5M3_61, {"format": "e8m0"}, ScaleSpec(E8M0)),
            (UE5M3_61, {"max": 1024}, ScaleSpec(UE5M3.with_max(1024))),
            (UE5M3_61, {}, ScaleSpec(UE5M3_61440)),
            ({"format": "e4m3", "max": 448}, {}, ScaleSpec(E4M3)),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("quantize", "operands", "expected"), SPECS, ids=str)
def test_exceptions_change_the_specs_of_their_operands(
    quantize: dict[str, Any], operands: dict[str, Any], expected: dict[Operand, QuantSpec | None], registry: Registry
) -> None:
    resolved = specs(registry, operands, quantize)
    assert {operand: resolved[operand] for operand in expected} == expected
    policy = load_policy({"version": 1, "default": {**quantize, "operands": operands}}, registry)
    assert policy.default.specs == resolved
    assert policy.quantizes


@pytest.mark.parametrize("address", [*GROUPS, *Operand])
def test_an_address_stands_for_its_operands(address: str, registry: Registry) -> None:
    resolved = specs(registry, {str(address): {"block": 8}}, {})
    expected = GROUPS.get(str(address), (address,))
    assert {operand for operand in Operand if resolved[operand] == BY_EIGHT} == set(expected)


def test_formats_of_plugins(registry: Registry) -> None:
    spec = specs(registry, {}, {"element": "e1m2", "scale": {"format": "ue4m2"}})[Q1]
    assert spec == QuantSpec(registry.elements["e1m2"], scale=ScaleSpec(registry.scales["ue4m2"], "nearest_even"))


def policy_with(registry: Registry, policy_techniques: list[Any], rule_techniques: list[Any]) -> Policy:
    rule = {"match": {}, "quantize": {}, "techniques": rule_techniques}
    return load_policy({"version": 1, "rules": [rule], "techniques": policy_techniques}, registry)


def test_techniques_of_a_rule_follow_those_of_the_policy_or_replace_namesakes(registry: Registry) -> None:
    with pytest.warns(PolicyWarning, match="'average' has no effect here: no rule quantizes its sites"):
        policy = policy_with(registry, [{"average": {"beta": 0.5}}, "dither"], ["echo", {"average": {"beta": 0.9}}])
    assert [technique.name for technique in policy.techniques] == ["average", "dither"]
    assert [technique.name for technique in policy.rules[0].techniques] == ["average", "dither", "echo"]
    assert policy.rules[0].techniques[0].beta == 0.9  # type: ignore[attr-defined]
    assert policy.techniques[0].beta == 0.5  # type: ignore[attr-defined]


def test_null_stands_for_no_options_and_lists_become_tuples(registry: Registry) -> None:
    assert policy_with(registry, [{"average": None}], []) == policy_with(registry, ["average"], [])
    policy, again = (policy_with(registry, [{"dither": {"scope": ["a", "b"]}}], []) for _ in range(2))
    assert policy.techniques[0].scope == ("a", "b")  # type: ignore[attr-defined]
    assert hash(policy) == hash(again)


def test_unnamed_rules_are_numbered(registry: Registry) -> None:
    rules = [{"match": {}, "keep": "x"}, {"match": {}, "quantize": {}}]
    assert [rule.name for rule in load_policy({"version": 1, "rules": rules}, registry).rules] == ["rule 1", "rule 2"]
