"""The shipped policies, operand by operand, against the papers."""

from __future__ import annotations

import dataclasses

import pytest

from fp4graph.numerics.formats import E4M3, E8M0
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.operands import Operand
from fp4graph.policy import Match, load_policy


def only_rule(name: str) -> dict[Operand, QuantSpec | None]:
    policy = load_policy(name)
    (rule,) = policy.rules
    assert rule.match == Match(op=("linear",), block=True)
    assert rule.required
    assert policy.default.keep is not None
    with pytest.raises(Exception, match="at least 1 quantized"):
        policy.expect.check(0, 10)
    return dict(rule.specs)


def test_bf16() -> None:
    policy = load_policy("bf16")
    assert not policy.rules
    assert not policy.techniques
    assert not policy.quantizes


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("microscaling", QuantSpec(block=32, scale=ScaleSpec(E8M0, "floor"))),
        ("mxfp4", QuantSpec(block=32, scale=ScaleSpec(E8M0, "nearest_even"))),
        ("nvfp4", QuantSpec(block=16, scale=ScaleSpec(E4M3, "nearest_even"))),
    ],
)
def test_six_alike(name: str, spec: QuantSpec) -> None:
    assert only_rule(name) == dict.fromkeys(Operand, spec)
    assert load_policy(name).techniques == ()


@pytest.mark.parametrize("name", ["tetrajet", "tetrajet-qema"])
def test_tetrajet(name: str) -> None:
    nearest = QuantSpec(block=32, scale=ScaleSpec(E8M0, "ceil"), ties="up")
    stochastic = dataclasses.replace(nearest, rounding="stochastic")
    again = dataclasses.replace(stochastic, source="fprop")
    q1, q2, q3, q4, q5, q6 = Operand
    assert only_rule(name) == {q1: nearest, q2: nearest, q3: stochastic, q4: again, q5: stochastic, q6: again}


def test_qema_extends_tetrajet() -> None:
    policy = load_policy("tetrajet-qema")
    (technique,) = policy.techniques
    assert (technique.name, technique.model_dump()["beta"]) == ("q_ema", 0.998)
    assert policy.rules[0].techniques == policy.techniques
    assert policy.fingerprint != load_policy("tetrajet").fingerprint
