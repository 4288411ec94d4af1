"""Shared by the tests of techniques."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx


@pytest.fixture
def inductor() -> Callable[..., Callable[..., Any]]:
    """``inductor(f, *example)``: ``f`` as one graph with symbolic sizes, compiled by Inductor. Dynamo alone breaks the
    graph where a program looks its techniques up, and what is compiled in pieces is not fused as in a model."""

    def compiled(function: Callable[..., Any], *example: torch.Tensor) -> Callable[..., Any]:
        graph = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example)
        return torch.compile(graph, fullgraph=True, dynamic=True)

    return compiled
