"""Runs the cases of ``make gpu-validate``: one by one, or in several processes.

Compilers, on the CPU, take most of a case's time. Checks therefore run side by side. Timings are prepared side by side,
in a process each, and then measured one at a time while the other processes wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

from benchmarks.processes import SPAWN, Figures, attempt, first_line

#: Case, figures, and whether the device still works in the process that ran the case.
Outcome = tuple["Case", Figures, bool]
#: Inductor would start a compiler for every core, in every process.
_ONE_COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Case:
    """One check or measurement."""

    part: str  # of the command
    about: Mapping[str, str]
    run: Callable[..., Figures]  # a timing's takes ``ready``, a function that it calls before it measures

    @property
    def name(self) -> dict[str, str]:
        """The case as plain data."""
        return {"part": self.part, **self.about}

    @property
    def timed(self) -> bool:
        """Return whether nothing else may run while the case measures."""
        return self.part in ("steps", "switches")


def one_by_one(cases: Iterable[Case], device: Any) -> Iterator[Outcome]:
    """Run each case in this process when its turn comes."""
    for case in cases:
        yield case, *_attempt_on(device, case.run)


def side_by_side(cases: Iterable[Case], device: Any, jobs: int) -> Iterator[Outcome]:
    """Run checks in ``jobs`` processes; a case is taken from ``cases`` when a process is free."""
    remaining, running = iter(cases), dict[Future[tuple[Figures, bool]], Case]()
    with patch.dict(os.environ, _ONE_COMPILER), ProcessPoolExecutor(jobs, SPAWN) as pool:
        while True:
            for case in islice(remaining, jobs - len(running)):
                running[pool.submit(_attempt_on, device, case.run)] = case
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                case = running.pop(future)
                if error := future.exception():  # the process was killed, and the pool with it
                    yield case, {"failed": first_line(error)}, False
                else:
                    yield case, *future.result()


def prepared_together(cases: Iterable[Case], jobs: int) -> Iterator[Outcome]:
    """Prepare ``jobs`` timings at a time, in a process each; when all are ready, measure one after the other.

    The figure ``prepared_beside`` is the number of other timings that were prepared, and compiled, at the same time.
    """
    remaining = iter(cases)
    while batch := list(islice(remaining, jobs)):
        with patch.dict(os.environ, _ONE_COMPILER):
            started = [_start(case) for case in batch]
        replies = [_received(pipe) for _, pipe, _ in started]
        for figures, (case, pipe, process) in zip(replies, started, strict=True):
            if figures is None:
                figures = _received(pipe, "the device is free")
            process.join()
            yield case, {**(figures or {}), "prepared_beside": len(batch) - 1}, True


def _start(case: Case) -> tuple[Case, Connection, Any]:
    pipe, child_pipe = SPAWN.Pipe()
    # A daemon ends with an interrupted command, which would otherwise wait until the process has compiled.
    process = SPAWN.Process(target=_prepare_and_measure, args=(case.run, child_pipe), daemon=True)
    process.start()
    child_pipe.close()
    return case, pipe, process


def _prepare_and_measure(run: Callable[..., Figures], pipe: Connection) -> None:
    """Send None when ready, wait until the device is free, then send the figures; send those of a failure at once."""

    def ready() -> None:
        pipe.send(None)
        pipe.recv()

    pipe.send(timed(partial(run, ready=ready)))


def _received(pipe: Connection, say: str | None = None) -> Figures | None:
    """Return the process's next message, after saying something to it."""
    try:
        if say is not None:
            pipe.send(say)
        received: Figures | None = pipe.recv()
    except (OSError, EOFError):
        return {"failed": "its process was killed"}
    return received


def timed(run: Callable[[], Figures]) -> Figures:
    """Return the figures of a case, or the reason why there are none, and the seconds that it took."""
    began = time.perf_counter()
    figures = attempt(run)
    return {**figures, "took_seconds": round(time.perf_counter() - began, 2)}


def _attempt_on(device: Any, run: Callable[[], Figures]) -> tuple[Figures, bool]:
    figures = timed(run)
    return figures, "failed" not in figures or answers(device)


def answers(device: Any) -> bool:
    """Return whether ``device`` still works in this process: after a fault, CUDA fails every later call."""
    if device.type == "cuda":
        import torch

        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return False
    return True
