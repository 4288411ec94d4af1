"""Fixtures for tests of the CPU's kernels."""

from __future__ import annotations

import pytest
import torch

from fp4graph.kernels import cpu, switches


@pytest.fixture
def kernels():
    """Check that kernels are used: without them a test would compare tensor code with itself."""
    assert cpu.available()
    assert switches.current().quantizers


@pytest.fixture
def set_threads():
    """Return a function that sets the number of threads; it is reset at the end of the test."""
    former = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(former)
