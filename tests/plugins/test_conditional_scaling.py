"""conditional_scaling against the two cases of the paper's A.13, written out in float64, block by block."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers.policies import loaded
from tests.plugins.layer import ENCODE, Layer, gaussian, products_by
from tests.recipes.arithmetic import SCALES, round_nearest, round_scale


def policy(options=None, **scale):
    return loaded("conditional_scaling", options, quantize=ENCODE | {"scale": ENCODE["scale"] | scale})


layer = Layer(policy)
quantized = layer.quantized


def expected(x, number="e4m3"):
    """Return h(X) in float64, and the case, 1 or 2."""
    largest, smallest = SCALES[number][-1], SCALES[number][1]
    blocks = [(r, c) for r in range(x.shape[0]) for c in range(0, x.shape[1], 16)]
    m = {(r, c): x[r, c : c + 16].abs().max().item() for r, c in blocks}
    g, g_min = max(m.values()), min(v for v in m.values() if v > 0)
    case = 1 if g / g_min <= largest / smallest else 2
    y = torch.zeros_like(x, dtype=torch.float64)
    for (r, c), largest_here in m.items():
        if largest_here == 0:
            continue
        s = 6 / largest_here
        if case == 1:
            gamma = math.sqrt(largest * smallest * g * g_min) / 6
            q = round_scale(gamma * s, number)
        else:
            gamma = g * largest / 6
            a = (largest - smallest) / (6 / g_min - 6 / g)
            b = largest - a * 6 / g_min
            q = round_scale(a * s + b, number)
        block = x[r, c : c + 16].double().numpy()
        y[r, c : c + 16] = torch.from_numpy(gamma / q * round_nearest(q / gamma * block, "e2m1"))
    return y, case


def spread(rows, decades, width=64, seed=0):
    """Return Gaussian rows whose sizes span ``decades`` powers of ten."""
    return gaussian(rows, width, seed=seed) * torch.logspace(0, -decades, rows)[:, None]


@pytest.mark.slow
@pytest.mark.parametrize("number", ["e4m3", "ue5m3"])
@pytest.mark.parametrize("decades", [0, 2, 4])
@pytest.mark.parametrize("width", [64, 72])  # 72: half-empty last blocks
def test_case_one_centres_the_scales(decades, number, width):
    x = spread(30, decades, width) * 1e-5
    x[3, 16:32] = 0
    y, case = expected(x, number)
    assert case == 1
    assert (y != 0).float().mean() > 0.7
    torch.testing.assert_close(quantized(x, format=number).double(), y, rtol=1e-5, atol=0)


def block_maxima(*maxima):
    """Return a block for each maximum; its other elements are zeros."""
    x = torch.zeros(len(maxima), 16)
    x[:, 0] = torch.tensor(maxima)
    return x


@pytest.mark.parametrize(("number", "ratio"), [("e4m3", 448 * 2.0**9), ("ue5m3", 114688 * 2.0**17)])
def test_the_case_changes_at_the_formats_range(number, ratio):
    """At g/g̃ = T/t the block scales are T and t, and both maxima are exact; just above, every element becomes zero."""
    x = block_maxima(ratio, 1.0)
    torch.testing.assert_close(quantized(x, format=number), x, rtol=1e-5, atol=0)
    wider = block_maxima(ratio * 1.001, 1.0)
    assert expected(wider, number)[1] == 2
    assert (quantized(wider, format=number) == 0).all()


def test_case_two_maps_the_scales_to_the_whole_range():
    """s̃ = a·s + b maps the least s to t and the largest to T; γ is g·T/Qmax."""
    maxima = [3e6, 1e4, 2.0, 1.0, 0.4]
    q = layer.quantize(block_maxima(*maxima))
    s = [6 / m for m in maxima]
    a = (448 - 2.0**-9) / (s[-1] - s[0])
    b = 448 - a * s[-1]
    expected_scales = torch.tensor([float(round_scale(a * v + b, "e4m3")) for v in s])
    assert torch.equal(q.scale.flatten(), expected_scales)
    assert q.scale.flatten()[[0, -1]].tolist() == [2.0**-9, 448]
    assert math.isclose(q.group_scale.item(), 3e6 * 448 / 6, rel_tol=1e-6)
    ratios = torch.tensor(maxima) * expected_scales * 6 / (3e6 * 448)
    torch.testing.assert_close(q.ratio[:, 0, 0], ratios, rtol=1e-5, atol=0)
    torch.testing.assert_close(6 / q.z.flatten(), torch.tensor([a * v + b for v in s]), rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("decades", [5.5, 7, 12])
def test_in_case_two_every_block_rounds_to_zero(decades):
    """No ratio reaches 2·Qmax·t/T, the bound in the technique's docstring."""
    x = spread(40, decades)
    y, case = expected(x)
    assert case == 2
    assert (y == 0).all()
    assert (quantized(x) == 0).all()
    assert layer.quantize(x).ratio.abs().max() < 2 * 6 * 2.0**-9 / 448


def test_extreme_magnitudes():
    extreme = block_maxima(1e38, 1e-38)
    assert (quantized(extreme).nan_to_num() == 0).all()
    x = spread(30, 2)
    for size in (1e-30, 1e30):  # g·g̃ lies outside fp32
        torch.testing.assert_close(quantized(x * size) / size, quantized(x), rtol=1e-5, atol=0)


def test_the_backward_scales_every_operand():
    x, w, dy = spread(40, 1), spread(8, 2, seed=1), spread(40, 3, 8, seed=2)
    by_hand = products_by(lambda t: expected(t)[0].float(), x, w, dy)
    torch.testing.assert_close(layer.products(x, w, dy), by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ulps", [-1, 1])
def test_a_square_root_that_is_an_ulp_off_changes_nothing(ulps, monkeypatch):
    """Some processors' vector library, which eager mode calls, errs by an ulp for some fp32 numbers."""
    tensors = spread(50, 3, 100), spread(30, 2), spread(33, 0, 90, seed=1)
    by_exact_roots = [quantized(x) for x in tensors]
    sqrt = torch.sqrt

    def off(x):
        integer = torch.int64 if x.dtype is torch.float64 else torch.int32
        return (sqrt(x).view(integer) + ulps).view(x.dtype)

    monkeypatch.setattr(torch, "sqrt", off)
    assert all(torch.equal(quantized(x), y) for x, y in zip(tensors, by_exact_roots, strict=True))
