"""A trial of a sweep as data: one configuration, and the state of its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from optuna.trial import FrozenTrial

#: States that count towards the requested number of results.
COUNTED = ("running", "complete", "diverged", "failed", "pruned")
#: States in which a trial's configuration is free to be run again.
FREE = ("lost", "withdrawn")


@dataclass(frozen=True)
class Trial:
    """One trial, as the database has it: its configuration (``policy`` as YAML), and what came of it.

    ``state`` is running; complete, diverged, failed, pruned or refused, which are final; lost (its worker is gone); or
    withdrawn (another has the configuration, the sweep was interrupted, a failure excused). ``result`` has loss,
    metrics, seconds, reason, ...
    """

    number: int
    state: str
    kind: str
    family: str
    summary: str
    key: str
    complexity: float | None
    policy: str
    assignment: Mapping[str, str]
    run: Mapping[str, Any]
    worker: str
    reports: tuple[float, ...] = ()
    result: Mapping[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """Validation loss; of a running trial the last reported."""
        loss = self.result.get("loss")
        return loss if loss is not None else self.reports[-1] if self.reports and self.state != "diverged" else None

    @property
    def counts(self) -> bool:
        """True for a trial that counts towards the requested number of results."""
        return self.state in COUNTED

    @property
    def finished(self) -> bool:
        """True for a trial that counts and has ended."""
        return self.counts and self.state != "running"


def read_trial(trial: FrozenTrial, excused: bool) -> Trial:
    """Read one of Optuna's trials; ``excused`` failures count as withdrawn."""
    attributes = trial.user_attrs
    result = attributes.get("result", {})
    state = result.get("outcome") or ("lost" if trial.state.is_finished() else "running")
    if excused or "withdrawn" in attributes:  # the attribute is that of form 1
        state = "withdrawn"
    reports = tuple(trial.intermediate_values[step] for step in sorted(trial.intermediate_values))
    return Trial(trial.number, state, reports=reports, result=result, **attributes["configuration"])
