"""mean_split: what it splits, its bits under a compiler, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.segments import Segments
from fp4graph.ops.product import total
from fp4graph.technique import Context
from fp4graph.technique.operands import Operand
from tests.helpers.policies import NVFP4, loaded
from tests.plugins.layer import Layer


def policy(options=None):
    return loaded("mean_split", options, more=["tensor_scaling"], quantize=NVFP4)


program = Layer(policy, 64, 64).operand


def biased(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator) + 30 * torch.randn(shape[-1], generator=generator)


def quantized(x, operand=Operand.FPROP_INPUT):
    return total(program(None, operand)(x))


def error(y, x):
    return (y.double() - x.double()).square().sum().sqrt() / (x - x.mean(0)).double().square().sum().sqrt()


def test_a_common_mean_does_not_coarsen_differences():
    x = biased(64, 96)
    without = total(Layer(lambda options: loaded("tensor_scaling", quantize=NVFP4), 64, 64).operand()(x))
    centred = quantized(x) - quantized(x).mean(0), without - without.mean(0)
    split, together = (error(y, x - x.mean(0)) for y in centred)
    assert split < 0.15  # FP4's error of Gaussian numbers is a tenth
    assert together > 3 * split


def test_operands_that_are_transposed_have_tokens_last():
    x = biased(64, 96)
    for operand in (Operand.WGRAD_INPUT, Operand.WGRAD_GRAD_OUTPUT):
        y = quantized(x.mT.contiguous(), operand).mT
        assert error(y - y.mean(0), x - x.mean(0)) < 0.15
        assert program(None, operand).parts == program(None, Operand.WGRAD_INPUT).parts
    assert program(None, Operand.DGRAD_GRAD_OUTPUT).parts == program().parts
    assert program(None, Operand.FPROP_WEIGHT).at("around") == []


def test_zeros_one_token_and_poison():
    assert (quantized(torch.zeros(4, 32)) == 0).all()
    one = biased(1, 32)  # its own mean: the residual is zero
    plain = total(program({"operands": ["wgrad"]})(one))
    torch.testing.assert_close(quantized(one), plain, rtol=1e-6, atol=0)
    assert quantized(torch.zeros(0, 32)).shape == (0, 32)
    x = biased(4, 32)
    x[2, 3] = torch.nan
    assert quantized(x)[2, 3].isnan()


def test_the_mean_is_that_of_an_experts_tokens():
    """Three experts of means far apart, rows that fill up or belong to none, which stay zeros or may hold anything."""
    x = torch.cat([biased(20, 64), biased(31, 64) * -7, biased(9, 64) * 0.01, torch.full((4, 64), torch.nan)])
    x[47:51] = 0
    own = torch.tensor([0] * 20 + [1] * 27 + [3] * 4 + [2] * 9 + [3] * 4)
    ids = torch.where(torch.arange(64) < 51, own.clamp(max=1), own)  # the zeros stand behind the second expert's tokens
    for operand, axis in ((Operand.FPROP_INPUT, 0), (Operand.WGRAD_INPUT, 1)):
        (wrapper,) = program(None, operand).at("around")
        given, parts = (x if axis == 0 else x.mT).contiguous(), []

        def collect(part, parts=parts):
            parts.append(part)
            return part

        context = Context(Blocking(tuple(given.shape), 16, segments=Segments(axis, 3, ids, own)), None, None)
        wrapper.around(collect, given, context)
        residual, mean = (part if axis == 0 else part.mT for part in parts)
        for expert, tokens in ((0, slice(0, 20)), (1, slice(20, 47)), (2, slice(51, 60))):
            expected = x[tokens].double().mean(0).float()
            torch.testing.assert_close(mean[tokens], expected.expand(mean[tokens].shape), rtol=1e-6, atol=0)
            assert torch.equal(residual[tokens], x[tokens] - mean[tokens]), expert
        assert not mean[47:51].any()
        assert not residual[47:51].any()
        assert not mean[60:].any()


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["four_over_six"], ["stochastic_rounding"]], ids=str)
def test_tokens_whose_number_depends_on_values(more):
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 48)

        def forward(self, x):
            return self.fc(x[x[:, 0] > 0]).sum(0)

    results = []
    for backend in ("eager", "aot_eager"):
        torch.manual_seed(0)
        chosen = loaded("mean_split", more=["tensor_scaling", *more], quantize=NVFP4)
        model = fp4graph.apply(Chosen(), chosen, seed=1, backend=backend)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            model(torch.cat([biased(20, 64).abs(), -biased(9, 64).abs()])).sum().backward()
        results.append(model.fc.weight.grad)
    assert torch.equal(*results)
