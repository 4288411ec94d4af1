"""What every program is held to: it trained, its products were quantized, and it warned of nothing else."""

import warnings
from collections import Counter

import pytest
import torch

from fp4graph.errors import PolicyWarning
from fp4graph.graph import functions


def pytest_itemcollected(item):
    """Mark every test of this folder ``long``; `make test` ignores it, because its libraries take seconds to import."""
    item.add_marker("long")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def products(monkeypatch):
    """Count the quantized products that run, by their modules, whatever path they run on (Inductor aside)."""
    counted = Counter()
    multiply = functions.quantized_matmul

    def counting(*args, **kwargs):
        site = kwargs.get("site", args[7] if len(args) > 7 else None)
        counted[str(site)] += 1
        return multiply(*args, **kwargs)

    monkeypatch.setattr(functions, "quantized_matmul", counting)
    return counted


@pytest.fixture
def said(recwarn):
    """Return the texts of our own warnings so far."""
    warnings.simplefilter("always", PolicyWarning)
    return lambda: [str(w.message) for w in recwarn if issubclass(w.category, PolicyWarning)]


@pytest.fixture
def moved():
    """Make a function that tells which parameters of a model have changed since."""

    def since(model):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        return lambda: {name for name, p in model.named_parameters() if not torch.equal(p, before.get(name, p))}

    return since
