"""macro_block_scaling against its equation in exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

import fp4graph
from fp4graph.technique.operands import Operand
from tests.helpers.policies import loaded
from tests.plugins.layer import Layer, gaussian

OPTIONS = {"block": 64}


def policy(options=None, *, block=16, element="e2m1", more=(), operands=None, **scale):
    quantize = {"element": element, "block": block, "scale": {"format": "e8m0", "rounding": "nearest_even", **scale}}
    return loaded("macro_block_scaling", options, more=more, operands=operands, quantize=quantize)


layer = Layer(policy)
quantized = layer.quantized
SPEC = fp4graph.QuantSpec(block=16, scale=fp4graph.ScaleSpec("e8m0", "nearest_even"))


def factor(largest, bits=3, qmax=Fraction(6)):
    """γ: the mantissa of g/Qmax, rounded up to so many bits."""
    if largest == 0:
        return Fraction(1)
    mantissa = Fraction(largest) / qmax
    while mantissa >= 2:
        mantissa /= 2
    while mantissa < 1:
        mantissa *= 2
    return Fraction(math.ceil(mantissa * 2**bits), 2**bits)


def expected(x, macro, spec, bits=3, qmax=6):
    """γ·Q(x/γ), macro block by macro block."""
    y = torch.empty_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], macro):
            part = x[row, start : start + macro]
            gamma = float(factor(part.abs().max().item(), bits, Fraction(qmax)))
            y[row, start : start + macro] = gamma * fp4graph.fake_quantize(part / torch.tensor(gamma), spec)
    return y


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
    scale = fp4graph.ScaleSpec("e8m0", "nearest_even", "encode")
    spec = fp4graph.QuantSpec(element, 16, scale)
    y = quantized(x, OPTIONS, element=element, convention="encode")
    assert torch.equal(y, expected(x, 64, spec, qmax=qmax))


@pytest.mark.parametrize("rounding", ["nearest_even", "ceil", "floor"])
def test_the_largest_block_loses_its_scale_bias(rounding):
    """Its scale times γ is Z/Qmax but for the rounding of γ, and never less, so that nothing is clipped. The maxima
    include every value just above, on and just below those that γ represents exactly."""
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


def test_blocks_of_two_axes_and_the_weight_of_both_gemms():
    """A macro block of 2-D blocks is a run of them; each row of blocks has its own."""
    w = log_normal(32, 128)
    y = quantized(w, OPTIONS, Operand.FPROP_WEIGHT, block=[16, 16])
    spec = fp4graph.QuantSpec(block=(16, 16), scale=fp4graph.ScaleSpec("e8m0", "nearest_even"))
    for rows in (slice(0, 16), slice(16, 32)):
        for columns in (slice(0, 64), slice(64, 128)):
            part = w[rows, columns]
            gamma = torch.tensor(float(factor(part.abs().max().item())))
            assert torch.equal(y[rows, columns], gamma * fp4graph.fake_quantize(part / gamma, spec))


def test_beside_a_tensor_scale():
    """A tensor scale changes the range of the block scales, and macro blocks of X/g have the mantissas of X's."""
    x = log_normal(20, 128)
    x = x / x.abs().max() * 8  # g = 8, by which division is exact
    alone = quantized(x, OPTIONS)
    assert torch.equal(quantized(x, OPTIONS, more=["tensor_scaling"]), alone)


def test_zeros_poison_tiny_and_empty():
    x = log_normal(6, 128)
    x[0], x[1, 3], x[2, 70], x[3] = 0, math.nan, math.inf, 1e-40
    y = quantized(x, OPTIONS)
    assert (y[0] == 0).all()
    assert y[1, :16].isnan().all()
    assert y[2, 64:80].isnan().all()
    assert y.isnan().sum() == 32
    # The poisoned block's neighbours, and what no scale reaches, are quantized without a factor.
    assert torch.equal(y[1, 16:64], fp4graph.fake_quantize(x, SPEC)[1, 16:64])
    assert torch.equal(y[3], fp4graph.fake_quantize(x, SPEC)[3])
    assert quantized(x[:0], OPTIONS).shape == (0, 128)
    assert quantized(x[:0].mT, OPTIONS).shape == (128, 0)


def test_the_gradient_quantizes_macro_blocks_along_each_gemms_own_axis():
    x, w, dy = log_normal(40, 64), gaussian(8, 64), gaussian(40, 8, seed=5)
    y, dx, dw = layer.products(x, w, dy, {"block": 32})

    def q(t):
        return expected(t.contiguous(), 32, SPEC)

    torch.testing.assert_close(y, q(x) @ q(w).mT, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx, q(dy) @ q(w.mT).mT, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dw, q(dy.mT) @ q(x.mT).mT, rtol=1e-6, atol=1e-6)


def test_a_kept_operand_is_not_checked_and_costs_are_counted():
    whole = {"gradients": {"block": "tensor"}}
    assert policy({"block": 64, "operands": ["forward"]}, operands=whole).complexity == 0.25
    policy(OPTIONS, operands={"gradients": "keep"})
