"""Predicates of rules, and the rule that decides about a site."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp4graph.errors import PolicyError
from fp4graph.policy import Match, Policy, Rule, check_modules, load_policy
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


def policy(registry: Registry, *rules: dict[str, Any], **rest: Any) -> Policy:
    return load_policy({"version": 1, "rules": list(rules), **rest}, registry)


def match(registry: Registry, **predicates: Any) -> Match:
    return policy(registry, {"match": predicates, "quantize": {}}).rules[0].match


def matches(predicates: Match, site: SiteView) -> bool:
    return Policy(name="one rule", rules=(Rule(name="it", match=predicates),)).decide(site).index == 0


#: For each predicate, values with which it holds for :data:`SITE`, and values with which it does not.
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "op": (["linear", ["sdpa", "linear"]], ["matmul", ["sdpa", "matmul"]]),
    "module": (
        [SITE.module, "*.qkv", "blocks.*", "blocks.?.attn.*", "blocks.[1-35-7].*", ["head", "*.attn.*"]],
        ["qkv", "attn", "blocks.3", "Blocks.*", "blocks.[0-24-6]*", ["head", "*.proj"]],
    ),
    "block": ([True], [False]),
    "first_blocks": ([4, 0.26], [3, 0.25]),
    "last_blocks": ([9, 0.75], [8, 0.66]),
    "in_features": ([192, {"min": 192, "max": 192}], [191, {"max": 191}]),
    "out_features": ([{"multiple_of": 64}, {"min": 100}], [{"min": 577}, {"multiple_of": 128}]),
    "min_numel": ([192 * 576], [192 * 576 + 1]),
    "producer": (["layer_norm", ["gelu", "layer_norm"]], ["gelu"]),
}
CASES = [
    *(({name: value}, {}, 1) for name, (holding, _) in VALUES.items() for value in holding),
    *(({name: value}, {}, 0) for name, (_, failing) in VALUES.items() for value in failing),
]
#: For each field of a site that may be unknown, predicates that hold if it is known.
UNKNOWN: dict[str, dict[str, Any]] = {
    "in_features": {"in_features": {"min": 0}},
    "out_features": {"out_features": {"max": 10**9}},
    "numel": {"min_numel": 1},
    "module": {"module": "*"},
    "block": {"first_blocks": 100},
    "producer": {"producer": "layer_norm"},
}
MORE_CASES: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    *((predicates, {field: None}, 0) for field, predicates in UNKNOWN.items()),
    *((predicates, {}, 1) for predicates in UNKNOWN.values()),
    *(({}, {field: None}, 1) for field in UNKNOWN),
    *(({"block": block}, {"block": None}, not block) for block in (True, False)),
    ({"module": "*"}, {"module": ""}, 1),  # the name of the root is empty, not unknown
    ({"module": "?*"}, {"module": ""}, 0),
    ({}, {"op": "sdpa"}, 0),  # fused attention is quantized only if a rule names it
    ({"op": "sdpa"}, {"op": "sdpa"}, 1),
    ({}, {}, 1),
    ({"first_blocks": 4, "last_blocks": 4}, {}, 0),
    ({"op": "linear", "module": "head"}, {}, 0),
]


@pytest.mark.parametrize(("predicates", "change", "holds"), [*CASES, *MORE_CASES], ids=str)
def test_predicates(predicates: dict[str, Any], change: dict[str, Any], holds: bool, registry: Registry) -> None:
    """``holds`` says whether the predicates hold for :data:`SITE` with the fields of ``change``."""
    assert matches(match(registry, **predicates), replace(SITE, **change)) == holds


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


def test_holds_at_looks_only_at_module_and_block(registry: Registry) -> None:
    failing = {"op": "matmul", "in_features": 1, "min_numel": 10**9, "producer": "x"}
    predicates = match(registry, module="*.qkv", first_blocks=4, **failing)
    assert predicates.holds_at(SITE)
    fifth = BlockPosition("blocks.*", 4, 12)
    elsewhere = [{"module": "head"}, {"module": None}, {"block": None}, {"block": fifth}]
    assert [change for change in elsewhere if predicates.holds_at(replace(SITE, **change))] == []  # type: ignore[arg-type]


def test_predicates_in_words(registry: Registry) -> None:
    for words, predicates in {
        "module a or b, in_features at least 1": {"module": ["a", "b"], "in_features": {"min": 1}},
        "in_features 3": {"in_features": 3},
        "in_features at least 1 and at most 5": {"in_features": {"min": 1, "max": 5}},
        "out_features a multiple of 32": {"out_features": {"multiple_of": 32}},
    }.items():
        assert str(match(registry, **predicates)) == words


def chosen(found: Policy, **change: Any) -> str:
    """Return the name of the rule for :data:`SITE` with a ``change``."""
    return found.decide(replace(SITE, **change)).rule.name


FIRST = BlockPosition("blocks.*", 0, 12)


def test_first_match_wins(registry: Registry) -> None:
    found = policy(
        registry,
        {"name": "edge", "match": {"first_blocks": 1}, "keep": "sensitive"},
        {"name": "qkv", "match": {"module": "*.qkv"}, "quantize": {"block": 16}},
        {"name": "rest", "match": {"block": True}, "quantize": {}},
    )
    assert chosen(found, module="blocks.0.attn.qkv", block=FIRST) == "edge"
    assert not found.decide(replace(SITE, block=FIRST)).rule.quantizes
    assert chosen(found) == "qkv"
    assert chosen(found, module="blocks.3.mlp.fc1") == "rest"


def test_unmatched_sites_get_the_default_which_keeps_fused_attention(registry: Registry) -> None:
    rule = {"match": {"module": "head"}, "quantize": {}}
    assert policy(registry, rule).decide(SITE).rule.keep == "no rule matches"
    quantizing = policy(registry, rule, default={"block": 16})
    assert quantizing.decide(SITE).rule.quantizes
    assert "op: sdpa" in str(quantizing.decide(replace(SITE, op="sdpa")).rule.keep)


def test_a_rule_that_keeps_decides_about_every_kind_of_operation(registry: Registry) -> None:
    keeping = {"name": "first", "match": {"first_blocks": 1}, "keep": "sensitive"}
    found = policy(registry, keeping, {"name": "attention", "match": {"op": "sdpa"}, "quantize": {}})
    for op in ("linear", "matmul", "sdpa", "_grouped_mm"):
        assert chosen(found, op=op, block=FIRST) == "first"
    assert chosen(found, op="sdpa") == "attention"
    assert found.decide(replace(SITE, op="_grouped_mm")).index == -1


def test_a_weight_has_a_decision_for_each_producer_that_a_rule_or_technique_names(registry: Registry) -> None:
    found = policy(
        registry,
        {"name": "down", "match": {"producer": "gelu"}, "quantize": {"block": 16}},
        {"name": "rest", "match": {"op": "linear"}, "quantize": {}},
    )
    decisions = found.decide_weight(replace(SITE, producer=None))
    decided = {site.producer: decision.rule.name for site, decision in decisions}
    assert decided == {"gelu": "down", "swiglu": "rest", None: "rest"}


def test_a_site_may_be_quantized_if_a_rule_quantizes_its_place_at_some_size(registry: Registry) -> None:
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


@pytest.mark.parametrize("module", ["head", "*.qkv", ["classifier", "head"], "classifier"], ids=str)
def test_globs_for_modules_of_the_model_and_globs_of_optional_rules_are_accepted(
    module: Any, registry: Registry
) -> None:
    rule = {"match": {"module": module}, "quantize": {}, "required": module != "classifier"}
    check_modules(policy(registry, rule), NAMES)


@pytest.mark.parametrize(
    ("glob", "names", "message"),
    [
        ("blocks.*.atn.qkv", NAMES, r"'blocks\.\*\.atn\.qkv'; the nearest are blocks\.\d\.attn\.qkv.*required: false"),
        ("zzz", NAMES, r"the model has patch_embed, blocks.0.attn.qkv, .*, head\. Correct"),
        ("zzz", [""], r"no modules but the root, whose name is ''\. Correct"),
        ("zzz", ["", *(f"a{i}" for i in range(6))], r"the model has a0, a1, a2, a3, a4, \.\.\.\. Correct"),
    ],
)
def test_a_glob_for_no_module_is_an_error(
    glob: str, names: list[str], message: str, tmp_path: Path, registry: Registry
) -> None:
    path = tmp_path / "p.yaml"
    rule = f"  - name: qkv\n    match: {{module: {glob}}}\n    quantize: {{}}\n"
    for beginning in ("rules:\n  - {match: {}, quantize: {}}\n", "default: {}\nphases:\n- at: 5\n  rules:\n"):
        path.write_text(f"version: 1\n{beginning}{rule}")
        line = beginning.count("\n") + 2
        with pytest.raises(PolicyError, match=rf"p.yaml:{line}: .*rule 'qkv'.*{message}"):
            check_modules(load_policy(path, registry), names)


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
def test_an_expectation_that_is_not_met_is_an_error(
    expect: dict[str, Any], quantized: int, total: int, message: str, registry: Registry, tmp_path: Path
) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f"version: 1\ndefault: {{}}\nexpect:\n  {str(expect)[1:-1]}\n")
    expected = load_policy(path, registry).expect
    with pytest.raises(PolicyError, match=f"^{path}:4: {re.escape(message)}"):
        expected.check(quantized, total)


def test_expectations_that_are_met(registry: Registry) -> None:
    expect = policy(registry, default={}, expect={"quantized": {"min": 1, "max": 3}, "kept": 2}).expect
    expect.check(1, 3)
    expect.check(3, 5)
    policy(registry, default={}).expect.check(0, 0)
