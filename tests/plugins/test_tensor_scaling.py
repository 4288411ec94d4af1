"""tensor_scaling against the arithmetic of NVFP4 written out, and the effects of its options."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fp4graph.ops.product import total
from fp4graph.technique.operands import Operand
from tests.helpers.policies import NVFP4, loaded, quantizer
from tests.helpers.training import applied
from tests.plugins.layer import Layer, gaussian
from tests.recipes.arithmetic import quantize

policy = partial(loaded, "tensor_scaling", quantize=NVFP4)
layer = Layer(policy)
quantized = layer.quantized


def nvfp4(x, largest=448, group=None):
    """Return γ·NVFP4(x/γ) with γ = amax/(6·largest) of the tensor, or of each ``group`` elements of a line."""
    lines = x.double().numpy().reshape(-1, 1, group or x.numel())
    blocks = {"block": 16, "fmt": "e4m3", "rule": "nearest_even"}
    parts = [quantize(line, 1, **blocks, tensor_scale=np.abs(line).max() / (6 * largest)) for line in lines]
    return torch.from_numpy(np.concatenate(parts)).reshape(x.shape)


@pytest.fixture
def x():
    return gaussian(12, 64) * torch.logspace(-5, 2, 12)[:, None]


@pytest.mark.parametrize(
    ("options", "largest", "group"),
    [
        ({}, 448, None), ({"headroom": 0.5}, 224, None), ({"target": 256}, 256, None),
        ({"granularity": "row"}, 448, 64), ({"granularity": 32}, 448, 32),
    ],
)  # fmt: skip
def test_values_are_those_of_nvfp4(x, options, largest, group):
    terms = layer.operand(options)(x)
    assert group or terms[0].multiplier is not None  # which multiplies the accumulator of the GEMM
    torch.testing.assert_close(total(terms).double(), nvfp4(x, largest, group), rtol=1e-6, atol=0)


def test_gradients_may_have_a_separate_target(x):
    options = {"target": 256, "gradient_target": 448}
    for operand in Operand:
        largest = 448 if operand.value.endswith("grad_output") else 256
        torch.testing.assert_close(quantized(x, options, operand).double(), nvfp4(x, largest), rtol=1e-6, atol=0)
    # X has equal parts in fprop and wgrad, and so shares compiled code.
    assert layer.operand(options).parts == layer.operand(options, Operand.WGRAD_INPUT).parts


def test_the_input_may_have_a_scale_of_each_row_beside_a_weight_with_one_scale(x):
    by_tensor, by_row = quantized(x), quantized(x, {"granularity": "row"})
    assert not torch.equal(by_tensor, by_row)
    for operand in Operand:
        expected = by_row if operand.value.endswith("input") else by_tensor
        assert torch.equal(quantized(x, {"input_granularity": "row"}, operand), expected), operand


def test_a_macro_block_at_the_end_may_be_incomplete(x):
    whole = quantized(x[:, :48], {"granularity": 32})
    for part in (slice(0, 32), slice(32, 48)):
        assert torch.equal(whole[:, part], quantized(x[:, part], {"granularity": 32}))


@pytest.mark.parametrize("scale", ["e4m3", "ue5m3", "e8m0", "e8m3"])
@pytest.mark.parametrize("exponent", [-20, 3, 40])
def test_a_scaled_tensor_commutes_with_powers_of_two(x, scale, exponent):
    under_scale = partial(quantized, quantize=quantizer(16, scale, "nearest_even"))
    assert torch.equal(under_scale(x * 2.0**exponent), under_scale(x) * 2.0**exponent)


def test_subnormal_numbers_give_finite_values():
    assert quantized(torch.full((2, 64), 1e-40)).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=[pytest.mark.compiler, pytest.mark.long])]
)
def test_held_scales_are_refreshed_every_few_forwards(backend):
    """γ of each operand is kept for 3 forwards; a forward without gradients in between does not change it."""
    torch.manual_seed(0)
    model = applied(nn.Linear(64, 32), policy({"hold_steps": 3}), backend=backend)
    w = model.weight.detach().clone()
    for step in range(7):
        x = gaussian(16, 64, seed=step).requires_grad_()
        y = model(x)
        (y * (step + 1)).sum().backward()
        with torch.no_grad():
            model(100 * x)
        held = {k.partition("scaling_")[2]: v for k, v in model.state_dict().items() if "gamma" in k}
        assert len(held) == 6
        refreshed = step - step % 3
        expected = {
            "fprop_input_gamma": gaussian(16, 64, seed=refreshed).abs().max(),
            "wgrad_grad_output_gamma": torch.tensor(refreshed + 1.0),
            "gamma": w.abs().max(),
        }
        for name, largest in expected.items():
            torch.testing.assert_close(held[name], largest / (6 * 448), rtol=1e-6, atol=0)


@pytest.mark.slow
def test_two_forwards_before_one_backward_with_held_scales():
    """Only under eager: AOTAutograd saves the γ of gradients, which a backward changes, and torch raises an error."""
    model = applied(nn.Linear(64, 32), policy({"hold_steps": 2}))
    x = torch.randn(16, 64, requires_grad=True)
    (model(x).sum() + model(2 * x).sum()).backward()
    assert x.grad.isfinite().all()
