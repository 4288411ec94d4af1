"""What a rule comes to: exceptions in their order, formats looked up, techniques overridden."""

from __future__ import annotations

from typing import Any

import pytest

from fp4graph.errors import PolicyWarning
from fp4graph.numerics.formats import E3M0, E4M3, E8M0, UE5M3, UE5M3_61440
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.policy import Policy, Specs, load_policy
from fp4graph.technique.operands import GROUPS, Operand
from fp4graph.technique.registry import Registry

Q1, Q2, Q3, Q4, Q5, Q6 = Operand


def specs(registry: Registry, operands: dict[str, Any], **quantize: Any) -> Specs:
    rule = {"match": {}, "quantize": quantize, "operands": operands}
    return load_policy({"version": 1, "rules": [rule]}, registry).rules[0].specs


def test_defaults_are_those_of_the_spec(registry: Registry) -> None:
    assert set(specs(registry, {}).values()) == {QuantSpec()}


def test_every_field_arrives(registry: Registry) -> None:
    found = specs(
        registry,
        {},
        element="e3m0",
        block=[16, 16],
        scale={"format": "e4m3", "rounding": "nearest_even", "convention": "encode", "zero": "to_one"},
        rounding="stochastic",
        ties="away",
        random_bits=8,
        from_master=True,
    )
    scale = ScaleSpec(E4M3, "nearest_even", "encode", "to_one")
    expected = QuantSpec(
        E3M0,
        (16, 16),
        scale,
        "stochastic",
        ties="away",
        random_bits=8,
        from_master=True,
    )
    assert set(found.values()) == {expected}


@pytest.mark.parametrize("block", [1, 128, "row", "tensor"])
def test_blocks(block: object, registry: Registry) -> None:
    assert specs(registry, {}, block=block)[Q1].block == block  # type: ignore[union-attr]


def test_source_fprop(registry: Registry) -> None:
    found = specs(registry, {"dgrad.weight": {"source": "fprop"}, "wgrad.input": {"source": "fprop"}})
    assert [spec.source for spec in found.values() if spec] == ["original"] * 3 + ["fprop", "original", "fprop"]


def test_source_fprop_of_a_kept_operand_is_allowed(registry: Registry) -> None:
    found = specs(registry, {"fprop.weight": "keep", "dgrad.weight": {"source": "fprop"}})
    assert found[Q2] is None
    assert found[Q4] == QuantSpec(source="fprop")


@pytest.mark.parametrize("address", [*GROUPS, *Operand])
def test_addresses(address: str, registry: Registry) -> None:
    found = specs(registry, {str(address): {"block": 8}})
    expected = GROUPS.get(str(address), (address,))
    assert [operand for operand in Operand if found[operand] == QuantSpec(block=8)] == [
        operand for operand in Operand if operand in expected
    ]


def test_other_is_weight(registry: Registry) -> None:
    assert specs(registry, {"dgrad.other": {"block": 8}}) == specs(registry, {"dgrad.weight": {"block": 8}})


def test_single_operands_win_over_groups_wherever_they_stand(registry: Registry) -> None:
    found = specs(registry, {"dgrad.weight": {"block": 1}, "backward": {"block": 2, "ties": "up"}})
    assert found[Q4] == QuantSpec(block=1, ties="up")
    assert found[Q3] == QuantSpec(block=2, ties="up")


def test_groups_act_in_the_order_written(registry: Registry) -> None:
    assert specs(registry, {"backward": {"block": 1}, "weights": {"block": 2}})[Q4] == QuantSpec(block=2)
    assert specs(registry, {"weights": {"block": 2}, "backward": {"block": 1}})[Q4] == QuantSpec(block=1)


def test_scale_is_merged_deep(registry: Registry) -> None:
    found = specs(
        registry,
        {"backward": {"scale": {"zero": "to_one"}}, "wgrad.input": {"scale": {"rounding": "toward_positive"}}},
        scale={"format": "e4m3", "rounding": "nearest_even"},
    )
    assert found[Q6] == QuantSpec(scale=ScaleSpec(E4M3, "toward_positive", zero="to_one"))
    assert found[Q5] == QuantSpec(scale=ScaleSpec(E4M3, "nearest_even", zero="to_one"))


@pytest.mark.parametrize(
    ("base", "exception", "expected"),
    [
        ({"format": "fp32"}, {}, ScaleSpec("fp32", "nearest_even")),  # type: ignore[arg-type]
        ({}, {"format": "e4m3"}, ScaleSpec(E4M3, "nearest_even")),  # nobody said floor
        ({"format": "e4m3"}, {"format": "e8m0"}, ScaleSpec("e8m0", "floor")),  # type: ignore[arg-type]
        ({"rounding": "stochastic"}, {"format": "e4m3"}, ScaleSpec(E4M3, "stochastic")),
        ({}, {"convention": "encode"}, ScaleSpec("e8m0", "nearest_even", "encode")),  # type: ignore[arg-type]
    ],
)
def test_a_scale_format_brings_its_rounding(
    registry: Registry, base: dict[str, str], exception: dict[str, str], expected: ScaleSpec
) -> None:
    assert specs(registry, {"wgrad.input": {"scale": exception}}, scale=base)[Q6] == QuantSpec(scale=expected)


def test_keep_makes_high_precision(registry: Registry) -> None:
    found = specs(registry, {"backward": "keep"})
    assert [operand for operand, spec in found.items() if spec is None] == [Q3, Q4, Q5, Q6]


def test_an_exception_after_keep_quantizes_again_from_the_rules_block(registry: Registry) -> None:
    found = specs(registry, {"weights": {"block": 8}, "backward": "keep", "dgrad.weight": {"ties": "up"}})
    assert found[Q4] == QuantSpec(ties="up")
    assert found[Q6] is None


def test_keep_of_one_operand_wins_over_its_group(registry: Registry) -> None:
    assert specs(registry, {"dgrad.weight": "keep", "backward": {"block": 8}})[Q4] is None


def test_an_empty_exception_changes_nothing(registry: Registry) -> None:
    assert specs(registry, {"backward": {}}, block=16) == specs(registry, {}, block=16)


def test_default_has_exceptions_too(registry: Registry) -> None:
    policy = load_policy({"version": 1, "default": {"block": 8, "operands": {"backward": "keep"}}}, registry)
    assert policy.default.specs == specs(registry, {"backward": "keep"}, block=8)
    assert policy.quantizes


def test_max_makes_a_variant_of_a_format(registry: Registry) -> None:
    found = specs(registry, {"weights": {"scale": {"max": 1024}}}, scale={"format": "ue5m3", "max": 61440})
    assert found[Q1].scale.format == UE5M3_61440  # type: ignore[union-attr]
    assert found[Q2].scale.format == UE5M3.with_max(1024)  # type: ignore[union-attr]


def test_max_goes_with_its_format(registry: Registry) -> None:
    found = specs(registry, {"weights": {"scale": {"format": "e8m0"}}}, scale={"format": "ue5m3", "max": 61440})
    assert found[Q2].scale.format == E8M0  # type: ignore[union-attr]


def test_the_formats_own_max_changes_nothing(registry: Registry) -> None:
    assert specs(registry, {}, scale={"format": "e4m3", "max": 448}) == specs(registry, {}, scale={"format": "e4m3"})


def test_formats_of_plugins(registry: Registry) -> None:
    spec = specs(registry, {}, element="e1m2", scale={"format": "ue4m2"})[Q1]
    assert spec is not None
    assert spec.element is registry.elements["e1m2"]
    assert spec.scale.format is registry.scales["ue4m2"]


def policy_with(registry: Registry, shared: list[Any], own: list[Any]) -> Policy:
    rule = {"match": {}, "quantize": {}, "techniques": own}
    return load_policy({"version": 1, "rules": [rule], "techniques": shared}, registry)


def test_techniques_of_a_rule_come_after_the_policys_or_replace_namesakes(registry: Registry) -> None:
    with pytest.warns(PolicyWarning, match="'average' has no effect here: no rule quantizes its sites"):
        policy = policy_with(registry, [{"average": {"beta": 0.5}}, "dither"], ["echo", {"average": {"beta": 0.9}}])
    assert [technique.name for technique in policy.techniques] == ["average", "dither"]
    assert [technique.name for technique in policy.rules[0].techniques] == ["average", "dither", "echo"]
    assert policy.rules[0].techniques[0].beta == 0.9  # type: ignore[attr-defined]
    assert policy.techniques[0].beta == 0.5  # type: ignore[attr-defined]


def test_a_spec_satisfies_what_a_technique_requires(registry: Registry) -> None:
    policy = load_policy({"version": 1, "default": {"rounding": "stochastic"}, "techniques": ["echo"]}, registry)
    assert policy.complexity == 1.5


def test_options_without_value_are_no_options(registry: Registry) -> None:
    assert policy_with(registry, [{"average": None}], []) == policy_with(registry, ["average"], [])


def test_lists_become_tuples(registry: Registry) -> None:
    policy = policy_with(registry, [{"dither": {"scope": ["a", "b"]}}], [])
    assert policy.techniques[0].scope == ("a", "b")  # type: ignore[attr-defined]
    assert hash(policy) == hash(policy_with(registry, [{"dither": {"scope": ["a", "b"]}}], []))


def test_unnamed_rules_are_numbered(registry: Registry) -> None:
    rules = [{"match": {}, "keep": "x"}, {"match": {}, "quantize": {}}]
    assert [rule.name for rule in load_policy({"version": 1, "rules": rules}, registry).rules] == ["rule 1", "rule 2"]
