"""Defaults of specs, and the values that their fields refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest
import torch

import fp4graph
from fp4graph import QuantSpec, ScaleSpec
from fp4graph.numerics.formats import SCALES, element_format
from fp4graph.numerics.noise import make_key
from fp4graph.numerics.scaling import block_scale
from fp4graph.numerics.spec import ScaleRounding


@pytest.mark.parametrize("name", SCALES)
def test_the_default_rounding_of_each_scale_format(name):
    """OCP's floor for powers of two, else rounding to nearest."""
    assert ScaleSpec(name).rounding == ("floor" if name == "e8m0" else "nearest_even")
    assert ScaleSpec(name, convention="encode").rounding == "nearest_even"
    assert QuantSpec.from_text(QuantSpec(scale=ScaleSpec(name)).to_text()).scale == ScaleSpec(name)


@pytest.mark.parametrize("name", [name for name in SCALES if name != "e8m0"])
@pytest.mark.parametrize("rule", ["floor", "ceil", "amax_ceil", "amax_even"])
def test_rules_of_powers_of_two_are_refused_for_formats_with_mantissa_bits(name, rule):
    with pytest.raises(fp4graph.SpecError, match=rf"{rule}.*{name}.*mantissa bits.*nearest_even"):
        ScaleSpec(name, rule)


def test_ties_of_scales_go_up_by_default():
    up, even = (ScaleSpec("e8m0", "nearest_even", ties=ties) for ties in ("up", "even"))
    assert up == ScaleSpec("e8m0", "nearest_even") != even
    assert "ties" not in json.loads(QuantSpec(scale=up).to_text())["scale"]
    assert QuantSpec.from_text(QuantSpec(scale=even).to_text()).scale == even


def test_rceil_is_another_name_of_ceil():
    """torchao's name."""
    assert ScaleSpec("e8m0", "rceil") == ScaleSpec("e8m0", "ceil")
    scales = ({"format": "e8m0", "rounding": rounding} for rounding in ("rceil", "ceil"))
    rceil, ceil = (fp4graph.load_policy({"version": 1, "default": {"scale": scale}}) for scale in scales)
    assert rceil.fingerprint == ceil.fingerprint


@pytest.mark.parametrize("rule", get_args(ScaleRounding))
def test_every_rule_is_computed_and_documented(rule):
    x = torch.tensor([[6.0, 1.0, -3.0, 0.5]])
    spec = QuantSpec(block=4, scale=ScaleSpec("e8m0", rule))
    coarse = torch.tensor([[6.0, 1.0, -3.0, 0.0]])  # on the grid of a scale of 2
    assert torch.equal(fp4graph.fake_quantize(x, spec, key=make_key(1)), coarse if rule == "amax_ceil" else x)
    documented = (Path(__file__).parents[2] / "docs/formats.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| .*`{rule}`.* \|", documented, re.MULTILINE)


def test_a_rule_without_code_is_an_error():
    """A new name must not fall through to rounding to nearest."""
    spec = ScaleSpec("e8m0")
    object.__setattr__(spec, "rounding", "away")
    with pytest.raises(ValueError, match="scale rounding 'away' has no implementation"):
        block_scale(torch.ones(2), spec, element_format("e2m1"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QuantSpec(scale={"format": "e4m3"}), r"scale must be a ScaleSpec.*ScaleSpec\(format='e4m3'\)"),
        (lambda: QuantSpec(scale="e4m3"), r"scale must be a ScaleSpec; got 'e4m3' \(str\)"),
        (lambda: QuantSpec(element=4), r"element must be .*name.*ElementFormat; got 4 \(int\)"),
        (lambda: QuantSpec(element="e2m2"), r"no element format 'e2m2'; did you mean"),
        (lambda: QuantSpec(block="32"), r"block must be .*got '32' \(str\)"),
        (lambda: QuantSpec(block=32.0), r"block must be .*got 32.0 \(float\)"),
        (lambda: QuantSpec(block=(1, 2, 3)), r"block must be .*tuple of two"),
        (lambda: QuantSpec(block=0), r"at least one element"),
        (lambda: QuantSpec(rounding="stochstic"), r"rounding must be one of nearest, stochastic; got 'stochstic'"),
        (lambda: QuantSpec(ties=True), r"ties must be one of even, up, away; got True"),
        (lambda: QuantSpec(random_bits="8"), r"random_bits is a whole number.*got '8' \(str\)"),
        (lambda: QuantSpec(source="Q1"), r"source must be one of original, fprop"),
        (lambda: QuantSpec(from_master=1), r"from_master must be True or False"),
        (lambda: ScaleSpec(8), r"scale format must be .*ScaleFormat; got 8 \(int\)"),
        (lambda: ScaleSpec("e4m3", "nearest"), r"scale rounding must be one of floor.*got 'nearest'"),
        (lambda: ScaleSpec(convention="both"), r"scale convention must be one of decode, encode"),
        (lambda: ScaleSpec(ties="away"), r"scale ties must be one of up, even; got 'away'"),
        (lambda: ScaleSpec(ties="even"), r"scale ties 'even' .*floor has no ties. Leave ties out"),
        (lambda: ScaleSpec("e8m0", "stochastic", ties="up"), r"scale ties 'up' .*stochastic has no ties"),
        (lambda: ScaleSpec("e4m3", ties="up"), r"e4m3 scales have mantissa bits, and their ties go to even already"),
        (lambda: ScaleSpec(zero=0), r"scale zero must be one of nearest_subnormal, to_one"),
        (lambda: fp4graph.fake_quantize(torch.ones(2, 32), {"element": "e2m1"}), r"spec must be a QuantSpec.*got dict"),
    ],
)
def test_invalid_values_are_refused(make, message):
    with pytest.raises(fp4graph.Error, match=message) as raised:
        make()
    assert isinstance(raised.value, TypeError)
    assert isinstance(raised.value, ValueError)
