"""four_over_six against a loop over blocks, with the scalar oracle and exact sums of errors."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch

import fp4graph
from fp4graph.errors import PolicyWarning
from fp4graph.numerics.formats import E2M1
from fp4graph.technique.operands import Operand
from tests.helpers import oracle
from tests.helpers.policies import loaded
from tests.plugins.layer import Layer, gaussian

MEASURES = {
    "mse": lambda errors: sum(e * e for e in errors),
    "mae": lambda errors: sum(abs(e) for e in errors),
    "amax": lambda errors: max(abs(e) for e in errors),
}


def policy(options=None, *, more=(), operands=None, element="e2m1", block=16, elements="nearest", **scale):
    scale = {"format": "e4m3", "rounding": "nearest_even", **scale}
    quantize = {"element": element, "block": block, "rounding": elements, "scale": scale}
    return loaded("four_over_six", options, more=more, operands=operands, quantize=quantize)


layer = Layer(policy)
quantization, quantized = layer.quantize, layer.quantized


def block_choice(values, spec, measure="mse"):
    """Return a block dequantized, and whether its maximum is scaled to 4."""
    largest = max(map(abs, values))
    candidates = []
    for stretch in (1.0, 1.5):
        scale = oracle.scale_of_block([largest * stretch], spec, E2M1)
        decode = spec.convention == "decode"
        codes = [oracle.round_nearest(_fp32(v / scale if decode else v * scale), E2M1, "even") for v in values]
        deq = [_fp32(q * scale if decode else q / scale) for q in codes]
        error = MEASURES[measure]([Fraction(d) - Fraction(v) for d, v in zip(deq, values, strict=True)])
        candidates.append((error, deq))
    (six, of_six), (four, of_four) = candidates
    saturates = spec.convention == "decode" and largest * 1.5 / 6 > spec.format.max
    return (of_four, True) if four < six and not saturates else (of_six, False)


def _fp32(value):
    return torch.tensor(value, dtype=torch.float64).float().item()


def expected(x, spec, measure):
    """Return x dequantized, and the number of blocks whose maximum is scaled to 4."""
    y, fours = torch.empty_like(x), 0
    for row, start in itertools.product(range(x.shape[0]), range(0, x.shape[1], 16)):
        deq, four = block_choice(x[row, start : start + 16].tolist(), spec, measure)
        y[row, start : start + 16] = torch.tensor(deq)
        fours += four
    return y, fours


@pytest.mark.slow
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize(
    "scale",
    [
        {"format": "e4m3"}, {"format": "e4m3", "convention": "encode"}, {"format": "bf16", "convention": "encode"},
        {"format": "e8m0"}, {"format": "e8m0", "rounding": "floor"}, {"format": "ue5m3", "rounding": "toward_positive"},
        {"format": "fp32"},
    ],
    ids=lambda scale: "-".join(scale.values()),
)  # fmt: skip
def test_each_block_takes_the_scale_that_errs_less(scale, measure):
    x = gaussian(24, 72)  # the last block of a row is half empty
    scale = {"rounding": "nearest_even", **scale}
    y, fours = expected(x, fp4graph.ScaleSpec(**scale), measure)
    assert torch.equal(quantized(x, {"measure": measure}, **scale), y)
    assert 0 < fours < 24 * 5


def test_a_worked_example():
    """Under unrounded scales 10, 20, 30, 40 are 10 times the values 1 to 4; 5, 20, 40, 60 are 10 times 0.5 to 6."""
    x = torch.zeros(2, 16)
    x[:, :4] = torch.tensor([[10.0, 20, 30, 40], [5.0, 20, 40, 60]])
    q = quantization(x, format="fp32")
    assert q.scale.flatten().tolist() == [10, 10]
    assert q.elements[:, 0, :4].tolist() == [[1, 2, 3, 4], [0.5, 2, 4, 6]]


def test_ties_take_six():
    """A block that has only zeros and its maximum is exact under both scales."""
    x = torch.zeros(3, 16)
    x[0, 3], x[1] = 48.0, -96.0
    assert quantization(x).scale.flatten().tolist() == [8, 16, 2**-9]


def test_a_tensor_scale_to_256_lets_the_largest_block_take_four():
    """The maximum 6·448 needs the scale 448 for 6, and for 4 the scale 672, which E4M3 does not have."""
    x = torch.zeros(2, 16)
    x[:, :4] = torch.tensor([10.0, 20, 30, 40]) * torch.tensor([[44.0], [67.2]])  # maxima 1760 and 2688
    assert quantization(x).scale.flatten().tolist() == [448, 448]
    assert quantization(x).elements[:, 0, 3].tolist() == [4, 6]
    # Under the paper's tensor scale the largest block has the scale 256 for 6, and 384 for 4.
    q = quantization(x, more=[{"tensor_scaling": {"target": 256}}])
    assert q.scale.flatten()[1] == 384
    assert q.scale.max() <= 448
    assert q.elements[:, 0, 3].tolist() == [4, 4]
    # Under the default target, 448, it takes 6.
    assert quantization(x, more=["tensor_scaling"]).scale.flatten()[1] == 448


def test_a_scale_for_four_above_the_formats_maximum_is_not_taken_though_it_would_err_less():
    """2000/4 is above 448. Under the scale 448 the elements 896 would be exact; under q(2000/6) = 320 none is."""
    x = torch.tensor([[2000.0] + [896.0] * 15])
    assert quantized(x)[0, :2].tolist() == [6 * 320.0, 3 * 320.0]
    # Encode scales for 4 are smaller than those for 6 and cannot be too large: under q(4/2000) = 2^-9, 1024 is 2.
    x = torch.tensor([[2000.0] + [1024.0] * 15])
    assert quantized(x, convention="encode")[0, :2].tolist() == [2048.0, 1024.0]


def test_stochastic_rounding_keeps_the_choice_of_nearest():
    x = gaussian(64, 64)
    nearest, stochastic = quantization(x), quantization(x, elements="stochastic")
    assert torch.equal(nearest.scale, stochastic.scale)
    assert not torch.equal(nearest.elements, stochastic.elements)


def test_poison_and_overflow():
    x = gaussian(4, 32)
    x[0, 3], x[1, 20], x[2] = math.nan, math.inf, 3e38
    for measure, scale in itertools.product(MEASURES, ({"format": "e8m0", "rounding": "floor"}, {"format": "fp32"})):
        y = quantized(x, {"measure": measure}, **scale)
        assert y[0, :16].isnan().all()
        assert y[1, 16:].isnan().all()
        assert y.isfinite().sum() == y.numel() - 32


def test_blocks_of_two_axes_share_one_choice():
    w = gaussian(32, 32)
    y = quantized(w, operand=Operand.FPROP_WEIGHT, block=[16, 16])
    for rows, columns in itertools.product((slice(0, 16), slice(16, 32)), repeat=2):
        deq, _ = block_choice(w[rows, columns].flatten().tolist(), fp4graph.ScaleSpec("e4m3", "nearest_even"))
        assert torch.equal(y[rows, columns].flatten(), torch.tensor(deq))


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["ceil", "amax_ceil", "toward_positive"])
def test_powers_of_two_rounded_up_never_take_four(rounding):
    x = gaussian(200, 64)
    with pytest.warns(PolicyWarning, match="never errs less"):
        y = quantized(x, format="e8m0", rounding=rounding)
    scale = fp4graph.ScaleSpec("e8m0", rounding)
    assert torch.equal(y, fp4graph.fake_quantize(x, fp4graph.QuantSpec(block=16, scale=scale)))
