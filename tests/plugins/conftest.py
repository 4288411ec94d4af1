"""Shared by the tests of techniques."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx


@pytest.fixture
def inductor() -> Callable[..., Callable[..., Any]]:
    """``inductor(f, *example)``: ``f`` as one graph with symbolic sizes, compiled by Inductor. Dynamo alone breaks the
    graph where a program looks its techniques up, and what is compiled in pieces is not fused as in a model."""

    def compiled(function: Callable[..., Any], *example: torch.Tensor) -> Callable[..., Any]:
        graph = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example)
        return torch.compile(graph, fullgraph=True, dynamic=True)

    return compiled


class Sharing(nn.Module):
    """One weight, used twice: ALBERT's way, by two names of one module, or tied, by two modules with one parameter."""

    def __init__(self, linear: nn.Linear, how: str) -> None:
        super().__init__()
        self.first = linear
        self.second = linear
        if how == "tied parameters":
            self.second = nn.Linear(linear.in_features, linear.out_features, bias=False, dtype=linear.weight.dtype)
            self.second.weight = linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)

    @property
    def weight(self) -> nn.Parameter:
        return self.first.weight

    @property
    def bias(self) -> nn.Parameter:
        return self.first.bias


@pytest.fixture(params=["shared module", "tied parameters"])
def sharing(request: pytest.FixtureRequest) -> Callable[[nn.Linear], Sharing]:
    """``sharing(linear)``: a model that uses the weight of ``linear`` twice."""
    return lambda linear: Sharing(linear, request.param)
