"""Variants that quantize parts of a policy: they equal shipped policies of the same parts, and keep the rest."""

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.lab.variants import VARIANTS, only, variants
from fp4graph.model.runtime import runtime_of
from fp4graph.technique.operands import Gemm, Operand
from fp4graph.technique.registry import default_registry
from tests.helpers.policies import one_rule

SHIPPED = {
    **{f"tetrajet-q{number}": ("tetrajet", "operand", f"Q{number}") for number in range(1, 7)},
    "mxfp4-fprop": ("mxfp4-full", "gemm", "fprop"),
    "mxfp4-fprop-dgrad": ("mxfp4-full", "gemm", "fprop+dgrad"),
    "mxfp4-full": ("microscaling", "gemm", "all"),
    "tetrajet": ("tetrajet", "operand", "all"),
}
PARTS = [(), *VARIANTS["operand"].values(), *VARIANTS["gemm"].values(), tuple(Operand)]


@pytest.mark.parametrize("name", SHIPPED)
def test_variants_equal_the_shipped_policies(name):
    """The shipped policies were written by hand from the papers' tables."""
    whole, by, variant = SHIPPED[name]
    derived, shipped = variants(whole, by)[variant], fp4graph.load_policy(name)
    assert (derived.fingerprint, derived.complexity) == (shipped.fingerprint, shipped.complexity)


def test_variants_are_named_in_the_order_of_the_table():
    by_operand = variants("tetrajet")
    assert list(by_operand) == ["none", "Q1", "Q2", "Q3", "Q4", "Q5", "Q6", "all"]
    assert by_operand["Q3"].name == "tetrajet-Q3"
    assert not by_operand["none"].ever_quantizes
    assert list(variants("mxfp4-fprop-dgrad", "gemm")) == ["none", "fprop", "dgrad", "fprop+dgrad", "all"]
    with pytest.raises(fp4graph.Error, match=r"got 'gem'; did you mean 'gemm'"):
        variants("tetrajet", "gem")


def test_a_policy_that_quantizes_in_a_later_phase_alone_has_variants_that_do():
    later = {"at": 4, "rules": one_rule(match={"op": "linear"})["rules"]}
    keeps = [{"name": "all", "match": {"op": "linear"}, "keep": "later"}]
    derived = variants(one_rule(rules=keeps, default="keep", phases=[later]), "gemm")
    assert list(derived) == ["none", "fprop", "dgrad", "wgrad", "fprop+dgrad", "all"]
    assert not derived["none"].phases
    specs = derived["dgrad"].phases[0].policy.rules[0].specs
    assert {operand.gemm for operand, spec in specs.items() if spec is not None} == {Gemm.DGRAD}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(default_registry().policies))
def test_every_shipped_policy_has_variants_that_quantize_the_chosen_operands(name):
    policy = fp4graph.load_policy(name)
    for operands in PARTS:
        part = only(policy, operands)  # without a warning
        for rule, former in zip((*part.rules, part.default), (*policy.rules, policy.default), strict=True):
            for operand in Operand:
                quantized = rule.specs[operand] is not None
                assert quantized == (operand in operands and former.specs[operand] is not None), (operands, operand)


def test_out_control_stays_where_both_operands_of_fprop_are_quantized():
    policy = fp4graph.load_policy("tetrajet-v2")
    for operands in PARTS:
        part = only(policy, operands)
        modes = [t.mode for p in (part, *(phase.policy for phase in part.phases)) for t in p.rules[0].techniques
                 if t.name == "out_control"]  # fmt: skip
        whole = {Operand.FPROP_INPUT, Operand.FPROP_WEIGHT} <= set(operands)
        assert modes == (["wait", "measure", "split"] if whole else []), operands


def test_a_variant_that_quantizes_nothing_has_the_exact_gradient():
    gradients = []
    for policy in (only(fp4graph.load_policy("tetrajet-qema"), ()), "bf16"):
        torch.manual_seed(0)
        model = fp4graph.apply(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), policy, backend="eager")
        model(torch.randn(8, 32)).square().mean().backward()
        assert not any(site.quantized for site in runtime_of(model).sites)
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
