"""A model without data: explained and rehearsed as the one with data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp4graph

pytestmark = pytest.mark.slow

X = torch.randn(4, 32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_buffer("positions", torch.arange(32))
        self.plain = torch.ones(32)  # neither a parameter nor a buffer

    def forward(self, x):
        return self.fc2(self.fc1(x + self.positions)) * self.plain


def net():
    model = nn.Sequential(Block(), Block())
    model[1].fc1.weight = model[0].fc1.weight
    return model


def sites(model, x=X):
    with torch.autocast("cpu", torch.bfloat16):
        explanation = fp4graph.explain(model, "tetrajet", (x,))
    assert explanation.problem is None
    return [(site.module, site.shapes, site.rule, site.operands) for site in explanation.sites]


@pytest.mark.parametrize("x", [X, X.to("meta")], ids=["inputs with data", "inputs without"])
def test_it_is_explained_as_with_data(x):
    with torch.device("meta"):
        model = net()
    assert sites(model, x) == sites(net())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model[0].plain.is_meta


def test_it_is_applied_and_rehearsed():
    with torch.device("meta"):
        model = net()
    fp4graph.apply(model, "tetrajet-qema", backend="eager", example_inputs=X)
    assert sites(model) == sites(net())
    fp4graph.remove(model)
