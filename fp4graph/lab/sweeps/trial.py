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
    """One trial: its configuration (``policy`` as YAML), and its ``result`` (loss, metrics, seconds, reason, ...).

    ``state`` is running; complete, diverged, failed, pruned or refused, which are final; lost (its worker is gone); or
    withdrawn (another has the configuration, the sweep was interrupted, a failure excused).
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
        return self.state in COUNTED

    @property
    def finished(self) -> bool:
        return self.counts and self.state != "running"


def read_trial(trial: FrozenTrial, excused: bool) -> Trial:
    """Read one of Optuna's trials; ``excused`` failures count as withdrawn."""
    attributes = trial.user_attrs
    result = attributes.get("result", {})
    state = result.get("outcome") or ("lost" if trial.state.is_finished() else "running")
    if excused or "withdrawn" in attributes:  # the attribute is that of form 1
        state = "withdrawn"
    reports = tuple(value for _, value in sorted(trial.intermediate_values.items()))
    return Trial(trial.number, state, reports=reports, result=result, **attributes["configuration"])
