"""Which rule speaks of a site."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fp4graph.errors import PolicyError
from fp4graph.policy import Match, Policy, Range, check_modules, load_policy
from fp4graph.registry import Registry
from fp4graph.site import BlockPosition, SiteView

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
    assert match(registry, **predicates).matches(SITE)


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
    assert not match(registry, **predicates).matches(SITE)


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
    assert match(registry, **predicates).matches(SITE)
    assert not match(registry, **predicates).matches(unknown)
    assert match(registry).matches(unknown)


def test_outside_a_block(registry: Registry) -> None:
    assert match(registry, block=False).matches(replace(SITE, block=None))


def test_the_root_has_a_name(registry: Registry) -> None:
    assert match(registry, module="*").matches(replace(SITE, module=""))
    assert not match(registry, module="?*").matches(replace(SITE, module=""))


def test_fused_attention_is_taken_apart_only_on_request(registry: Registry) -> None:
    fused = replace(SITE, op="sdpa")
    assert not match(registry).matches(fused)
    assert match(registry, op="sdpa").matches(fused)
    rule = load_policy({"version": 1, "default": {}}, registry).rule_for(fused)
    assert rule.keep is not None
    assert "op: sdpa" in rule.keep


def test_candidates_look_at_modules_only(registry: Registry) -> None:
    predicates = match(
        registry, op="matmul", module="*.qkv", first_blocks=4, in_features=1, min_numel=10**9, producer="x"
    )
    assert predicates.module_candidate(SITE.module, SITE.block)
    assert not predicates.module_candidate("head", SITE.block)
    assert not predicates.module_candidate(None, SITE.block)
    assert not predicates.module_candidate(SITE.module, None)
    assert not predicates.module_candidate(SITE.module, BlockPosition("blocks.*", 4, 12))


def test_range_in_words() -> None:
    assert str(Range(3, 3)) == "3"
    assert str(Range(1, 5)) == "at least 1 and at most 5"
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
    assert found.rule_for(first).name == "edge"
    assert not found.rule_for(first).quantizes
    assert found.rule_for(SITE).name == "qkv"
    assert found.rule_for(replace(SITE, module="blocks.3.mlp.fc1")).name == "rest"


def test_unmatched_sites_get_the_default(registry: Registry) -> None:
    rule = {"match": {"module": "head"}, "quantize": {}}
    assert policy(registry, rule).rule_for(SITE).keep == "no rule matches"
    assert policy(registry, rule, default={"block": 16}).rule_for(SITE).quantizes


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
    with pytest.raises(PolicyError, match=r"the model has .*patch_embed"):
        check_modules(policy(registry, {"match": {"module": "zzz"}, "quantize": {}}), NAMES)


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
