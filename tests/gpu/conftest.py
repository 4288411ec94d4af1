"""Workers: processes of their own, since what they do to torch and Triton cannot be undone."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

#: No pool of further processes to compile in: starting it takes longer than the compiling.
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


@contextmanager
def worker(**environment: str) -> Iterator[ProcessPoolExecutor]:
    """A process started under ``environment``, which runs one task after another."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with mock.patch.dict(os.environ, {**ENVIRONMENT, **environment}):
            pool.submit(torch.set_num_threads, 1).result()
        yield pool


@pytest.fixture(scope="session")
def compiler() -> Iterator[ProcessPoolExecutor]:
    """A process that believes in a GPU, for the functions of absent.py."""
    with worker() as pool:
        yield pool


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton functions are interpreted."""
    from tests.gpu import interpreted  # not above: it imports Triton, without which the tests are skipped

    with worker(TRITON_INTERPRET="1") as pool:
        pool.submit(interpreted.prepare).result()
        yield pool
