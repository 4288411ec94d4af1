"""Fixtures of the tests of all clients: the quantized products, the warnings, and the parameters that train."""

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
def policy_warnings(recwarn):
    """Make a function that returns the texts of fp4graph's warnings so far."""
    warnings.simplefilter("always", PolicyWarning)
    return lambda: [str(w.message) for w in recwarn if issubclass(w.category, PolicyWarning)]


@pytest.fixture
def watch_parameters():
    """Make ``watch(model)``: it records the parameters, and returns a function that names those that have changed."""

    def watch(model):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        return lambda: {name for name, p in model.named_parameters() if not torch.equal(p, before.get(name, p))}

    return watch
