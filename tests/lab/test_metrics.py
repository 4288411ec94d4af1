"""The statistics against their definitions, written out in NumPy or plain loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4graph.formats import E2M1, E4M3, ELEMENTS, INT4
from fp4graph.lab.statistics import metrics as m
from fp4graph.lab.statistics.sampling import Moments, Sample

EVERY = frozenset({"snr", "error", "saturation", "underflow"})


def sampled(x, q, ideal, ratio, element=E2M1):
    tensors = [torch.tensor(each, dtype=torch.float32)[None, None] for each in (x, q, ideal, ratio)]
    return Sample(*tensors, Moments(tensors[1]), element, torch.ones(1))


def test_operand_statistics_of_five_elements():
    x, q = [1.0, -2.0, 0.1, 0.0, 7.0], [1.0, -1.5, 0.0, 0.0, 6.0]
    ideal, ratio = [1.25, -1.75, 0.0, 0.0, 7.0], [1.0, -2.0, 0.1, 0.0, 7.0]
    sums = {name: value.item() for name, value in m.operand_sums(sampled(x, q, ideal, ratio)).items()}
    record = m.operand_fields(sums, EVERY)
    signal = 1 + 4 + 0.01 + 49
    assert (record["elements"], record["saturated"], record["underflowed"]) == (5, 1 / 5, 1 / 5)
    assert record["snr_db"] == pytest.approx(10 * math.log10(signal / (0.25 + 0.01 + 1)), rel=1e-6)
    assert record["gain"] == pytest.approx((1 + 3 + 42) / signal, rel=1e-6)
    assert record["relative_error"] == pytest.approx((0.25 + 0.01 + 1) / signal, rel=1e-6)
    assert record["dead_zone"] == pytest.approx(0.01 / signal, rel=1e-6)
    assert record["scale_bias"] == pytest.approx((0.25**2 + 0.25**2 + 1) / signal, rel=1e-6)
    assert record["grid_noise"] == pytest.approx((0.25**2 + 0.25**2) / signal, rel=1e-6)
    assert record["interaction"] == pytest.approx(2 * (-(0.25**2) + 0.25 * 0.25) / signal, abs=1e-9)

    # Elements with a value that is not finite are counted, and left out of the other sums.
    nan, inf = math.nan, math.inf
    sums = m.operand_sums(sampled([1.0, nan, 2.0], [1.0, nan, inf], [1.0, 1.0, 2.0], [1.0, 1.0, 1.0]))
    assert (sums["nonfinite"].item(), sums["signal"].item()) == (2, 1)


@given(st.floats(-9, 9, width=32))
def test_confidence_by_the_definition_of_tetrajet_with_a_table_of_max_dist(u):
    thresholds = [s * t for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5) for s in (1, -1)]
    max_dist = {0: 0.25, 0.5: 0.25, 1: 0.25, 1.5: 0.25, 2: 0.375, 3: 0.5, 4: 0.75, 6: 1.0}
    inside = min(abs(u), 6.0)
    code = min(max_dist, key=lambda v: abs(v - inside))
    distance = min(abs(inside - t) for t in thresholds)
    got = m.confidence(torch.tensor([u]), E2M1).item()
    assert got == pytest.approx(distance / max_dist[code], abs=1e-6)
    assert 0 <= got <= 1


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_confidence_of_every_format_is_0_at_thresholds_and_at_most_1(element):
    u = torch.linspace(-1.2 * element.max, 1.2 * element.max, 4001)
    confidence = m.confidence(u, element)
    assert 0 <= confidence.min() <= confidence.max() <= 1
    values = torch.tensor(element.magnitudes())
    thresholds = (values[1:] + values[:-1]) / 2
    assert m.confidence(thresholds, element).abs().max() < 1e-6
    assert m.confidence(values[-1:], element).item() == 1


def test_confidence_of_a_transposed_weight_raises_no_warning():
    ratio = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    torch.set_warn_always(True)
    try:
        assert torch.equal(m.confidence(ratio.T, E2M1), m.confidence(ratio.T.contiguous(), E2M1))
    finally:
        torch.set_warn_always(False)


@settings(deadline=None)
@given(st.integers(0, 100))
def test_oscillation_ratio_by_paths(seed):
    path = np.random.default_rng(seed).normal(size=(6, 4)).astype(np.float32)
    path[:, 1] = path[0, 1]  # weight 1 never moves
    quantized = np.round(path * 2) / 2
    quantized[:, 2] = 1  # weight 2 moves, its quantized value does not
    quantized[2, 1] = 9  # the quantized value of weight 1 changes
    moved, moved_q = (np.abs(np.diff(way, axis=0)).sum(0) for way in (path, quantized))
    got = m.oscillation_ratio(torch.from_numpy(moved_q), torch.from_numpy(moved))
    assert got[:3].tolist() == pytest.approx([moved_q[0] / moved[0], math.inf, 0])
    assert m.oscillation_ratio(torch.zeros(1), torch.zeros(1)).item() == 0


def test_a_flip_is_a_change_of_value_and_not_of_a_scale():
    values = torch.tensor(E2M1.magnitudes())
    pairs = torch.cartesian_prod(values, values)
    flips = m.flipped(pairs[:, 0], pairs[:, 1], E2M1)
    assert torch.equal(flips, pairs[:, 0] != pairs[:, 1])
    rescaled = values[1:] * (8 / 9)  # an E4M3 scale, one step down
    assert not m.flipped(rescaled, values[1:], E2M1).any()
    assert m.flipped(torch.tensor([7.0]), torch.tensor([6.0]), INT4).all()
    e2m3 = torch.tensor(ELEMENTS["e2m3"].magnitudes()[1:])
    assert m.flipped(e2m3[1:], e2m3[:-1], ELEMENTS["e2m3"]).all()


def test_rate_of_change_by_numpy():
    a, b = np.random.default_rng(0).normal(size=(2, 5, 7))
    expected = math.sqrt(((a - b) ** 2).sum()) / math.sqrt((b**2).sum())
    assert m.relative_change(torch.tensor(a), torch.tensor(b)).item() == pytest.approx(expected)
    assert m.relative_change(torch.ones(3), torch.zeros(3)).isnan()


def test_scales_are_counted_by_exponent():
    scales = [1.0, 1.9, 2.0, 2.0**-126, 2.0**-149, 2.0**127, 0.0, math.nan, math.inf]
    sums = m.scale_sums(torch.tensor([*scales, 448.0, 2.0**-9]), E4M3)
    counted = {place: int(count) for place, count in enumerate(sums["scales"].tolist(), m.LOWEST_EXPONENT) if count}
    assert counted == {0: 2, 1: 1, -126: 1, -149: 1, 127: 1, 8: 1, -9: 1}
    assert (sums["blocks"], sums["zero_blocks"], sums["limit_blocks"]) == (11, 1, 2)


def test_histograms_by_numpy():
    x = np.random.default_rng(0).normal(size=(5, 100)).astype(np.float32)
    x[1, 3] = math.nan
    x[4, 4] = math.inf
    got = m.histogram(torch.tensor(x), 12, -1.5, 1.5)
    expected, _ = np.histogram(np.clip(x[~np.isnan(x)], -1.5, 1.5), bins=12, range=(-1.5, 1.5))
    np.testing.assert_array_equal(got.numpy(), expected)


def test_the_variance_of_a_product_by_sampling():
    """The elements are independent, and each takes one of two values."""
    generator = torch.Generator().manual_seed(0)
    low, gap, p = (torch.rand(2, 3, 4, generator=generator) for _ in range(3))
    mean, variance = low + p * gap, p * (1 - p) * gap.square()
    left, right = (Moments(mean[i][None], variance[i][None]) for i in range(2))
    exact = [torch.randn(1, 3, 4, generator=generator) for _ in range(2)]
    sums = m.gradient_sums(left, right, *exact)

    draws = 200_000
    a, b = (low[i] + gap[i] * (torch.rand(draws, 3, 4, generator=generator) < p[i]) for i in range(2))
    products = (a @ b.mT).double()
    g = (exact[0] @ exact[1].mT)[0].double()
    assert sums["variance"].item() == pytest.approx(products.var(0).sum().item(), rel=0.02)
    assert sums["offset"].item() == pytest.approx((products.mean(0) - g).square().sum().item(), rel=0.02)
    assert sums["exact"].item() == pytest.approx(g.square().sum().item(), rel=1e-5)
    assert sums["product"].item() == pytest.approx((products.mean(0) * g).sum().item(), rel=0.02)
