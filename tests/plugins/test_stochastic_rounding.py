"""stochastic_rounding, its scopes and range guards, and stochastic_scale_rounding."""

from __future__ import annotations

import math

import pytest
import torch

import fp4graph
from fp4graph.graph.plan import plan_site
from fp4graph.ops.product import total
from fp4graph.technique.operands import Operand
from tests.helpers.policies import NVFP4, one_rule, quantizer
from tests.plugins.layer import Layer, draw, gaussian

Q1, Q2, Q3, Q4, Q5, Q6 = Operand
FLOOR = quantizer(32, rounding="floor")


def plan(*techniques, quantize=FLOOR):
    """Return the plan of a linear layer, and the policy."""
    policy = fp4graph.load_policy(one_rule(*techniques, quantize=quantize))
    return plan_site(Layer(None).site, policy.rules[0]), policy


def gradient(options, quantize=FLOOR):
    """Return the quantizer of dY in dgrad."""
    return plan({"stochastic_rounding": options}, quantize=quantize)[0].program.operand(Q3)


@pytest.mark.parametrize(
    ("operands", "stochastic"),
    [
        ("backward", {Q3, Q5, Q6}),
        ("all_activation", {Q1, Q3, Q5, Q6}),
        (["gradients"], {Q3, Q5}),
        (["fprop.weight", "wgrad"], {Q2, Q5, Q6}),
    ],
)
def test_operands_names_the_operands_that_round_stochastically(operands, stochastic):
    """As in Chmiel et al., ``backward`` is dY in both backward GEMMs, and X in wgrad; W rounds to nearest in dgrad."""
    planned, policy = plan({"stochastic_rounding": {"operands": operands, "bits": 8}})
    assert {o for o, spec in planned.specs if spec.rounding == "stochastic"} == stochastic
    assert {spec.random_bits for o, spec in planned.specs if o in stochastic} == {8}
    assert policy.complexity == 0.5


@pytest.mark.slow
def test_a_guard_of_three_quarters_clips_nothing_and_is_unbiased():
    """u = 3/4·x/S with S = 2^(floor(log2 amax) - 2), so abs(u) < 6, and 4/3·SR(u)·S has the mean x (Tseng et al.)."""
    x = gaussian(4, 64)
    x[0, 5], x[1, 40] = 7.9, -7.999  # ratios up to 8 without the guard
    program = gradient({"range_guard": 0.75})
    quantization = program.quantize(x, draw())
    blocks = x.reshape(4, 2, 32).double()
    scale = 2.0 ** (torch.floor(torch.log2(blocks.abs().amax(2, keepdim=True))) - 2)
    assert torch.equal(quantization.scale.double(), scale)  # the scale of the unguarded maximum
    torch.testing.assert_close(quantization.ratio.double(), blocks * 0.75 / scale, rtol=3e-7, atol=0)
    assert quantization.ratio.abs().max() < 6
    samples = torch.stack([total(program(x, draw(i))) for i in range(2000)]).double()
    z = (samples.mean(0) - x) / (samples.std(0) / math.sqrt(2000)).clamp(min=1e-12)
    assert (z.abs() > 4.5).float().mean() < 0.01
    unguarded = gradient({})
    clipped = torch.stack([total(unguarded(x, draw(i))) for i in range(50)]).mean(0)
    assert clipped[0, 5] == 6.0


def test_a_guard_of_seventeen_sixteenths_keeps_e4m3_scales_from_clipping():
    x = gaussian(500, 64, seed=1)
    plain, guarded = (gradient(options, NVFP4).quantize(x, draw()) for options in ({}, {"range_guard": 1.0625}))
    assert plain.ratio.abs().max() > 6
    assert guarded.ratio.abs().max() <= 6
    expected = (x.reshape(500, 4, 16).abs().amax(2, keepdim=True) * 1.0625 / 6).to(torch.float8_e4m3fn).float()
    assert torch.equal(guarded.scale, expected)


def test_stochastic_scales_have_the_ideal_scale_as_their_mean():
    """An E8M0 scale of 1.25 becomes 2 with probability 1/4, and else 1."""
    planned, policy = plan({"stochastic_scale_rounding": {"operands": ["gradients"]}})
    assert policy.complexity == 0.25
    assert {o for o, spec in planned.specs if spec.scale.rounding == "stochastic"} == {Q3, Q5}
    x = torch.full((2000, 32), 6 * 1.25)
    scale = planned.program.operand(Q3).quantize(x, draw()).scale
    assert set(scale.unique().tolist()) == {1.0, 2.0}
    assert scale.mean().item() == pytest.approx(1.25, abs=4 * math.sqrt(0.1875 / 2000))


def test_stochastic_scales_have_no_ties_and_the_complexity_of_the_technique():
    quantize = {**FLOOR, "scale": {"format": "e8m0", "rounding": "nearest_even", "ties": "even"}}
    planned, _ = plan({"stochastic_scale_rounding": {"operands": ["gradients"]}}, quantize=quantize)
    scales = {operand: (spec.scale.rounding, spec.scale.ties) for operand, spec in planned.specs}
    assert scales[Q3] == ("stochastic", None)
    assert scales[Q1] == ("nearest_even", "even")
    assert plan(quantize=quantizer(32, rounding="stochastic"))[1].complexity == 0.25
