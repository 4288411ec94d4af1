"""Inductor gives the same bits as eager mode, from one fused kernel."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from fp4graph.numerics.noise import make_key
from fp4graph.numerics.quantize import fake_quantize
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from tests.helpers.floats import any_floats, assert_same_bits, blocks_of_every_scale

pytestmark = [pytest.mark.compiler, pytest.mark.inductor]

CASES = {
    "mxfp4": (QuantSpec(), -1),
    "tetrajet": (QuantSpec(scale=ScaleSpec("e8m0", "ceil"), rounding="stochastic"), 0),
    "ties up": (QuantSpec(scale=ScaleSpec("e8m0", "ceil"), ties="up"), -1),
    "nvfp4, stochastic": (QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even"), "stochastic"), -1),
    "stochastic ue5m3 scale": (QuantSpec("e2m1", 32, ScaleSpec("ue5m3", "stochastic", zero="to_one")), 0),
    "stochastic e8m0 scale": (QuantSpec("e2m1", (16, 16), ScaleSpec("e8m0", "stochastic")), -1),
    "e3m0, encode e8m3": (QuantSpec("e3m0", 16, ScaleSpec("e8m3", "nearest_even", "encode")), -1),
    "if4, stochastic": (QuantSpec(("e2m1", "int4"), 16, ScaleSpec("e4m3"), "stochastic"), -1),
    "int4 per tensor": (QuantSpec("int4", "tensor", ScaleSpec("fp32", "nearest_even")), 0),
}
#: Cases with and without noise, along both axes. The others are `long`.
FEW = {"tetrajet", "ties up", "stochastic e8m0 scale", "int4 per tensor"}


def data() -> torch.Tensor:
    """``[.., 64]``: all exponents, subnormals, zeros, NaN and Inf, in a number of rows that 32 divides."""
    x = torch.cat([any_floats((100, 64)), blocks_of_every_scale(64), torch.randn(200, 64), torch.zeros(1, 64)])
    x[3, 5], x[150, 40], x[151, 0] = torch.nan, torch.inf, -torch.inf
    return x[: len(x) // 32 * 32].contiguous()


@pytest.mark.parametrize(
    "case", [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_one_kernel_gives_the_bits_of_eager_mode(case):
    spec, dim = CASES[case]
    x = data() if spec.block != "tensor" else torch.randn(200, 64)
    key = make_key(11)
    compiled = torch.compile(lambda x, key: fake_quantize(x, spec, dim, key), dynamic=False)
    result, code = run_and_get_code(compiled, x, key)
    assert_same_bits(result, fake_quantize(x, spec, dim, key))
    assert sum(source.count('extern "C"') for source in code) == 1


@pytest.mark.parametrize(
    ("dim", "dtype"), [(0, torch.bfloat16), pytest.param(1, torch.float32, marks=pytest.mark.long)]
)
def test_the_last_elements_are_written_where_blocks_do_not_fit(dim, dtype):
    """Inductor on the CPU loses them if it fuses a slice with the loop over blocks (``Blocking.join``). Here another
    quantizer and a product read the result, and might be fused with it."""
    spec, x = QuantSpec(rounding="stochastic"), torch.randn(90, 90).to(dtype)
    key = make_key(12)

    def step(x, key):
        q = fake_quantize(x, QuantSpec(), dim)
        return fake_quantize(q, spec, 1 - dim, key), q * 2

    for actual, expected in zip(torch.compile(step, dynamic=False)(x, key), step(x, key), strict=True):
        assert_same_bits(actual, expected)


def test_a_dynamic_number_of_rows_does_not_recompile():
    spec, key, compiles = QuantSpec(rounding="stochastic"), make_key(13), 0

    def count(graph, example):
        nonlocal compiles
        compiles += 1
        return torch._inductor.compile(graph, example)

    compiled = torch.compile(lambda x, key: fake_quantize(x, spec, 0, key), backend=count)
    for rows in (64, 65, 96, 33, 130):
        x = torch.randn(rows, 48)
        torch._dynamo.mark_dynamic(x, 0)
        assert_same_bits(compiled(x, key), fake_quantize(x, spec, 0, key))
    assert compiles == 1
