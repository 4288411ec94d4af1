"""Runs the cases of ``make gpu-validate``: one by one, or in several processes.

Compilers, on the CPU, take most of a case's time. Checks therefore run side by side. Timings are prepared side by side,
in a process each, and then measured one at a time while the other processes wait.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

Figures = dict[str, Any]
#: Case, figures, and whether the device still works in the process that ran the case.
Outcome = tuple["Case", Figures, bool]
SPAWN = multiprocessing.get_context("spawn")  # a process that was forked cannot use CUDA
#: Inductor would start a compiler for every core, in every process.
_ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Case:
    """One check or measurement.

    Attributes:
        part: its part of the command.
        about: its description in plain values.
        run: the function that runs it. A timing's takes ``ready``, a function that it calls before it measures.
    """

    part: str
    about: Mapping[str, str]
    run: Callable[..., Figures]

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
    with patch.dict(os.environ, _ALONE), ProcessPoolExecutor(jobs, SPAWN) as pool:
        while True:
            for case in islice(remaining, jobs - len(running)):
                running[pool.submit(_attempt_on, device, case.run)] = case
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                case = running.pop(future)
                if error := future.exception():  # the process was killed, and the pool with it
                    yield case, {"failed": _short(error)}, False
                else:
                    yield case, *future.result()


def prepared_together(cases: Iterable[Case], jobs: int) -> Iterator[Outcome]:
    """Prepare ``jobs`` timings at a time, in a process each; when all are ready, measure one after the other."""
    remaining = iter(cases)
    while batch := list(islice(remaining, jobs)):
        with patch.dict(os.environ, _ALONE):
            started = [_start(case) for case in batch]
        ended: list[tuple[Case, Figures | None]] = [(case, _received(pipe)) for case, pipe, _ in started]
        for (case, figures), (_, pipe, process) in zip(ended, started, strict=True):
            if figures is None:
                pipe.send("go")
                figures = _received(pipe)
            process.join()
            yield case, {**(figures or {}), "prepared_beside": len(batch) - 1}, True


def _start(case: Case) -> tuple[Case, Connection, Any]:
    pipe, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_prepare_and_measure, args=(case.run, theirs))
    process.start()
    theirs.close()
    return case, pipe, process


def _prepare_and_measure(run: Callable[..., Figures], pipe: Connection) -> None:
    """Send None when ready, wait for a word, then send the figures. A failure sends its figures at once."""

    def ready() -> None:
        pipe.send(None)
        pipe.recv()

    pipe.send(attempt(lambda: run(ready=ready)))


def _received(pipe: Connection) -> Figures | None:
    try:
        figures: Figures | None = pipe.recv()
    except EOFError:
        return {"failed": "its process was killed"}
    return figures


def attempt(run: Callable[[], Figures]) -> Figures:
    """Return the figures of a case, or the reason why there are none, so that a failure does not end the command."""
    began = time.perf_counter()
    try:
        figures = run()
    except Exception as error:  # noqa: BLE001  # a compiler's, the driver's, a lack of memory
        traceback.print_exc()
        figures = {"failed": _short(error)}
    return {**figures, "took_seconds": round(time.perf_counter() - began, 2)}


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"


def _attempt_on(device: Any, run: Callable[[], Figures]) -> tuple[Figures, bool]:
    figures = attempt(run)
    return figures, "failed" not in figures or answers(device)


def answers(device: Any) -> bool:
    """Return whether ``device`` still works in this process: after a fault, CUDA fails every later call."""
    import torch

    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return False
    return True
