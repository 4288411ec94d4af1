"""Processes that begin anew, for what a process can do or be only once, and attempts that may fail.

Nothing here imports torch, which would take seconds in every process.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
SPAWN = multiprocessing.get_context("spawn")  # a process that was forked cannot use CUDA
Figures = dict[str, Any]


class Inapplicable(Exception):
    """A case cannot be measured: its library is not installed, or its policy does not fit the model."""


def attempt(measure: Callable[[], Figures]) -> Figures:
    """Return the figures of ``measure``, or the reason why there are none.

    An error of one case, a compiler's or the driver's, must not end a run of hours.
    """
    try:
        return measure()
    except Inapplicable as error:
        return {"inapplicable": str(error).replace(f"{ROOT}{os.sep}", "")}
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return {"failed": first_line(error)}


def first_line(error: BaseException) -> str:
    """Return the class and the first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"


def _nothing() -> None:
    """Run when a process starts."""


@contextmanager
def process(**environment: str) -> Iterator[ProcessPoolExecutor]:
    """Start a process under ``environment``, which runs one task after another."""
    with ProcessPoolExecutor(1, SPAWN) as pool:
        with patch.dict(os.environ, environment):
            pool.submit(_nothing).result()
        yield pool
