"""tensor_scaling against NVFP4's arithmetic written out, and what its options do."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.errors import CaptureError, PolicyError
from fp4graph.graph.plan import plan_site
from fp4graph.ops.product import total
from fp4graph.technique.operands import Operand
from fp4graph.technique.site import SiteView
from tests.helpers.policies import NVFP4, loaded

policy = partial(loaded, "tensor_scaling", quantize=NVFP4)


def program(options, quantize=NVFP4, operand=Operand.FPROP_INPUT):
    rule = policy(options, quantize=quantize).rules[0]
    return plan_site(SiteView("fc", "linear", 64, 8, 512), rule).program.operand(operand)


def nvfp4(x, largest=448.0, granularity=None):
    """S_enc = 448·6/amax; S_b = E4M3(amax_b/6 · S_enc); code = E2M1(x·S_enc/S_b); value = code·S_b/S_enc."""
    blocks = x.double().reshape(x.shape[0], -1, 16)
    amax = blocks.abs().amax() if granularity is None else granularity(blocks.abs().amax(2))
    encode = largest * 6 / amax
    scale = (blocks.abs().amax(2, keepdim=True) / 6 * encode).float().to(torch.float8_e4m3fn).double()
    scale = torch.where(scale == 0, 2.0**-9, scale)
    u = blocks * encode / scale
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0], dtype=torch.float64)
    distance = (u.abs().clamp(max=6)[..., None] - values).abs()
    # even codes win ties: a tie has two equal minima, next to each other
    code = torch.where(
        distance.argmin(-1) % 2 == 0, distance.argmin(-1), values.numel() - 1 - distance.flip(-1).argmin(-1)
    )
    return (values[code] * u.sign() * scale / encode).reshape(x.shape)


@pytest.fixture
def x():
    return torch.randn(12, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-5, 2, 12)[:, None]


@pytest.mark.parametrize(("options", "largest"), [({}, 448), ({"headroom": 0.5}, 224), ({"target": 256}, 256)])
def test_nvfp4(x, options, largest):
    terms = program(options)(x)
    assert terms[0].multiplier is not None  # waits for the GEMM's accumulator
    torch.testing.assert_close(total(terms).double(), nvfp4(x, largest), rtol=1e-6, atol=0)


def test_gradients_may_have_a_separate_target(x):
    options = {"target": 256, "gradient_target": 448}
    for operand in Operand:
        found = total(program(options, operand=operand)(x)).double()
        largest = 448 if operand.value.endswith("grad_output") else 256
        torch.testing.assert_close(found, nvfp4(x, largest), rtol=1e-6, atol=0)
    assert program(options).parts == program(options, operand=Operand.WGRAD_INPUT).parts  # so they share compiled code


def test_the_input_may_have_rows_and_the_weight_a_tensor(x):
    by_tensor, by_row = total(program({})(x)), total(program({"granularity": "row"})(x))
    assert not torch.equal(by_tensor, by_row)
    for operand in Operand:
        found = total(program({"input_granularity": "row"}, operand=operand)(x))
        assert torch.equal(found, by_row if operand.value.endswith("input") else by_tensor), operand


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_target": 512}, "target 512 is above the largest scale of dgrad.grad_output, 448"),
        (
            {"gradient_target": 448, "operands": ["forward"]},
            "gradient_target is for gradients, which operands does not list",
        ),
        ({"input_granularity": "row", "operands": ["weights"]}, "input_granularity is for inputs, which"),
        ({"input_granularity": "row", "hold_steps": 5}, "granularity: tensor for all of them"),
    ],
)
def test_what_differs_for_gradients_and_inputs_must_fit_and_act(options, message):
    with pytest.raises(PolicyError, match=message):
        policy(options)


def test_rows(x):
    found = total(program({"granularity": "row"})(x)).double()
    torch.testing.assert_close(found, nvfp4(x, granularity=lambda z: z.amax(1)[:, None, None]), rtol=1e-6, atol=0)


def test_macro_blocks(x):
    def by_two(z):
        return z.reshape(12, 2, 2).amax(2).repeat_interleave(2, 1)[..., None]

    found = total(program({"granularity": 32})(x)).double()
    torch.testing.assert_close(found, nvfp4(x, granularity=by_two), rtol=1e-6, atol=0)


def test_a_macro_block_at_the_end_may_be_incomplete(x):
    x = x[:, :48]
    found = total(program({"granularity": 32})(x))
    torch.testing.assert_close(found[:, :32], total(program({"granularity": 32})(x[:, :32])), rtol=0, atol=0)
    torch.testing.assert_close(found[:, 32:], total(program({"granularity": 32})(x[:, 32:])), rtol=0, atol=0)


@pytest.mark.parametrize("scale", ["e4m3", "ue5m3", "e8m0", "e8m3"])
@pytest.mark.parametrize("exponent", [-20, 3, 40])
def test_commutes_with_powers_of_two(x, scale, exponent):
    f = program({}, {**NVFP4, "scale": {"format": scale, "rounding": "nearest_even"}})
    assert torch.equal(total(f(x * 2.0**exponent)), total(f(x)) * 2.0**exponent)


def test_a_tensor_scale_saves_small_blocks_from_underflow():
    """E4M3 scales alone cannot tell 1e-4 from 0; with a tensor scale they can."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)) * 1e-5
    plain = fp4graph.fake_quantize(x, fp4graph.QuantSpec(block=16, scale=fp4graph.ScaleSpec("e4m3", "nearest_even")))
    scaled = total(program({})(x))
    assert (plain - x).norm() / x.norm() > 0.9
    assert (scaled - x).norm() / x.norm() < 0.15


def test_zeros_subnormals_and_poison():
    f = program({})
    assert torch.equal(total(f(torch.zeros(2, 64))), torch.zeros(2, 64))
    tiny = total(f(torch.full((2, 64), 1e-40)))
    assert tiny.isfinite().all()
    for bad in (math.nan, math.inf):
        x = torch.ones(2, 64)
        x[0, 3] = bad
        assert total(f(x)).isnan()[0, :16].all()
    assert total(f(torch.zeros(0, 64))).shape == (0, 64)


@pytest.mark.slow
def test_every_operand_has_its_own_tensor_scale():
    six = plan_site(SiteView("fc", "linear", 64, 8, 512), policy({}).rules[0]).program
    assert all(six.operand(operand).parts for operand in Operand)
    only = policy({"operands": ["gradients"]})
    six = plan_site(SiteView("fc", "linear", 64, 8, 512), only.rules[0]).program
    acting = {operand for operand in Operand if six.operand(operand).parts}
    assert acting == {Operand.DGRAD_GRAD_OUTPUT, Operand.WGRAD_GRAD_OUTPUT}


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=[pytest.mark.compiler, pytest.mark.long])]
)
def test_held_scales_are_refreshed_every_few_forwards(backend):
    """γ of all six operands: kept for 3 forwards, saved, restored; an evaluation in between changes nothing."""
    torch.manual_seed(0)
    model = nn.Linear(64, 32)
    model = fp4graph.apply(model, policy({"hold_steps": 3}), backend=backend)
    w = model.weight.detach().clone()
    history = []
    for step in range(7):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).requires_grad_()
        y = model(x)
        (y * (step + 1)).sum().backward()
        with torch.no_grad():
            model(100 * x)
        history.append({k: v.clone() for k, v in model.state_dict().items() if "gamma" in k})
        kappa = 6 * 448
        fresh = step % 3 == 0
        source = x if fresh else torch.randn(16, 64, generator=torch.Generator().manual_seed(step - step % 3))
        held = history[-1]["_fp4graph_tensor_scaling_fprop_input_gamma"]
        torch.testing.assert_close(held, source.detach().abs().max() / kappa, rtol=1e-6, atol=0)
        gradient = history[-1]["_fp4graph_tensor_scaling_wgrad_grad_output_gamma"]
        torch.testing.assert_close(gradient, torch.tensor((step - step % 3 + 1) / kappa), rtol=1e-6, atol=0)
        weight = history[-1]["_fp4graph_tensor_scaling_gamma"]
        torch.testing.assert_close(weight, w.abs().max() / kappa, rtol=1e-6, atol=0)
    assert len(history[0]) == 6


@pytest.mark.slow
def test_two_forwards_before_one_backward_with_held_scales():
    """Under eager. AOTAutograd saves the γ of gradients, which a backward changes, and torch then refuses, loudly."""
    model = fp4graph.apply(nn.Linear(64, 32), policy({"hold_steps": 2}), backend="eager")
    x = torch.randn(16, 64, requires_grad=True)
    loss = model(x).sum() + model(2 * x).sum()
    loss.backward()
    assert x.grad.isfinite().all()


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.compiler
def test_compiled_bits(x):
    for options in ({}, {"granularity": "row"}, {"granularity": 32}):
        f = program(options)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(lambda t, f=f: total(f(t)))(x), total(f(x))), options


def test_the_encode_scale_of_the_largest_block_must_fit():
    encode = {**NVFP4, "scale": {**NVFP4["scale"], "convention": "encode"}}
    with pytest.raises(PolicyError, match=r"target 0.001 makes the encode scale .* 1000, and e4m3 ends at 448"):
        policy({"target": 1e-3}, quantize=encode)


def test_a_row_has_no_macro_blocks():
    with pytest.raises(PolicyError, match="blocks of a row have no fixed length"):
        policy({"granularity": 32}, quantize={**NVFP4, "block": "row"})


def test_products_of_activations_hold_nothing():
    with pytest.raises((CaptureError, PolicyError), match="hold_steps: 1"):
        policy({"hold_steps": 5}, op="matmul")
