"""Draws score over complexity, like Figure 4 of "Elucidating the design space of FP4 training"."""

from __future__ import annotations

import io
import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

from fp4graph.errors import Error, needs
from fp4graph.lab.pictures.style import plain
from fp4graph.lab.sweeps.results import Results, Rule, Scored, frontier

_MARKERS = "osD^vPX*"
#: The most characters of a line below a panel.
_LINE = 100


def figure(studies: Sequence[Results], rule: Rule = "table") -> Any:
    """Return a matplotlib figure, a panel per study: Ω along x, S along y, a marker and a stepped frontier per family.

    The points of every frontier are numbered, and listed below the panel. S = 0 is the better unquantized baseline.

    Raises:
        Error: a study has no scores, or matplotlib is not installed.
    """
    needs("matplotlib", "figures are drawn with matplotlib", "sweep")
    from matplotlib.figure import Figure

    for study in studies:
        if not _points(study, rule):
            raise Error(
                f"study {study.name!r} has nothing to plot: a score needs a complete baseline and another complete "
                f"trial, and the study has {study.count('complete')} complete trials, {study.count('diverged')} "
                "diverged; run the sweep further"
            )
    lines = max(len(_named(study, rule)) for study in studies)
    height = 3.6 + 0.17 * (lines + 2)
    drawn = Figure(figsize=(6.4 * len(studies), height), dpi=150)
    for column, study in enumerate(studies):
        place = (column + 0.13) / len(studies), 1 - 3.2 / height, 0.83 / len(studies), 2.8 / height
        _panel(drawn.add_axes(place), study, rule)
    return drawn


def png(studies: Sequence[Results], rule: Rule = "table", format: str = "png") -> bytes:
    """Return the figure as the bytes of a PNG, or of another ``format`` that matplotlib writes."""
    buffer = io.BytesIO()
    figure(studies, rule).savefig(buffer, format=format)
    return buffer.getvalue()


def _panel(axes: Any, study: Results, rule: Rule) -> None:
    points, numbered = _points(study, rule), _numbered(study, rule)
    for index, family in enumerate(study.families):
        marker = {"color": f"C{index}", "marker": _MARKERS[index % len(_MARKERS)]}
        pure = [s.trial.summary for s in study.trials if s.trial.family == family and s.trial.kind == "pure"]
        name = plain(pure[0] if pure and pure[0] != "plain" else family)
        best = [s for _, family_index, s in numbered if family_index == index]
        if best:
            xs, ys = _coordinates([s for s in points if s.trial.family == family], rule)
            axes.scatter(xs, ys, s=18, alpha=0.45, linewidths=0, label=name, **marker)
            xs, ys = _coordinates(best, rule)
            axes.step(xs, ys, where="post", color=f"C{index}", linewidth=1.2)
            axes.scatter(xs, ys, s=34, edgecolors="black", linewidths=0.6, zorder=3, **marker)
    for number, index, s in numbered:
        right = index % 2 == 0  # numbers of neighbouring families stand on different sides
        axes.annotate(
            str(number), (s.trial.complexity, s.value(rule)), xytext=(5 if right else -5, 4),
            ha="left" if right else "right", textcoords="offset points", fontsize=8, color=f"C{index}",
            weight="bold", zorder=4,
        )  # fmt: skip
    axes.axhline(0, color="grey", linewidth=0.8, linestyle="--", label="unquantized")
    _scale(axes, *_coordinates(points, rule), _coordinates([s for *_, s in numbered], rule)[1])
    title = study.task if study.name == study.task else f"{study.name} ({study.task})"
    lost = f", {study.count('diverged')} diverged" if study.count("diverged") else ""
    axes.set_title(plain(f"{title}, {len(points)} configurations{lost}"), fontsize=10)
    axes.set_xlabel("complexity Ω [points]")
    labels = {"text": "score S = G/(1 + Ω)", "table": "score S = G/max(1, Ω), or G·max(1, Ω) for G < 0"}
    axes.set_ylabel(labels[rule], fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="best", framealpha=0.9)
    for row, (text, colour) in enumerate(_named(study, rule)):
        axes.annotate(
            text, (0, 0), xycoords="axes fraction", xytext=(-28, -44 - 12.2 * row), textcoords="offset points",
            fontsize=7.5, color=colour, annotation_clip=False,
        )  # fmt: skip


def _numbered(study: Results, rule: Rule) -> list[tuple[int, int, Scored]]:
    """Return (number, index of the family, trial) for every trial of a family's frontier."""
    best = [(index, s) for index, f in enumerate(study.families) for s in frontier(study.complete_of(f), rule)]
    return [(number, index, s) for number, (index, s) in enumerate(best, 1)]


def _named(study: Results, rule: Rule) -> list[tuple[str, str]]:
    """Return the lines below a panel with their colours: the numbered trials with their full names."""
    lines: list[tuple[str, str]] = []
    for number, index, s in _numbered(study, rule):
        figures = f"Ω {s.trial.complexity:g}, S {s.value(rule):+.3g}, loss {s.trial.loss:.4g}"
        name = f"{number}  trial {s.trial.number}, {figures}: {s.trial.summary}"
        lines += [(plain(line), f"C{index}") for line in textwrap.wrap(name, _LINE, subsequent_indent=" " * 6)]
    return lines


def _scale(axes: Any, complexities: Sequence[float], scores: Sequence[float], best: Sequence[float]) -> None:
    """Scale the axes. Scores are linear up to the first power of ten above the median magnitude of ``best``."""
    linear = 10.0 ** math.ceil(math.log10(max(statistics.median(map(abs, best)), 1e-3)))
    axes.set_yscale("symlog", linthresh=linear)
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axes.set_ylim(1.4 * min(0.0, *scores) - 0.1 * linear, 1.4 * max(0.0, *scores) + 0.25 * linear)
    most = max(complexities)
    axes.set_xlim(-0.06 * max(most, 1), most + 0.08 * max(most, 1))


def _points(study: Results, rule: Rule) -> list[Scored]:
    return [s for s in study.complete if math.isfinite(s.value(rule))]


def _coordinates(trials: Sequence[Scored], rule: Rule) -> tuple[list[float], list[float]]:
    return [s.trial.complexity or 0.0 for s in trials], [s.value(rule) for s in trials]
