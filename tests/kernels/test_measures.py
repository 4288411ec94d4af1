"""Errors, moments and choices of blocks by the CPU's operators beside the tensor code, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp4graph.kernels import measures
from fp4graph.numerics import scaling
from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.noise import Noise, make_key
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from tests.helpers.floats import any_floats, assert_same_bits
from tests.helpers.operators import check_declaration
from tests.kernels.quantizers import by_both

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]


def parts(shape: tuple[int, ...], spec: QuantSpec, transposed: bool = False) -> tuple[Blocking, Tensor, Tensor, Tensor]:
    """Return a blocking, values of every magnitude with NaN and Inf among them unless all are one block, statistics and
    scales."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-30, 30, shape).float())
    if x.numel() and spec.block != "tensor":
        x.flatten()[::97] = any_floats((x.flatten()[::97].numel(),))
        x.flatten()[:200:60] = torch.tensor([torch.inf, torch.nan, -torch.inf, 1e-42])
    x = x.mT.contiguous().mT if transposed else x
    blocking = Blocking(shape, spec.block)
    values = blocking.split(x)
    z = scaling.amax(values, blocking.axes)
    return blocking, values, z, scaling.block_scale(z, spec.scale, spec.element)


CASES = [
    pytest.param(16, "mse", "decode", (40, 100)),
    pytest.param(16, "mae", "decode", (3, 20, 64)),
    pytest.param(16, "amax", "encode", (40, 100)),
    pytest.param((16, 16), "mse", "decode", (2, 40, 50)),
    pytest.param("row", "mse", "decode", (33, 70)),
    pytest.param("tensor", "mae", "decode", (33, 70), marks=pytest.mark.long),
    pytest.param(16, "mse", "decode", (0, 32)),
    pytest.param(16, "mse", "decode", (200,)),
    pytest.param(1, "mse", "decode", (70, 8), marks=pytest.mark.long),
]


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(("block", "measure", "convention", "shape"), CASES)
def test_errors_of_blocks(block, measure, convention, shape, transposed):
    if transposed and len(shape) < 2:
        pytest.skip("a vector has no other layout")
    spec = QuantSpec("e2m1", block, ScaleSpec("e4m3", "nearest_even", convention), rounding="stochastic")
    blocking, values, z, scale = parts(shape, spec, transposed)
    found, expected = by_both(lambda: measures.block_errors(values, scale, z, spec, measure, blocking))
    assert_same_bits(found, expected)
    assert found.numel() == 0 or (found.isfinite() & (found > 0)).any()


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_moments_of_blocks(transposed):
    spec = QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even"), ties="away")
    blocking, values, _, scale = parts((64 if transposed else 70, 96), spec, transposed)
    assert values.is_contiguous() != transposed
    found, expected = by_both(lambda: measures.block_moments(values, scale, spec, blocking, 128.0, 128))
    for sums, due in zip(found, expected, strict=True):
        assert_same_bits(sums, due)


@pytest.mark.parametrize(
    ("elements", "block", "selector", "shape"),
    [
        (["e2m1", "int4"], 16, "mse", (40, 100)),
        (["int4", "e2m1"], 32, "amax", (40, 100)),
        (["e2m1", "int4"], (16, 16), "mae", (2, 40, 50)),
    ],
)
@pytest.mark.parametrize("rounding", [("nearest", "even", 24), ("stochastic", "away", 8)], ids=lambda r: r[0])
def test_elements_that_blocks_choose(elements, block, selector, shape, rounding):
    how = dict(zip(("rounding", "ties", "random_bits"), rounding, strict=True))
    spec = QuantSpec(elements, block, ScaleSpec("e4m3", "nearest_even"), selector=selector, **how)
    blocking, values, _, scale = parts(shape, spec, transposed=len(shape) > 2)
    ratios, noise = scaling.ratio(values, scale, spec), Noise(make_key(3), blocking, values.device)
    found, expected = by_both(lambda: measures.round_elements(ratios, spec, noise))
    assert_same_bits(found, expected)
    alone = [measures.round_elements(ratios, QuantSpec(e, block, spec.scale, **how), noise) for e in elements]
    assert all((found != other).any() for other in alone)


DRAWN = {"rounding": "stochastic"}
TEXT, OTHER, DRAWS, OTHER_DRAWS = (
    QuantSpec(e, 16, ScaleSpec("e4m3", "nearest_even"), **how).to_text()
    for how in ({}, DRAWN)
    for e in ("e2m1", "int4")
)
VALUES, SCALE = torch.randn(8, 16), torch.rand(8, 1) + 0.5
BITS = torch.arange(128, dtype=torch.int32).reshape(8, 16) * 2**24
OPERATORS = {
    "block_errors": [(VALUES, SCALE, torch.ones(8, 1), 1, TEXT, "mse", 2.0**49)],
    "block_moments": [(VALUES, SCALE, 1, TEXT, 128.0, 2.0**49)],
    "choose_elements": [
        (VALUES, None, 1, TEXT, OTHER, "mse", 2.0**49),
        (VALUES, BITS, 1, DRAWS, OTHER_DRAWS, "mse", 2.0**49),
    ],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_keep_their_promises(name):
    for arguments in OPERATORS[name]:
        check_declaration(name, arguments)
