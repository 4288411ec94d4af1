"""Element rounding against the oracle, ml_dtypes and gfloat."""

from __future__ import annotations

import math

import gfloat
import gfloat.formats as gfloat_formats
import numpy as np
import pytest
import torch

from fp4graph.numerics import surrogates
from fp4graph.numerics.formats import ELEMENTS, SCALES
from fp4graph.numerics.noise import hash_bits, make_key
from fp4graph.numerics.rounding import bracket, round_nearest, round_stochastic
from tests.helpers import ml_formats, oracle
from tests.helpers.floats import any_floats, around, assert_same_bits, critical_points


def points(name: str) -> torch.Tensor:
    return torch.cat([torch.tensor(critical_points(ELEMENTS[name])), any_floats((200,))])


@pytest.mark.parametrize("ties", ["even", "up", "away"])
@pytest.mark.parametrize("name", ELEMENTS)
def test_nearest_agrees_with_the_oracle(name, ties):
    u, element = points(name), ELEMENTS[name]
    expected = torch.tensor([oracle.round_nearest(v, element, ties) for v in u.tolist()])
    assert_same_bits(round_nearest(u, element, ties), expected)


@pytest.mark.parametrize("random_bits", [1, 4, 8, 23, 24])
@pytest.mark.parametrize("name", ELEMENTS)
def test_stochastic_agrees_with_the_oracle(name, random_bits):
    u, element = points(name), ELEMENTS[name]
    bits = hash_bits(make_key(1), torch.arange(len(u), dtype=torch.int32))
    expected = [
        oracle.round_stochastic(v, element, b, random_bits) for v, b in zip(u.tolist(), bits.tolist(), strict=True)
    ]
    assert_same_bits(round_stochastic(u, element, bits, random_bits), torch.tensor(expected))


@pytest.mark.parametrize(("name", "dtype"), ml_formats.ELEMENTS.items())
def test_nearest_even_is_the_cast_of_ml_dtypes(name, dtype):
    u = points(name).clamp(-ELEMENTS[name].max, ELEMENTS[name].max)  # ml_dtypes' 8-bit casts overflow to NaN or Inf
    expected = torch.from_numpy(u.numpy().astype(dtype).astype(np.float32))
    assert_same_bits(round_nearest(u, ELEMENTS[name]), expected)


@pytest.mark.parametrize(
    ("ties", "mode"), [("even", gfloat.RoundMode.TiesToEven), ("away", gfloat.RoundMode.TiesToAway)]
)
@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "int8"])
def test_nearest_agrees_with_gfloat(name, ties, mode):
    u, element = points(name), ELEMENTS[name]
    info = getattr(gfloat_formats, f"format_info_ocp_{name}")
    # gfloat's int8 has -2, fp4graph's does not.
    expected = gfloat.round_ndarray(info, u.clamp(-element.max, element.max).double().numpy(), mode, sat=True)
    actual = round_nearest(u, element, ties)
    if element.integer:
        assert torch.equal(actual, torch.from_numpy(expected).float())
    else:
        assert_same_bits(actual, torch.from_numpy(expected).float())


@pytest.mark.parametrize("name", ELEMENTS)
def test_bracket_gives_the_two_neighbouring_values(name):
    u, element = points(name), ELEMENTS[name]
    expected = torch.tensor([oracle.neighbours(v, element) for v in u.tolist()])
    assert torch.equal(torch.stack(bracket(u, element), 1), expected)


@pytest.mark.parametrize("name", ELEMENTS)
def test_nan_stays_nan_and_infinity_saturates(name):
    element, u = ELEMENTS[name], torch.tensor([math.nan, math.inf, -math.inf])
    for q in (
        *(round_nearest(u, element, ties) for ties in ("even", "up", "away")),
        round_stochastic(u, element, torch.zeros(3, dtype=torch.int32)),
        *bracket(u, element),
    ):
        assert q[0].isnan()
        assert q[1:].tolist() == [element.max, -element.max]


@pytest.mark.parametrize("u", [0.1, 0.3, 1.2, 2.7, 4.5, 5.9, -0.1, -3.25])
def test_stochastic_rounding_is_unbiased(u):
    n = 200_000
    bits = hash_bits(make_key("unbiased"), torch.arange(n, dtype=torch.int32))
    q = round_stochastic(torch.full((n,), u), ELEMENTS["e2m1"], bits)
    assert len(q.unique()) == 2
    sigma = q.double().std().item() / math.sqrt(n)
    assert abs(q.double().mean().item() - float(np.float32(u))) < 3 * sigma


def test_stochastic_rounding_keeps_values_of_the_format():
    for element in ELEMENTS.values():
        u = torch.tensor(element.values())
        for word in (0, 1, -1, 2**31 - 1, -(2**31)):
            assert torch.equal(round_stochastic(u, element, torch.full_like(u, word, dtype=torch.int32)), u)


@pytest.mark.parametrize("limit", [6.0, 448.0, 7.0, 0.5])
def test_inside_is_one_up_to_the_limit_and_else_zero(limit):
    u = torch.tensor([*around([limit, 0.0, 1e-40, 1.0]), math.inf, -math.inf, math.nan, -math.nan])
    inside = surrogates.inside(u, limit)
    assert inside.dtype is torch.float32
    assert inside.tolist() == [1.0 if abs(value) <= limit else 0.0 for value in u.tolist()]


@pytest.mark.parametrize("name", ["e4m3", "e8m3", "bf16"])
def test_the_position_of_a_scale_between_neighbours(name):
    """At every code or every 61st: also where the spacing of the scales is subnormal in fp32."""
    values, step = SCALES[name].values(), 61 if name == "bf16" else 1
    for share in (0.0, 0.25, 0.5, 0.75):
        codes = range(0, len(values) - 1, step)
        scale = [values[code] + share * (values[code + 1] - values[code]) for code in codes]
        part, odd = surrogates.scale_fraction(torch.tensor(scale), SCALES[name])
        assert part.tolist() == [share] * len(codes)
        assert odd.tolist() == [code % 2 if share < 0.5 else 1 - code % 2 if share > 0.5 else 0 for code in codes]
