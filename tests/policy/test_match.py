"""Which rule speaks of a site."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fp4graph.errors import PolicyError
from fp4graph.policy import Match, Policy, Range, Rule, check_modules, load_policy
from fp4graph.technique.registry import Registry
from fp4graph.technique.site import BlockPosition, SiteView

SITE = SiteView(
    module="blocks.3.attn.qkv",
    op="linear",
    in_features=192,
    out_features=576,
    numel=192 * 576,
    block=BlockPosition("blocks.*", index=3, total=12),
    producer="layer_norm",
)


def match(registry: Registry, **predicates: Any) -> Match:
    rule = {"match": predicates, "quantize": {}}
    return load_policy({"version": 1, "rules": [rule]}, registry).rules[0].match


def matches(predicates: Match, site: SiteView) -> bool:
    return Policy(name="one rule", rules=(Rule(name="it", match=predicates),)).decide(site).index == 0


@pytest.mark.parametrize(
    "predicates",
    [
        {},
        {"op": "linear"},
        {"op": ["sdpa", "linear"]},
        {"module": "blocks.3.attn.qkv"},
        {"module": "*.qkv"},
        {"module": "blocks.*"},
        {"module": "blocks.?.attn.*"},
        {"module": "blocks.[0-5].*"},
        {"module": ["head", "*.attn.*"]},
        {"block": True},
        {"first_blocks": 4},
        {"last_blocks": 9},
        {"first_blocks": 0.26},
        {"last_blocks": 0.75},
        {"in_features": 192},
        {"in_features": {"min": 192, "max": 192}},
        {"out_features": {"multiple_of": 64}},
        {"out_features": {"min": 100}},
        {"min_numel": 192 * 576},
        {"producer": "layer_norm"},
        {"producer": ["gelu", "layer_norm"]},
    ],
)
def test_holds(predicates: dict[str, Any], registry: Registry) -> None:
    assert matches(match(registry, **predicates), SITE)


@pytest.mark.parametrize(
    "predicates",
    [
        {"op": "matmul"},
        {"op": ["sdpa", "matmul"]},
        {"module": "qkv"},
        {"module": "attn"},
        {"module": "blocks.3"},
        {"module": "Blocks.*"},
        {"module": ["head", "*.proj"]},
        {"block": False},
        {"first_blocks": 3},
        {"last_blocks": 8},
        {"first_blocks": 0.25},
        {"last_blocks": 0.66},
        {"first_blocks": 4, "last_blocks": 4},
        {"in_features": 191},
        {"in_features": {"max": 191}},
        {"out_features": {"min": 577}},
        {"out_features": {"multiple_of": 128}},
        {"min_numel": 192 * 576 + 1},
        {"producer": "gelu"},
        {"op": "linear", "module": "head"},
    ],
)
def test_does_not_hold(predicates: dict[str, Any], registry: Registry) -> None:
    assert not matches(match(registry, **predicates), SITE)


@pytest.mark.parametrize(
    ("field", "predicates"),
    [
        ("in_features", {"in_features": {"min": 0}}),
        ("out_features", {"out_features": {"max": 10**9}}),
        ("numel", {"min_numel": 1}),
        ("module", {"module": "*"}),
        ("block", {"block": True}),
        ("block", {"first_blocks": 100}),
        ("producer", {"producer": "layer_norm"}),
    ],
)
def test_what_is_unknown_satisfies_no_predicate(field: str, predicates: dict[str, Any], registry: Registry) -> None:
    unknown = replace(SITE, **{field: None})  # type: ignore[arg-type]
    assert matches(match(registry, **predicates), SITE)
    assert not matches(match(registry, **predicates), unknown)
    assert matches(match(registry), unknown)


@pytest.mark.parametrize(
    ("share", "total", "blocks"),
    # 0.07 · 100 is above 7 and 0.29 · 100 below 29 in binary arithmetic.
    [(0.15, 12, 2), (0.15, 20, 3), (0.15, 2, 1), (0.15, 1, 1), (0.07, 100, 7), (0.29, 100, 29), (0.5, 3, 2)],
)
def test_a_share_is_rounded_up_to_whole_blocks(share: float, total: int, blocks: int, registry: Registry) -> None:
    places = [replace(SITE, block=BlockPosition("blocks.*", index, total)) for index in range(total)]
    last, first = match(registry, last_blocks=share), match(registry, first_blocks=share)
    assert [matches(last, place) for place in places] == [False] * (total - blocks) + [True] * blocks
    assert [matches(first, place) for place in places] == [True] * blocks + [False] * (total - blocks)


def test_outside_a_block(registry: Registry) -> None:
    assert matches(match(registry, block=False), replace(SITE, block=None))


def test_the_root_has_a_name(registry: Registry) -> None:
    assert matches(match(registry, module="*"), replace(SITE, module=""))
    assert not matches(match(registry, module="?*"), replace(SITE, module=""))


def test_fused_attention_is_taken_apart_only_on_request(registry: Registry) -> None:
    fused = replace(SITE, op="sdpa")
    assert not matches(match(registry), fused)
    assert matches(match(registry, op="sdpa"), fused)
    rule = load_policy({"version": 1, "default": {}}, registry).decide(fused).rule
    assert rule.keep is not None
    assert "op: sdpa" in rule.keep


def test_places_look_at_modules_only(registry: Registry) -> None:
    predicates = match(
        registry, op="matmul", module="*.qkv", first_blocks=4, in_features=1, min_numel=10**9, producer="x"
    )
    assert predicates.holds_at(SITE)
    assert not predicates.holds_at(replace(SITE, module="head"))
    assert not predicates.holds_at(replace(SITE, module=None))
    assert not predicates.holds_at(replace(SITE, block=None))
    assert not predicates.holds_at(replace(SITE, block=BlockPosition("blocks.*", 4, 12)))


def test_range_in_words() -> None:
    assert str(Range(min=3, max=3)) == "3"
    assert str(Range(min=1, max=5)) == "at least 1 and at most 5"
    assert str(Range(multiple_of=32)) == "a multiple of 32"


def policy(registry: Registry, *rules: dict[str, Any], **rest: Any) -> Policy:
    return load_policy({"version": 1, "rules": list(rules), **rest}, registry)


def test_first_match_wins(registry: Registry) -> None:
    found = policy(
        registry,
        {"name": "edge", "match": {"first_blocks": 1}, "keep": "sensitive"},
        {"name": "qkv", "match": {"module": "*.qkv"}, "quantize": {"block": 16}},
        {"name": "rest", "match": {"block": True}, "quantize": {}},
    )
    first = replace(SITE, module="blocks.0.attn.qkv", block=BlockPosition("blocks.*", 0, 12))
    assert found.decide(first).rule.name == "edge"
    assert not found.decide(first).rule.quantizes
    assert found.decide(SITE).rule.name == "qkv"
    assert found.decide(replace(SITE, module="blocks.3.mlp.fc1")).rule.name == "rest"


def test_unmatched_sites_get_the_default(registry: Registry) -> None:
    rule = {"match": {"module": "head"}, "quantize": {}}
    assert policy(registry, rule).decide(SITE).rule.keep == "no rule matches"
    assert policy(registry, rule, default={"block": 16}).decide(SITE).rule.quantizes


def test_a_rule_that_keeps_speaks_of_every_kind_of_operation(registry: Registry) -> None:
    keeping = {"name": "first", "match": {"first_blocks": 1}, "keep": "sensitive"}
    found = policy(registry, keeping, {"name": "attention", "match": {"op": "sdpa"}, "quantize": {}})
    early = replace(SITE, block=BlockPosition("blocks.*", 0, 12))
    for op in ("linear", "matmul", "sdpa", "_grouped_mm"):
        assert found.decide(replace(early, op=op)).rule.name == "first"
    assert found.decide(replace(SITE, op="sdpa")).rule.name == "attention"
    assert found.decide(replace(SITE, op="_grouped_mm")).index == -1


def test_a_weight_is_asked_about_once_for_every_producer_that_rules_tell_apart(registry: Registry) -> None:
    found = policy(
        registry,
        {"name": "down", "match": {"producer": "gelu"}, "quantize": {"block": 16}},
        {"name": "rest", "match": {"op": "linear"}, "quantize": {}},
    )
    decided = {
        site.producer: decision.rule.name for site, decision in found.decide_weight(replace(SITE, producer=None))
    }
    assert decided == {"gelu": "down", "swiglu": "rest", None: "rest"}


def test_a_place_that_no_predicate_excludes_may_be_quantized(registry: Registry) -> None:
    wide = {"name": "wide", "match": {"module": "*.fc", "in_features": 12345}, "quantize": {}}
    found = policy(registry, wide)
    fc = SiteView("blocks.0.fc", "linear", None, None, None)
    assert found.may_quantize(fc)
    assert not found.may_quantize(replace(fc, module="head"))
    assert not found.may_quantize(replace(fc, op="sdpa"))
    assert not found.decide(replace(SITE, module="blocks.0.fc")).rule.quantizes
    for keeping, may in (({"module": "blocks.*"}, False), ({"module": "blocks.*", "min_numel": 9}, True)):
        first = policy(registry, {"name": "kept", "match": keeping, "keep": "sensitive"}, wide)
        assert first.may_quantize(fc) is may


NAMES = ["", "patch_embed", "blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.1.attn.qkv", "head"]


@pytest.mark.parametrize("module", ["head", "*.qkv", ["classifier", "head"]])
def test_modules_that_exist(module: Any, registry: Registry) -> None:
    check_modules(policy(registry, {"match": {"module": module}, "quantize": {}}), NAMES)


def test_modules_that_do_not_exist(tmp_path: Any, registry: Registry) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "version: 1\nrules:\n  - {match: {}, quantize: {}}\n  - name: qkv\n    match: {module: blocks.*.atn.qkv}\n"
        "    quantize: {}\n"
    )
    with pytest.raises(
        PolicyError, match=r"'blocks\.\*\.atn\.qkv'; the nearest are blocks\.\d\.attn\.qkv.*required: false"
    ) as e:
        check_modules(load_policy(path, registry), NAMES)
    assert (e.value.file, e.value.line) == (str(path), 4)
    assert "rule 'qkv'" in str(e.value)


def test_a_glob_like_nothing_lists_modules(registry: Registry) -> None:
    nowhere = policy(registry, {"match": {"module": "zzz"}, "quantize": {}})
    with pytest.raises(PolicyError, match=r"the model has patch_embed, blocks.0.attn.qkv, .*, head\. Correct"):
        check_modules(nowhere, NAMES)
    with pytest.raises(PolicyError, match=r"no modules but the root, whose name is ''\. Correct"):
        check_modules(nowhere, [""])
    with pytest.raises(PolicyError, match=r"the model has a0, a1, a2, a3, a4, \.\.\.\. Correct"):
        check_modules(nowhere, ["", *(f"a{i}" for i in range(6))])


def test_optional_rules_may_match_nothing(registry: Registry) -> None:
    optional = {"match": {"module": "classifier"}, "required": False, "quantize": {}}
    check_modules(policy(registry, optional), NAMES)


@pytest.mark.parametrize(
    ("expect", "quantized", "total", "message"),
    [
        ({"quantized": {"min": 1}}, 0, 5, "expected at least 1 quantized site(s), found 0 of 5"),
        ({"quantized": {"max": 3}}, 4, 5, "expected at most 3 quantized site(s), found 4 of 5"),
        ({"quantized": {"exactly": 48}}, 47, 50, "expected 48 quantized site(s), found 47 of 50"),
        ({"quantized": 48}, 49, 50, "expected 48 quantized site(s), found 49 of 50"),
        ({"kept": {"max": 1}}, 1, 3, "expected at most 1 kept site(s), found 2 of 3"),
    ],
)
def test_expectations(
    expect: dict[str, Any], quantized: int, total: int, message: str, registry: Registry, tmp_path: Any
) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f"version: 1\ndefault: {{}}\nexpect:\n  {str(expect)[1:-1]}\n")
    expected = load_policy(path, registry).expect
    with pytest.raises(PolicyError) as caught:
        expected.check(quantized, total)
    assert message in str(caught.value)
    assert (caught.value.file, caught.value.line) == (str(path), 4)


def test_expectations_met(registry: Registry) -> None:
    expect = policy(
        registry, {"match": {}, "quantize": {}}, expect={"quantized": {"min": 1, "max": 3}, "kept": 2}
    ).expect
    expect.check(1, 3)
    expect.check(3, 5)
    policy(registry, {"match": {}, "quantize": {}}).expect.check(0, 0)
