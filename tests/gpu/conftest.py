"""Workers: processes of their own, since what they do to torch and Triton cannot be undone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest


@pytest.fixture(scope="session")
def compiler() -> Iterator[ProcessPoolExecutor]:
    """A process that believes in a GPU, for the functions of benchmarks.gpu.absent."""
    from benchmarks.gpu.absent import worker  # not above: it imports Triton, without which the tests are skipped

    with worker() as pool:
        yield pool


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton functions are interpreted."""
    from benchmarks.gpu.absent import worker
    from tests.gpu import interpreted

    with worker(TRITON_INTERPRET="1") as pool:
        pool.submit(interpreted.prepare).result()
        yield pool
