"""low_rank_residual against subspace iteration and singular values, by numpy in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fp4graph_plugins.low_rank_residual import _rounded

import fp4graph
from fp4graph.numerics import noise
from fp4graph.ops.draw import operand_draw
from fp4graph.ops.product import total
from fp4graph.technique.operands import Operand
from tests.helpers.policies import loaded, quantizer
from tests.plugins.layer import DRAW, SPEC, Layer, draw, gaussian
from tests.recipes.arithmetic import rotate

NVFP4 = ("e4m3", "nearest_even")


def policy(options=None, scale=("e8m0", "ceil"), others=(), rounding="nearest", **rule):
    quantize = quantizer(32, *scale) | {"rounding": rounding}
    return loaded("low_rank_residual", options, after=others, quantize=quantize, **rule)


layer = Layer(policy, 96, 64)


def terms(w, options=None, **more):
    return layer.terms(w, options, Operand.FPROP_WEIGHT, **more)


def acting(w, options=None, **more):
    """Return the part of the technique that acts at fprop.weight, and its context."""
    return layer.operand(options, Operand.FPROP_WEIGHT, **more).acting(w, DRAW, None)[0]


def decaying(n, k, power=0.7, seed=0):
    """Return a matrix with the singular values i^−power."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.standard_normal((size, min(n, k)))).Q for size in (n, k))
    return torch.from_numpy(u * np.arange(1, min(n, k) + 1) ** -power @ v.T).float()


def with_strong_directions(n, k, rank=8, seed=0):
    """Return weights of size 0.02 plus a few directions that are large in a few places, as trained weights have."""
    generator = torch.Generator().manual_seed(seed)
    w = 0.02 * torch.randn(n, k, generator=generator)
    u, v = torch.randn(n, rank, generator=generator), torch.randn(rank, k, generator=generator) ** 3
    return w + 0.03 * u @ v


def subspace_iteration(w, rank, iterations, context):
    """L in float64, by the equations."""
    omega = noise.gaussian(context.constant.key, torch.arange(w.shape[1] * rank, dtype=torch.int32))
    w, omega = w.double().numpy(), omega.double().numpy().reshape(w.shape[1], rank)
    y = w @ omega
    for _ in range(iterations):
        y = w @ np.linalg.qr(w.T @ np.linalg.qr(y).Q).Q
    a = np.linalg.qr(y).Q
    return torch.from_numpy(a @ (a.T @ w))


@pytest.mark.parametrize("shape", [(64, 96), (80, 50), (3, 96)])  # 50: padded blocks; 3: fewer rows than rank
@pytest.mark.parametrize(("rank", "iterations"), [(16, 2), (5, 0), (1, 1), (40, 3)])
def test_the_approximation_is_subspace_iteration_and_its_remainder_is_quantized(shape, rank, iterations):
    w, options = decaying(*shape), {"rank": rank, "iterations": iterations}
    part, low_rank = terms(w, options)
    expected = subspace_iteration(w, rank, iterations, acting(w, options)[1])
    torch.testing.assert_close(low_rank.double(), expected, rtol=0, atol=2e-6)
    assert torch.equal(part, fp4graph.fake_quantize(w - low_rank, SPEC))
    assert np.linalg.matrix_rank(low_rank.double().numpy(), tol=1e-5) == min(rank, *shape)


@pytest.mark.slow
@pytest.mark.parametrize("power", [0.3, 0.7, 1.5])
def test_iterations_approach_the_best_approximation(power):
    w = decaying(96, 128, power)
    best = np.linalg.svd(w.double().numpy(), compute_uv=False)
    errors = [(w - terms(w, {"iterations": q})[1]).double().norm().item() for q in (0, 1, 2, 6)]
    optimum = math.sqrt((best[16:] ** 2).sum())
    assert optimum * 0.9999 < errors[3] < errors[2] < errors[1] < errors[0]
    assert errors[2] < 1.05 * optimum
    assert errors[3] < 1.02 * optimum


@pytest.mark.parametrize("shape", [(64, 96), (8, 96), (64, 8), (1, 96), (64, 1), (1, 1)])
def test_a_rank_beyond_the_matrix_leaves_no_remainder(shape):
    w = gaussian(*shape)
    part, low_rank = terms(w, {"rank": 200})
    torch.testing.assert_close(low_rank, w, rtol=0, atol=1e-5)
    assert part.abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("quantized", [False, True])
def test_the_terms_sum_to_w_to_half_a_unit_of_the_remainder(dtype, quantized):
    w = with_strong_directions(64, 96).to(dtype)
    splitter, context = acting(w, {"quantize_components": quantized})
    part, low_rank = splitter.split(w, context)
    assert part.dtype is low_rank.dtype is dtype
    error = (part.double() + low_rank.double() - w.double()).abs()
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    tiny = 2.0**-25 if dtype is torch.float16 else 0  # half of its subnormal spacing
    # float64 is rounded to fp32 first, which may err by half a unit of W.
    assert (error <= (part.double().abs() + (dtype is torch.float64) * w.abs()) * eps / 2 + tiny).all()
    reference = splitter.split(w.float(), context)[1]
    torch.testing.assert_close(low_rank.float(), reference, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-7)


@pytest.mark.slow
def test_the_product_and_the_weight_that_dgrad_reads_from_fprop_have_both_terms():
    x, w, dy = gaussian(40, 96, seed=1), with_strong_directions(64, 96), gaussian(40, 64)
    exact = {"wgrad": "keep", "dgrad.grad_output": "keep", "dgrad.weight": "fprop"}
    y, dx, _ = layer.products(x, w, dy, operands=exact)
    part, low_rank = terms(w, draw=operand_draw(DRAW, Operand.FPROP_WEIGHT))  # the source from which a layer draws
    torch.testing.assert_close(dx, dy @ (part + low_rank), rtol=1e-6, atol=1e-5)
    left = fp4graph.fake_quantize(x, SPEC).double()
    expected = left @ low_rank.double().mT + left @ fp4graph.fake_quantize(w - low_rank, SPEC).double().mT
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_components_are_quantized_along_their_own_contraction():
    """A [N, k] in blocks along k, here of two blocks, the second padded; B [k, K] in blocks along K."""
    w = decaying(64, 96)
    w = w / w.abs().max() * 1.5  # so that W is divided by the power of two 1
    options = {"rank": 40, "quantize_components": True}
    splitter, context = acting(w, options)
    a, b = splitter.factors(w, context)
    assert a.shape == (64, 40)
    torch.testing.assert_close(a.mT @ a, torch.eye(40), rtol=0, atol=1e-5)
    part, low_rank = terms(w, options)
    qa, qb = (fp4graph.fake_quantize(factor, SPEC) for factor in (a, b))
    assert torch.equal(low_rank, qa @ qb)
    assert torch.equal(part, fp4graph.fake_quantize(w - low_rank, SPEC))
    assert not torch.equal(low_rank, fp4graph.fake_quantize(a, SPEC, dim=0) @ qb)


@pytest.mark.slow
def test_components_are_rounded_to_nearest_even_if_the_operand_is_rounded_stochastically():
    w, options = with_strong_directions(64, 96), {"quantize_components": True}
    part, low_rank = terms(w, options, rounding="stochastic")
    assert torch.equal(low_rank, terms(w, options)[1])
    spec = replace(SPEC, rounding="stochastic")
    assert torch.equal(part, fp4graph.fake_quantize(w - low_rank, spec, key=DRAW.varying))
    nearest, stochastic = (terms(w, options, scale=("e4m3", r))[1] for r in ("nearest_even", "stochastic"))
    assert torch.equal(nearest, stochastic)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [("e8m0", "ceil"), NVFP4])
@pytest.mark.parametrize("quantized", [False, True])
def test_the_approximation_commutes_with_powers_of_two(quantized, scale):
    """Also with powers under which a product of W with itself over- or underflows, or W leaves the range of E4M3."""
    w, options = with_strong_directions(64, 96), {"quantize_components": quantized}
    reference = terms(w, options, scale=scale)[1]
    assert (w - reference).norm() < 0.5 * w.norm()
    for exponent in (-100, -20, 100):
        assert torch.equal(terms(w * 2.0**exponent, options, scale=scale)[1], reference * 2.0**exponent)


@pytest.mark.slow
def test_the_approximation_depends_on_the_seed_and_not_on_forward_or_rank():
    w = with_strong_directions(64, 96)
    draws = draw(), draw(7), draw(7, rank=3), draw(seed=1)
    first, later, other_rank, other_seed = (terms(w, draw=each)[1] for each in draws)
    assert torch.equal(first, later)
    assert torch.equal(first, other_rank)
    assert 0 < (first - other_seed).norm() < 0.05 * first.norm()


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [False, True])
def test_nan_and_inf_do_not_change_the_approximation(quantized):
    """The approximation takes zeros in place of NaN and Inf, and the block around them holds zeros."""
    options = {"quantize_components": quantized}
    w = with_strong_directions(64, 96)
    w[3:5, 32:64] = 0
    reference = terms(w, options)
    for bad in (math.nan, math.inf, -math.inf):
        w[3, 40] = bad
        part, low_rank = terms(w, options)
        assert part[3, 32:64].isnan().all()
        assert part.isnan().sum() == 32
        part[3, 32:64] = reference[0][3, 32:64]
        assert torch.equal(part, reference[0])
        assert torch.equal(low_rank, reference[1])
    assert terms(torch.full((64, 96), math.nan), options)[0].isnan().all()


@pytest.mark.parametrize("quantized", [False, True])
def test_each_matrix_of_a_batch_is_approximated_separately(quantized):
    matrices = [with_strong_directions(40, 96, seed=seed) for seed in range(6)]
    options = {"quantize_components": quantized, "rank": 8}
    _, low_rank = terms(torch.stack(matrices).view(2, 3, 40, 96), options)
    for batched, alone in zip(low_rank.view(6, 40, 96), (terms(w, options)[1] for w in matrices), strict=True):
        # Products of a batch sum in another order, so that some elements may round to the other neighbour.
        assert (batched - alone).norm() / alone.norm() < (0.02 if quantized else 1e-5)


def test_the_tensor_scale_is_that_of_the_remainder():
    w = with_strong_directions(64, 96)
    operand = layer.operand(None, Operand.FPROP_WEIGHT, scale=NVFP4, others=["tensor_scaling"])
    part, low_rank = operand(w, DRAW)
    remainder = w - low_rank.values
    gamma = remainder.abs().max() / (6 * 448)
    mantissa = gamma / 2 ** gamma.log2().floor()  # the power of two is multiplied into an operand before the GEMM
    torch.testing.assert_close(part.multiplier, mantissa, rtol=1e-6, atol=0)
    assert low_rank.multiplier is None
    assert (part.product() - remainder).norm() / remainder.norm() < 0.12


def test_beside_hadamard_the_rotated_weight_is_approximated():
    x, w = gaussian(40, 96, seed=1), with_strong_directions(64, 96)
    beside = {"others": [{"hadamard": {"kind": "deterministic", "block": 32}}]}
    program = layer.program(**beside)
    rotated = torch.from_numpy(rotate(w.numpy(), 1, 32))
    weight = program.operand(Operand.FPROP_WEIGHT)
    actual = weight(program.fprop.rotate(x, w, DRAW).right, DRAW)
    context = next(c for t, c in weight.acting(w, DRAW, None) if t.name == "low_rank_residual")
    expected = subspace_iteration(rotated, 16, 2, context)
    torch.testing.assert_close(actual[1].values.double(), expected, rtol=0, atol=1e-5)
    assert (total(actual) - rotated).norm() / rotated.norm() < 0.05
    y, _, _ = layer.products(x, w, torch.zeros(40, 64), **beside)
    plain = fp4graph.fake_quantize(x, SPEC) @ fp4graph.fake_quantize(w, SPEC).mT
    assert (y - x @ w.mT).norm() < (plain - x @ w.mT).norm()


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "dtype", "far"),
    [
        ({}, torch.float32, 1e-5),
        ({}, torch.bfloat16, 2e-3),  # a rounding to bf16 or to a code may go the other way
        ({"rank": 5, "quantize_components": True}, torch.float32, 2e-2),
        ({"rank": 4}, "batches", 1e-5),
    ],
)
def test_eager_and_inductor_agree(options, dtype, far, inductor):
    """They agree up to the effect of last bits of LAPACK's QR and of a BLAS's products, relative to W."""

    def f(w):
        return tuple(term.values for term in layer.operand(options, Operand.FPROP_WEIGHT)(w, DRAW))

    if dtype == "batches":
        tensors = [torch.stack([with_strong_directions(40, 70, seed=seed) for seed in range(3)])]
    else:
        tensors = [with_strong_directions(*shape).to(dtype) for shape in ((130, 70), (200, 90))]
        tensors[1][3, 5] = math.nan
    compiled = inductor(f, tensors[0])
    for w in tensors:
        for a, b in zip(f(w), compiled(w), strict=True):
            assert torch.equal(a.isnan(), b.isnan())
            assert (a.float() - b.float()).nan_to_num().norm() <= far * w.nan_to_num().norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_by_bits_is_the_cast(dtype):
    """The fp32 values have few bits below the dtype's last bit, so that some are ties, which go to even."""
    mantissas = torch.arange(2**12, dtype=torch.float32) / 2**12 + 1
    x = torch.cat([mantissas, -mantissas, mantissas * 2**-6, torch.randn(1000), torch.tensor([0.0, torch.inf])])
    assert torch.equal(_rounded(x, dtype), x.to(dtype).float())
    assert _rounded(torch.tensor([torch.nan]), dtype).isnan()
