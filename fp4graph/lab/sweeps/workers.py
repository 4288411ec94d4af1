"""The processes of a sweep on this machine: started, watched, and replaced where one is lost."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import optuna
import torch

from fp4graph.errors import Error
from fp4graph.lab.sweeps.space import parse_space
from fp4graph.lab.sweeps.study import PRUNERS, Study
from fp4graph.lab.sweeps.sweep import POLL, REPLACE, SAMPLERS, Objective, train_once, work, worker_name
from fp4graph.lab.sweeps.trial import Trial


@dataclass(frozen=True)
class Job:
    """The arguments of a worker process; everything else is in the study."""

    url: str
    study: str
    target: int
    sampler: str
    pruner: str
    device: str
    log: str
    workers: int
    index: int = 0
    token: str = ""
    parent: int = 0
    objective: Objective = train_once

    def __post_init__(self) -> None:
        for name, known in (("sampler", SAMPLERS), ("pruner", PRUNERS)):
            if getattr(self, name) not in known:
                raise Error(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")


def _process(job: Job, parent: Connection) -> None:
    """Run a worker process. Its output goes to its log; an Error is sent to the process that started it."""
    with Path(job.log).open("a", encoding="utf-8", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.workers))
    count = torch.cuda.device_count() if job.device in ("auto", "cuda") else 0
    device = f"cuda:{job.index % count}" if count > 1 else job.device  # several are dealt out to the workers
    try:
        study = Study.open(job.url, job.study, job.pruner)
        space = parse_space(study.manifest.space, f"space of study {job.study}")
        work(
            study,
            space,
            job.target,
            sampler=job.sampler,
            worker=worker_name(os.getpid(), job.token),
            device=device,
            objective=job.objective,
            going=lambda: os.getppid() == job.parent,  # an orphan finishes its trial, and no more
        )
    except Error as error:
        parent.send(str(error))
        sys.exit(1)


@dataclass(frozen=True)
class _Worker:
    """A process, the pipe for its last error, the mark of its trials, and the study's progress when it began."""

    process: Any
    pipe: Connection
    name: str
    progress: int


class Workers:
    """The worker processes of one sweep on this machine: a context in which they run."""

    def __init__(self, job: Job, study: Study) -> None:
        self._job, self._study = job, study
        self._context = multiprocessing.get_context("spawn")
        self._running: dict[int, _Worker] = {}

    def __enter__(self) -> Workers:
        try:
            for index in range(self._job.workers):
                self._start(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with _blocked(signal.SIGINT, signal.SIGTERM):  # an impatient signal must not leave one of them at work
            for worker in self._running.values():
                worker.process.terminate()  # at any point: its running trial is withdrawn below
        for worker in self._running.values():
            worker.process.join()
        names = {worker.name for worker in self._running.values()}
        with contextlib.suppress(Error), self._study.hurried():  # where it is away, their silence tells
            for number in self._running_trials(names) if names else ():
                self._study.withdraw(number, "interrupted")

    def _start(self, index: int) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        log = str(Path(self._job.log) / f"worker-{index}.log")
        job = replace(self._job, log=log, index=index, token=uuid.uuid4().hex, parent=os.getpid())
        process = self._context.Process(target=_process, args=(job, theirs), name=f"worker {index}")
        # It blocks Ctrl-C, which reaches all processes of a terminal but is for the first one; a handler of its own
        # would come after seconds of imports. The tracker would lift the block if the first process started it.
        resource_tracker.ensure_running()
        with _blocked(signal.SIGINT):
            process.start()
        theirs.close()
        assert process.pid is not None
        name = worker_name(process.pid, job.token)
        self._running[index] = _Worker(process, ours, name, _progress(self._study.trials()))

    def watch(self, stop: Callable[[], bool] = lambda: False) -> Iterator[tuple[list[Trial], list[str]]]:
        """Yield the trials and the events of workers about once a second, until all workers have ended.

        A killed worker is replaced as long as trials make progress, and its trial is free at once. ``stop`` is asked
        before workers are looked at: a signal to the whole process group ends the workers too, which is no loss.

        Raises:
            Error: of a worker that cannot go on; or workers end without making progress.
        """
        while self._running:
            if stop():
                return
            events: list[str] = []
            for index, worker in list(self._running.items()):
                if worker.process.is_alive():
                    continue
                if stop():
                    return
                del self._running[index]
                if worker.pipe.poll():
                    with contextlib.suppress(EOFError):
                        raise Error(worker.pipe.recv())
                if worker.process.exitcode == 0:
                    continue
                for number in self._running_trials({worker.name}):
                    self._study.lose(number)
                events.append(f"worker {index} ended ({_ending(worker.process.exitcode)}); its trial is free again")
                if _progress(self._study.trials()) == worker.progress:
                    raise Error(f"{events[-1]}; {self._job.log}/worker-{index}.log may say why")
                self._start(index)
            yield self._study.trials(), events
            time.sleep(POLL)
        yield self._study.trials(), []

    def _running_trials(self, workers: set[str]) -> list[int]:
        running = (trial for trial in self._study.trials() if trial.state == "running")
        return [trial.number for trial in running if trial.worker in workers]


class Interrupts:
    """A context in which the first Ctrl-C or SIGTERM sets ``asked`` and tells the user.

    A KeyboardInterrupt may fall between any two instructions. Inside SQLAlchemy or Optuna's cache it would leave a
    wrong session or list of trials, through which the running trials must still be taken back; inside a finalizer it
    is lost. A further signal, a second or more later, raises KeyboardInterrupt, for users who do not wait for a
    database that is away.
    """

    def __init__(self) -> None:
        self.asked = False
        self._since = math.inf
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as a shell's background jobs have SIGINT
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, *_: object) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._since = True, now
            with contextlib.suppress(OSError):  # past Python's buffers, which the signal may have interrupted
                os.write(2, b"\nstopping, and taking the running trials back; once more to stop at once\n")
        elif now - self._since >= 1:  # one that is pressed twice is meant once
            raise KeyboardInterrupt


@contextlib.contextmanager
def _blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Delay these signals until the context ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _progress(trials: Sequence[Trial]) -> int:
    """Return a number that grows as long as workers make progress, and is bounded."""
    return sum(trial.finished or trial.state in ("lost", "refused") for trial in trials)


def _ending(code: int) -> str:
    if code == REPLACE:
        return "its device was of no more use"
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"
