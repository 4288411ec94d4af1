"""Results of a sweep: scored trials, the best of every family, the frontier of score over complexity, exports."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, get_args

from fp4graph.lab.runs.run import finite
from fp4graph.lab.sweeps.score import Rule, gain, score
from fp4graph.lab.sweeps.study import Study
from fp4graph.lab.sweeps.trial import Trial


@dataclass(frozen=True)
class Scored:
    """A trial with its scores, which are None where the trial or all baselines did not complete."""

    trial: Trial
    gain: float | None
    scores: dict[Rule, float | None]

    def value(self, rule: Rule) -> float:
        """Return the score by ``rule``, -inf for none."""
        return -math.inf if (score := self.scores[rule]) is None else score


@dataclass(frozen=True)
class Results:
    """A study's trials, scored, with M_ref, the validation loss of the better baseline, if one came through."""

    name: str
    task: str
    reference: float | None
    trials: tuple[Scored, ...]

    @property
    def complete(self) -> list[Scored]:
        """The trials with a loss, without baselines."""
        return [s for s in self.trials if s.trial.state == "complete" and s.trial.kind != "baseline"]

    @property
    def families(self) -> list[str]:
        """The families in the order in which they were begun."""
        return list(dict.fromkeys(s.trial.family for s in self.trials if s.trial.kind != "baseline"))

    def complete_of(self, family: str) -> list[Scored]:
        """The complete trials of one family."""
        return [s for s in self.complete if s.trial.family == family]

    def count(self, *states: str) -> int:
        return sum(s.trial.state in states for s in self.trials)


def reference_loss(trials: Sequence[Trial]) -> float | None:
    """Return M_ref: the lowest loss of the complete baselines, or None unless it is positive."""
    losses = [t.loss for t in trials if t.kind == "baseline" and t.state == "complete" and t.loss is not None]
    return min(losses) if losses and min(losses) > 0 else None


def scored(trial: Trial, reference: float | None) -> Scored:
    """Return a complete trial with its scores by both rules; a diverged trial's are -inf."""
    if reference is None or trial.complexity is None or trial.state not in ("complete", "diverged"):
        return Scored(trial, None, {"text": None, "table": None})
    loss = math.nan if trial.loss is None else trial.loss
    scores: dict[Rule, float | None] = {r: score(loss, reference, trial.complexity, r) for r in get_args(Rule)}
    return Scored(trial, gain(loss, reference), scores)


def results(study: Study) -> Results:
    """Return the results of a study, as it is now."""
    trials = [trial for trial in study.trials() if trial.counts or trial.state == "refused"]
    reference = reference_loss(trials)
    return Results(study.name, study.manifest.task, reference, tuple(scored(trial, reference) for trial in trials))


def best(found: Results, rule: Rule) -> list[tuple[str, str, Scored]]:
    """Return (family, category, trial): every baseline, then what the design-space paper's tables have per family."""
    rows = [(s.trial.family, "baseline", s) for s in found.trials if s.trial.kind == "baseline" and s.trial.finished]
    for family in found.families:
        here = found.complete_of(family)
        own = [s for s in found.trials if s.trial.family == family and s.trial.kind == "pure"]
        rows += [(family, "pure FP4", s) for s in own if s.trial.finished]
        if here:
            rows.append((family, "best loss", min(here, key=lambda s: s.trial.loss or 0.0)))
        positive = [s for s in here if s.value(rule) > 0]
        negative = [s for s in here if s.scores[rule] is not None and s.value(rule) <= 0]
        for what, some in (("best score > 0", positive), ("best score ≤ 0", negative)):
            if some:
                rows.append((family, what, max(some, key=lambda s: s.value(rule))))
    return rows


def frontier(some: Sequence[Scored], rule: Rule) -> list[Scored]:
    """Return the trials to which no other is preferable, by ascending Ω; their scores ascend too."""
    kept: list[Scored] = []
    for s in sorted(some, key=lambda s: (s.trial.complexity, -s.value(rule), s.trial.number)):
        if math.isfinite(s.value(rule)) and (not kept or s.value(rule) > kept[-1].value(rule)):
            kept.append(s)
    return kept


@dataclass(frozen=True)
class Effect:
    """The losses of a family's trials that take one choice of one parameter; of ``lost`` ones the loss is infinite."""

    family: str
    parameter: str
    choice: str
    trials: int
    lost: int
    median: float
    best: float


def effects(found: Results) -> list[Effect]:
    """Return the effect of every choice, by family and parameter; pruned trials and single choices are left out.

    Medians of choices drawn at random compare, because they are combined with the same others on average. Medians of
    choices that a sampler sought out do not.
    """
    losses: dict[tuple[str, str], dict[str, list[float]]] = {}
    for s in found.trials:
        if s.trial.state in ("complete", "diverged", "failed"):
            loss = s.trial.loss if s.trial.state == "complete" and s.trial.loss is not None else math.inf
            for parameter, choice in s.trial.assignment.items():
                losses.setdefault((s.trial.family, parameter), {}).setdefault(choice, []).append(loss)
    return [
        Effect(family, parameter, choice, len(seen), seen.count(math.inf), statistics.median(seen), min(seen))
        for family in found.families
        for (whose, parameter), choices in losses.items()
        if whose == family and len(choices) > 1
        for choice, seen in choices.items()
    ]


def flat_trials(found: Results) -> list[dict[str, Any]]:
    """Return one flat mapping per trial."""
    return [
        {
            "study": found.name,
            "task": found.task,
            "trial": s.trial.number,
            **{name: getattr(s.trial, name) for name in ("state", "kind", "family", "summary", "complexity")},
            "validation_loss": s.trial.loss,
            "train_loss": s.trial.result.get("train_loss"),
            "reference_loss": found.reference,
            "gain": finite(s.gain),
            **{f"score_{rule}": finite(score) for rule, score in s.scores.items()},
            "seconds": s.trial.result.get("seconds"),
            "reason": s.trial.result.get("reason"),
            "choices": dict(s.trial.assignment),
            "run": dict(s.trial.run),
            "metrics": dict(s.trial.result.get("metrics") or {}),
            "history": list(s.trial.result.get("history") or ()),
            "policy": s.trial.policy,
        }
        for s in found.trials
    ]


def to_json(all_results: Sequence[Results]) -> str:
    """Return the trials of several studies as JSON, with their policies and curves."""
    data = {"fp4graph": version("fp4graph"), "trials": [r for found in all_results for r in flat_trials(found)]}
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def effects_json(all_results: Sequence[Results]) -> str:
    """Return the effects of several studies as JSON; an infinite loss is null."""
    data = [finite({"study": found.name, **asdict(effect)}) for found in all_results for effect in effects(found)]
    return json.dumps({"fp4graph": version("fp4graph"), "choices": data}, indent=1, ensure_ascii=False) + "\n"


def to_csv(all_results: Sequence[Results]) -> str:
    """Return the trials as a table: a column per choice, metric and setting; without policies and curves."""
    import pandas

    rows = []
    for trial in (trial for found in all_results for trial in flat_trials(found)):
        row = {key: value for key, value in trial.items() if key not in ("policy", "history")}
        for part in ("choices", "run", "metrics"):
            row |= {f"{part}.{key}": value for key, value in row.pop(part).items()}
        rows.append(row)
    return str(pandas.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n"))
