"""The kernel of INT4 by rows: the bits of tensor code, and its line in a schedule."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import fp4graph
from fp4graph.kernels import operators
from fp4graph.kernels.rows import TENSOR_CODE, of_spec
from fp4graph.kernels.rows.int4_rows import Int4Rows
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.ops.operand import OperandProgram
from tests.helpers.policies import one_rule

QUANTIZE = {"element": "int4", "block": "row", "scale": {"format": "fp32"}}
SPEC = QuantSpec("int4", "row", ScaleSpec("fp32"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 64), (0, 8)], ids=str)
def test_bits_are_those_of_tensor_code(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def trained(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        model = torch.nn.Linear(shape[-1], 24, bias=False, dtype=dtype)
        model.weight.data = w.clone()
        fp4graph.apply(model, one_rule(quantize=QUANTIZE), backend="eager", seed=0)
        x = x.detach().requires_grad_()
        y = model(x)
        return y, *torch.autograd.grad(y.sum(), (x, model.weight))

    x, w = torch.randn(shape).to(dtype), torch.randn(24, shape[-1]).to(dtype)
    (term,) = OperandProgram(SPEC)(x)
    kernel = trained(x, w)
    with operators.tensor_code():
        assert of_spec(SPEC, x.device) == TENSOR_CODE
        (expected,) = OperandProgram(SPEC)(x)
        plain = trained(x, w)
    assert torch.equal(term.values, expected.values)
    assert all(torch.equal(own, other) for own, other in zip(kernel, plain, strict=True))


def test_the_schedule_names_it() -> None:
    assert of_spec(SPEC, torch.device("cpu")) == Int4Rows()
    assert of_spec(dataclasses.replace(SPEC, rounding="stochastic"), torch.device("cpu")) != Int4Rows()
    assert of_spec(QuantSpec("int4", 32), torch.device("cpu")) != Int4Rows()
    model = torch.nn.Linear(64, 32)
    explained = fp4graph.explain(model, one_rule(quantize=QUANTIZE), (torch.randn(8, 64, requires_grad=True),))
    schedule = explained.sites[0].schedule
    assert schedule is not None
    assert str(schedule).splitlines()[0] == "fprop.input: INT4 by rows; keeps original"
    assert "INT4 by rows" in explained.schedule()
