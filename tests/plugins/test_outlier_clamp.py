"""outlier_clamp against thresholds from a sorted copy, by numpy, and against Y = Q(clamp(X))·Ŵᵀ + ΔX·Ŵᵀ written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fp4graph
from fp4graph.numerics.blocking import Blocking
from fp4graph.ops import contract
from fp4graph.ops.product import total
from fp4graph.technique.operands import Operand
from tests.helpers.policies import loaded, quantizer
from tests.plugins.layer import DRAW, SPEC, Layer, gaussian
from tests.recipes.arithmetic import rotate


def policy(options=None, scale=("e8m0", "ceil"), others=(), **rule):
    return loaded("outlier_clamp", options, after=others, quantize=quantizer(32, *scale), **rule)


layer = Layer(policy, 96, 64)
terms = layer.terms


def activations(*shape, seed=0):
    """Return Gaussian numbers, shifted, with a few large elements of either sign."""
    x = gaussian(*shape, seed=seed) + 0.3
    x.view(-1)[::97] *= 40
    x.view(-1)[::89] *= -25
    return x


def thresholds(x, hundredths):
    """Return the elements with ⌊n·hundredths/100⌋ elements below them, and above them."""
    ordered = np.sort(x.double().numpy().reshape(-1))
    cut = ordered.size * hundredths // 100
    return ordered[cut], ordered[ordered.size - 1 - cut]


def clamped(x, hundredths):
    low, high = thresholds(x, hundredths)
    return torch.from_numpy(np.minimum(np.maximum(x.double().numpy(), low), high)).to(x.dtype)


@pytest.mark.parametrize("width", [96, 80])  # 80: the last block of each row is padded
@pytest.mark.parametrize(("options", "hundredths"), [(None, 1), ({"quantile": 0.97}, 3), ({"quantile": 0.71}, 29)])
def test_the_clamped_tensor_is_quantized_and_the_residual_is_exact(width, options, hundredths):
    x = activations(40, width)
    bulk = clamped(x, hundredths)
    part, residual = terms(x, options)
    assert torch.equal(part, fp4graph.fake_quantize(bulk, SPEC))
    assert torch.equal(residual, x - bulk)
    cut = x.numel() * hundredths // 100
    assert (residual > 0).sum() == (residual < 0).sum() == cut > 0
    (alone,) = terms(x, {**(options or {}), "residual": False})
    assert torch.equal(alone, part)


@pytest.mark.parametrize("quantile", [0.999, 0.99, 0.97, 0.6])
@pytest.mark.parametrize("n", [3, 203, 1499, 3001])
def test_the_thresholds_are_numpys_quantiles(quantile, n):
    x = activations(1, n, seed=n)
    values = x.double().numpy()
    program = layer.operand({"quantile": quantile})
    (part,) = program.parts
    blocking = Blocking(tuple(x.shape), program.spec.block)
    thresholds_found = part.thresholds(x, contract.context(part, DRAW, blocking, x.device, spec=program.spec))
    for q, threshold in zip((1 - quantile, quantile), thresholds_found, strict=True):
        assert threshold.item() in [np.quantile(values, q, method=method) for method in ("lower", "higher")]


def test_a_hundredth_of_three_hundred_elements_is_three():
    """In floats it could be two or four, because 1 − 0.99 is a little above a hundredth."""
    x = torch.randperm(300, generator=torch.Generator().manual_seed(0)).float().view(3, 100)
    _, residual = terms(x)
    assert sorted(residual[residual != 0].tolist()) == [-3, -2, -1, 1, 2, 3]


def test_elements_equal_to_a_threshold_are_not_cut():
    x = torch.full((4, 100), 2.0)
    x[0, :2], x[1, :2] = 50, -50
    part, residual = terms(x)
    # Four elements may be cut at each end. Two of them differ from the threshold, which is the fifth element.
    assert torch.equal(residual, x - 2)
    assert (part == 2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_terms_sum_to_x_to_half_a_unit_of_the_residual(dtype):
    x = activations(64, 96).to(dtype)
    splitter, context = layer.operand().acting(x, DRAW, None)[0]
    part, residual = splitter.split(x, context)
    assert part.dtype is residual.dtype is dtype
    error = (part.double() + residual.double() - x.double()).abs()
    assert (error <= residual.double().abs() * torch.finfo(dtype).eps / 2).all()
    assert ((part == x) == (residual == 0)).all()
    assert part.abs().max() < x.abs().max() / 4


def test_the_product_and_the_input_that_wgrad_reads_from_fprop_have_both_terms():
    x, w, dy = activations(40, 96), gaussian(64, 96, seed=1), gaussian(40, 64, seed=2)
    exact = {"dgrad": "keep", "wgrad.grad_output": "keep", "wgrad.input": "fprop"}
    y, _, dw = layer.products(x, w, dy, operands=exact)
    torch.testing.assert_close(dw, dy.mT @ sum(terms(x)), rtol=1e-6, atol=1e-4)
    bulk = clamped(x, 1)
    left = fp4graph.fake_quantize(bulk, SPEC).double() + (x - bulk).double()
    expected = left @ fp4graph.fake_quantize(w, SPEC).double().mT
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_count_as_outliers(bad, residual):
    options = {"quantile": 0.9, "residual": residual}
    x = activations(40, 96)
    x[3, 40] = bad
    bulk = clamped(x.nan_to_num(math.inf, math.inf, -math.inf), 10)
    assert torch.equal(terms(x, options)[0][:3], fp4graph.fake_quantize(bulk[:3], SPEC))
    # With more NaN or Inf than may be cut nothing is clamped at that end, and every NaN stays.
    x[:20] = bad
    actual = sum(terms(x, options))
    assert actual[:20].isnan().all()
    assert actual[20:].isfinite().all()


@pytest.mark.parametrize("residual", [True, False])
def test_a_single_element_is_not_clamped(residual):
    part, *rest = terms(torch.ones(1, 1), {"residual": residual})
    assert torch.equal(part, torch.ones(1, 1))
    assert rest == ([torch.zeros(1, 1)] if residual else [])


def test_the_tensor_scale_is_that_of_the_clamped_tensor():
    x = activations(40, 96)
    bulk = clamped(x, 1)
    part, residual = layer.operand(scale=("e4m3", "nearest_even"), others=["tensor_scaling"])(x, DRAW)
    gamma = bulk.abs().max() / (6 * 448)
    mantissa = gamma / 2 ** gamma.log2().floor()  # the power of two is multiplied into an operand before the GEMM
    torch.testing.assert_close(part.multiplier, mantissa, rtol=1e-6, atol=0)
    assert torch.equal(residual.values, x - bulk)
    assert residual.multiplier is None


def test_beside_hadamard_elements_of_the_rotated_operand_are_clamped():
    x, w = activations(40, 96), gaussian(64, 96, seed=1)
    beside = {"others": [{"hadamard": {"kind": "deterministic", "block": 32}}]}
    program = layer.program(**beside)
    rotated = torch.from_numpy(rotate(x.numpy(), 1, 32)).float()
    rotation = program.fprop.rotate(x, w, DRAW)
    actual = total(program.operand(Operand.FPROP_INPUT)(rotation.left, DRAW))
    bulk = clamped(rotated, 1)
    expected = fp4graph.fake_quantize(bulk, SPEC) + (rotated - bulk)
    # The reference rotates in float64, so an element next to a rounding boundary may fall on its other side.
    assert ((actual - expected).abs() < 1e-4).float().mean() > 0.999
    y, _, _ = layer.products(x, w, torch.zeros(40, 64), **beside)
    assert (y - x @ w.mT).norm() / (x @ w.mT).norm() < 0.2
