"""A sweep's trials in a database, through Optuna: claimed by one worker each, with their results.

A trial is written with all that determines it in one transaction; transactions number the trials. A reader of trial n
therefore sees all trials before it, and two workers that chose the same configuration agree without speaking: the lower
number runs, the other withdraws. A worker writes a sign of life regularly (``beat``). If the beat does not change for
``patience`` seconds by an observer's clock, the worker counts as gone, and its trial as lost: the configuration is free
again. A trial's ``result`` is one value, written before Optuna is told, so that after a kill in between the next reader
finds it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

import optuna
import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import RandomSampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from fp4graph.errors import Error
from fp4graph.lab.runs.run import finite
from fp4graph.lab.sweeps.database import AWAY, answering, open_storage, reason
from fp4graph.lab.sweeps.space import Assignment, Configuration, Space
from fp4graph.lab.sweeps.trial import FREE, Trial, read_trial

#: The version of the attributes that this module writes; a later version may not be readable.
FORMAT = 1
#: Seconds for which a database that stopped answering in the middle of a sweep is asked again.
ASK_AGAIN = 120.0
#: The same for clean-up that only makes the next start quicker.
HURRIED = 5.0
#: Pruners by name; their steps are validations.
PRUNERS: dict[str, Callable[[], BasePruner]] = {
    "none": NopPruner,
    "median": partial(optuna.pruners.MedianPruner, n_startup_trials=5, n_warmup_steps=1),
    "hyperband": optuna.pruners.HyperbandPruner,
}
_T = TypeVar("_T")


def _pruner(name: str) -> BasePruner:
    if name not in PRUNERS:
        raise Error(f"unknown pruner {name!r}; known: {', '.join(PRUNERS)}")
    return PRUNERS[name]()


class Away(Error):
    """The database has not answered for too long."""


class TakenOver(Exception):
    """This worker was taken to be gone, and its trial belongs to others now: its result is dropped."""


@dataclass(frozen=True)
class Manifest:
    """The settings that all trials of a study share; a sweep with other settings needs another study.

    ``run`` is the run that configurations are laid over, without device and workers. ``space`` is the search space as
    YAML. ``patience`` is the seconds without a beat after which a worker counts as gone.
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
        """Return in words the differences between the settings of a study, ``other``, and these."""
        found = []
        if self.fp4graph != other.fp4graph:
            found.append(f"version {other.fp4graph} of fp4graph, and this is {self.fp4graph}")
        if self.task != other.task:
            found.append(f"the task {other.task!r}, and now it is {self.task!r}")
        if self.space_digest != other.space_digest:
            same = " under the same name" if self.space_name == other.space_name else ""
            found.append(f"another search space{same} ({other.space_name!r}, and now it is {self.space_name!r})")
        for key in sorted({*self.run, *other.run} - {"task"}):
            mine, theirs = self.run.get(key), other.run.get(key)
            if mine != theirs:
                was, is_now = ("unset" if value is None else repr(value) for value in (theirs, mine))
                found.append(f"{key} {was}, and now it is {is_now}")
        return found


class Study:
    """A sweep's study in its database. Make one with :meth:`create` or :meth:`open`.

    Every method may raise :class:`Away` where the database does not answer for :data:`ASK_AGAIN` seconds.
    """

    def __init__(self, storage: RDBStorage, study: optuna.Study, manifest: Manifest, shown: str) -> None:
        self._storage = storage
        self._study = study
        self._id = storage.get_study_id_from_name(study.study_name)
        self._patience = ASK_AGAIN
        self._beats: dict[int, tuple[int, float]] = {}
        self.name, self.manifest, self.shown = study.study_name, manifest, shown

    @classmethod
    def create(cls, url: str, name: str, manifest: Manifest, pruner: str = "none") -> Study:
        """Open the study of that name, or create it.

        Raises:
            Error: as :meth:`open`, or the study has another manifest.
        """
        _pruner(pruner)  # refuses an unknown one before anything is written
        storage, shown = open_storage(url)
        with answering(shown), suppress(DuplicatedStudyError):
            made = optuna.create_study(storage=storage, study_name=name, direction="minimize", sampler=RandomSampler())
            made.set_user_attr("fp4graph", asdict(manifest))
        study = cls.open(url, name, pruner)
        different = manifest.differences(study.manifest)
        if different:
            raise Error(
                f"study {name!r} in {shown} was made with {'; with '.join(different)}. Results of both do not compare: "
                "give a new one another name with --study, or go on with what this one was made with. What it has "
                "stays readable with fp4graph score and fp4graph pareto"
            )
        return study

    @classmethod
    def open(cls, url: str, name: str, pruner: str = "none") -> Study:
        """Open the study of that name; ``pruner`` is one of :data:`PRUNERS`.

        Raises:
            Error: the pruner is unknown; the database cannot be reached, or has no such study; or something else or a
                later fp4graph wrote it.
        """
        chosen = _pruner(pruner)
        storage, shown = open_storage(url, existing=True)
        with answering(shown):
            names = optuna.get_all_study_names(storage)
            if name not in names:
                raise Error(f"{shown} has no study {name!r}; it has {', '.join(sorted(names)) or 'none'}")
            study = optuna.load_study(study_name=name, storage=storage, sampler=RandomSampler(), pruner=chosen)
            manifest = None
            for _ in range(50):  # between a study's creation and its manifest lies a moment
                manifest = study.user_attrs.get("fp4graph")
                if manifest is not None or study.get_trials(deepcopy=False):
                    break
                time.sleep(0.1)
        if not isinstance(manifest, dict) or "format" not in manifest:
            raise Error(
                f"study {name!r} in {shown} is not a sweep's: fp4graph did not make it, or was stopped as it did; give "
                "another name with --study"
            )
        if manifest["format"] > FORMAT:
            raise Error(
                f"study {name!r} in {shown} was written by fp4graph {manifest.get('fp4graph')} in a form that this "
                f"version, {version('fp4graph')}, does not know; update fp4graph, or use the one that wrote it"
            )
        return cls(storage, study, Manifest(**manifest), shown)

    def trials(self) -> list[Trial]:
        """Return all trials, by number."""
        frozen = self._patiently(lambda: self._study.get_trials(deepcopy=False))
        excused = set(self._patiently(lambda: self._study.user_attrs).get("excused", ()))
        return [read_trial(trial, trial.number in excused) for trial in frozen if "configuration" in trial.user_attrs]

    def claim(self, configuration: Configuration, space: Space, worker: str, target: int) -> Claim | None:
        """Create a trial of ``configuration``; return None if another has it, or ``target`` trials were begun."""
        policy = configuration.policy
        attributes = {name: getattr(configuration, name) for name in ("kind", "family", "summary", "key")} | {
            "complexity": None if policy is None else policy.complexity,
            "policy": policy.to_yaml() if policy else yaml.safe_dump(configuration.document, sort_keys=False),
            "assignment": dict(configuration.assignment),
            "run": dict(configuration.run),
            "worker": worker,
        }
        # Optuna knows the parameters too, for its own tools.
        about = {"configuration": attributes}
        template = optuna_trial(space, configuration.assignment, state=TrialState.RUNNING, user_attrs=about)
        identifier = self._patiently(lambda: self._storage.create_new_trial(self._id, template))
        number = self._patiently(lambda: self._storage.get_trial_number_from_id(identifier))
        before = [trial for trial in self.trials() if trial.number < number]
        same = [trial.number for trial in before if trial.key == configuration.key and trial.state not in FREE]
        if same:
            self.withdraw(number, f"trial {same[0]} has the same configuration")
            return None
        if policy is not None and sum(trial.counts for trial in before) >= target:
            self.withdraw(number, "as many as were asked for were begun")
            return None
        return Claim(self, number, identifier)

    def finish(self, number: int, result: Mapping[str, Any]) -> None:
        """Write a trial's result, which has at least an ``outcome``.

        Raises:
            TakenOver: the trial is not this worker's any more.
        """
        if not self._set(number, "result", finite(result)):
            raise TakenOver
        self._tell(number, result)

    def withdraw(self, number: int, reason: str) -> None:
        """Take a trial back, as if it had never been begun."""
        if self._set(number, "withdrawn", reason):
            self._tell(number, {"outcome": "withdrawn"})

    def excuse_failed(self) -> int:
        """Free the configurations of all failed trials, to be run again, and return their number."""
        failed = [trial.number for trial in self.trials() if trial.state == "failed"]
        excused = self._study.user_attrs.get("excused", [])
        if failed:
            self._patiently(lambda: self._study.set_user_attr("excused", [*excused, *failed]))
        return len(failed)

    def lose(self, number: int) -> None:
        """Record that the worker of a running trial is gone."""
        self._tell(number, {"outcome": "lost"})

    def tidy(self, trials: list[Trial]) -> bool:
        """Finish half-written trials, and lose the running trials of silent workers. Return whether any were lost."""
        tidied = False
        for trial in trials:
            if trial.result and not trial.told:
                self._tell(trial.number, trial.result)
            elif trial.state == "running" and self._is_silent(trial):
                self.lose(trial.number)
                tidied = True
        return tidied

    def _is_silent(self, trial: Trial) -> bool:
        """Return whether the trial's beat has not changed for too long, by this process's own clock."""
        now = time.monotonic()
        beat, since = self._beats.get(trial.number, (None, now))
        if beat != trial.beat:
            since = now
        self._beats[trial.number] = trial.beat, since
        return now - since > self.manifest.patience

    def _set(self, number: int, name: str, value: object) -> bool:
        """Write an attribute of a trial, and return whether the trial could be written: it had not ended."""
        identifier = self._patiently(lambda: self._storage.get_trial_id_from_study_id_trial_number(self._id, number))
        try:
            self._patiently(lambda: self._storage.set_trial_user_attr(identifier, name, value))
        except UpdateFinishedTrialError:
            return False
        return True

    def _tell(self, number: int, result: Mapping[str, Any]) -> None:
        """Set Optuna's own state of a trial; only a complete trial may have a value."""
        states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
        state = states.get(result["outcome"], TrialState.FAIL)
        values = result["loss"] if state is TrialState.COMPLETE else None
        with suppress(UpdateFinishedTrialError):  # by another in this moment
            self._patiently(lambda: self._study.tell(number, values, state, skip_if_finished=True))

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Wait only seconds for the database within this context: for work that need not be done."""
        before, self._patience = self._patience, min(HURRIED, self._patience)
        try:
            yield
        finally:
            self._patience = before

    def _patiently(self, action: Callable[[], _T]) -> _T:
        """Run ``action``, and repeat it for a while if the database is busy or away."""
        patience = self._patience
        deadline, delay = time.monotonic() + patience, 0.05
        while True:
            try:
                return action()
            except AWAY as error:
                if time.monotonic() > deadline:
                    raise Away(
                        f"{self.shown} has not answered for {patience:.0f} seconds: {reason(error)}. What is written "
                        "stays; when it answers again, the same command goes on"
                    ) from error
                time.sleep(delay * (1 + random.random()))
                delay = min(2 * delay, 5.0)


class Claim:
    """A running trial of this worker, as a context in which the worker gives signs of life."""

    def __init__(self, study: Study, number: int, identifier: int) -> None:
        self.number = number
        self._study, self._identifier = study, identifier
        self._trial = optuna.trial.Trial(study._study, identifier)
        self._reports = 0
        self._over = threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Claim:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def report(self, loss: float) -> None:
        """Report the loss of the trial's next validation.

        Raises:
            TakenOver: the trial is not this worker's any more.
        """
        if self._lost:
            raise TakenOver
        step, self._reports = self._reports, self._reports + 1
        try:
            self._study._patiently(lambda: self._trial.report(loss, step))
        except UpdateFinishedTrialError:
            raise TakenOver from None

    def should_prune(self) -> bool:
        """Return whether the study's pruner gives this trial up, by its reports and those of other trials."""
        return self._study._patiently(self._trial.should_prune)

    def _beat(self) -> None:
        storage, count = self._study._storage, 0
        while True:
            try:
                storage.set_trial_user_attr(self._identifier, "beat", count)
            except UpdateFinishedTrialError:
                self._lost = True
                break
            except AWAY:
                pass  # the next one may get through
            count += 1
            if self._over.wait(self._study.manifest.patience / 6):
                break
        storage.remove_session()  # this thread's


def optuna_trial(space: Space, assignment: Assignment, **more: Any) -> FrozenTrial:
    """Return a trial of ``assignment`` as Optuna has it; ``more`` is as for ``optuna.create_trial``."""
    taken = (parameter for parameter in space.parameters if parameter.name in assignment)
    distributions: dict[str, BaseDistribution] = {p.name: CategoricalDistribution(tuple(p.choices)) for p in taken}
    return optuna.create_trial(params=dict(assignment), distributions=distributions, **more)
