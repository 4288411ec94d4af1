"""The processes of a sweep on this machine: started, watched, and replaced where one is lost."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import torch

from fp4graph.errors import Error
from fp4graph.lab.sweeps.results import Trial
from fp4graph.lab.sweeps.space import parse_space
from fp4graph.lab.sweeps.study import PRUNERS, Study
from fp4graph.lab.sweeps.sweep import POLL, REPLACE, SAMPLERS, Objective, train_once, work, worker_name

#: Seconds for which the end of a sweep waits for a database that is away.
HURRIED = 5.0


@dataclass(frozen=True)
class Job:
    """The arguments of a worker process; everything else is in the study. ``log`` is a folder."""

    url: str
    study: str
    target: int
    sampler: str
    pruner: str
    device: str
    log: str
    workers: int
    objective: Objective = train_once

    def __post_init__(self) -> None:
        for name, known in (("sampler", SAMPLERS), ("pruner", PRUNERS)):
            if getattr(self, name) not in known:
                raise Error(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")

    def log_of(self, index: int) -> Path:
        return Path(self.log) / f"worker-{index}.log"


class _Worker(NamedTuple):
    """A process, the pipe for its last error, the mark of its trials, and the progress when it began."""

    process: Any
    pipe: Any
    name: str
    progress: int


def _process(job: Job, index: int, token: str, parent: int, pipe: Any) -> None:
    """Run a worker process. Its output goes to its log; an Error is sent to the process that started it."""
    with job.log_of(index).open("a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.workers))
    count = torch.cuda.device_count() if job.device in ("auto", "cuda") else 0
    try:
        study = Study.open(job.url, job.study, job.pruner)
        work(
            study,
            parse_space(study.manifest.space, f"space of study {job.study}"),
            job.target,
            sampler=job.sampler,
            worker=worker_name(os.getpid(), token),
            device=f"cuda:{index % count}" if count > 1 else job.device,  # several are dealt out to the workers
            objective=job.objective,
            going=lambda: os.getppid() == parent,  # an orphan finishes its trial, and no more
        )
    except Error as error:
        pipe.send(str(error))
        sys.exit(1)


class Workers:
    """The worker processes of one sweep on this machine: a context in which they run."""

    def __init__(self, job: Job, study: Study) -> None:
        self._job, self._study = job, study
        self._running: dict[int, _Worker] = {}

    def __enter__(self) -> Workers:
        with contextlib.ExitStack() as undone:
            undone.push(self.__exit__)
            for index in range(self._job.workers):
                self._start(index)
            undone.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with _blocked(signal.SIGINT, signal.SIGTERM):  # an impatient signal must not leave one of them at work
            for worker in self._running.values():
                worker.process.terminate()  # at any point: its running trial is withdrawn below
        for worker in self._running.values():
            worker.process.join()
        self._study.storage.ask_again = HURRIED
        with contextlib.suppress(Error):  # where the database is away, their silence tells
            for number in self._trials_of(*self._running.values()):
                self._study.withdraw(number, "interrupted")

    def _start(self, index: int) -> None:
        context, token = multiprocessing.get_context("spawn"), uuid.uuid4().hex
        ours, theirs = context.Pipe(duplex=False)
        process: Any = context.Process(target=_process, args=(self._job, index, token, os.getpid(), theirs))
        # It blocks Ctrl-C, which reaches all processes of a terminal but is for the first one; a handler of its own
        # would come after seconds of imports. The tracker would lift the block if the first process started it.
        resource_tracker.ensure_running()
        with _blocked(signal.SIGINT):
            process.start()
        theirs.close()
        self._running[index] = _Worker(process, ours, worker_name(process.pid, token), self._progress())

    def watch(self, stop: Callable[[], bool] = lambda: False) -> Iterator[tuple[list[Trial], list[str]]]:
        """Yield the trials and the events of workers about once a second, until all workers have ended.

        A killed worker is replaced as long as trials make progress, and its trial is free at once. ``stop`` is asked
        before workers are looked at: a signal to the whole process group ends the workers too, which is no loss.

        Raises:
            Error: of a worker that cannot go on; or workers end without making progress.
        """
        while self._running and not stop():
            ended = {index: worker for index, worker in self._running.items() if not worker.process.is_alive()}
            if ended and stop():
                return
            events = [event for index, worker in ended.items() for event in self._replace(index, worker)]
            yield self._study.trials(), events
            if self._running:
                time.sleep(POLL)

    def _replace(self, index: int, worker: _Worker) -> Iterator[str]:
        """Free the trial of a worker that has ended, start another, and yield what happened; nothing if it was done."""
        del self._running[index]
        with contextlib.suppress(EOFError):
            if worker.pipe.poll():
                raise Error(worker.pipe.recv())
        if (code := worker.process.exitcode) == 0:
            return
        for number in self._trials_of(worker):
            self._study.lose(number)
        how = "its device was of no more use" if code == REPLACE else f"exit status {code}"
        event = f"worker {index} ended ({signal.Signals(-code).name if code < 0 else how}); its trial is free again"
        if self._progress() == worker.progress:
            raise Error(f"{event}; {self._job.log_of(index)} may say why")
        self._start(index)
        yield event

    def _progress(self) -> int:
        """Return a number that grows as long as workers make progress, and is bounded."""
        return sum(trial.finished or trial.state in ("lost", "refused") for trial in self._study.trials())

    def _trials_of(self, *workers: _Worker) -> list[int]:
        names = [worker.name for worker in workers]
        trials = self._study.trials() if names else ()
        return [trial.number for trial in trials if trial.state == "running" and trial.worker in names]


@contextlib.contextmanager
def _blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Delay these signals until the context ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
