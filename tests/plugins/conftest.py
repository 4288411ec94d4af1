"""The fixture of the tests of techniques."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx


@pytest.fixture
def inductor() -> Callable[..., Callable[..., Any]]:
    """``inductor(f, *example)`` compiles ``f`` by Inductor, as one graph with symbolic sizes. Dynamo alone would break
    the graph where a program looks up its techniques, and Inductor fuses nothing across pieces, unlike in a model."""

    def compiled(function: Callable[..., Any], *example: torch.Tensor) -> Callable[..., Any]:
        graph = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example)
        return torch.compile(graph, fullgraph=True, dynamic=True)

    return compiled
