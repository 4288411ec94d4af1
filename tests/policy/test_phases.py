"""Phases: changes of a policy during a training."""

from __future__ import annotations

from typing import Any

import pytest

from fp4graph.errors import PolicyError
from fp4graph.policy import Policy, load_policy
from fp4graph.technique.operands import Operand
from tests.helpers.policies import NVFP4, one_rule
from tests.policy.test_round_trip import check_round_trip

Q1, Q2, Q3, Q4, Q5, Q6 = Operand


def policy(*phases: dict[str, Any], **more: Any) -> Policy:
    operands = {"dgrad.weight": {"rounding": "stochastic"}}
    return load_policy(one_rule(quantize=NVFP4, operands=operands, phases=list(phases), **more))


def test_exceptions_of_a_phase_apply_after_those_of_each_rule() -> None:
    whole = policy({"at": 0.9, "operands": {"backward": "keep"}})
    (phase,) = whole.phases
    (before,), (after,) = whole.rules, phase.policy.rules
    assert before.specs[Q4] is not None
    assert [operand for operand, spec in after.specs.items() if spec is None] == [Q3, Q4, Q5, Q6]
    assert after.specs[Q1] == before.specs[Q1]
    assert phase.policy.phases == ()


def test_a_phase_replaces_rules_and_adds_techniques() -> None:
    keep = {"name": "first", "match": {"first_blocks": 1}, "keep": "sensitive", "required": False}
    rule = {"name": "rest", "match": {"op": "linear"}, "quantize": NVFP4}
    whole = policy(
        {"at": 100, "rules": [keep, rule]},
        {"at": 200, "rules": [], "default": "keep"},
        techniques=["tensor_scaling"],
    )
    first, second = (phase.policy for phase in whole.phases)
    assert [rule.name for rule in first.rules] == ["first", "rest"]
    assert [t.name for t in first.rules[1].techniques] == ["tensor_scaling"]
    assert not second.quantizes
    with_more = policy(
        {"at": 5, "techniques": ["hadamard", {"tensor_scaling": {"headroom": 0.5}}]}, techniques=["tensor_scaling"]
    )
    assert [t.model_dump(exclude_unset=True) for t in with_more.phases[0].policy.techniques] == [{"headroom": 0.5}, {}]
    assert with_more.weights == {"tensor_scaling": 0.5, "hadamard": 1.0, "stochastic_rounding": 0.5}
    assert with_more.complexity == 2.0  # counts the techniques of every phase


def test_phase_counts_the_phases_that_have_begun() -> None:
    whole = policy({"at": 3, "operands": {"dgrad": "keep"}}, {"at": 0.5, "operands": {"wgrad": "keep"}})
    assert [whole.phase(count, 20) for count in (0, 2, 3, 9, 10, 19)] == [0, 0, 1, 1, 2, 2]
    assert whole.in_phase(0) is whole
    assert whole.in_phase(2) is whole.phases[1].policy
    with pytest.raises(PolicyError, match="length is not known"):
        whole.phase(0, None)
    with pytest.raises(PolicyError, match="begins at 2, and the one above it at 3"):
        whole.phase(0, 4)


@pytest.mark.parametrize(
    "phases",
    [
        [{"at": 0.9, "operands": {"backward": "keep"}}],
        [{"at": 10, "rules": []}, {"at": 0.9, "default": {**NVFP4, "operands": {"fprop": "keep"}}}],
        [{"at": 10, "techniques": ["hadamard"]}],
    ],
)
def test_round_trip(phases: list[dict[str, Any]]) -> None:
    whole = policy(*phases, default="keep", techniques=["tensor_scaling"])
    check_round_trip(whole)
    assert whole.fingerprint != policy(default="keep", techniques=["tensor_scaling"]).fingerprint
