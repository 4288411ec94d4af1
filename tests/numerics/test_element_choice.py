"""Blocks that choose between element formats, compared with a scalar oracle that sums errors exactly."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import fp4graph
from fp4graph import QuantSpec, ScaleSpec
from fp4graph.kernels.devices import CPU, GPU
from fp4graph.numerics.exact import in_bfloat16
from fp4graph.numerics.formats import E2M1, E3M0, INT4, ElementFormat
from fp4graph.numerics.noise import make_key
from tests.helpers.oracle import scale_of_block

MEASURES = {
    "mse": lambda errors: sum(e * e for e in errors),
    "mae": lambda errors: sum(abs(e) for e in errors),
    "amax": lambda errors: max(abs(e) for e in errors),
}
IF4 = QuantSpec(["e2m1", "int4"], 16, ScaleSpec("e4m3"))
COARSE = replace(INT4, name="int4_3", max=3.0)  # stretched to the maximum of E2M1: 0, 2, 4, 6


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grid(element: ElementFormat, largest: float) -> list[Fraction]:
    """The values of ``element``, from zero up, stretched to ``largest``."""
    stretch = Fraction(largest) / Fraction(element.max)
    return [Fraction(value) * stretch for value in element.magnitudes()]


def nearest(u: Fraction, values: Sequence[Fraction]) -> Fraction:
    """The nearest of ``values`` to ``u``, with the sign of ``u``; a tie goes to the even index."""
    place = min(range(len(values)), key=lambda i: (abs(abs(u) - values[i]), i % 2))
    return values[place] * (1 if u >= 0 else -1)


def expected(block: Sequence[float], spec: QuantSpec) -> tuple[list[Fraction], int]:
    """Return the dequantized block, exact but for its rounded scale, and the place of the chosen format in the spec."""
    scale = Fraction(scale_of_block(list(block), spec.scale, spec.element))
    assert spec.selector is not None
    outcomes = []
    for element in spec.elements:
        q = [nearest(Fraction(x) / scale, grid(element, spec.element.max)) * scale for x in block]
        outcomes.append((MEASURES[spec.selector]([Fraction(x) - y for x, y in zip(block, q, strict=True)]), q))
    place = min(range(len(outcomes)), key=lambda i: (outcomes[i][0], i))
    return outcomes[place][1], place


def places_of(x: Tensor, spec: QuantSpec, rows: int, columns: int) -> set[int]:
    """Compare each block of ``rows`` × ``columns`` with exact arithmetic; return the places of the chosen formats."""
    got, places = fp4graph.fake_quantize(x, spec).double(), set()
    for i, j in itertools.product(range(0, x.shape[0], rows), range(0, x.shape[1], columns)):
        inside = slice(i, i + rows), slice(j, j + columns)
        values, place = expected(x[inside].flatten().tolist(), spec)
        whole = torch.tensor([float(v) for v in values], dtype=torch.float64)
        torch.testing.assert_close(got[inside].flatten(), whole, rtol=2**-22, atol=0)
        places.add(place)
    return places


@pytest.mark.parametrize("selector", MEASURES)
@pytest.mark.parametrize("elements", [("e2m1", "int4"), ("int4", "e2m1"), ("e2m1", "int4", "e3m0")])
def test_each_block_takes_the_format_of_the_least_error(selector, elements):
    x = gaussian(24, 48) * torch.logspace(-2, 2, 24)[:, None]
    x[0, :16] = torch.tensor([6 * 2.0**-k for k in range(8)] * 2)  # values of E3M0
    spec = QuantSpec(elements, 16, ScaleSpec("e4m3"), selector=selector)
    assert places_of(x, spec, 1, 16) == set(range(len(elements)))


@pytest.mark.parametrize(
    ("block", "size", "shape"),
    [((4, 8), (4, 8), (10, 20)), ("row", (1, 40), (6, 40)), ("tensor", (5, 12), (5, 12))],
)
def test_blocks_of_any_shape_take_one_format_each(block, size, shape):
    places_of(gaussian(*shape, seed=1), replace(IF4, block=block), *size)


def test_of_equal_errors_the_first_format_wins():
    """u = 29/7 lies halfway between E2M1's 4 = 28/7 and INT4's 5·6/7 = 30/7; both formats have the block's maximum."""
    x = torch.zeros(16)
    x[0], x[1] = 42.0, 29.0
    for elements, value in ((("e2m1", "int4"), 28.0), (("int4", "e2m1"), 30.0)):
        q = fp4graph.fake_quantize(x, QuantSpec(elements, 16, ScaleSpec("fp32")))
        assert q[:2].tolist() == [42.0, value]


@pytest.mark.slow
def test_the_choice_does_not_depend_on_the_draw_and_the_mean_is_the_operand():
    """RTN errors decide. Choosing the format with the better draw would bias the mean."""
    x = gaussian(8, 16, seed=2)
    stochastic = replace(IF4, rounding="stochastic", scale=ScaleSpec("fp32"))
    draws = torch.stack([fp4graph.fake_quantize(x, stochastic, key=make_key(seed)) for seed in range(600)])
    for line, drawn in zip(x, draws.unbind(1), strict=True):
        scale = line.abs().max() / 6
        _, place = expected(line.tolist(), replace(stochastic, rounding="nearest"))
        values = torch.tensor([float(v) for v in grid(stochastic.elements[place], 6.0)])
        off = ((drawn / scale).abs()[..., None] - values).abs().amin(-1)
        assert off.max() < 1e-5  # all draws are values of the format with the least RTN error
    widest = 2 * x.abs().amax(1, keepdim=True) / 6  # the gap between 4 and 6
    assert ((draws.mean(0) - x).abs() < 4 * widest / 2 / 600**0.5 + 1e-6).all()


def test_nan_or_inf_poisons_its_block_alone():
    x = gaussian(3, 32, seed=3)
    x[0, 3], x[1, 20] = torch.nan, torch.inf
    q, poisoned = fp4graph.fake_quantize(x, IF4).unflatten(1, (2, 16)), [[True, False], [False, True], [False, False]]
    assert q.isnan().all(-1).tolist() == (~q.isfinite().all(-1)).tolist() == poisoned
    assert (fp4graph.fake_quantize(torch.zeros(2, 16), IF4) == 0).all()


def test_a_list_of_formats_is_plain_data():
    assert (IF4.element, IF4.others, IF4.elements, IF4.selector) == (E2M1, (INT4,), (E2M1, INT4), "mse")
    assert QuantSpec.from_text(IF4.to_text()) == IF4
    assert hash(replace(IF4, block=16)) == hash(IF4)
    three = replace(IF4, others=(INT4, E3M0), selector="amax")
    assert QuantSpec.from_text(three.to_text()) == three
    assert "others" not in QuantSpec("e2m1").to_text()
    assert QuantSpec(["e2m1"]) == QuantSpec("e2m1")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"element": ()}, "empty list"),
        ({"element": ("e2m1", "e2m1")}, "the elements of a list must differ; got e2m1|e2m1"),
        ({"element": ("e2m1", "int8")}, "codes of one width, in bits; got e2m1 4, int8 8"),
        ({"element": ("e2m1", "int5")}, "no element format 'int5'"),
        ({"element": "e2m1", "selector": "mse"}, "element names only e2m1; name several"),
        ({"element": ("e2m1", "int4"), "selector": "rms"}, "selector must be one of mse, mae, amax"),
        ({"element": ("e2m1", "int4"), "others": (E3M0,)}, "write the list alone"),
        ({"element": "e2m1", "others": [INT4]}, "others must be a tuple"),
        (
            {"element": ["e2m1", "int4", COARSE]},
            "no block would choose int4_3: each of its values, stretched to the maximum of e2m1, is a value of e2m1",
        ),
    ],
)
def test_invalid_lists_of_formats_are_refused(fields, message):
    with pytest.raises(fp4graph.SpecError, match=re.escape(message)):
        QuantSpec(**fields)


def test_a_finer_format_may_follow_a_coarse_one():
    finer_second = QuantSpec([COARSE, "e2m1"], 16, ScaleSpec("e4m3"))
    assert 1 in places_of(gaussian(20, 16), finer_second, 1, 16)


def test_packing_kernels_and_bf16_refuse_a_choice():
    with pytest.raises(fp4graph.SpecError, match=r"e2m1\|int4\) cannot be packed.*name one element"):
        fp4graph.pack(gaussian(2, 16), IF4)
    assert CPU.unknown(IF4)
    assert CPU.unpacked(IF4)
    assert GPU.unknown(IF4) == "a choice between e2m1 and int4"
    assert in_bfloat16(replace(IF4, others=(), selector=None))
    assert not in_bfloat16(IF4)  # bf16 does not represent 6/7
