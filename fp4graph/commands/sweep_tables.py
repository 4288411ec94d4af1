"""Tables of sweeps, and their progress: a table on a terminal, else a line per result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fp4graph.lab.sweeps.results import FREE, Results, Rule, Scored, Trial, best, effects, reference_loss, scored

_COLOURS = {"complete": "green", "running": "cyan", "diverged": "red", "failed": "red", "lost": "yellow"}


class Progress:
    """A context in which :meth:`show` updates a table of trials."""

    def __init__(self, console: Console, target: int, rule: Rule, title: str) -> None:
        self._console, self._target, self._rule, self._title = console, target, rule, title
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None
        self._printed: set[int] = set()
        self._started, self._at_first = time.monotonic(), -1

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, trials: Sequence[Trial], events: Sequence[str] = ()) -> None:
        """Show all trials of the study, and the events of workers since the last call."""
        reference = reference_loss(trials)
        shown = [scored(trial, reference) for trial in trials if trial.state not in FREE]
        done = sum(s.trial.finished for s in shown)
        ended = [s for s in shown if s.trial.state != "running"]
        running = [s for s in shown if s.trial.state == "running"]
        for event in events:
            self._console.print(event, style="yellow" if self._live else None, highlight=False)
        if self._live:
            room = max(3, self._console.height - 10 - len(running))
            table = trial_table([*ended[-room:], *running], self._rule, self._heading(done))
            self._live.update(Group(table, *self._best(ended)), refresh=True)
            return
        for s in ended:
            if s.trial.number not in self._printed:
                self._printed.add(s.trial.number)
                self._console.print(f"{done}/{self._target}  {_line(s, self._rule)}", highlight=False, soft_wrap=True)

    def _heading(self, done: int) -> str:
        self._at_first = done if self._at_first < 0 else self._at_first
        new, heading = done - self._at_first, f"{self._title}: {done} of {self._target}"
        if new <= 0 or done >= self._target:
            return heading
        left = (time.monotonic() - self._started) / new * (self._target - done)
        return f"{heading}, about {timedelta(seconds=round(left))} left"

    def _best(self, ended: Sequence[Scored]) -> list[Text]:
        """Return lines for the trials with the lowest loss and with the highest score."""
        complete = [s for s in ended if s.trial.state == "complete" and s.trial.kind != "baseline"]
        ranked = [s for s in complete if s.scores[self._rule] is not None]
        lowest = sorted(complete, key=lambda s: s.trial.loss or 0.0)[:1]
        highest = sorted(ranked, key=lambda s: -(s.scores[self._rule] or 0.0))[:1]
        lines = [("best loss ", s) for s in lowest] + [("best score", s) for s in highest]
        return [Text(f"{what}  {_line(s, self._rule)}") for what, s in lines]


def trial_table(trials: Sequence[Scored], rule: Rule, title: str | None = None) -> Table:
    """Return a table with a row per trial."""
    table = _table(title, "trial>", "configuration", "Ω>", "loss>", "score>", "state")
    for s in trials:
        summary = s.trial.summary if s.trial.kind != "baseline" else f"{s.trial.summary} (baseline)"
        line = Text(summary, no_wrap=True, overflow="ellipsis")  # the column shrinks, and the text is cut
        state = Text(s.trial.state, style=_COLOURS.get(s.trial.state, ""))
        table.add_row(str(s.trial.number), line, *_figures(s, rule), state)
    return table


def best_table(results: Results, rule: Rule) -> Table:
    """Return a table with the baselines and, for each family, pure FP4 and the trials of best loss and best scores."""
    reference = "unknown, because no baseline completed" if results.reference is None else f"{results.reference:.4g}"
    title = f"{results.name}: best per family; loss of the better baseline {reference}"
    table = _table(title, "family", "", "trial>", "configuration", "Ω>", "loss>", "score>")
    for family, what, s in best(results, rule):
        complexity, loss, score = _figures(s, rule)
        loss = loss if s.trial.state == "complete" else s.trial.state
        table.add_row(family, what, str(s.trial.number), s.trial.summary, complexity, loss, score)
    return table


def effects_table(results: Results) -> Table:
    """Return a table of every choice's losses, by family and parameter."""
    title = f"{results.name}: every choice, over all its combinations"
    table = _table(title, "family", "parameter", "choice>", "trials>", "lost>", "median loss>", "best loss>")
    for place, group in groupby(effects(results), lambda effect: (effect.family, effect.parameter)):
        for number, effect in enumerate(group):
            losses = f"{effect.median:.4g}", f"{effect.best:.4g}"
            counts = str(effect.trials), str(effect.lost)
            table.add_row(*(("", "") if number else place), effect.choice, *counts, *losses)
        table.add_section()
    return table


def _table(title: str | None, *columns: str) -> Table:
    """Return an empty table; ``>`` after a column's name aligns it to the right."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left")
    return table


def _line(s: Scored, rule: Rule) -> str:
    """Return a trial in one line."""
    complexity, loss, score = _figures(s, rule)
    reason = s.trial.result.get("reason")
    parts = [f"trial {s.trial.number}", s.trial.summary, f"Ω {complexity}"]
    parts += [f"loss {loss}"] if s.trial.loss is not None else []
    parts += [f"score {score}"] if s.scores[rule] is not None and score else []
    if s.trial.state != "complete":
        parts.append(f"{s.trial.state}: {reason}" if reason else s.trial.state)
    return "  ".join(parts)


def _figures(s: Scored, rule: Rule) -> tuple[str, str, str]:
    """Return complexity, loss and score as text; baselines have no score, because scores refer to them."""
    pairs = (s.trial.complexity, "g"), (s.trial.loss, ".4g"), (s.scores[rule], "+.4f")
    complexity, loss, score = ("–" if value is None else format(value, form) for value, form in pairs)
    return complexity, loss, "" if s.trial.kind == "baseline" else score
