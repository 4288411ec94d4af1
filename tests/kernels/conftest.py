"""A fixture for tests of the CPU's kernels."""

from __future__ import annotations

import pytest

from fp4graph.kernels import cpu, switches


@pytest.fixture
def kernels():
    """Make sure of the kernels: a test without them would compare the tensor code with itself."""
    assert cpu.available()
    assert switches.current().quantizers
