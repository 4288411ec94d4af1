"""Kernels multiply by the scales that a technique's ``rescale`` returns, as tensor code does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp4graph.kernels import operators
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.ops.operand import OperandProgram
from fp4graph.technique import BlockScale, Context, Quantization
from tests.helpers.floats import assert_same_bits
from tests.helpers.techniques import technique

pytestmark = pytest.mark.compiler

SPEC = QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even"))


class Dividing(BlockScale):
    mixes = "none"
    gamma: float

    def group_scale(self, z: Tensor, group: object, context: Context) -> Tensor:
        return torch.full((1,) * z.dim(), self.gamma)


class Rescaling(BlockScale):
    """Adds to each scale an amount that depends on every field of ``Quantization``."""

    mixes = "block"

    def rescale(self, quantization: Quantization, context: Context) -> Tensor:
        gamma = quantization.group_scale
        errors = (quantization.ratio - quantization.elements).abs().amax(-1, keepdim=True)
        share = errors if gamma is None else errors / gamma
        return quantization.scale * (1 + share) + quantization.z / 64


@pytest.mark.parametrize("gammas", [(), (1.7,), (1.7, 0.3)], ids=["none", "one", "two"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_kernels_multiply_by_the_scale_of_rescale(gammas: tuple[float, ...], transposed: bool) -> None:
    options = technique("scales")()
    parts = (*(Dividing(options=options, gamma=gamma) for gamma in gammas), Rescaling(options=options))
    program = OperandProgram(SPEC, parts)
    x = torch.randn(70, 96) * torch.exp2(torch.randint(-4, 4, (70, 1)).float())
    x = x.T.contiguous().T if transposed else x
    (term,) = program(x)
    with operators.tensor_code():
        (expected,) = program(x)
    assert_same_bits(term.values, expected.values)
    plain, *_ = OperandProgram(SPEC, parts[:-1])(x)
    assert (term.values != plain.values).any()
