"""Searches a space: chooses the next configuration, and runs the processes that train configurations."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import torch
from optuna.trial import TrialState

from fp4graph.errors import Error, PolicyError
from fp4graph.lab.runs.run import Outcome, Run
from fp4graph.lab.sweeps.database import Away
from fp4graph.lab.sweeps.results import FREE, Trial
from fp4graph.lab.sweeps.space import Configuration, Parameter, Space, parse_space
from fp4graph.lab.sweeps.study import PRUNERS, Study, TakenOver, optuna_trial

SAMPLERS = ("random", "tpe")
#: Trains a run, calling back with (step, validation loss) after each validation.
Objective = Callable[[Run, Callable[[int, float], None]], Outcome]

#: The number of times a configuration may end its worker's process before it is recorded as failed.
LOSSES = 3
#: The number of draws, plus ten per trial, after which the space is enumerated.
DRAWS = 1000
#: Seconds between looks at the database while waiting for other workers.
POLL = 1.0
#: Exit status of a worker whose accelerator became unusable. Every status but 0 has the worker replaced.
REPLACE = 75
#: Seconds for which the end of a sweep waits for an unreachable database.
HURRIED = 5.0


def propose(space: Space, trials: Sequence[Trial], seed: int, sampler: str = "random") -> Configuration | None:
    """Return the next configuration to run, from all trials of the study; None if no configuration is left or ready.

    The baselines come first. Other configurations wait until a baseline has finished, because scores need its loss, and
    because it shows faults of data or device. Then come each family's plain choices, the trials that were lost,
    interrupted or excused, and sampled choices. ``random`` choices are the same for equal seeds, independent of the
    workers.
    """
    taken = {trial.key for trial in trials if trial.state not in FREE}
    first = space.first()
    baselines = {configuration.key for configuration in first if configuration.kind == "baseline"}
    has_baseline = any(trial.key in baselines and trial.finished for trial in trials)
    free = [trial for trial in trials if trial.state in FREE and trial.key not in taken]
    repeated = (space.configuration(trial.assignment, trial.kind) for trial in free)
    for configuration in itertools.chain(first, repeated, _drawn(space, trials, seed, sampler)):
        if configuration.kind != "baseline" and not has_baseline:
            return None
        if configuration.key not in taken:
            return configuration
    return None


def _drawn(space: Space, trials: Sequence[Trial], seed: int, sampler: str) -> Iterator[Configuration]:
    """Yield the sampler's configurations, then all others; leave out configurations that a trial has taken."""
    taken = {tuple(trial.assignment.items()) for trial in trials if trial.state not in FREE}
    estimated = _estimated(space, trials, seed) if sampler == "tpe" else ()
    draws = (space.draw(random.Random(f"{seed}:{draw}")) for draw in range(DRAWS + 10 * len(trials)))
    for assignment in itertools.chain(estimated, draws, space.assignments()):
        if (choices := tuple(assignment.items())) not in taken:
            taken.add(choices)
            yield space.configuration(assignment)


def _estimated(space: Space, trials: Sequence[Trial], seed: int) -> Iterator[Mapping[str, str]]:
    """Yield suggestions of Optuna's TPE. A running trial counts as bad, so that suggestions differ from it."""
    estimator = optuna.samplers.TPESampler(seed=seed + len(trials), constant_liar=True, n_startup_trials=10)
    study = optuna.create_study(sampler=estimator, directions=["minimize", "minimize"])
    for trial in trials:
        if trial.kind == "baseline" or trial.complexity is None or not trial.counts:
            continue
        loss = float("inf") if trial.loss is None or trial.state in ("diverged", "failed") else trial.loss
        running = trial.state == "running"
        state, values = (TrialState.RUNNING, None) if running else (TrialState.COMPLETE, [loss, trial.complexity])
        study.add_trial(optuna_trial(space, trial.assignment, state=state, values=values))
    for _ in range(20):
        ask = study.ask()
        assignment = space.assigned(partial(_suggested, ask))
        study.tell(ask, state=TrialState.FAIL)
        if space.contains(assignment):  # a choice may have a condition that the estimator does not know
            yield assignment


def _suggested(ask: optuna.Trial, parameter: Parameter, labels: list[str]) -> str:
    return ask.suggest_categorical(parameter.name, tuple(parameter.choices))


def train_once(run: Run, report: Callable[[int, float], None]) -> Outcome:
    """Train one run as ``fp4graph train`` does; the objective of a sweep."""
    from fp4graph.lab.runs.train import train

    torch.compiler.reset()  # each trial has a new model, and Dynamo limits the recompilations of a function
    gc.collect()
    return train(run, report=report)


def work(
    study: Study,
    space: Space,
    target: int,
    *,
    sampler: str = "random",
    worker: str | None = None,
    device: str | None = None,
    objective: Objective = train_once,
    going: Callable[[], bool] = lambda: True,
) -> None:
    """Run trials of ``study`` until it has ``target`` results, or the space of its manifest is exhausted.

    Any number of processes on any number of machines may work at once. ``worker`` is a unique mark of this worker's
    trials. ``going`` is called before each trial; False ends the worker.

    Raises:
        Error: a baseline or a plain configuration failed, as all others would, or the database is unreachable.
    """
    run = Run(**study.manifest.run)
    run = replace(run, device=device or run.device)
    worker = worker or worker_name(os.getpid(), uuid.uuid4().hex)
    while going():
        study.lose_silent(study.trials())
        trials = study.trials()
        if sum(trial.finished for trial in trials) >= target:
            return
        full = sum(trial.counts for trial in trials) >= target
        configuration = None if full else propose(space, trials, run.seed, sampler)
        if configuration is None:
            if not any(trial.state == "running" for trial in trials):
                return  # every configuration has run
            time.sleep(POLL)
            continue
        lost = sum(trial.key == configuration.key and trial.state == "lost" for trial in trials)
        claim = study.claim(configuration, space, worker, target)
        if claim is not None:
            with contextlib.suppress(TakenOver):
                _run(study, claim, configuration, run, lost, objective)


def _run(
    study: Study, claim: optuna.Trial, configuration: Configuration, run: Run, lost: int, objective: Objective
) -> None:
    """Run one trial to its end, or until another worker takes it over."""
    started = time.monotonic()
    reported: list[float] = []
    is_baseline = configuration.kind == "baseline"

    def ended(outcome: str, *, fatal: bool = False, **more: Any) -> None:
        """Write the result; if ``fatal``, instead withdraw the trial and raise an Error that ends the sweep."""
        if fatal:
            study.withdraw(claim.number, more["reason"])
            what = f"{'baseline' if is_baseline else 'plain configuration'} {configuration.summary!r}"
            raise Error(f"the {what} failed, and so would all others: {more['reason']}")
        study.finish(claim.number, {"outcome": outcome, "seconds": time.monotonic() - started, **more})

    def report(step: int, loss: float) -> None:
        claim.report(loss, len(reported))
        reported.append(loss)
        if configuration.kind == "trial" and claim.should_prune():
            raise optuna.TrialPruned

    if configuration.error is not None:
        return ended("refused", reason=str(configuration.error))
    if lost >= LOSSES:
        return ended("failed", fatal=is_baseline, reason=f"{lost} workers ended while they trained this configuration")
    try:
        with study.beating(claim.number):
            outcome = objective(replace(run, policy=configuration.document, **configuration.run), report)
    except optuna.TrialPruned:
        ended("pruned", loss=reported[-1])
    except (TakenOver, Away):
        raise  # not the configuration's fault
    except PolicyError as error:
        ended("refused", fatal=configuration.kind != "trial", reason=str(error))
    except Exception as error:  # noqa: BLE001 - any exception of a training is its result
        with contextlib.suppress(OSError):  # a full disk loses the log, not the result
            traceback.print_exc()
        reason = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
        ended("failed", fatal=is_baseline, reason=reason[:4000])
        if isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError):
            sys.exit(REPLACE)  # this process can no longer use its accelerator, except after running out of memory
    except BaseException:
        study.withdraw(claim.number, "interrupted")
        raise
    else:
        data = outcome.to_json()
        data["loss"] = data.pop("validation_loss")
        ended("diverged" if outcome.diverged else "complete", **data)


def worker_name(pid: int, token: str) -> str:
    """Return the mark of a worker's trials. The token distinguishes machines with equal names and process numbers."""
    return f"{socket.gethostname()}:{pid}:{token}"


@dataclass(frozen=True)
class Job:
    """The arguments of a worker process besides the study's settings. ``log`` is the folder of the workers' logs."""

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
        for name, choices in (("sampler", SAMPLERS), ("pruner", PRUNERS)):
            if getattr(self, name) not in choices:
                raise Error(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(choices)}")

    def log_of(self, index: int) -> Path:
        return Path(self.log) / f"worker-{index}.log"


class _Worker(NamedTuple):
    """A process, the pipe for its last error, the mark of its trials, and the sweep's progress at its start."""

    process: Any
    pipe: Any
    name: str
    progress: int


def _process(job: Job, index: int, token: str, parent: int, pipe: Any) -> None:
    """Run a worker process. Write its output to its log, and send an Error to the parent process."""
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
            device=f"cuda:{index % count}" if count > 1 else job.device,  # workers share several GPUs evenly
            objective=job.objective,
            going=lambda: os.getppid() == parent,  # an orphan only finishes its trial
        )
    except Error as error:
        pipe.send(str(error))
        sys.exit(1)


class Workers:
    """A context in which the worker processes of one sweep run on this machine."""

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
        with _blocked(signal.SIGINT, signal.SIGTERM):  # a second signal must not leave a worker running
            for worker in self._running.values():
                worker.process.terminate()  # safe in the middle of a trial: the trial is withdrawn below
        for worker in self._running.values():
            worker.process.join()
        self._study.storage.ask_again = HURRIED
        with contextlib.suppress(Error):  # without a database, the missing heartbeats free the trials
            for number in self._trials_of(*self._running.values()):
                self._study.withdraw(number, "interrupted")

    def _start(self, index: int) -> None:
        context, token = multiprocessing.get_context("spawn"), uuid.uuid4().hex
        receiver, sender = context.Pipe(duplex=False)
        process: Any = context.Process(target=_process, args=(self._job, index, token, os.getpid(), sender))
        # Ctrl-C reaches all processes of a terminal, but only this one handles it. A worker inherits the block, because
        # it could set a handler only after seconds of imports. Starting the tracker in the block would lift the block.
        resource_tracker.ensure_running()
        with _blocked(signal.SIGINT):
            process.start()
        sender.close()
        self._running[index] = _Worker(process, receiver, worker_name(process.pid, token), self._progress())

    def watch(self, stop: Callable[[], bool] = lambda: False) -> Iterator[tuple[list[Trial], list[str]]]:
        """Yield the trials and the events of workers about once a second, until all workers have ended.

        A killed worker is replaced as long as trials make progress, and its trial is freed at once. ``stop`` is called
        before dead workers are replaced, because a signal that stops the sweep may have ended the workers too.

        Raises:
            Error: a worker raised an Error, or a worker ended and no trial made progress since its start.
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
        """Free the trial of a killed worker, start a new worker, and yield the event; ignore a finished worker."""
        del self._running[index]
        with contextlib.suppress(EOFError):
            if worker.pipe.poll():
                raise Error(worker.pipe.recv())
        if (code := worker.process.exitcode) == 0:
            return
        for number in self._trials_of(worker):
            self._study.lose(number)
        status = "its device became unusable" if code == REPLACE else f"exit status {code}"
        event = f"worker {index} ended ({signal.Signals(-code).name if code < 0 else status}); its trial is free again"
        if self._progress() == worker.progress:
            raise Error(f"{event}; see {self._job.log_of(index)} for the cause")
        self._start(index)
        yield event

    def _progress(self) -> int:
        """Count the trials that have ended. The count grows while workers make progress, but not without bound."""
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
