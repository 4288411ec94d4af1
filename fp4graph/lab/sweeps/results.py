"""Results of a sweep: trials as data, their scores, the best of every family, the frontier, exports.

The score is from "Elucidating the design space of FP4 training", sec. 7: the gain of a policy reduced by its cost.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, Literal, get_args

from fp4graph.lab.runs.run import finite

Rule = Literal["text", "table"]
#: States that count towards the requested number of results.
COUNTED = ("running", "complete", "diverged", "failed", "pruned")
#: States whose configurations may run again.
FREE = ("lost", "withdrawn")


def gain(loss: float, reference: float) -> float:
    """Return G = (M_ref − M)/M_ref, the validation loss that a run saves, relative to the better unquantized baseline.

    A higher loss gives a negative gain, and divergence (NaN or infinite loss) gives -inf.

    Raises:
        ValueError: ``reference`` is not a positive finite number.
    """
    if not (math.isfinite(reference) and reference > 0):
        raise ValueError(f"the reference loss must be positive and finite, as a divisor; got {reference}")
    return (reference - loss) / reference if math.isfinite(loss) else -math.inf


def score(loss: float, reference: float, complexity: float, rule: Rule = "text") -> float:
    """Return S, the gain of a run reduced by the cost of its techniques, Ω (``Policy.complexity``).

    - ``text``: S = G/(1 + Ω), as the paper defines it (sec. 7). It shrinks negative gains too: of two policies with
      equal negative gains, the costlier one scores higher.
    - ``table``: S = G/max(1, Ω) for G > 0, else S = G·max(1, Ω). The paper does not state this rule, but 113 of the 118
      scores in its appendix (Tables 3 to 8) follow it, and 46 follow ``text``.

    Raises:
        ValueError: as :func:`gain`; ``complexity`` is negative or not finite; or ``rule`` is not one of the two.
    """
    if not (math.isfinite(complexity) and complexity >= 0):
        raise ValueError(f"the complexity must be finite and at least 0, as a sum of weights; got {complexity}")
    saved = gain(loss, reference)
    if rule == "text":
        return saved / (1 + complexity)
    if rule == "table":
        weight = max(1.0, complexity)
        return saved / weight if saved > 0 else saved * weight
    raise ValueError(f"unknown rule {rule!r} of the score; known: {', '.join(get_args(Rule))}")


@dataclass(frozen=True)
class Trial:
    """One trial: its configuration (``policy`` as YAML), and its ``result`` (loss, metrics, seconds, reason, ...).

    ``state`` is running; a final state (complete, diverged, failed, pruned or refused); lost (the worker died); or
    withdrawn (another trial has the configuration, the sweep was interrupted, or a failure was excused).
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
        """The validation loss; for a running trial, the last reported one."""
        loss = self.result.get("loss")
        return loss if loss is not None else self.reports[-1] if self.reports and self.state != "diverged" else None

    @property
    def counts(self) -> bool:
        return self.state in COUNTED

    @property
    def finished(self) -> bool:
        return self.counts and self.state != "running"


@dataclass(frozen=True)
class Scored:
    """A trial with its scores: -inf if it diverged, None if it did not complete or if no baseline completed."""

    trial: Trial
    gain: float | None
    scores: dict[Rule, float | None]

    def value(self, rule: Rule) -> float:
        """Return the score by ``rule``, or -inf for None."""
        return -math.inf if (score := self.scores[rule]) is None else score


@dataclass(frozen=True)
class Results:
    """A study's scored trials, and ``reference``, the loss M_ref of :func:`reference_loss`."""

    name: str
    task: str
    reference: float | None
    trials: tuple[Scored, ...]

    @classmethod
    def of(cls, name: str, task: str, trials: Sequence[Trial]) -> Results:
        """Score the trials that count or were refused."""
        reference = reference_loss(trials)
        chosen = (scored(trial, reference) for trial in trials if trial.counts or trial.state == "refused")
        return cls(name, task, reference, tuple(chosen))

    @property
    def complete(self) -> list[Scored]:
        """The complete trials, without baselines."""
        return [s for s in self.trials if s.trial.state == "complete" and s.trial.kind != "baseline"]

    @property
    def families(self) -> list[str]:
        """The families, in the order of their first trials."""
        return list(dict.fromkeys(s.trial.family for s in self.trials if s.trial.kind != "baseline"))

    def complete_of(self, family: str) -> list[Scored]:
        return [s for s in self.complete if s.trial.family == family]

    def count(self, *states: str) -> int:
        return sum(s.trial.state in states for s in self.trials)


def reference_loss(trials: Sequence[Trial]) -> float | None:
    """Return M_ref: the lowest loss of the complete baselines, or None unless it is positive."""
    losses = [t.loss for t in trials if t.kind == "baseline" and t.state == "complete" and t.loss is not None]
    return min(losses) if losses and min(losses) > 0 else None


def scored(trial: Trial, reference: float | None) -> Scored:
    """Return a complete trial with its scores by both rules, or a diverged trial with -inf."""
    if reference is None or trial.complexity is None or trial.state not in ("complete", "diverged"):
        return Scored(trial, None, {"text": None, "table": None})
    loss = math.nan if trial.loss is None else trial.loss
    scores: dict[Rule, float | None] = {r: score(loss, reference, trial.complexity, r) for r in get_args(Rule)}
    return Scored(trial, gain(loss, reference), scores)


def best(results: Results, rule: Rule) -> list[tuple[str, str, Scored]]:
    """Return (family, category, trial): every baseline, then each family's rows of the design-space paper's tables."""
    ended = [s for s in results.trials if s.trial.finished]
    rows = [(s.trial.family, "baseline", s) for s in ended if s.trial.kind == "baseline"]
    for family in results.families:
        complete = results.complete_of(family)
        rows += [(family, "pure FP4", s) for s in ended if s.trial.family == family and s.trial.kind == "pure"]
        rows += [(family, "best loss", s) for s in sorted(complete, key=lambda s: s.trial.loss or 0.0)[:1]]
        ranked = sorted((s for s in complete if s.scores[rule] is not None), key=lambda s: -s.value(rule))
        rows += [(family, "best score > 0", s) for s in ranked[:1] if s.value(rule) > 0]
        rows += [(family, "best score ≤ 0", s) for s in [s for s in ranked if s.value(rule) <= 0][:1]]
    return rows


def frontier(trials: Sequence[Scored], rule: Rule) -> list[Scored]:
    """Return the Pareto-optimal trials by ascending Ω, and so by ascending score."""
    kept: list[Scored] = []
    for s in sorted(trials, key=lambda s: (s.trial.complexity, -s.value(rule), s.trial.number)):
        if math.isfinite(s.value(rule)) and (not kept or s.value(rule) > kept[-1].value(rule)):
            kept.append(s)
    return kept


@dataclass(frozen=True)
class Effect:
    """The losses of a family's trials with one choice of a parameter; ``lost`` is the number of infinite losses."""

    family: str
    parameter: str
    choice: str
    trials: int
    lost: int
    median: float
    best: float


def effects(results: Results) -> list[Effect]:
    """Return the effect of every choice, by family and parameter; pruned trials and single choices are left out.

    Compare medians only for random choices, which on average are combined with the same other choices. A sampler that
    favours choices biases them.
    """
    losses: dict[tuple[str, str], dict[str, list[float]]] = {}
    for s in results.trials:
        if s.trial.state in ("complete", "diverged", "failed"):
            loss = s.trial.loss if s.trial.state == "complete" and s.trial.loss is not None else math.inf
            for parameter, choice in s.trial.assignment.items():
                losses.setdefault((s.trial.family, parameter), {}).setdefault(choice, []).append(loss)
    return [
        Effect(family, parameter, choice, len(values), values.count(math.inf), statistics.median(values), min(values))
        for family in results.families
        for (of_family, parameter), choices in losses.items()
        if of_family == family and len(choices) > 1
        for choice, values in choices.items()
    ]


def flat_trials(results: Results) -> list[dict[str, Any]]:
    """Return one flat mapping per trial."""
    return [
        {
            "study": results.name,
            "task": results.task,
            "trial": s.trial.number,
            **{name: getattr(s.trial, name) for name in ("state", "kind", "family", "summary", "complexity")},
            "validation_loss": s.trial.loss,
            "train_loss": s.trial.result.get("train_loss"),
            "reference_loss": results.reference,
            "gain": finite(s.gain),
            **{f"score_{rule}": finite(score) for rule, score in s.scores.items()},
            **{name: s.trial.result.get(name) for name in ("seconds", "reason")},
            "choices": dict(s.trial.assignment),
            "run": dict(s.trial.run),
            "metrics": dict(s.trial.result.get("metrics") or {}),
            "history": list(s.trial.result.get("history") or ()),
            "policy": s.trial.policy,
        }
        for s in results.trials
    ]


def to_json(all_results: Sequence[Results], *, choices: bool = False) -> str:
    """Return the trials of studies as JSON, with policies and curves; with ``choices``, the effects of choices.

    An infinite loss is null.
    """
    if choices:
        data = [finite({"study": r.name, **asdict(effect)}) for r in all_results for effect in effects(r)]
    else:
        data = [trial for results in all_results for trial in flat_trials(results)]
    content = {"fp4graph": version("fp4graph"), "choices" if choices else "trials": data}
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_csv(all_results: Sequence[Results]) -> str:
    """Return the trials as CSV, with a column per choice, metric and setting, and without policies and curves."""
    import pandas

    rows = []
    for row in (trial for results in all_results for trial in flat_trials(results)):
        del row["policy"], row["history"]
        for part in ("choices", "run", "metrics"):
            row |= {f"{part}.{key}": value for key, value in row.pop(part).items()}
        rows.append(row)
    return str(pandas.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n"))
