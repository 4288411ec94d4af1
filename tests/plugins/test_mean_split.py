"""mean_split: the axis and the experts over which means are taken, and the errors that remain without the mean."""

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
from tests.helpers.models import module_of
from tests.helpers.policies import NVFP4, loaded
from tests.plugins.layer import Layer


def policy(options=None):
    return loaded("mean_split", options, more=["tensor_scaling"], quantize=NVFP4)


program = Layer(policy, 64, 64).operand


def biased(*shape):
    """Return Gaussian tokens around one large vector."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator) + 30 * torch.randn(shape[-1], generator=generator)


def quantized(x, operand=Operand.FPROP_INPUT):
    return total(program(None, operand)(x))


def error(y, x):
    """Return the error of ``y`` relative to the distances of the tokens ``x`` from their mean."""
    return (y.double() - x.double()).square().sum().sqrt() / (x - x.mean(0)).double().square().sum().sqrt()


def test_a_common_mean_does_not_coarsen_the_differences_between_tokens():
    x = biased(64, 96)
    without = total(Layer(lambda options: loaded("tensor_scaling", quantize=NVFP4), 64, 64).operand()(x))
    split, together = (error(y - y.mean(0), x - x.mean(0)) for y in (quantized(x), without))
    assert split < 0.15  # FP4's error of Gaussian numbers is a tenth
    assert together > 3 * split


def test_operands_of_wgrad_have_their_tokens_in_the_last_axis():
    x = biased(64, 96)
    for operand in (Operand.WGRAD_INPUT, Operand.WGRAD_GRAD_OUTPUT):
        y = quantized(x.mT.contiguous(), operand).mT
        assert error(y - y.mean(0), x - x.mean(0)) < 0.15
        assert program(None, operand).parts == program(None, Operand.WGRAD_INPUT).parts
    assert program(None, Operand.DGRAD_GRAD_OUTPUT).parts == program().parts
    assert program(None, Operand.FPROP_WEIGHT).at("around") == []


def test_one_token_is_quantized_as_without_a_split():
    """It is the mean, so that the residual is zero."""
    one = biased(1, 32)
    plain = total(program({"operands": ["wgrad"]})(one))
    torch.testing.assert_close(quantized(one), plain, rtol=1e-6, atol=0)


def test_each_expert_has_the_mean_of_its_tokens():
    """Three experts with means far apart. Rows of padding stay zero, and rows outside all experts may hold anything."""
    x = torch.cat([biased(20, 64), biased(31, 64) * -7, biased(9, 64) * 0.01, torch.full((4, 64), torch.nan)])
    x[47:51] = 0
    unpadded = torch.tensor([0] * 20 + [1] * 27 + [3] * 4 + [2] * 9 + [3] * 4)
    ids = torch.where(torch.arange(64) < 51, unpadded.clamp(max=1), unpadded)  # zeros pad the second expert's tokens
    for operand, axis in ((Operand.FPROP_INPUT, 0), (Operand.WGRAD_INPUT, 1)):
        (wrapper,) = program(None, operand).at("around")
        tensor, parts = (x if axis == 0 else x.mT).contiguous(), []

        def collect(part, parts=parts):
            parts.append(part)
            return part

        context = Context(Blocking(tuple(tensor.shape), 16, segments=Segments(axis, 3, ids, unpadded)), None, None)
        wrapper.around(collect, tensor, context)
        residual, mean = (part if axis == 0 else part.mT for part in parts)
        for expert, tokens in ((0, slice(0, 20)), (1, slice(20, 47)), (2, slice(51, 60))):
            expected = x[tokens].double().mean(0).float()
            torch.testing.assert_close(mean[tokens], expected.expand(mean[tokens].shape), rtol=1e-6, atol=0)
            assert torch.equal(residual[tokens], x[tokens] - mean[tokens]), expert
        assert not mean[47:51].any()
        assert not residual[47:51].any()
        assert not mean[60:].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [[], *(pytest.param([name], marks=pytest.mark.long) for name in ("four_over_six", "stochastic_rounding"))],
    ids=str,
)
def test_a_number_of_tokens_that_depends_on_values_compiles_to_the_same_bits(more):
    results = []
    for backend in ("eager", "aot_eager"):
        torch.manual_seed(0)
        module = module_of(lambda self, x: self.fc(x[x[:, 0] > 0]).sum(0), fc=nn.Linear(64, 48))
        split = loaded("mean_split", more=["tensor_scaling", *more], quantize=NVFP4)
        model = fp4graph.apply(module, split, seed=1, backend=backend)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            model(torch.cat([biased(20, 64).abs(), -biased(9, 64).abs()])).sum().backward()
        results.append(model.fc.weight.grad)
    assert torch.equal(*results)
