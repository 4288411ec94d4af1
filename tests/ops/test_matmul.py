"""The three GEMMs of a site beside the equations of TetraJet (Eq. 3-5) and Microscaling (Eq. 6-7) by hand."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fp4graph
from fp4graph.graph.functions import site_function
from fp4graph.numerics import noise
from fp4graph.numerics.draw import Draw
from fp4graph.ops.draw import operand_draw
from fp4graph.technique.operands import Operand
from tests.helpers.policies import NVFP4, one_rule, quantizer
from tests.helpers.sites import program_of
from tests.helpers.training import assert_equal

CEIL = fp4graph.ScaleSpec("e8m0", "ceil")
FLOOR = fp4graph.ScaleSpec("e8m0", "floor")
KEY, STEP = noise.make_key("site", "fc"), noise.make_step(0, 0, 0)


def linear(policy: str):
    return site_function(program_of(policy), "linear", 1.0, 1.0)


def run(policy, x, w, bias, dy, step=STEP):
    x, w, bias = (t.detach().clone().requires_grad_() for t in (x, w, bias))
    y = (policy if callable(policy) else linear(policy))(x, w, bias, KEY, step, 0)
    y.backward(dy)
    return y.detach(), x.grad, w.grad, bias.grad


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    # 50 tokens: the block of 32 does not divide them, so wgrad's operands are padded.
    shapes = (50, 64), (96, 64), (96,), (50, 96)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def test_microscaling_is_its_equations(data):
    x, w, bias, dy = data
    quantize = partial(fp4graph.fake_quantize, spec=fp4graph.QuantSpec(scale=FLOOR))
    y, dx, dw, db = run("microscaling", *data)
    expected = [torch.addmm(bias, quantize(x, dim=1), quantize(w, dim=1).T), quantize(dy, dim=1) @ quantize(w, dim=0)]
    assert_equal([y, dx, dw, db], [*expected, quantize(dy, dim=0).T @ quantize(x, dim=0), dy.sum(0)])


def test_tetrajet_is_its_equations(data):
    x, w, bias, dy = data
    nearest = fp4graph.QuantSpec(scale=CEIL, ties="up")
    stochastic = dataclasses.replace(nearest, rounding="stochastic")
    key = noise.mix(KEY, STEP)

    def sr(t, operand):  # blocks along the last axis, as the GEMM reads the operand
        return fp4graph.fake_quantize(t, stochastic, -1, operand_draw(Draw(key), operand).varying)

    y, dx, dw, _ = run("tetrajet", x, w, bias, dy)
    q1, q2 = fp4graph.fake_quantize(x, nearest, 1), fp4graph.fake_quantize(w, nearest, 1)
    q3, q4 = sr(dy, Operand.DGRAD_GRAD_OUTPUT), sr(q2.T, Operand.DGRAD_WEIGHT).T
    q5, q6 = sr(dy.T, Operand.WGRAD_GRAD_OUTPUT), sr(q1.T, Operand.WGRAD_INPUT).T
    assert_equal([y, dx, dw], [torch.addmm(bias, q1, q2.T), q3 @ q4, q5 @ q6])


@pytest.mark.slow
def test_tetrajet_averages_to_the_unbiased_gradient(data):
    """E[gradient] is the gradient of the quantized forward (TetraJet's Eq. 8-9), within 4 standard errors for all but
    one element in a thousand."""
    x, w, _, dy = data
    nearest, steps = fp4graph.QuantSpec(scale=CEIL, ties="up"), 400
    tetrajet = linear("tetrajet")
    draws = zip(*(run(tetrajet, *data, noise.make_step(0, 0, i))[1:3] for i in range(steps)), strict=True)
    q1, q2 = (fp4graph.fake_quantize(t, nearest, 1).double() for t in (x, w))
    gradients = {"dx": dy.double() @ q2, "dw": dy.double().T @ q1}
    biased = run("microscaling", *data)[1:3]
    for (name, expected), samples, other in zip(gradients.items(), map(torch.stack, draws), biased, strict=True):
        mean, deviation = samples.double().mean(0), samples.double().std(0)
        z = (mean - expected) / (deviation / steps**0.5)
        assert z.abs().mean() < 0.9, name  # E|z| of a standard normal is 0.8
        assert (z.abs() > 4).float().mean() < 1e-3, name
        # Microscaling's mean is another: its bias does not shrink.
        assert (other.double() - expected).norm() > 5 * (mean - expected).norm(), name


@pytest.mark.parametrize("shape", [(64,), (0, 64), (1, 64), (3, 5, 64), (2, 3, 4, 64)])
def test_leading_axes_are_tokens(shape):
    f, w = linear("tetrajet"), torch.randn(96, 64)
    x = torch.randn(shape, requires_grad=True)
    y = f(x, w, None, KEY, STEP, 0)
    assert y.shape == F.linear(x, w).shape
    y.sum().backward()
    assert x.grad.shape == x.shape
    flat = f(x.detach().reshape(-1, 64), w, None, KEY, STEP, 0)
    assert torch.equal(y.detach().reshape(-1, 96), flat.reshape(-1, 96))


def test_gemms_of_kept_operands_are_exact(data):
    x, w, bias, dy = data
    _, dx, dw, _ = run(one_rule(operands={"backward": "keep"}), x, w, bias, dy)
    assert torch.equal(dx, dy @ w)
    assert torch.equal(dw, dy.T @ x)


@pytest.mark.slow
def test_autocast_runs_the_gemms_in_its_dtype(data):
    x, w, bias, dy = data
    f = linear("tetrajet")
    with torch.autocast("cpu", torch.bfloat16):
        y = f(x.requires_grad_(), w.requires_grad_(), bias, KEY, STEP, 0)
    assert y.dtype is torch.bfloat16
    y.backward(dy.to(torch.bfloat16))
    assert x.grad.dtype is w.grad.dtype is torch.float32
    q = partial(fp4graph.fake_quantize, spec=fp4graph.QuantSpec(scale=CEIL, ties="up"))
    assert torch.equal(y, torch.addmm(bias.bfloat16(), q(x.bfloat16()), q(w.bfloat16()).T))


def test_from_master_quantizes_before_the_cast(data):
    x, w, _, _ = data
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(one_rule(quantize=quantizer(from_master=True)))(x, w, None, KEY, STEP, 0)
    spec = fp4graph.QuantSpec(scale=CEIL)
    expected = fp4graph.fake_quantize(x, spec).bfloat16() @ fp4graph.fake_quantize(w, spec).bfloat16().T
    assert torch.equal(y, expected)


@pytest.mark.parametrize("form", ["linear", "matmul", "grouped", "parted"])
def test_a_second_derivative_is_refused(data, form):
    x, w, _, _ = data
    more = {"out_control": {"mode": "split"}} if form == "parted" else "hadamard"
    op = "linear" if form == "parted" else form
    program = program_of(one_rule(more, op=op, quantize=NVFP4), op)
    assert (program.apart is not None) == (form == "parted")
    state, ends = (torch.rand(64),) if form == "parted" else (), None
    if form == "grouped":
        w, ends = torch.stack([w, w]), torch.tensor([20, 50], dtype=torch.int32)
    b = w.requires_grad_() if op == "linear" else w.requires_grad_().mT
    y = site_function(program, op, 1.0, 1.0)(x, b, None, KEY, STEP, 0, *state, site="fc", ends=ends)
    torch.autograd.grad(y.sum(), w, retain_graph=True)
    with pytest.raises(fp4graph.Error, match=r"^fc: .*create_graph=True .* fp4graph\.bypass"):
        torch.autograd.grad(y.sum(), w, create_graph=True)


SPLIT = {"out_control": {"mode": "split"}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("technique", ["hadamard", "tensor_scaling", "outlier_clamp", SPLIT], ids=str)
def test_beta_0_ignores_the_addend_as_torch_does(data, technique, dtype):
    """The addend may be uninitialized: Hugging Face's GPT-2 passes torch.empty."""
    x, w, _, dy = (t.to(dtype) for t in data)
    program = program_of(one_rule(technique, quantize=NVFP4))
    state, results = (torch.rand(64),) if technique is SPLIT else (), []
    for addend in (None, torch.full((96,), torch.nan, dtype=dtype), torch.full((50, 96), torch.nan, dtype=dtype)):
        given = [t.detach().requires_grad_() for t in (x, w, addend) if t is not None]
        y = site_function(program, "linear", 0.5, 0.0)(*given[:2], *(given[2:] or [None]), KEY, STEP, 0, *state)
        results.append((y, *torch.autograd.grad(y, given, dy)))
    assert all(torch.isfinite(t).all() for t in results[0])
    for *result, daddend in results[1:]:
        assert_equal(result, results[0])
        assert torch.equal(daddend, torch.zeros_like(daddend))


def test_batched_products_broadcast_and_sum_back():
    spec = fp4graph.QuantSpec(scale=CEIL)
    f = site_function(program_of(one_rule(op="matmul"), "matmul", 16, 7), "matmul", 1.0, 1.0)
    a, b = torch.randn(2, 3, 5, 16, requires_grad=True), torch.randn(3, 16, 7, requires_grad=True)
    y, q = f(a, b, None, None, None, 0), partial(fp4graph.fake_quantize, spec=spec)
    assert torch.equal(y, q(a) @ q(b, dim=-2))
    dy = torch.randn_like(y)
    y.backward(dy)
    assert torch.equal(a.grad, q(dy) @ q(b, dim=-1).mT)
    assert torch.equal(b.grad, (q(a, dim=-2).mT @ q(dy, dim=-2)).sum(0))
