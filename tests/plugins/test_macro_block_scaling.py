"""macro_block_scaling against its equation in exact fractions."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

import fp4graph
from fp4graph.technique.operands import Operand
from tests.helpers.policies import loaded, quantizer
from tests.plugins.layer import Layer, gaussian, products_by

OPTIONS = {"block": 64}


def policy(options=None, *, block=16, element="e2m1", more=(), after=(), operands=None, **scale):
    quantize = {"element": element, "block": block, "scale": {"format": "e8m0", "rounding": "nearest_even", **scale}}
    return loaded("macro_block_scaling", options, more=more, after=after, operands=operands, quantize=quantize)


layer = Layer(policy)
quantized = layer.quantized
SPEC = fp4graph.QuantSpec(block=16, scale=fp4graph.ScaleSpec("e8m0", "nearest_even"))


def factor(largest, bits=3, qmax=Fraction(6)):
    """Return γ: the mantissa of g/Qmax, rounded up to so many bits."""
    if largest == 0:
        return Fraction(1)
    mantissa = Fraction(largest) / qmax
    while mantissa >= 2:
        mantissa /= 2
    while mantissa < 1:
        mantissa *= 2
    return Fraction(math.ceil(mantissa * 2**bits), 2**bits)


def expected(x, macro, spec, bits=3, qmax=6, lines=1):
    """Return γ·Q(x/γ) for macro blocks of ``lines`` lines and ``macro`` columns."""

    def quantized(part):
        gamma = torch.tensor(float(factor(part.abs().max().item(), bits, Fraction(qmax))))
        return gamma * fp4graph.fake_quantize(part / gamma, spec)

    return torch.cat([torch.cat([quantized(part) for part in row.split(macro, 1)], 1) for row in x.split(lines)])


def log_normal(*shape, seed=0):
    return torch.exp(gaussian(*shape, seed=seed)) * gaussian(*shape, seed=seed + 1).sign()


@pytest.mark.parametrize("rounding", ["nearest_even", "ceil", "floor"])
@pytest.mark.parametrize("width", [192, 200])  # 200: a macro block of half a block
def test_each_macro_block_has_the_mantissa_of_its_largest_block(width, rounding):
    x = log_normal(20, width) * torch.logspace(-30, 30, 20)[:, None]
    spec = fp4graph.QuantSpec(block=16, scale=fp4graph.ScaleSpec("e8m0", rounding))
    y = quantized(x, OPTIONS, rounding=rounding)
    assert torch.equal(y, expected(x, 64, spec))
    assert not torch.equal(y, fp4graph.fake_quantize(x, spec))


@pytest.mark.parametrize("bits", [1, 2, 7, 10])
def test_mantissa_bits(bits):
    x = log_normal(20, 192)
    assert torch.equal(quantized(x, {**OPTIONS, "mantissa_bits": bits}), expected(x, 64, SPEC, bits))


@pytest.mark.slow
@pytest.mark.parametrize(("element", "qmax"), [("e3m0", 16), ("int4", 7), ("e4m3", 448), ("int8", Fraction(127, 64))])
def test_other_elements_and_encode_scales(element, qmax):
    x = log_normal(20, 128)
    spec = fp4graph.QuantSpec(element, 16, fp4graph.ScaleSpec("e8m0", "nearest_even", "encode"))
    y = quantized(x, OPTIONS, element=element, convention="encode")
    assert torch.equal(y, expected(x, 64, spec, qmax=qmax))


@pytest.mark.parametrize("rounding", ["nearest_even", "ceil", "floor"])
def test_the_largest_block_loses_its_scale_bias(rounding):
    """Its scale times γ is Z/Qmax up to the rounding of γ, and never less, so that nothing is clipped. Among the maxima
    are the values that γ represents exactly, and their neighbours."""
    exact = torch.tensor([6 * (1 + k / 8) for k in range(8)])
    edges = torch.cat([exact, torch.nextafter(exact, exact + 1), torch.nextafter(exact, exact - 1)])
    maxima = torch.cat([edges, 6 * torch.exp2(torch.rand(500))])
    x = gaussian(maxima.numel(), 64).clamp(-1, 1)
    x[:, 20] = maxima
    q = layer.quantize(x, OPTIONS, rounding=rounding)
    scale = (q.scale * q.group_scale)[:, 1, 0].double()
    ideal = maxima.double() / 6
    assert (scale >= ideal).all()
    assert (scale <= ideal * 1.125 * (1 + 1e-6)).all()
    assert (q.ratio[:, 1].abs().amax(-1) <= 6).all()


def test_a_macro_block_of_2d_blocks_is_a_run_of_blocks():
    """Each row of blocks has separate macro blocks."""
    w = log_normal(32, 128)
    y = quantized(w, OPTIONS, Operand.FPROP_WEIGHT, block=[16, 16])
    assert torch.equal(y, expected(w, 64, replace(SPEC, block=(16, 16)), lines=16))


def test_a_tensor_scale_does_not_change_the_mantissas_of_macro_blocks():
    """It changes only the range of the block scales, for which E8M0 has room."""
    x = log_normal(20, 128)
    x = x / x.abs().max() * 8  # g = 8, by which division is exact
    assert torch.equal(quantized(x, OPTIONS, more=["tensor_scaling"]), quantized(x, OPTIONS))


@pytest.mark.parametrize("order", ["more", "after"])
def test_tensor_scaling_of_other_operands_is_declared_in_any_order_with_any_granularity(order):
    x, w, dy = log_normal(40, 64), gaussian(8, 64), gaussian(40, 8, seed=5)
    scaling = {"operands": ["backward"], "granularity": 32}
    both = {order: [{"tensor_scaling": scaling}]}
    y, *gradients = layer.products(x, w, dy, OPTIONS | {"operands": ["forward"]}, **both)
    assert torch.equal(y, layer.products(x, w, dy, OPTIONS)[0])
    quantize = quantizer(16, "e8m0", "nearest_even")
    alone = Layer(lambda _: loaded("tensor_scaling", scaling, quantize=quantize)).products(x, w, dy)
    assert all(map(torch.equal, gradients, alone[1:]))


def test_a_macro_block_with_a_poisoned_block_or_too_small_for_every_scale_has_no_factor():
    x = log_normal(3, 64)
    x[0, 3], x[1, 3], x[2] = math.nan, math.inf, 1e-40
    y = quantized(x, OPTIONS)
    assert y[:2, :16].isnan().all()
    assert torch.equal(y[:2, 16:], fp4graph.fake_quantize(x, SPEC)[:2, 16:])
    assert torch.equal(y[2], fp4graph.fake_quantize(x, SPEC)[2])


def test_the_gradient_quantizes_macro_blocks_along_each_gemms_own_axis():
    x, w, dy = log_normal(40, 64), gaussian(8, 64), gaussian(40, 8, seed=5)
    actual = layer.products(x, w, dy, {"block": 32})
    torch.testing.assert_close(actual, products_by(lambda t: expected(t, 32, SPEC), x, w, dy), rtol=1e-6, atol=1e-6)
