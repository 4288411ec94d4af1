"""The reference arithmetic equals ml_dtypes, examples that papers print, and examples by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fp4graph import QuantSpec, ScaleSpec
from fp4graph.numerics.spec import ScaleRounding, Zero
from tests.helpers.oracle import scale_of_block
from tests.recipes.arithmetic import (
    ELEMENTS,
    SCALES,
    block_amax,
    block_scales,
    hadamard,
    quantize,
    rotate,
    round_nearest,
    round_scale,
    round_stochastic,
)


def _codes(dtype: type, count: int) -> np.ndarray:
    """Returns the values of the first `count` codes of an ml_dtypes format, in float64."""
    return np.arange(count, dtype=np.uint8).view(dtype).astype(np.float64)


def test_tables_have_the_values_of_the_formats() -> None:
    np.testing.assert_array_equal(ELEMENTS["e2m1"][7:], _codes(ml_dtypes.float4_e2m1fn, 8))
    np.testing.assert_array_equal(SCALES["e4m3"], _codes(ml_dtypes.float8_e4m3fn, 127))
    np.testing.assert_array_equal(SCALES["e8m0"], _codes(ml_dtypes.float8_e8m0fnu, 255))
    np.testing.assert_array_equal(ELEMENTS["e3m0"][8:], 2.0 ** np.arange(-2, 5))


@pytest.mark.parametrize(
    ("fmt", "smallest", "largest"),
    [("e4m3", 2.0**-9, 448), ("ue5m3", 2.0**-17, 114688), ("ue5m3_61440", 2.0**-17, 61440)],
)
def test_scale_ranges(fmt: str, smallest: float, largest: float) -> None:
    table = SCALES[fmt]
    assert (table[0], table[1], table[-1]) == (0, smallest, largest)
    assert (np.diff(table) > 0).all()


def test_e2m1_to_nearest_even_equals_ml_dtypes() -> None:
    u = np.arange(-8, 8, 1 / 64)
    np.testing.assert_array_equal(
        round_nearest(u, "e2m1", "even"), u.astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    )


@pytest.mark.parametrize(
    ("ties", "expected"),
    [
        ("even", [0, 1, 1, 2, 2, 4, 4, -0.0, -1, -1, -2, -2, -4, -4]),
        ("up", [0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4]),
        ("away", [0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6]),
    ],
)
def test_e2m1_ties(ties: str, expected: list[float]) -> None:
    thresholds = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    u = np.concatenate([thresholds, -thresholds])
    np.testing.assert_array_equal(round_nearest(u, "e2m1", ties), expected)


def test_e3m0_and_int4_nearest() -> None:
    """Ties of E3M0 go to the even code: codes 0 ... 7 are 0, 1/4, 1/2, 1, 2, 4, 8, 16, so 3 goes to 2 and 6 to 8."""
    u = np.array([0.125, 0.375, 0.75, 1.5, 3, 6, 12, 40])
    np.testing.assert_array_equal(round_nearest(u, "e3m0"), [0, 0.5, 0.5, 2, 2, 8, 8, 16])
    np.testing.assert_array_equal(round_nearest(u, "e3m0", "up"), [0.25, 0.5, 1, 2, 4, 8, 16, 16])
    u = np.arange(-9, 9, 0.25)
    np.testing.assert_array_equal(round_nearest(u, "int4"), np.clip(np.rint(u), -7, 7))


def test_e4m3_scales_equal_ml_dtypes() -> None:
    """At all values, at all midpoints and beside them; beyond 464 ml_dtypes gives NaN and the reference saturates."""
    table = SCALES["e4m3"]
    middle = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    ideal = np.concatenate([table[1:], middle, np.nextafter(middle, 0), np.nextafter(middle, 448)]).astype(np.float32)
    cast = ideal.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(round_scale(ideal, "e4m3"), np.where(cast == 0, 2.0**-9, cast))
    np.testing.assert_array_equal(round_scale(np.array([464, 1e9]), "e4m3"), 448)


def test_e4m3_elements_equal_ml_dtypes() -> None:
    """At all values, at all midpoints and beside them, of both signs; beyond 448 the reference saturates."""
    table = ELEMENTS["e4m3"]
    middle = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    beside = (np.nextafter(middle, np.float32(toward)) for toward in (-1000, 1000))
    u = np.concatenate([table, middle, *beside]).astype(np.float32)
    np.testing.assert_array_equal(round_nearest(u, "e4m3"), u.astype(ml_dtypes.float8_e4m3fn).astype(np.float64))
    np.testing.assert_array_equal(round_nearest(np.array([470.0, -1e9]), "e4m3"), [448, -448])


def test_e8m0_scales_equal_ml_dtypes() -> None:
    k = np.ldexp(np.float32(1), np.arange(-126, 126)).astype(np.float32)
    for factor in (1, 1.25, np.nextafter(np.float32(1.5), np.float32(1)), 1.5, 1.75):
        ideal = (k * np.float32(factor)).astype(np.float32)
        np.testing.assert_array_equal(round_scale(ideal, "e8m0"), ideal.astype(ml_dtypes.float8_e8m0fnu).astype(float))
    np.testing.assert_array_equal(round_scale(np.array([1e-300, 1e300]), "e8m0"), [2.0**-127, 2.0**127])


def test_toward_positive_is_the_smallest_value_not_below() -> None:
    ideal = np.array([1e-9, 0.3, 1.0, 1.01, 447.9, 500])
    np.testing.assert_array_equal(round_scale(ideal, "e4m3", "toward_positive"), [2.0**-9, 0.3125, 1, 1.125, 448, 448])
    np.testing.assert_array_equal(round_scale(ideal[1:4], "e8m0", "toward_positive"), [0.5, 1, 2])


def test_a_scale_that_underflows_is_the_smallest_subnormal_or_one() -> None:
    """EL 3.1: an underflow becomes the smallest subnormal, or one (Chmiel et al.); a tie at half of it underflows."""
    ideal = np.array([0, 2.0**-12, 2.0**-10, 1.5 * 2.0**-10])
    np.testing.assert_array_equal(round_scale(ideal, "e4m3"), 2.0**-9)
    np.testing.assert_array_equal(round_scale(ideal, "e4m3", zero="to_one"), [1, 1, 1, 2.0**-9])


@pytest.mark.parametrize("zero", ["nearest_subnormal", "to_one"])
@pytest.mark.parametrize("rule", ["nearest_even", "toward_positive", "floor", "ceil"])
def test_e8m0_scales_underflow_where_the_oracles_do(rule: ScaleRounding, zero: Zero) -> None:
    z = np.array([0, *(6 * np.ldexp(m, -k) for m in (1, 1.25, 1.5, 1.75) for k in range(126, 132))])
    spec = QuantSpec(block=32, scale=ScaleSpec("e8m0", rule, zero=zero))
    expected = [scale_of_block([each], spec.scale, spec.element) for each in z.tolist()]
    np.testing.assert_array_equal(block_scales(z, fmt="e8m0", rule=rule, zero=zero), expected)


def test_floor_truncates_tetrajets_example_and_ceil_does_not() -> None:
    """TJ 3.2: M = 31 gives S = 4 and 7.75, truncated to 6, by the floor; S = 8 and 3.875 by the ceiling."""
    x = np.array([[31.0, 4.0]])
    z = np.array([31.0])
    assert block_scales(z, fmt="e8m0", rule="floor") == 4
    assert block_scales(z, fmt="e8m0", rule="ceil") == 8
    np.testing.assert_array_equal(quantize(x, 1, block=32, fmt="e8m0", rule="floor"), [[24, 4]])
    np.testing.assert_array_equal(quantize(x, 1, block=32, fmt="e8m0", rule="ceil"), [[32, 4]])


def test_floor_and_ceil_are_exact_next_to_their_steps() -> None:
    """At the exponents of float32 within E8M0's range. There floor(log2 z) in floating point would be wrong."""
    for k in range(-120, 120):
        power, six = np.float32(2.0**k), np.float32(6 * 2.0**k)
        below, above = np.nextafter(power, np.float32(0)), np.nextafter(six, np.float32(np.inf))
        floor = block_scales(np.array([power, below]), fmt="e8m0", rule="floor")
        ceil = block_scales(np.array([six, above]), fmt="e8m0", rule="ceil")
        np.testing.assert_array_equal(floor, [2.0 ** (k - 2), 2.0 ** (k - 3)])
        np.testing.assert_array_equal(ceil, [2.0**k, 2.0 ** (k + 1)])


def test_ceil_of_e3m0_divides_by_sixteen() -> None:
    scales = block_scales(np.array([16, 16.5, 1, 0.9]), element="e3m0", fmt="e8m0", rule="ceil")
    np.testing.assert_array_equal(scales, [1, 2, 2.0**-4, 2.0**-4])


def test_ceil_rounds_the_decode_scale_toward_positive() -> None:
    z = np.abs(np.random.default_rng(0).standard_normal(1000)).astype(np.float32)
    np.testing.assert_array_equal(
        block_scales(z, fmt="e8m0", rule="ceil"), block_scales(z, fmt="e8m0", rule="toward_positive")
    )


def test_encode_scales_to_nearest_e8m0_invert_floor_except_at_powers_of_two() -> None:
    """At Z = 2^k the ideal scale 6/Z is a midpoint and goes up, to twice the inverse of the floor (DEF)."""
    z = np.exp2(np.random.default_rng(1).uniform(-20, 20, 2000)).astype(np.float32)
    z = z[np.frexp(z)[0] != 0.5]
    encode = block_scales(z, fmt="e8m0", rule="nearest_even", convention="encode")
    np.testing.assert_array_equal(1 / encode, block_scales(z, fmt="e8m0", rule="floor"))
    assert block_scales(np.array([4.0]), fmt="e8m0", rule="nearest_even", convention="encode") == 2
    np.testing.assert_array_equal(
        quantize(np.array([[4.0, 1]]), 1, block=2, fmt="e8m0", rule="nearest_even", convention="encode"), [[3, 1]]
    )


def test_conventions_by_hand() -> None:
    """Z = 10: S = q(1.667) = 1.625, 10/1.625 = 6.15 -> 6; s = q(0.6) = 0.625, 10*0.625 = 6.25 -> 6, 6/0.625 = 9.6."""
    x = np.array([[10.0, 3.0]])
    decode = quantize(x, 1, block=16, fmt="e4m3", rule="nearest_even")
    encode = quantize(x, 1, block=16, fmt="e4m3", rule="nearest_even", convention="encode")
    np.testing.assert_allclose(decode, [[9.75, 3.25]], rtol=1e-15)
    np.testing.assert_allclose(encode, [[9.6, 3.2]], rtol=1e-15)


def test_range_of_el_tensor_scaling() -> None:
    """EL 3.1 prints 2/E4M3max for the largest block's encode scale; its decode scale is half of E4M3max."""
    gamma = 100 / (6 * 448 * 0.5)
    assert 6 / (100 / gamma) == pytest.approx(2 / 448, rel=1e-15)
    decode = block_scales(np.array([100 / gamma]), fmt="e4m3", rule="nearest_even")
    encode = block_scales(np.array([100 / gamma]), fmt="e4m3", rule="nearest_even", convention="encode")
    assert (decode[0], encode[0]) == (224, 2 * 2.0**-9)
    x = np.array([[100.0, 10.0]])
    out = quantize(x, 1, block=1, fmt="e4m3", rule="nearest_even", convention="encode", tensor_scale=gamma)
    # 100: 100/gamma * 2/512 = 5.25 -> 6 of s = 2/512; 10: s = q(22.857/512) = 22/512 (subnormal up to 8/512, then
    # steps of 2/512 from 16/512), 10/gamma * 22/512 = 5.775 -> 6.
    np.testing.assert_allclose(out, [[gamma * 6 * 256, gamma * 6 * 512 / 22]], rtol=1e-15)


def test_int4_per_tensor() -> None:
    x = np.array([[7.0, -2.5], [0.5, 3.5]])
    out = quantize(x, 1, element="int4", block="tensor", fmt="fp32", rule="nearest_even")
    np.testing.assert_array_equal(out, [[7, -2], [0, 4]])


def test_blocks() -> None:
    x = np.arange(1.0, 16).reshape(3, 5)
    np.testing.assert_array_equal(block_amax(x, 1, 2)[0], [2, 2, 4, 4, 5])
    np.testing.assert_array_equal(block_amax(x, 0, 2)[:, 0], [6, 6, 11])
    np.testing.assert_array_equal(block_amax(x, 0, (2, 3))[:, [0, 2, 3]], [[8, 8, 10], [8, 8, 10], [13, 13, 15]])
    np.testing.assert_array_equal(block_amax(x, 1, "row")[:, 0], [5, 10, 15])
    np.testing.assert_array_equal(block_amax(x, 0, "row")[0], [11, 12, 13, 14, 15])
    np.testing.assert_array_equal(block_amax(x, -1, "tensor"), np.full((3, 5), 15))


@pytest.mark.parametrize("convention", ["decode", "encode"])
def test_zero_and_poisoned_blocks(convention: str) -> None:
    x = np.array([[0, 0, np.inf, 1, 2, np.nan, 6, 1.0]])
    out = quantize(x, 1, block=2, fmt="e4m3", rule="nearest_even", convention=convention)
    np.testing.assert_array_equal(out, [[0, 0, *[np.nan] * 4, 6, 1]])


@pytest.mark.parametrize("element", ["e2m1", "e3m0", "int4"])
def test_stochastic_rounding_has_the_exact_mean(element: str) -> None:
    """Over equidistant random numbers the mean is u, because the fractions are multiples of their step."""
    uniform = np.arange(64) / 64
    for u in np.arange(-4, 4, 1 / 16):
        values = round_stochastic(np.full(64, u), element, uniform)
        assert values.mean() == u
        assert len(set(np.abs(values))) <= 2


def test_stochastic_rounding_goes_up_where_the_fraction_exceeds_the_random_number() -> None:
    u = np.array([2.5, 2.5, -2.5, -2.5, 2.0, 7.0])
    uniform = np.array([0.49, 0.5, 0.49, 0.5, 0.0, 0.99])
    np.testing.assert_array_equal(round_stochastic(u, "e2m1", uniform), [3, 2, -3, -2, 2, 6])


def test_hadamard_and_rotation() -> None:
    popcount = np.array([[(-1) ** (i & j).bit_count() for j in range(8)] for i in range(8)])
    np.testing.assert_allclose(hadamard(8), popcount / np.sqrt(8), rtol=1e-15)
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((3, 70)), rng.standard_normal((4, 70))
    signs = rng.choice([-1.0, 1.0], 96)
    np.testing.assert_allclose(rotate(a, 1, 32, signs) @ rotate(b, 1, 32, signs).T, a @ b.T, atol=1e-12)
    np.testing.assert_allclose(rotate(a.T, 0, 32, signs), rotate(a, 1, 32, signs).T)
    # Signs come before H: after H they could not change magnitudes.
    np.testing.assert_allclose(rotate(np.ones((1, 2)), 1, 2, np.array([1, -1.0])), [[0, np.sqrt(2)]], atol=1e-15)
