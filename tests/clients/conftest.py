"""What every program is held to: it trained, its products were quantized, and it warned of nothing else."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fp4graph.errors import PolicyWarning
from fp4graph.graph import functions


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the quantized products that run, by their modules, whatever path they run on (Inductor aside)."""
    counted: Counter[str] = Counter()
    multiply = functions.quantized_matmul

    def counting(*args: Any, **kwargs: Any) -> Any:
        site = kwargs.get("site", args[7] if len(args) > 7 else None)
        counted[str(site)] += 1
        return multiply(*args, **kwargs)

    monkeypatch.setattr(functions, "quantized_matmul", counting)
    return counted


@pytest.fixture
def said(recwarn: pytest.WarningsRecorder) -> Callable[[], list[str]]:
    """Return the texts of our own warnings so far."""
    warnings.simplefilter("always", PolicyWarning)
    return lambda: [str(w.message) for w in recwarn if issubclass(w.category, PolicyWarning)]


class Moved:
    """Tells which parameters of a model have changed since."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def __call__(self) -> set[str]:
        now = dict(self.model.named_parameters())
        return {name for name, p in self._before.items() if not torch.equal(p, now[name])}


@pytest.fixture
def moved() -> type[Moved]:
    return Moved
