"""A sweep's trials in a database, through Optuna; each trial is claimed by one worker.

One transaction writes a trial with its full configuration, and transactions number the trials. A reader of trial n
therefore sees all trials before it. If two workers choose the same configuration, the trial with the lower number runs,
and the other trial is withdrawn. A trial's ``result`` is one attribute, written before Optuna's state.

Workers send Optuna's heartbeats, and Optuna fails the trials of silent workers. This module handles two cases that
Optuna does not: A worker may die before its trial's first heartbeat, so an observer sends the first heartbeat. A kill
may lose Optuna's retry callback, so the next proposal finds the lost trial.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import optuna
import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning, UpdateFinishedTrialError
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import RandomSampler
from optuna.storages import fail_stale_trials
from optuna.storages._heartbeat import HeartbeatThread
from optuna.trial import FrozenTrial, TrialState

from fp4graph.errors import Error
from fp4graph.lab.runs.run import finite
from fp4graph.lab.sweeps.database import Storage
from fp4graph.lab.sweeps.results import FREE, Results, Trial
from fp4graph.lab.sweeps.space import Assignment, Configuration, Space

#: The format of studies. Format 1 had other heartbeats; its results are still readable.
FORMAT = 2
#: Pruners by name; a pruner's step is a validation.
PRUNERS: dict[str, Callable[[], BasePruner]] = {
    "none": NopPruner,
    "median": partial(MedianPruner, n_startup_trials=5, n_warmup_steps=1),
    "hyperband": HyperbandPruner,
}
#: Raised when a worker reports a loss or a result of a trial that it no longer has, because it counted as dead.
TakenOver = UpdateFinishedTrialError


@dataclass(frozen=True)
class Manifest:
    """The settings that all trials of a study share; a sweep with other settings needs another study.

    ``run`` is the run that configurations change, without device and workers. ``space`` is the search space as YAML.
    ``patience`` is the number of seconds without a heartbeat after which a worker counts as dead.
    """

    task: str
    run: Mapping[str, Any]
    space: str
    space_name: str
    space_digest: str
    patience: float
    fp4graph: str = version("fp4graph")
    format: int = FORMAT

    @classmethod
    def of(cls, space: Space, run: Mapping[str, Any], patience: float) -> Manifest:
        common = {key: value for key, value in run.items() if key not in ("policy", "device", "workers")}
        return cls(str(run["task"]), common, space.text, space.name, space.digest, patience)

    def differences(self, other: Manifest) -> list[str]:
        """Return in words how these settings differ from ``other``, the settings of a study."""
        differences = []
        old, new = (f"{m.fp4graph} of fp4graph (form {m.format})" for m in (other, self))
        if old != new:
            differences.append(f"version {old}, and this is {new}")
        if self.space_digest != other.space_digest:
            same = " under the same name" if self.space_name == other.space_name else ""
            differences.append(f"another search space{same} ({other.space_name!r}, and now it is {self.space_name!r})")
        for key in sorted({*self.run, *other.run}, key=lambda key: (key != "task", key)):
            old, new = ("unset" if (value := m.run.get(key)) is None else repr(value) for m in (other, self))
            if old != new:
                differences.append(f"{'the task' if key == 'task' else key} {old}, and now it is {new}")
        return differences


class Study:
    """A sweep's study in its database. Make one with :meth:`create` or :meth:`open`.

    Every method raises ``Away`` if the database does not answer in time.
    """

    def __init__(self, storage: Storage, study: optuna.Study, manifest: Manifest) -> None:
        storage.heartbeat_interval = max(1, round(manifest.patience / 6))
        storage.grace_period = max(1, round(manifest.patience))
        self.storage, self._study = storage, study
        self._id = storage.get_study_id_from_name(study.study_name)
        self._seen: set[int] = set()
        self.name, self.manifest = study.study_name, manifest

    @classmethod
    def create(cls, url: str, name: str, manifest: Manifest, pruner: str = "none") -> Study:
        """Open the study of that name, or create it.

        Raises:
            Error: as for :meth:`open`, or the study has another manifest.
        """
        storage = Storage(url)
        with suppress(DuplicatedStudyError):
            made = optuna.create_study(storage=storage, study_name=name, sampler=RandomSampler())
            made.set_user_attr("fp4graph", asdict(manifest))
        study = cls.open(url, name, pruner)
        if different := manifest.differences(study.manifest):
            raise Error(
                f"study {name!r} in {storage.shown} was made with {'; with '.join(different)}. Results would not be "
                "comparable: give the new study another name with --study, or use the settings of the old study. "
                "fp4graph sweep-results still reads the old study"
            )
        return study

    @classmethod
    def open(cls, url: str, name: str, pruner: str = "none") -> Study:
        """Open the study of that name; ``pruner`` is one of :data:`PRUNERS`.

        Raises:
            Error: the database cannot be reached or has no such study, or another program or a later fp4graph wrote it.
        """
        storage = Storage(url, existing=True)
        names = optuna.get_all_study_names(storage)
        if name not in names:
            raise Error(f"{storage.shown} has no study {name!r}; it has {', '.join(sorted(names)) or 'none'}")
        study = optuna.load_study(study_name=name, storage=storage, sampler=RandomSampler(), pruner=PRUNERS[pruner]())
        for _ in range(50):  # wait for the manifest of a study that is being created
            if (manifest := study.user_attrs.get("fp4graph")) or study.get_trials(deepcopy=False):
                break
            time.sleep(0.1)
        if not isinstance(manifest, dict) or "format" not in manifest:
            raise Error(
                f"study {name!r} in {storage.shown} is not a sweep: another program made it, or fp4graph was stopped "
                "while making it; give another name with --study"
            )
        if manifest["format"] > FORMAT:
            raise Error(
                f"study {name!r} in {storage.shown} was written by fp4graph {manifest.get('fp4graph')} in a form that "
                f"this version, {version('fp4graph')}, does not know; update fp4graph"
            )
        return cls(storage, study, Manifest(**manifest))

    def trials(self) -> list[Trial]:
        """Return all trials, by number."""
        excused = self._study.user_attrs.get("excused", ())
        frozen = self._study.get_trials(deepcopy=False)
        return [_read(trial, trial.number in excused) for trial in frozen if "configuration" in trial.user_attrs]

    def results(self) -> Results:
        """Return the results so far."""
        return Results.of(self.name, self.manifest.task, self.trials())

    def claim(self, configuration: Configuration, space: Space, worker: str, target: int) -> optuna.Trial | None:
        """Create a trial of ``configuration``; return None if another trial has it, or ``target`` trials have begun."""
        policy = configuration.policy
        attributes = {name: getattr(configuration, name) for name in ("kind", "family", "summary", "key")} | {
            "complexity": None if policy is None else policy.complexity,
            "policy": policy.to_yaml() if policy else yaml.safe_dump(configuration.document, sort_keys=False),
            "assignment": dict(configuration.assignment),
            "run": dict(configuration.run),
            "worker": worker,
        }
        attrs = {"configuration": attributes}
        template = optuna_trial(space, configuration.assignment, state=TrialState.RUNNING, user_attrs=attrs)
        claim = optuna.Trial(self._study, self.storage.create_new_trial(self._id, template))
        before = [trial for trial in self.trials() if trial.number < claim.number]
        same = [trial.number for trial in before if trial.key == configuration.key and trial.state not in FREE]
        if not same and (policy is None or sum(trial.counts for trial in before) < target):
            return claim
        reason = f"trial {same[0]} has the same configuration" if same else "the requested number of trials has begun"
        self.withdraw(claim.number, reason)
        return None

    def finish(self, number: int, result: Mapping[str, Any]) -> None:
        """Write a trial's result, which has at least an ``outcome``.

        Raises:
            TakenOver: the trial is no longer this worker's; the result is dropped.
        """
        self.storage.set_trial_user_attr(self._trial_id(number), "result", finite(result))
        states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
        state = states.get(result["outcome"], TrialState.FAIL)
        self._tell(number, state, result["loss"] if state is TrialState.COMPLETE else None)

    def withdraw(self, number: int, reason: str) -> None:
        """Take a trial back, as if it had never begun."""
        with suppress(TakenOver):
            self.finish(number, {"outcome": "withdrawn", "reason": reason})

    def lose(self, number: int) -> None:
        """Record that the worker of a running trial has died."""
        self._tell(number, TrialState.FAIL)

    def excuse_failed(self) -> int:
        """Let the configurations of all failed trials run again, and return their number."""
        failed = [trial.number for trial in self.trials() if trial.state == "failed"]
        self._study.set_user_attr("excused", [*self._study.user_attrs.get("excused", []), *failed])
        return len(failed)

    def lose_silent(self, trials: list[Trial]) -> None:
        """Lose the running trials whose workers sent no heartbeat for too long."""
        for number in [t.number for t in trials if t.state == "running" and t.number not in self._seen]:
            self.storage.begin_heartbeats(self._trial_id(number))  # without one, a trial never becomes stale
            self._seen.add(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            fail_stale_trials(self._study)

    def beating(self, number: int) -> HeartbeatThread:
        """Return a context in which Optuna sends a trial's heartbeats."""
        return HeartbeatThread(self._trial_id(number), self.storage)

    def _trial_id(self, number: int) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self._id, number)

    def _tell(self, number: int, state: TrialState, value: float | None = None) -> None:
        with suppress(TakenOver):  # another worker may end the trial at the same time
            self._study.tell(number, value, state, skip_if_finished=True)


def _read(trial: FrozenTrial, excused: bool) -> Trial:
    """Read one of Optuna's trials; ``excused`` failures count as withdrawn."""
    attributes = trial.user_attrs
    result = attributes.get("result", {})
    state = result.get("outcome") or ("lost" if trial.state.is_finished() else "running")
    if excused or "withdrawn" in attributes:  # format 1 has this attribute
        state = "withdrawn"
    reports = tuple(value for _, value in sorted(trial.intermediate_values.items()))
    return Trial(trial.number, state, reports=reports, result=result, **attributes["configuration"])


def optuna_trial(space: Space, assignment: Assignment, **more: Any) -> FrozenTrial:
    """Return a trial whose assignment Optuna's tools read; ``more`` are arguments of ``optuna.create_trial``."""
    taken = (parameter for parameter in space.parameters if parameter.name in assignment)
    distributions: dict[str, BaseDistribution] = {p.name: CategoricalDistribution(tuple(p.choices)) for p in taken}
    return optuna.create_trial(params=dict(assignment), distributions=distributions, **more)
