"""quest_scale: its scales, Quartet's released forward by value, its bits under a compiler, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fp4graph
from fp4graph.errors import PolicyError
from fp4graph.graph.plan import plan_site
from fp4graph.numerics.quantize import fake_quantize
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.product import total
from fp4graph.technique.operands import Operand
from fp4graph.technique.site import SiteView
from tests.helpers.policies import NVFP4, loaded, quantizer
from tests.recipes import shipped
from tests.recipes.other_references import VARIANTS, quest_scales

FLOOR = quantizer(32, "e8m0", "floor")


def program(options=None):
    site = SiteView("fc", "linear", 64, 48, 48 * 64)
    return plan_site(site, loaded("quest_scale", options, quantize=FLOOR).rules[0]).program.operand(Operand.FPROP_INPUT)


def wide(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 64, generator=generator)
    return x * torch.randint(-40, 30, (rows, 1), generator=generator).float().exp2() + x.mean(1, keepdim=True)


def test_scales_are_those_of_the_released_code():
    x = wide(4000)
    x[0], x[1], x[2, :32] = 0, 3.0, 3.0  # without deviation: 2^⌊log2 1e-8⌋
    expected = quest_scales(x.double().numpy()).reshape(4000, 2, 32)[..., :1]
    np.testing.assert_array_equal(program().quantize(x).scale.numpy(), expected)
    assert (program().quantize(x[:2]).scale == 2.0**-27).all()
    wider = program({"c": 2 * 2.92247856}).quantize(x[3:]).scale
    large = expected[3:] > 1e-4  # where 1e-8 is no part of it
    np.testing.assert_array_equal(wider.numpy()[large], 2 * expected[3:][large])


def test_poison_and_padding():
    x = wide(3)[:, :40]
    x[1, 3], x[2, 35] = torch.nan, torch.inf
    y = total(program()(x))
    assert y[1, :32].isnan().all()
    assert y[2, 32:].isnan().all()
    padded = torch.nn.functional.pad(x[:1], (0, 24))
    assert torch.equal(y[:1], total(program()(padded))[:, :40])


def test_the_figures_of_its_page():
    """Of Gaussian blocks of every magnitude within a binade, the squared errors under both floors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40_000, 64, generator=generator) * torch.rand(40_000, 1, generator=generator).exp2()

    def error(y):
        sizes = x.square().sum(1)
        return ((y - x).square().sum(1) / sizes).mean().item()

    assert error(total(program()(x))) == pytest.approx(0.0224, abs=0.0003)
    assert error(fake_quantize(x, QuantSpec())) == pytest.approx(0.0134, abs=0.0003)


@pytest.mark.slow
def test_it_makes_quartet_the_released_forward(monkeypatch):
    monkeypatch.setitem(shipped.REFERENCES, "quartet@quest", VARIANTS["quartet@quest"])
    policy = fp4graph.load_policy({"version": 1, "extends": "quartet", "techniques": ["quest_scale"]})
    assert policy.complexity == 4.0
    for data in shipped.data_for("quartet").values():
        references = shipped.expected("quartet@quest", data)
        assert shipped.differences("quartet", policy, data, references) == []
        assert shipped.differences("quartet", "quartet", data, references)


@pytest.mark.long
@pytest.mark.inductor
def test_compiled_bits(inductor):
    run, x = program(), wide(50, seed=1)
    compiled = inductor(lambda given: total(run(given)), x)
    assert torch.equal(compiled(x), total(run(x)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantize": NVFP4}, "e4m3 scales by nearest_even. Write scale: {format: e8m0, rounding: floor}"),
        ({"quantize": {**FLOOR, "scale": {"format": "e8m0", "rounding": "ceil"}}}, "e8m0 scales by ceil"),
        ({"quantize": {**FLOOR, "block": "row"}}, "has block row"),
        ({"options": {"operands": ["backward"]}}, "cannot act on 'backward'"),
        ({"options": {"c": 0}}, "above 0"),
        ({"more": ["smooth_max"]}, "cannot share a site"),
    ],
)
def test_refusals(given, message):
    with pytest.raises(PolicyError, match=message):
        loaded("quest_scale", given.pop("options", None), **{"quantize": FLOOR, **given})
