"""The progress of a sweep: a table on a terminal, a line per result elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fp4graph.lab.sweeps.results import Results, Scored, best, effects, reference_loss, scored
from fp4graph.lab.sweeps.score import Rule
from fp4graph.lab.sweeps.trial import FREE, Trial

_COLOURS = {"complete": "green", "running": "cyan", "diverged": "red", "failed": "red", "lost": "yellow"}


class Progress:
    """A context in which :meth:`show` keeps a table of trials up to date."""

    def __init__(self, console: Console, target: int, rule: Rule, title: str) -> None:
        self._console, self._target, self._rule, self._title = console, target, rule, title
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None
        self._said: set[int] = set()
        self._started = time.monotonic()
        self._at_first: int | None = None

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
        for event in events:
            self._console.print(event, style="yellow" if self._live else None, highlight=False)
        if self._live:
            self._live.update(self._screen(shown), refresh=True)
            return
        done = sum(s.trial.finished for s in shown)
        for s in shown:
            if s.trial.state != "running" and s.trial.number not in self._said:
                self._said.add(s.trial.number)
                self._console.print(f"{done}/{self._target}  {_line(s, self._rule)}", highlight=False, soft_wrap=True)

    def _screen(self, shown: Sequence[Scored]) -> RenderableType:
        room = max(5, self._console.height - 10)
        ended = [s for s in shown if s.trial.state != "running"]
        running = [s for s in shown if s.trial.state == "running"]
        visible = [*ended[-max(3, room - len(running)) :], *running]
        return Group(trial_table(visible, self._rule, self._heading(shown)), *self._best(shown))

    def _heading(self, shown: Sequence[Scored]) -> str:
        done = sum(s.trial.finished for s in shown)
        if self._at_first is None:
            self._at_first = done
        heading = f"{self._title}: {done} of {self._target}"
        fresh = done - self._at_first
        if fresh > 0 and done < self._target:
            left = (time.monotonic() - self._started) / fresh * (self._target - done)
            heading += f", about {_duration(left)} left"
        return heading

    def _best(self, shown: Sequence[Scored]) -> list[Text]:
        complete = [s for s in shown if s.trial.state == "complete" and s.trial.kind != "baseline"]
        ranked = [s for s in complete if s.scores[self._rule] is not None]
        lowest = sorted(complete, key=lambda s: s.trial.loss or 0.0)[:1]
        highest = sorted(ranked, key=lambda s: -(s.scores[self._rule] or 0.0))[:1]
        lines = [("best loss ", s) for s in lowest] + [("best score", s) for s in highest]
        return [Text(f"{what}  {_line(s, self._rule)}") for what, s in lines]


def trial_table(some: Sequence[Scored], rule: Rule, title: str | None = None) -> Table:
    """Return a table with a row per trial."""
    table = Table(title=title, title_justify="left")
    for name in ("trial", "configuration", "Ω", "loss", "score", "state"):
        right = name in ("trial", "Ω", "loss", "score")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "configuration")
    for s in some:
        state = Text(s.trial.state, style=_COLOURS.get(s.trial.state, ""))
        summary = s.trial.summary if s.trial.kind != "baseline" else f"{s.trial.summary} (baseline)"
        loss, points = _figure(s.trial.loss, ".4g"), _figure(s.trial.complexity, "g")
        line = Text(summary, no_wrap=True, overflow="ellipsis")  # the column gives way, and the line is cut
        table.add_row(str(s.trial.number), line, points, loss, _score(s, rule), state)
    return table


def best_table(found: Results, rule: Rule) -> Table:
    """Return a table of the baselines and, per family, of pure FP4, the best loss and the best scores."""
    reference = "none came through" if found.reference is None else f"{found.reference:.4g}"
    table = Table(title=f"{found.name}: best per family; loss of the better baseline {reference}", title_justify="left")
    for name in ("family", "", "trial", "configuration", "Ω", "loss", "score"):
        table.add_column(name, justify="right" if name in ("trial", "Ω", "loss", "score") else "left")
    for family, what, s in best(found, rule):
        loss = _figure(s.trial.loss, ".4g") if s.trial.state == "complete" else s.trial.state
        points = _figure(s.trial.complexity, "g")
        table.add_row(family, what, str(s.trial.number), s.trial.summary, points, loss, _score(s, rule))
    return table


def effects_table(found: Results) -> Table:
    """Return a table of every choice's losses, by family and parameter."""
    table = Table(title=f"{found.name}: every choice, over all that it was combined with", title_justify="left")
    for name in ("family", "parameter", "choice", "trials", "lost", "median loss", "best loss"):
        table.add_column(name, justify="left" if name in ("family", "parameter", "choice") else "right")
    for place, some in groupby(effects(found), lambda effect: (effect.family, effect.parameter)):
        for number, effect in enumerate(some):
            named = ("", "") if number else place
            losses = f"{effect.median:.4g}", f"{effect.best:.4g}"
            table.add_row(*named, effect.choice, str(effect.trials), str(effect.lost), *losses)
        table.add_section()
    return table


def _line(s: Scored, rule: Rule) -> str:
    trial = s.trial
    parts = [f"trial {trial.number}", trial.summary, f"Ω {_figure(trial.complexity, 'g')}"]
    if trial.loss is not None:
        parts.append(f"loss {trial.loss:.4g}")
    if s.scores[rule] is not None and trial.kind != "baseline":
        parts.append(f"score {s.scores[rule]:+.4f}")
    if trial.state != "complete":
        parts.append(trial.state + (f": {trial.result['reason']}" if trial.result.get("reason") else ""))
    return "  ".join(parts)


def _score(s: Scored, rule: Rule) -> str:
    """Return a trial's score as text; baselines have none, for scores refer to them."""
    return "" if s.trial.kind == "baseline" else _figure(s.scores[rule], "+.4f")


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min" if minutes else "a minute"
