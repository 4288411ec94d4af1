"""The search of a space: the choice of the next configuration, and the worker that trains it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import optuna
import torch
from optuna.trial import TrialState

from fp4graph.errors import Error, PolicyError
from fp4graph.lab.runs.run import Outcome, Run
from fp4graph.lab.sweeps.database import Away
from fp4graph.lab.sweeps.results import FREE, Trial
from fp4graph.lab.sweeps.space import Configuration, Parameter, Space
from fp4graph.lab.sweeps.study import Study, TakenOver, optuna_trial

SAMPLERS = ("random", "tpe")
#: Trains a run, calling back with (step, validation loss) after each validation.
Objective = Callable[[Run, Callable[[int, float], None]], Outcome]

#: The number of times a configuration may end its worker's process before it is recorded as failed.
LOSSES = 3
#: Draws, and ten more per trial, after which all of the space is gone through.
DRAWS = 1000
#: Seconds between looks at the database while there is nothing to do but wait for others.
POLL = 1.0
#: Exit status of a worker that another should take the place of.
REPLACE = 75


def propose(space: Space, trials: Sequence[Trial], seed: int, sampler: str = "random") -> Configuration | None:
    """Return the next configuration to run, given all trials of the study; None if there is none, or none yet.

    The baselines come first and alone: without a finished one nothing can be scored, and faults of data or device show
    there. Then come the plain choices in every family, the lost trials, and the sampler's choices: ``random`` ones are
    the same for equal seeds, whatever the number and the fate of the workers.
    """
    taken = {trial.key for trial in trials if trial.state not in FREE}
    first = space.first()
    baselines = {configuration.key for configuration in first if configuration.kind == "baseline"}
    has_baseline = any(trial.key in baselines and trial.finished for trial in trials)
    for configuration in first:
        if configuration.kind != "baseline" and not has_baseline:
            return None
        if configuration.key not in taken:
            return configuration
    for trial in trials:
        if trial.state == "lost" and trial.key not in taken:
            return space.configuration(trial.assignment, trial.kind)
    return _drawn(space, trials, taken, seed, sampler)


def _drawn(space: Space, trials: Sequence[Trial], taken: set[str], seed: int, sampler: str) -> Configuration | None:
    estimated = _estimated(space, trials, seed) if sampler == "tpe" else ()
    draws = (space.draw(random.Random(f"{seed}:{draw}")) for draw in range(DRAWS + 10 * len(trials)))
    known = {tuple(trial.assignment.items()) for trial in trials if trial.key in taken}
    for assignment in itertools.chain(estimated, draws, space.assignments()):
        if tuple(assignment.items()) not in known:
            configuration = space.configuration(assignment)
            if configuration.key not in taken:
                return configuration
            known.add(tuple(assignment.items()))
    return None


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
        assignment = space.assigned(partial(_asked, ask))
        study.tell(ask, state=TrialState.FAIL)
        if space.contains(assignment):  # a choice may have a condition that the estimator does not know
            yield assignment


def _asked(ask: optuna.Trial, parameter: Parameter, labels: list[str]) -> str:
    return ask.suggest_categorical(parameter.name, tuple(parameter.choices))


def train_once(run: Run, report: Callable[[int, float], None]) -> Outcome:
    """The objective: one training, as ``fp4graph train`` does it."""
    from fp4graph.lab.runs.train import train

    torch.compiler.reset()  # each trial is a model of its own, and Dynamo allows few per function
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
    """Run trials of ``study`` until it has ``target`` results, or the space of its manifest has no more.

    Any number of processes, on any number of machines, may do so at once. ``worker`` is a unique mark of this one's
    trials. ``going`` is asked before each trial; False ends the worker.

    Raises:
        Error: a baseline or a plain configuration failed, as all others would; or the database went away.
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
                return  # nothing is left to be run
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
    """Run one trial to its end, or until another worker has it."""
    started = time.monotonic()
    reported: list[float] = []
    is_baseline = configuration.kind == "baseline"

    def ended(outcome: str, *, fatal: bool = False, **more: Any) -> None:
        """Write the result; withdraw the trial and raise an Error where all other configurations would fail too."""
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
        return ended("failed", fatal=is_baseline, reason=f"its worker's process ended {lost} times while it ran")
    try:
        with study.beating(claim.number):
            outcome = objective(replace(run, policy=configuration.document, **configuration.run), report)
    except optuna.TrialPruned:
        ended("pruned", loss=reported[-1])
    except (TakenOver, Away):
        raise  # nothing that this configuration did
    except PolicyError as error:
        ended("refused", fatal=configuration.kind != "trial", reason=str(error))
    except Exception as error:  # noqa: BLE001 - whatever a training raises is its result
        with contextlib.suppress(OSError):  # a full disk costs the log, not the result
            traceback.print_exc()
        reason = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
        ended("failed", fatal=is_baseline, reason=reason[:4000])
        if isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError):
            sys.exit(REPLACE)  # this process cannot use its accelerator any more; running out of memory is survived
    except BaseException:
        study.withdraw(claim.number, "interrupted")
        raise
    else:
        data = outcome.to_json()
        data["loss"] = data.pop("validation_loss")
        ended("diverged" if outcome.diverged else "complete", **data)


def worker_name(pid: int, token: str) -> str:
    """Return the mark of a worker's trials. The token tells machines apart that share a name and process numbers."""
    return f"{socket.gethostname()}:{pid}:{token}"
