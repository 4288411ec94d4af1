"""Searching a space: which configuration is next, the worker that trains it, and the processes that do so together."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState

from fp4graph.errors import Error, PolicyError
from fp4graph.experiments.run import Outcome, Run
from fp4graph.experiments.space import Configuration, Space, parse_space
from fp4graph.experiments.study import FREE, Claim, Study, TakenOver, Trial, Watch, make_pruner

Sampler = Literal["random", "tpe"]
Pruner = Literal["none", "median", "hyperband"]
#: Trains a run, calling back with (step, validation loss) after each validation.
Objective = Callable[[Run, Callable[[int, float], None]], Outcome]

#: How often a configuration may take its worker down with it before it is recorded as failed.
LOSSES = 3
#: Draws of known configurations in a row after which all of the space is gone through.
DRAWS = 1000
#: Seconds between looks at the database while there is nothing to do but wait for others.
POLL = 1.0
#: Exit status of a worker that another should take the place of.
REPLACE = 75


class Pruned(Exception):
    """The study's pruner gave a trial up."""


class Interrupted(BaseException):
    """The process was told to stop."""


# ------------------------------------------------------------------ what comes next


def propose(space: Space, trials: Sequence[Trial], seed: int, sampler: Sampler = "random") -> Configuration | None:
    """The configuration to be run next, given all trials of the study; None where there is none, or none yet.

    The baselines come first and alone: without one that came through nothing can be scored, and what is wrong with
    data or device shows there. Then the plain choices in every family, then what was lost with its worker, and then
    what the sampler says: ``random`` gives the same configurations in the same order for equal seeds, however many
    workers there are and whatever became of them; ``tpe`` asks Optuna's tree-structured Parzen estimator for such as
    may have a low loss or a low Ω.
    """
    taken = {trial.key for trial in trials if trial.state not in FREE}
    first = space.first()
    baselines = [configuration for configuration in first if configuration.kind == "baseline"]
    for configuration in first:
        if configuration.kind != "baseline" and not _came_through(trials, baselines):
            return None
        if configuration.key not in taken:
            return configuration
    for trial in trials:
        if trial.state == "lost" and trial.key not in taken:
            return space.configuration(trial.assignment, trial.kind)
    return _drawn(space, trials, taken, seed, sampler)


def _came_through(trials: Sequence[Trial], baselines: Sequence[Configuration]) -> bool:
    keys = {baseline.key for baseline in baselines}
    return any(trial.key in keys and trial.finished for trial in trials)


def _drawn(space: Space, trials: Sequence[Trial], taken: set[str], seed: int, sampler: Sampler) -> Configuration | None:
    draws: Iterator[Mapping[str, str]] = (space.draw(random.Random(f"{seed}:{draw}")) for draw in itertools.count())
    if sampler == "tpe":
        draws = itertools.chain(_estimated(space, trials, seed), draws)
    in_a_row = 0
    known: set[tuple[tuple[str, str], ...]] = {tuple(t.assignment.items()) for t in trials if t.key in taken}
    for assignment in draws:
        if tuple(assignment.items()) not in known:
            configuration = space.configuration(assignment)
            if configuration.key not in taken:
                return configuration
            known.add(tuple(assignment.items()))
            in_a_row = 0
        in_a_row += 1
        if in_a_row > DRAWS + len(trials):
            break
    remaining = (space.configuration(a) for a in space.assignments() if tuple(a.items()) not in known)
    return next((configuration for configuration in remaining if configuration.key not in taken), None)


def _estimated(space: Space, trials: Sequence[Trial], seed: int) -> Iterator[Mapping[str, str]]:
    """A few suggestions of Optuna's TPE from the trials so far; a running one counts as bad, so that others differ."""
    estimator = optuna.samplers.TPESampler(seed=seed + len(trials), constant_liar=True, n_startup_trials=10)
    study = optuna.create_study(sampler=estimator, directions=["minimize", "minimize"])
    choices = {parameter.name: CategoricalDistribution(tuple(parameter.choices)) for parameter in space.parameters}
    for trial in trials:
        if trial.kind == "baseline" or trial.complexity is None or not trial.counts:
            continue
        running = trial.state == "running"
        loss = float("inf") if trial.loss is None or trial.state in ("diverged", "failed") else trial.loss
        study.add_trial(
            optuna.create_trial(
                state=TrialState.RUNNING if running else TrialState.COMPLETE,
                values=None if running else [loss, trial.complexity],
                params=dict(trial.assignment),
                distributions={name: choices[name] for name in trial.assignment},
            )
        )
    for _ in range(20):
        suggested = study.ask()
        assignment: dict[str, str] = {}
        for parameter in space.parameters:
            if parameter.open_to(assignment):
                assignment[parameter.name] = suggested.suggest_categorical(parameter.name, tuple(parameter.choices))
        study.tell(suggested, state=TrialState.FAIL)
        if space.contains(assignment):  # a choice may have a condition that the estimator does not know
            yield assignment


# ------------------------------------------------------------------ a worker


def train_once(run: Run, report: Callable[[int, float], None]) -> Outcome:
    """The objective: one training, as ``fp4graph train`` does it."""
    import torch

    from fp4graph.experiments.train import train

    torch.compiler.reset()  # each trial is a model of its own, and Dynamo allows few per function
    gc.collect()
    return train(run, report=report)


def work(
    study: Study,
    space: Space,
    target: int,
    *,
    sampler: Sampler = "random",
    device: str | None = None,
    objective: Objective = train_once,
    going: Callable[[], bool] = lambda: True,
) -> None:
    """Run trials of ``study`` until it has ``target`` results, or the space has no more.

    Any number of processes, on any number of machines, may do so at once.

    Args:
        study: its manifest says what is trained.
        space: its manifest's space.
        target: results in all, those that were there before included; refused configurations do not count.
        device: in place of the run's.
        going: asked before each trial; the worker returns where it says no.

    Raises:
        Error: a baseline failed: so would everything else; or the database went away.
    """
    run = Run(**study.manifest.run)
    if device is not None:
        run = replace(run, device=device)
    watch = Watch(study.manifest.patience)
    worker = f"{socket.gethostname()}:{os.getpid()}"
    while going():
        trials = study.trials()
        if study.tidy(trials, watch.silent):
            continue
        if sum(trial.finished for trial in trials) >= target:
            return
        running = any(trial.state == "running" for trial in trials)
        full = sum(trial.counts for trial in trials) >= target
        configuration = None if full else propose(space, trials, run.seed, sampler)
        if configuration is None:
            if not running:
                return  # nothing is left to be run
            time.sleep(POLL)
            continue
        lost = sum(trial.key == configuration.key and trial.state == "lost" for trial in trials)
        claim = study.claim(configuration, space, worker, target)
        if claim is not None:
            with contextlib.suppress(TakenOver):
                _run(study, claim, configuration, run, lost, objective)


def _run(study: Study, claim: Claim, configuration: Configuration, run: Run, lost: int, objective: Objective) -> None:
    """One trial, to its end or until someone else has it."""
    if configuration.refusal is not None:
        study.finish(claim.number, {"outcome": "refused", "reason": configuration.refusal})
        return
    if lost >= LOSSES:
        reason = f"its worker's process ended {lost} times while it ran"
        study.finish(claim.number, {"outcome": "failed", "reason": reason})
        return
    started = time.monotonic()

    def ended(outcome: str, **more: Any) -> None:
        study.finish(claim.number, {"outcome": outcome, "seconds": time.monotonic() - started, **more})

    def report(step: int, loss: float) -> None:
        claim.report(loss)
        if configuration.kind == "trial" and claim.should_prune():
            raise Pruned

    try:
        with claim:
            outcome = objective(replace(run, policy=configuration.document, **configuration.run), report)
    except Pruned:
        last = next(trial.reports[-1] for trial in study.trials() if trial.number == claim.number)
        ended("pruned", loss=last)
    except TakenOver:
        raise
    except PolicyError as error:
        ended("refused", reason=str(error))
    except Exception as error:
        traceback.print_exc()
        reason = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
        if configuration.kind == "baseline":
            study.withdraw(claim.number, reason)
            raise Error(f"the baseline {configuration.summary!r} failed, and so would all others: {reason}") from error
        ended("failed", reason=reason[:4000])
        if _device_is_broken(error):
            sys.exit(REPLACE)
    except BaseException:
        study.withdraw(claim.number, "interrupted")
        raise
    else:
        data = outcome.to_json()
        data["loss"] = data.pop("validation_loss")
        ended("diverged" if outcome.diverged else "complete", **data)


def _device_is_broken(error: Exception) -> bool:
    """Whether a process can use its accelerator no more; running out of its memory is survived."""
    import torch

    broken = getattr(torch, "AcceleratorError", ())
    return isinstance(error, broken) and not isinstance(error, torch.OutOfMemoryError)


# ------------------------------------------------------------------ processes


@dataclass(frozen=True)
class Job:
    """What a worker process needs to know; the rest is in the study."""

    url: str
    study: str
    target: int
    sampler: Sampler
    pruner: Pruner
    device: str
    log: str
    workers: int
    index: int = 0
    parent: int = 0
    objective: Objective = train_once

    def __post_init__(self) -> None:
        for name, known in (("sampler", get_args(Sampler)), ("pruner", get_args(Pruner))):
            if getattr(self, name) not in known:
                raise Error(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")


def _process(job: Job, parent: Connection) -> None:
    """A worker process. What it prints goes to its log; an Error is sent to the process that started it."""
    with Path(job.log).open("a", encoding="utf-8", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    import torch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.workers))
    try:
        study = Study.open(job.url, job.study, make_pruner(job.pruner))
        space = parse_space(study.manifest.space, f"space of study {job.study}")
        work(
            study,
            space,
            job.target,
            sampler=job.sampler,
            device=_device(job),
            objective=job.objective,
            going=lambda: os.getppid() == job.parent,  # an orphan finishes its trial, and no more
        )
    except Error as error:
        parent.send(str(error))
        sys.exit(1)
    except Interrupted:
        sys.exit(1)


def _interrupt(*_: object) -> None:
    raise Interrupted


def _device(job: Job) -> str:
    """The job's; where there are several accelerators, they are dealt out."""
    import torch

    count = torch.cuda.device_count() if job.device in ("auto", "cuda") else 0
    return f"cuda:{job.index % count}" if count > 1 else job.device


class Workers:
    """The worker processes of one sweep on this machine: a context in which they run."""

    def __init__(self, job: Job, study: Study) -> None:
        self._job, self._study = job, study
        self._context = multiprocessing.get_context("spawn")
        self._running: dict[int, tuple[Any, Connection, int]] = {}

    def __enter__(self) -> Workers:
        for index in range(self._job.workers):
            self._start(index)
        return self

    def __exit__(self, *_: object) -> None:
        for process, _pipe, _progress in self._running.values():
            process.terminate()
        for process, _pipe, _progress in self._running.values():
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()

    def _start(self, index: int) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        log = str(Path(self._job.log) / f"worker-{index}.log")
        job = replace(self._job, log=log, index=index, parent=os.getpid())
        process = self._context.Process(target=_process, args=(job, theirs), name=f"worker {index}")
        process.start()
        theirs.close()
        self._running[index] = process, ours, _progress(self._study.trials())

    def watch(self) -> Iterator[tuple[list[Trial], list[str]]]:
        """The trials, and what happened to workers meanwhile, about once a second until all workers are through.

        A worker that was killed is replaced, as long as trials go on: its own is at once free for others.

        Raises:
            Error: what a worker could not go on after, or that they end without doing anything.
        """
        while self._running:
            events: list[str] = []
            for index, (process, pipe, progress) in list(self._running.items()):
                if process.is_alive():
                    continue
                del self._running[index]
                if pipe.poll():
                    with contextlib.suppress(EOFError):
                        raise Error(pipe.recv())
                if process.exitcode == 0:
                    continue
                self._release(process.pid)
                events.append(f"worker {index} ended ({_ending(process.exitcode)}); its trial is free again")
                if _progress(self._study.trials()) == progress:
                    raise Error(f"{events[-1]}; {self._job.log}/worker-{index}.log may say why")
                self._start(index)
            yield self._study.trials(), events
            time.sleep(POLL)
        yield self._study.trials(), []

    def _release(self, pid: int) -> None:
        worker = f"{socket.gethostname()}:{pid}"
        for trial in self._study.trials():
            if trial.worker == worker and trial.state == "running":
                self._study.lose(trial.number)


def _progress(trials: Sequence[Trial]) -> int:
    """What grows as long as workers do anything at all; bounded, as losses of one configuration are."""
    return sum(trial.finished or trial.state in ("lost", "refused") for trial in trials)


def _ending(code: int) -> str:
    if code == REPLACE:
        return "its device was of no more use"
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"
