"""Batches from which a mask chooses no token: compiled code does not know the number of tokens, which may be 0."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp4graph
from fp4graph.kernels import operators
from tests.helpers.long import LONG
from tests.helpers.policies import one_rule
from tests.helpers.training import assert_equal

PER_TENSOR = {"block": "tensor", "element": "int4", "scale": {"format": "fp32", "rounding": "nearest_even"}}
POLICIES: dict[str, Any] = {
    "a tensor scale": "nvfp4",
    "blocks of a tensor": one_rule(quantize=PER_TENSOR),
    "mean_split": "averis",
    "smooth_swiglu": "nvfp4-smooth-swiglu",
    **{kind: one_rule({"smooth_max": {"kind": kind}}, quantize=PER_TENSOR) for kind in ("absmax", "hybrid")},
}


#: Every policy has two cases: with kernels, and in tensor code. These are not long.
SHORT = [("blocks of a tensor", True), ("mean_split", True), ("absmax", False)]


class Chosen(nn.Module):
    """The MLP of a decoder on the tokens that a mask chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x[mask]
        y: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y.sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        pytest.param(name, kernels, marks=() if (name, kernels) in SHORT else LONG)
        for name in POLICIES
        for kernels in (True, False)
    ],
)
def test_aot_eager_trains_as_eager_does_on_a_batch_without_tokens(name: str, kernels: bool) -> None:
    gradients = []
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Chosen()
        with (
            nullcontext() if kernels else operators.tensor_code(),
            torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        ):
            fp4graph.apply(model, POLICIES[name], backend=backend, total_forwards=3, seed=1)
            fp4graph.prepare_optimizer(model, torch.optim.SGD(model.parameters()))
            for count in (5, 0, 7):
                mask = torch.arange(32).view(4, 8) < count
                model.zero_grad()
                model(torch.randn(4, 8, 64), mask).backward()
                gradients.append([parameter.grad for parameter in model.parameters()])
    for compiled, expected in zip(gradients[3:], gradients[:3], strict=True):
        assert_equal(compiled, expected)
        assert all(gradient.isfinite().all() for gradient in compiled)
