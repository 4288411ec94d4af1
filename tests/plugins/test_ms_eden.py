"""ms_eden: unbiased block scales, unbiased products, and the groups that an expert's tokens fill in part."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fp4graph.graph.plan import plan_site
from fp4graph.numerics import noise
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.hadamard import rotate, unrotate
from fp4graph.numerics.segments import Segments
from fp4graph.ops.product import total
from fp4graph.technique.operands import Operand
from fp4graph.technique.site import SiteView
from tests.helpers.policies import NVFP4, loaded
from tests.plugins.layer import ROTATED, Layer, draw, gaussian

OPERAND = Operand.DGRAD_GRAD_OUTPUT


def policy(options=None):
    return loaded("ms_eden", options, more=[ROTATED], quantize=NVFP4)


program = partial(Layer(policy, 256, 256).operand, operand=OPERAND)


def test_the_mean_of_a_scale_is_the_corrected_one():
    """E[S'] is c·S with c = Σu²/Σuq over each group of 128, whatever the elements were rounded to."""
    lines, copies = 4, 400
    x = gaussian(lines, 256) * torch.logspace(-2, 2, lines)[:, None]
    result = program().quantize(x.repeat(copies, 1), draw(0))
    mean = result.scale.double().reshape(copies, lines, 16).mean(0)
    corrected, step = (each.reshape(copies, lines, 16)[0] for each in by_hand(result))
    # A scale is one of two neighbours: its deviation is half their distance at most.
    assert ((mean - corrected).abs() <= 4 * step / 2 / copies**0.5).all()


def test_scales_that_round_far_down_are_corrected_too():
    """Lines 10⁵ below the tensor's maximum have subnormal scales: 1.45 units round to 1, and ratios reach 9.1."""
    x = gaussian(40, 256, seed=5)
    x[:, ::16] = x.abs().amax() * torch.where(x[:, ::16] < 0, -1, 1)  # every block has its line's maximum
    unit = x.abs().amax() / (6 / (17 / 16 * 0.93) * 255.99) * 2.0**-9
    x[1:] *= (1.45 * unit * 6 / (17 / 16 * 0.93)) / x.abs().amax()
    result = program().quantize(x, draw(0))
    assert result.ratio[1:].abs().max() > 8
    corrected, step = by_hand(result)
    error = result.scale.double()[1:].mean() - corrected[1:].mean()
    assert error.abs() <= 4 * step[1:].max() / 2 / corrected[1:].numel() ** 0.5


def by_hand(result):
    """Return the corrected scale c·S of each block, and the distance between its neighbours in E4M3, in float64."""
    u, q = result.ratio.double(), result.elements.double()
    scale = (result.values.double() / u).nan_to_num(0).amax(-1, keepdim=True)  # S, by which elements were rounded
    factor = (u * u).reshape(len(u), 2, 128).sum(-1) / (u * q).reshape(len(u), 2, 128).sum(-1)
    corrected = scale * factor.repeat_interleave(8, 1)[..., None]
    return corrected, 2.0 ** (torch.floor(torch.log2(corrected)).clamp(min=-6) - 3)


def test_rotated_at_random_the_mean_of_an_operand_is_the_operand():
    """Rounding to nearest shrinks the operand, and the factor makes up for it; the remaining error has mean zero."""
    x, count = gaussian(1, 128, seed=4), 4000
    signs = torch.randint(0, 2, (count, 128), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    rotated = rotate(x * signs, 128)
    result = program().quantize(rotated, draw(0))
    before = (result.values / result.ratio).nan_to_num(0).amax(-1, keepdim=True) * result.group_scale
    nearest = result.blocking.join(result.elements * before)
    means = [(unrotate(y, 128) * signs).double().mean(0) for y in (total(program()(rotated, draw(0))), nearest)]
    slope, shrunk = ((x.double() * y).sum() / x.double().square().sum() for y in means)
    # FP4's errors are a tenth of the signal: the mean of 4000·128 of them is off by less than a thousandth.
    assert abs(slope - 1) < 1e-3
    assert abs(shrunk - 1) > 3e-3


def of_grouped(operand):
    return plan_site(SiteView("fc", "grouped", 256, 256, 256 * 256), policy().rules[0]).program.operand(operand)


def filled(length, tokens):
    """Return the segments of one expert with so many tokens, padded to ``length``."""
    return Segments(1, 1, torch.zeros(length, dtype=torch.int64), torch.where(torch.arange(length) < tokens, 0, 1))


def of_experts(x, copies, tokens, operand):
    """Return copies of ``x [N, tokens]``, an operand of an expert, each quantized under a random rotation."""
    signs = torch.randint(0, 2, (copies, 1, 128), generator=torch.Generator().manual_seed(7)) * 2.0 - 1
    rows = torch.nn.functional.pad(x, (0, 128 - tokens)).expand(copies, -1, -1) * signs
    source = Draw(noise.make_key("site", str(operand)), noise.make_step(0, 0, 0))
    terms = of_grouped(operand)(rotate(rows.reshape(-1, 128), 128), source, segments=filled(128, tokens))
    return total(terms).double().view(copies, -1, 128)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2, 5, 10, 31])
def test_few_tokens_of_an_expert_give_no_bias(tokens):
    """Without stochastic rounding of sparse groups, 2 to 10 tokens in a group of 128 bias dW by 2 to 7 % of its rms."""
    copies, dy, x = 2000, gaussian(8, tokens, seed=1), gaussian(8, tokens, seed=2)
    left = of_experts(dy, copies, tokens, Operand.WGRAD_GRAD_OUTPUT)
    right = of_experts(x, copies, tokens, Operand.WGRAD_INPUT)
    draws, exact = left @ right.mT, dy.double() @ x.double().T
    z = (draws.mean(0) - exact) / (draws.std(0) / copies**0.5)
    assert z.square().mean() < 1.7  # 64 unbiased numbers have the mean square 1 ± 0.18
    assert z.abs().max() < 4.5


def test_groups_that_tokens_fill_to_a_quarter_are_quantized_as_in_a_linear():
    """Of three groups the last has 32 tokens, or 31; a sparse group does not change the other groups of the expert."""
    planned, x = of_grouped(Operand.WGRAD_INPUT), gaussian(4, 384, seed=8)
    segments = None, filled(384, 288), filled(384, 287)
    plain, quarter, less = (planned.quantize(x, draw(0), None, each) for each in segments)
    assert torch.equal(quarter.dequantized(), plain.dequantized())
    assert torch.equal(less.dequantized()[:, :16], plain.dequantized()[:, :16])
    assert not torch.equal(less.dequantized()[:, 16:], plain.dequantized()[:, 16:])
    assert (less.ratio[:, 16:].abs() <= 6).all()  # nothing is clipped


def test_scales_are_neighbours_of_the_corrected_one():
    result = program().quantize(gaussian(3, 256, seed=1), draw(3))
    corrected, step = by_hand(result)
    values = torch.tensor(result.spec.scale.format.values(), dtype=torch.float64)
    assert torch.isin(result.scale.double(), values).all()
    distance = (result.scale.double() - corrected).abs()
    assert (distance < step).all()
    assert (distance > 0.5 * step).any()  # the farther neighbour is drawn too
