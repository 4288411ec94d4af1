"""Worker processes, because changes that they make to torch and Triton cannot be undone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest


def calls_in(pool: ProcessPoolExecutor) -> Callable[..., Any]:
    return lambda function, *arguments, **options: pool.submit(function, *arguments, **options).result()


@pytest.fixture(scope="session")
def compiler():
    """Call a function in a process in which torch takes a GPU to be present."""
    from benchmarks.gpu.absent import worker  # not above: it imports Triton, without which the tests are skipped

    with worker() as pool:
        yield calls_in(pool)


@pytest.fixture(scope="session")
def interpreter():
    """Call a function in a process in which Triton functions are interpreted."""
    from benchmarks.gpu.absent import worker
    from tests.gpu import interpreted

    with worker(TRITON_INTERPRET="1") as pool:
        pool.submit(interpreted.prepare).result()
        yield calls_in(pool)
