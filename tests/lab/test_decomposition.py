"""The three parts of the quantization error add up to it exactly, and equal their definitions."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4graph
from fp4graph.formats import ELEMENTS, SCALES
from fp4graph.lab import decompose
from fp4graph.numerics.quantize import fake_quantize
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from tests.lab.test_sampling import normal, with_technique

PAIRS = [(element, scale) for element in ELEMENTS for scale in SCALES]
#: Numbers of fp32 whose magnitude is 0, or from the smallest normal number to 2^120.
NUMBERS = st.one_of(
    st.just(0.0),
    st.floats(2.0**-126, 2.0**120, width=32).flatmap(lambda v: st.sampled_from([v, -v])),
    st.floats(-8, 8, width=32).filter(lambda v: v == 0 or abs(v) > 2.0**-126),
)


@pytest.mark.slow
@pytest.mark.parametrize(("element", "scale"), PAIRS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_terms_sum_to_the_error_exactly(element, scale, data):
    powers_of_two = [] if SCALES[scale].mantissa_bits else ["floor", "ceil"]
    rounding = data.draw(st.sampled_from([*powers_of_two, "nearest_even", "toward_positive", "stochastic"]))
    convention = "encode" if rounding == "nearest_even" and data.draw(st.booleans()) else "decode"
    spec = QuantSpec(
        element,
        block=data.draw(st.sampled_from([4, 16, "row", "tensor"])),
        scale=ScaleSpec(scale, rounding, convention, data.draw(st.sampled_from(["nearest_subnormal", "to_one"]))),
        rounding=data.draw(st.sampled_from(["nearest", "stochastic"])),
    )
    rows = data.draw(st.lists(st.lists(NUMBERS, min_size=6, max_size=6), min_size=1, max_size=3))
    x = torch.tensor(rows, dtype=torch.float32)
    parts = decompose(x, spec, key=3)

    assert parts.total.dtype is torch.float64
    assert parts.total.isfinite().all()
    assert torch.equal(parts.scale_bias + parts.grid_noise + parts.dead_zone, parts.total)
    # Fractions add without rounding, so the sum in floating point was not rounded either.
    terms = (parts.scale_bias, parts.dead_zone, parts.grid_noise, parts.total)
    for values in zip(*(part.flatten().tolist() for part in terms), strict=True):
        bias, dead, grid, total = map(Fraction, values)
        assert bias + dead + grid == total


@pytest.mark.parametrize(("element", "scale"), PAIRS)
def test_the_terms_sum_to_the_error_exactly_where_scales_saturate(element, scale):
    """There x, Q(x) and the ideal values of a block differ in magnitude by more than the 53 bits of float64."""
    generator = torch.Generator().manual_seed(0)
    exponents = 60 * (2 * torch.rand(64, 64, generator=generator) - 1)
    x = torch.randn(64, 64, generator=generator) * exponents.exp2()
    rules = ("toward_positive" if SCALES[scale].mantissa_bits else "floor", "nearest_even")
    for scale_rounding, rounding in itertools.product(rules, ("nearest", "stochastic")):
        spec = QuantSpec(element, 16, ScaleSpec(scale, scale_rounding), rounding=rounding)
        parts = decompose(x, spec, key=3)
        assert torch.equal(parts.scale_bias + parts.grid_noise + parts.dead_zone, parts.total)
        if rounding == "nearest":
            error = fake_quantize(x, spec).double() - x.double()
            assert ((parts.total - error).abs() <= 2.0**-50 * torch.maximum(x.double().abs(), error.abs())).all()


def by_hand(x, block):
    """Return scale bias, dead zone, grid noise ``[3, R, C]`` of MXFP4 with scales 2^floor(log2 amax) / 4, by loops."""
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]

    def nearest(u):
        best = min(values, key=lambda v: (abs(abs(u) - v), values.index(v) % 2))  # ties to the even code
        return math.copysign(best, u)

    result = np.zeros((3, *x.shape))
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], block):
            chunk = [float(v) for v in x[row, start : start + block]]
            amax = max(map(abs, chunk))
            if amax == 0:
                continue
            scale = 2.0 ** (math.frexp(amax)[1] - 1 - 2)
            ideal = float(np.float32(amax) / np.float32(6))
            for column, value in enumerate(chunk, start):
                q = nearest(value / scale) * scale
                q_ideal = float(np.float32(nearest(float(np.float32(value) / np.float32(ideal))) * ideal))
                if q == 0:
                    result[1, row, column] = -value
                else:
                    result[0, row, column], result[2, row, column] = q - q_ideal, q_ideal - value
    return result


def test_the_terms_are_their_definitions():
    x = normal(16, 64)
    x[3, :32] = 0
    parts = decompose(x, QuantSpec("e2m1", 32, ScaleSpec("e8m0", "floor")))
    bias, dead, grid = by_hand(x.numpy(), 32)
    for got, expected in ((parts.scale_bias, bias), (parts.dead_zone, dead), (parts.grid_noise, grid)):
        np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=1e-15)
    assert (parts.dead_zone != 0).any()
    assert (parts.scale_bias != 0).any()


def test_an_ideal_scale_has_no_bias_and_blocks_lie_along_the_chosen_axis():
    x = normal(64, 8)
    parts = decompose(x, QuantSpec("e2m1", 32, ScaleSpec("fp32", "nearest_even")))
    assert not parts.scale_bias.any()
    assert torch.equal(parts.grid_noise + parts.dead_zone, parts.total)
    spec = QuantSpec("e2m1", 32)
    parts, turned = decompose(x, spec, dim=0), decompose(x.T, spec)
    assert torch.equal(parts.scale_bias, turned.scale_bias.T)
    assert torch.equal(parts.total, (fake_quantize(x, spec, dim=0) - x.double()))


@pytest.mark.parametrize("name", ["macro_block_scaling", "outlier_fallback", "four_over_six", "tensor_scaling"])
def test_techniques_take_part_and_the_sum_stays_exact(name):
    spec = QuantSpec("e2m1", 16, ScaleSpec("e4m3" if name == "four_over_six" else "e8m0", "nearest_even"))
    plain, helped = decompose(normal(8, 256) * 3, spec), decompose(normal(8, 256) * 3, with_technique(name, spec))
    assert torch.equal(helped.scale_bias + helped.grid_noise + helped.dead_zone, helped.total)
    assert helped.total.square().sum() != plain.total.square().sum()


def test_macro_blocks_of_one_block_leave_little_scale_bias_and_blocks_with_an_infinity_are_nan():
    """A factor with 10 bits for each block makes every scale ideal to a thousandth."""
    spec, x = QuantSpec("e2m1", 32, ScaleSpec("e8m0", "nearest_even")), normal(32, 256)
    macro = with_technique("macro_block_scaling", spec, block=32, mantissa_bits=10)
    plain, helped = decompose(x, spec), decompose(x, macro)
    assert helped.scale_bias.square().sum() < 0.05 * plain.scale_bias.square().sum()
    x = torch.ones(1, 64)
    x[0, 3] = torch.inf
    parts = decompose(x, QuantSpec("e2m1", 32))
    assert parts.total[0, :32].isnan().all()
    assert parts.total[0, 32:].isfinite().all()


@pytest.mark.parametrize(
    ("convention", "rounding"), [("decode", "floor"), ("decode", "ceil"), ("encode", "nearest_even")]
)
def test_the_printed_definition_by_hand(convention, rounding):
    """The scales and (s_rounded − s_true)·x/s_rounded, the scale bias, are written out; the rest of the error is split
    by Q(x) = 0 into dead zone and grid noise."""
    x, spec = normal(8, 64), QuantSpec("e2m1", 32, ScaleSpec("e8m0", rounding, convention))
    blocks = x.double().numpy().reshape(-1, 32)
    amax = np.abs(blocks).max(1, keepdims=True)
    true = amax / 6
    # The encode scale 6/amax rounds to 1/s for 4·s < amax <= 8·s. Floor gives the same s unless amax = 8·s.
    rounded = 2.0 ** (np.ceil(np.log2(true)) if rounding == "ceil" else np.floor(np.log2(amax)) - 2)
    q = fake_quantize(x, spec).double().numpy().reshape(-1, 32)
    bias = (rounded - true) * blocks / rounded
    rest = q - blocks - bias
    parts = decompose(x, spec, definition="printed")
    for found, expected in (
        (parts.total, q - blocks),
        (parts.scale_bias, bias),
        (parts.dead_zone, np.where(q == 0, rest, 0)),
        (parts.grid_noise, np.where(q == 0, 0, rest)),
    ):
        np.testing.assert_allclose(found.numpy().reshape(-1, 32), expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(parts.scale_bias + parts.dead_zone + parts.grid_noise, parts.total)
    ideal = decompose(x, spec)
    assert torch.equal(ideal.total, parts.total)
    assert (ideal.scale_bias[parts.dead_zone != 0] == 0).all()


def test_blocks_with_an_infinity_are_nan_in_every_printed_term():
    x = torch.ones(1, 64)
    x[0, 3] = torch.inf
    for term in vars(decompose(x, QuantSpec("e2m1", 32), definition="printed")).values():
        assert term[0, :32].isnan().all()
        assert term[0, 32:].isfinite().all()


def test_the_printed_definition_is_refused_if_a_technique_quantizes_twice():
    x, spec = torch.randn(4, 64), QuantSpec("e2m1", 32)
    parts = decompose(x, with_technique("macro_block_scaling", spec), definition="printed")
    torch.testing.assert_close(parts.scale_bias + parts.dead_zone + parts.grid_noise, parts.total)
    with pytest.raises(fp4graph.Error, match="unlike outlier_fallback"):
        decompose(x, with_technique("outlier_fallback", spec), definition="printed")
    with pytest.raises(fp4graph.Error, match="ideal or printed"):
        decompose(x, spec, definition="theirs")
