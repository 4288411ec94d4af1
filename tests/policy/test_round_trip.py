"""Policies are equal if their content is equal; the YAML that a policy writes loads as an equal policy."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from fp4graph.errors import PolicyError
from fp4graph.numerics.formats import ElementFormat
from fp4graph.policy import Policy, load_policy
from fp4graph.technique.operands import ADDRESSES, Operand
from fp4graph.technique.registry import Registry
from tests.helpers.techniques import offering


def check_round_trip(policy: Policy, registry: Registry | None = None) -> None:
    text = policy.to_yaml()
    again = load_policy(yaml.safe_load(text), registry)
    assert again == policy
    assert hash(again) == hash(policy)
    assert again.fingerprint == policy.fingerprint
    assert again.complexity == policy.complexity
    assert again.to_yaml() == text
    assert "extends" not in yaml.safe_load(text)


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


NEAREST, ENCODE = {"rounding": "nearest_even"}, {"convention": "encode"}
SCALES: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        *({}, {"rounding": "ceil"}, {"format": "e4m3"}, {"format": "e4m3", "max": 240}, {"format": "fp32"}),
        {"format": "ue5m3", "max": 61440, **NEAREST},
        {"format": "ue4m2", "rounding": "stochastic", "zero": "to_one"},
        *(ENCODE, {**NEAREST, **ENCODE}, {"format": "e8m0", **NEAREST}, {"zero": "to_one"}),
        *({**NEAREST, "ties": "even"}, {**NEAREST, "ties": "up"}, {**ENCODE, "ties": "even"}),
        *({"ties": "even"}, {"ties": "up"}),
    ]
)
#: Words of the only errors that policies drawn from :data:`POLICIES` may have.
_BY_CHANCE = (
    *("all six operands", "decode scales", "mantissa bits", "chooses between elements", "scale ties"),
    "no rule quantizes",
)
QUANTIZE = optional(
    element=st.sampled_from(["e2m1", "e3m0", "int4", "e1m2", ["e2m1", "int4"], ["int4", "e1m2", "e2m1"]]),
    selector=st.sampled_from(["mse", "amax"]),
    block=st.sampled_from([1, 16, 32, [16, 16], "row", "tensor"]),
    scale=SCALES,
    rounding=st.sampled_from(["nearest", "stochastic"]),
    ties=st.sampled_from(["even", "up", "away"]),
    random_bits=st.integers(1, 24),
    from_master=st.booleans(),
)
OPERANDS = st.dictionaries(st.sampled_from(sorted(ADDRESSES)), st.just("keep") | QUANTIZE, max_size=4)
SOURCES = st.sampled_from([{}, {"dgrad.weight": {"source": "fprop"}}])
LETTERS: dict[str, Any] = {"codec": "utf-8", "categories": ["L", "N", "P", "S"]}
TEXT = st.text(st.characters(**LETTERS), min_size=1, max_size=12)
TITLE = st.text(st.characters(**LETTERS, exclude_characters="/\\"), min_size=1, max_size=12)
BOUNDS = st.integers(0, 4096) | st.sampled_from([{"min": 3}, {"max": 9, "multiple_of": 4}, {"min": 5, "max": 5}])
MATCH = optional(
    op=st.sampled_from(["linear", "sdpa", ["linear", "matmul"], ["matmul"]]),
    module=TEXT | st.lists(TEXT, min_size=1, max_size=3),
    block=st.just(True),
    first_blocks=st.integers(1, 5),
    last_blocks=st.integers(1, 5) | st.sampled_from([0.15, 0.5]),
    in_features=BOUNDS,
    out_features=BOUNDS,
    min_numel=st.integers(1, 10**9),
    producer=TEXT,
)
TECHNIQUES = st.lists(
    st.sampled_from(["dither", {"dither": {"bits": 8, "scope": ["x", "y"]}}, {"average": {"beta": 1e-5}}, "average"]),
    max_size=2,
    unique_by=lambda entry: entry if isinstance(entry, str) else next(iter(entry)),
)
QUANTIZING = st.fixed_dictionaries(
    {"match": MATCH, "quantize": QUANTIZE, "operands": st.builds(dict.__or__, OPERANDS, SOURCES)},
    optional={"techniques": TECHNIQUES, "required": st.booleans()},
)
KEEPING = st.fixed_dictionaries({"match": MATCH, "keep": TEXT}, optional={"required": st.booleans()})
POLICIES = st.fixed_dictionaries(
    {"version": st.just(1), "default": st.just("keep") | QUANTIZE},
    optional={
        "name": TITLE,
        "description": TEXT,
        "rules": st.lists(QUANTIZING | KEEPING, max_size=3),
        "techniques": TECHNIQUES,
        "expect": optional(quantized=st.just({"min": 1}), kept=st.integers(0, 9)),
    },
)


@pytest.mark.filterwarnings("ignore:.*has no effect here:fp4graph.PolicyWarning")
@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(content=POLICIES)
def test_random_policies_round_trip(content: dict[str, Any], registry: Registry) -> None:
    try:
        policy = load_policy(content, registry)
    except PolicyError as error:
        if not any(words in str(error) for words in _BY_CHANCE):
            raise
        reject()
    check_round_trip(policy, registry)


@pytest.mark.parametrize("name", ["bf16", "microscaling", "tetrajet", "tetrajet-qema", "mxfp4", "nvfp4"])
def test_shipped_policies_round_trip(name: str) -> None:
    check_round_trip(load_policy(name))


RULE = {"match": {"op": "linear"}, "quantize": {"element": "e2m1", "block": 16, "ties": "even"}}
EXCEPTIONS = {"dgrad": "keep", "wgrad": {"rounding": "stochastic"}}
LEAST = {"name": "rule 1", "match": {"op": "linear"}, "quantize": {"block": 16}, "operands": EXCEPTIONS}
LARGEST = {"scale": {"format": "e4m3", "max": 240.0}}


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ({"rules": [{**RULE, "operands": {"fprop": {"rounding": "nearest"}, **EXCEPTIONS}}]}, {"rules": [LEAST]}),
        ({"default": {}, "techniques": [{"ramp": {"steps": 3}}]}, {"techniques": [{"ramp": {"steps": 3}}]}),
        ({"default": {"scale": {"format": "e4m3", "max": 240}}}, {"default": LARGEST}),
    ],
    ids=["only differences from defaults", "options by their aliases", "a maximum beside its format"],
)
def test_to_yaml_writes_the_shortest_data(content: dict[str, Any], written: dict[str, Any], registry: Registry) -> None:
    policy = load_policy({"version": 1, "name": "x", **content}, registry)
    found = yaml.safe_load(policy.to_yaml())
    assert {key: found[key] for key in written} == written
    assert "rules" not in written or found == {"version": 1, "name": "x", "default": "keep", **written}
    check_round_trip(policy, registry)


EVEN = {**NEAREST, "ties": "even"}


@pytest.mark.parametrize(
    ("scale", "exception", "expected"),
    [
        (EVEN, {**ENCODE, "ties": "even"}, "even"),
        (EVEN, {"zero": "to_one"}, "even"),
        (EVEN, {"ties": "up"}, None),
        (EVEN, ENCODE, None),  # another rounding has its own ties
        (EVEN, {"rounding": "stochastic"}, None),
        (EVEN, {"format": "e4m3"}, None),
        ({**ENCODE, "ties": "even"}, {"convention": "decode"}, None),
        (NEAREST, {"ties": "even"}, "even"),
    ],
)
def test_ties_of_scales_are_inherited_only_with_their_rounding(
    scale: dict[str, str], exception: dict[str, str], expected: str | None, registry: Registry
) -> None:
    content = {"version": 1, "default": {"scale": scale, "operands": {"weights": {"scale": exception}}}}
    policy = load_policy(content, registry)
    weight = policy.default.specs[Operand.FPROP_WEIGHT]
    assert weight is not None
    assert weight.scale.ties == expected
    check_round_trip(policy, registry)


RULES = [{"name": "r", "match": {"op": "linear"}, "quantize": {"block": 16}}]
BASE: dict[str, Any] = {"version": 1, "name": "x", "default": "keep", "rules": RULES}
BASE |= {"techniques": ["average"], "expect": {"quantized": 3}}
OF_THE_RULE = {"match": {"op": "matmul"}, "quantize": {"block": 32}, "required": False, "techniques": ["dither"]}
TECHNIQUE_LISTS = ([], [{"average": {"beta": 0.5}}], ["average", "dither"], ["dither", "average"])
CHANGES: list[dict[str, Any]] = [
    *({"default": {}}, {"expect": {"quantized": 4}}),
    *({"rules": [{**RULES[0], key: value}]} for key, value in OF_THE_RULE.items()),
    *({"techniques": techniques} for techniques in TECHNIQUE_LISTS),
]


def test_each_change_of_behaviour_changes_the_fingerprint(registry: Registry) -> None:
    """The order of techniques is one such change."""
    policies = [load_policy({**BASE, **change}, registry) for change in ({}, *CHANGES)]
    assert len({policy.fingerprint for policy in policies}) == len(set(policies)) == len(policies)


def test_names_and_places_do_not_change_the_fingerprint(tmp_path: Path, registry: Registry) -> None:
    base = load_policy(BASE, registry)
    renamed = load_policy({**BASE, "name": "y", "description": "z"}, registry)
    assert renamed.fingerprint == base.fingerprint
    assert renamed != base
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(BASE))
    assert {load_policy(path, registry), pickle.loads(pickle.dumps(base)), copy.deepcopy(base)} == {base}
    with pytest.raises(AttributeError):
        base.name = "y"  # type: ignore[misc]


def test_a_format_with_the_same_name_and_another_maximum_changes_the_fingerprint() -> None:
    def fingerprint(largest: float) -> str:
        odd = ElementFormat("odd", exponent_bits=2, mantissa_bits=1, bias=1, max=largest)
        registry = Registry([("formats", offering(formats=[odd]))], entry_point_group=None)
        return load_policy({"version": 1, "default": {"element": "odd"}}, registry).fingerprint

    assert fingerprint(6.0) != fingerprint(4.0)
