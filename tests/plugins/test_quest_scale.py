"""quest_scale: its scales, Quartet's released forward by value, and the errors in its docstring."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fp4graph
from fp4graph.numerics.quantize import fake_quantize
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.product import total
from tests.helpers.policies import loaded, quantizer
from tests.plugins.layer import Layer
from tests.recipes import shipped
from tests.recipes.other_references import VARIANTS, quest_scales

FLOOR = quantizer(32, rounding="floor")

program = Layer(lambda options: loaded("quest_scale", options, quantize=FLOOR), 64, 48).operand


def wide(rows):
    """Return rows of very different size, each shifted by a mean."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 64, generator=generator)
    return x * torch.randint(-40, 30, (rows, 1), generator=generator).float().exp2() + x.mean(1, keepdim=True)


def test_scales_are_those_of_the_released_code():
    x = wide(4000)
    x[0], x[1], x[2, :32] = 0, 3.0, 3.0  # no deviation, so S is 2^⌊log2 1e-8⌋
    expected = quest_scales(x.double().numpy()).reshape(4000, 2, 32)[..., :1]
    np.testing.assert_array_equal(program().quantize(x).scale.numpy(), expected)
    assert (program().quantize(x[:2]).scale == 2.0**-27).all()
    wider = program({"c": 2 * 2.92247856}).quantize(x[3:]).scale
    large = expected[3:] > 1e-4  # where the addend 1e-8 does not matter
    np.testing.assert_array_equal(wider.numpy()[large], 2 * expected[3:][large])


def test_padding_counts_as_zeros():
    x = wide(3)[:, :40]
    padded = torch.nn.functional.pad(x, (0, 24))
    assert torch.equal(total(program()(x)), total(program()(padded))[:, :40])


@pytest.mark.slow
def test_the_errors_in_the_docstring_of_the_technique():
    """Squared errors of Gaussian blocks, averaged over sizes of a binade, under QuEST's scale and under OCP's floor."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40_000, 64, generator=generator) * torch.rand(40_000, 1, generator=generator).exp2()

    def error(y):
        sizes = x.square().sum(1)
        return ((y - x).square().sum(1) / sizes).mean().item()

    assert error(total(program()(x))) == pytest.approx(0.0224, abs=0.0003)
    assert error(fake_quantize(x, QuantSpec())) == pytest.approx(0.0134, abs=0.0003)


@pytest.mark.slow
def test_quartet_with_it_is_the_released_forward(monkeypatch):
    monkeypatch.setitem(shipped.REFERENCES, "quartet@quest", VARIANTS["quartet@quest"])
    policy = fp4graph.load_policy({"version": 1, "extends": "quartet", "techniques": ["quest_scale"]})
    assert policy.complexity == 4.0
    for data in shipped.data_for("quartet").values():
        references = shipped.expected("quartet@quest", data)
        assert shipped.differences("quartet", policy, data, references) == []
        assert shipped.differences("quartet", "quartet", data, references)
