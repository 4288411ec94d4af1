"""Policies taken apart: they are the shipped ones where those exist, train, and are compared as defined."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
from fp4graph.lab.ablation import VARIANTS, Ablation, ablation, only, reaches
from torch import nn

import fp4graph
from fp4graph.model.runtime import runtime_of
from fp4graph.technique.operands import Operand
from fp4graph.technique.registry import default_registry

SHIPPED = {
    **{f"tetrajet-q{number}": ("tetrajet", f"Q{number}") for number in range(1, 7)},
    "mxfp4-fprop": ("mxfp4-full", "fprop"),
    "mxfp4-fprop-dgrad": ("mxfp4-full", "fprop+dgrad"),
    "mxfp4-full": ("microscaling", "all"),
    "tetrajet": ("tetrajet", "all"),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_parts_of_policies_are_those_that_are_shipped(name):
    """Written by hand from the papers' tables."""
    whole, variant = SHIPPED[name]
    derived = only(fp4graph.load_policy(whole), VARIANTS[variant])
    assert derived.fingerprint == fp4graph.load_policy(name).fingerprint
    assert derived.complexity == fp4graph.load_policy(name).complexity


@pytest.mark.parametrize("name", sorted(default_registry().policies))
def test_every_shipped_policy_can_be_taken_apart(name):
    policy = fp4graph.load_policy(name)
    for variant, operands in VARIANTS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error", fp4graph.PolicyWarning)
            part = only(policy, operands)
        for rule, former in zip((*part.rules, part.default), (*policy.rules, policy.default), strict=True):
            for operand in Operand:
                quantized = rule.specs[operand] is not None
                assert quantized == (operand in operands and former.specs[operand] is not None), (variant, operand)


def test_channels_stay_apart_where_fprop_is_quantized():
    policy = fp4graph.load_policy("tetrajet-v2")
    for variant, operands in VARIANTS.items():
        part = only(policy, operands)
        modes = [t.mode for p in (part, *(phase.policy for phase in part.phases)) for t in p.rules[0].techniques
                 if t.name == "out_control"]  # fmt: skip
        whole = {Operand.FPROP_INPUT, Operand.FPROP_WEIGHT} <= operands
        assert modes == (["wait", "measure", "split"] if whole else []), variant


def linear(policy):
    torch.manual_seed(0)
    model = fp4graph.apply(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), policy, backend="eager")
    x = torch.randn(8, 32)
    model(x).square().mean().backward()
    return runtime_of(model), [p.grad for p in model.parameters()]


def test_nothing_quantized_is_the_exact_gradient():
    policy = fp4graph.load_policy("tetrajet-qema")
    runtime, gradients = linear(only(policy, ()))
    assert not any(site.quantized for site in runtime.sites)
    _, exact = linear("bf16")
    assert all(torch.equal(a, b) for a, b in zip(gradients, exact, strict=True))


@pytest.mark.slow
def test_the_whole_is_the_policy():
    _, whole = linear(only(fp4graph.load_policy("tetrajet"), tuple(Operand)))
    _, shipped = linear("tetrajet")
    assert all(torch.equal(a, b) for a, b in zip(whole, shipped, strict=True))


def decay(rate, noise=0.0):
    return [(step, 2 * math.exp(-rate * step) + 0.1 + noise) for step in range(0, 101, 10)]


RATES = {"none": 0.05, "Q1": 0.04, "fprop": 0.025}


def counted(calls):
    def train(policy, seed):
        calls.append((policy.name, seed))
        return decay(RATES[policy.name.removeprefix("tetrajet-")], noise=0.01 * seed)

    return train


def test_the_comparison_by_hand(tmp_path):
    calls = []
    result = ablation(
        "tetrajet", counted(calls), variants=RATES, seeds=(0, 1), target=0.5, directory=tmp_path
    )  # curves 2·exp(−r·t) + 0.1 + 0.01·seed
    assert calls == [(f"tetrajet-{variant}", seed) for seed in (0, 1) for variant in RATES]
    rows = {row.variant: row for row in result.results}
    assert rows["none"].final == pytest.approx(2 * math.exp(-5) + 0.105)
    assert rows["none"].spread == pytest.approx(0.01 / math.sqrt(2))
    assert rows["none"].extra == 0
    excess = 2 * math.exp(-2.5) - 2 * math.exp(-5)
    assert rows["fprop"].excess == pytest.approx(excess)
    assert rows["fprop"].excess_spread == pytest.approx(0, abs=1e-12)

    def crossing(rate):
        for step in range(0, 100, 10):
            a, b = (2 * math.exp(-rate * t) + 0.105 for t in (step, step + 10))
            if b <= 0.5:
                return step + 10 * (a - 0.5) / (a - b)
        return None

    assert rows["fprop"].reached == pytest.approx(crossing(0.025))
    assert rows["fprop"].extra == pytest.approx(crossing(0.025) / crossing(0.05) - 1)
    assert "fprop" in "".join(str(cell) for column in result.table().columns for cell in column.cells)

    calls.clear()
    again = ablation("tetrajet", counted(calls), variants=RATES, seeds=(0, 1, 2), target=0.5, directory=tmp_path)
    assert [seed for _, seed in calls] == [2, 2, 2]
    assert isinstance(again, Ablation)


def test_by_default_every_variant_reaches_the_target():
    result = ablation("tetrajet", counted([]), variants=RATES)
    assert result.target == pytest.approx(2 * math.exp(-2.5) + 0.1)
    assert all(row.reached is not None for row in result.results)


def test_a_training_that_diverges_is_recorded(tmp_path):
    def train(policy, seed):
        return [(0, 2.0), (10, math.nan)] if policy.name.endswith("Q1") else [(0, 2.0), (10, 1.0)]

    for _ in range(2):
        result = ablation("tetrajet", train, variants=("none", "Q1"), directory=tmp_path)
        rows = {row.variant: row for row in result.results}
        assert math.isnan(rows["Q1"].final)
        assert result.target == 2.0
    result.table()


def test_when_a_curve_reaches_a_loss():
    curve = [(10, 3.0), (20, 2.0), (30, 2.5), (40, 1.0)]
    assert reaches(curve, 2.0) == 20
    assert reaches(curve, 2.5) == 15
    assert reaches(curve, 5.0) == 10
    assert reaches(curve, 0.5) is None
    assert reaches([(10, math.nan), (20, 1.0)], 1.5) == 20


def test_what_there_is_not(tmp_path):
    with pytest.raises(fp4graph.Error, match="unknown variant 'fpropp'; did you mean 'fprop'"):
        ablation("tetrajet", counted([]), variants=["fpropp"])
    ablation("tetrajet", counted([]), variants=["none"], directory=tmp_path)
    with pytest.raises(fp4graph.Error, match="is of policy 'tetrajet' as it was then"):
        ablation("mxfp4", counted([]), variants=["none"], directory=tmp_path)
    file = tmp_path / "ablation.json"
    file.write_text(json.dumps({"format": "other"}))
    with pytest.raises(fp4graph.Error, match="not an ablation of this version"):
        ablation("tetrajet", counted([]), variants=["none"], directory=tmp_path)
    file.write_text("{")
    with pytest.raises(fp4graph.Error, match="is not JSON"):
        ablation("tetrajet", counted([]), variants=["none"], directory=tmp_path)
    (tmp_path / "taken").write_text("")
    with pytest.raises(fp4graph.Error, match="cannot write"):
        ablation("tetrajet", counted([]), variants=["none"], directory=tmp_path / "taken" / "x")
