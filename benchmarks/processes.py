"""Processes that begin anew, for what a process can do or be only once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from unittest.mock import patch

SPAWN = multiprocessing.get_context("spawn")  # a process that was forked cannot use CUDA


def _nothing() -> None:
    """Run when a process starts."""


@contextmanager
def process(**environment: str) -> Iterator[ProcessPoolExecutor]:
    """Start a process under ``environment``, which runs one task after another."""
    with ProcessPoolExecutor(1, SPAWN) as pool:
        with patch.dict(os.environ, environment):
            pool.submit(_nothing).result()
        yield pool
