"""Parts of pictures: curves over steps with a range, histograms of two steps, bars of an error's terms, legends."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fp4graph.graph.blocks import pattern_of
from fp4graph.lab.pictures.style import OPERANDS, PALETTE, TERMS, subplots
from fp4graph.lab.statistics.storage import Measurement, Recorded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Kinds of sites that get a line of their own.
KINDS = 7
#: Steps with the values of the sites of one kind.
Curve = Mapping[int, Sequence[float]]
#: Named errors, each with its total and its parts in percent of the signal; an empty one is unknown.
Errors = Mapping[str, Mapping[str, float]]


def grid(panels: int, height: float, more: float, **options: Any) -> tuple[Figure, Any]:
    """Return a picture with up to three panels a row, each ``height`` inches high, and ``more`` inches in all."""
    columns = min(3, panels)
    lines = math.ceil(panels / columns)
    picture, every = subplots(lines * height + more, lines, columns, squeeze=False, **options)
    for axes in every.flat[panels:]:
        axes.set_visible(False)
    return picture, every


def error_panels(
    picture: Figure, panels: Any, errors: Mapping[str, Errors], label: str, *, height: float = 0.6, small: bool = False
) -> None:
    """Fill the panels, rows and columns of them, each with a title and its errors.

    An error is a bar of its parts, as TERMS names them, in a row, and a mark at ``total``, the error that they leave
    together. An unknown one keeps its place. ``height`` is a bar's; ``small`` texts are for many panels.
    """
    ticks, labels = (8.5, 9.0) if small else ("medium", "medium")
    for axes, (title, bars) in zip(panels.flat, errors.items(), strict=False):
        for place, shares in enumerate(bars.values()):
            if not shares:
                continue
            left = 0.0
            for term, (name, color) in TERMS.items():
                axes.barh(place, shares[term], left=left, color=color, height=height, label=None if place else name)
                left += shares[term]
            axes.plot([shares["total"]] * 2, [place - 0.4, place + 0.4], color="#222", linewidth=2.2,
                      solid_capstyle="butt", label=None if place else "error that is left")  # fmt: skip
        axes.set_yticks(range(len(bars)), list(bars), fontsize=ticks)
        axes.grid(axis="y", visible=False)
        axes.set_title(title)
    for axes in panels[-1]:
        axes.set_xlabel(label, fontsize=labels)
    panels[0][0].invert_yaxis()
    legend_below(picture, panels[0][0], columns=4)


def mean_error(rows: Sequence[Measurement]) -> dict[str, float]:
    """Return the mean error of several sites and its parts, in percent of the signal; empty without rows."""
    columns = {**{term: term for term in TERMS}, "total": "relative_error"} if rows else {}
    return {name: 100 * statistics.fmean(row[column] for row in rows) for name, column in columns.items()}


def loss_scale(axes: Axes, values: Sequence[float]) -> None:
    """Label the axis of losses, logarithmic where they span more than a factor of 5, with its numbers written out."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = min(values), max(values)
    axes.set_ylabel("loss (log scale)" if (logarithmic := low > 0 and high > 5 * low) else "loss")
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter("{x:g}")  # 0.5, not 5·10⁻¹


def gathered(points: Iterable[tuple[int, float | None]]) -> Curve:
    curve: dict[int, list[float]] = defaultdict(list)
    for step, value in points:
        if value is not None:
            curve[step].append(value)
    return dict(sorted(curve.items()))


def curve_of(recorded: Recorded, column: str, tensor: str, factor: float = 1.0) -> Curve:
    return gathered((row["step"], factor * row[column]) for row in recorded.having(column) if row["tensor"] == tensor)


def operand_curves(recorded: Recorded, column: str, factor: float = 1.0) -> dict[str, Curve]:
    """Return the curves of the operands that have ``column``."""
    return {operand: curve for operand in OPERANDS if (curve := curve_of(recorded, column, operand, factor))}


def by_operand(rows: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """Return the rows of each operand that has some."""
    return {operand: own for operand in OPERANDS if (own := [row for row in rows if row["tensor"] == operand])}


def by_kind(rows: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    """Return the rows of each kind of site: of all sites with one name but for the numbers of blocks."""
    found: dict[str, list[Measurement]] = defaultdict(list)
    for row in rows:
        found[pattern_of(row["site"])].append(row)
    return found


def latest(recorded: Recorded, column: str) -> list[Measurement]:
    """Return the rows of the last step that has ``column``."""
    rows = recorded.having(column)
    last = max((row["step"] for row in rows), default=None)
    return [row for row in rows if row["step"] == last]


def band(axes: Axes, curve: Curve, color: str, label: str, *, shade: bool = True, dashed: bool = False) -> None:
    steps = list(curve)
    marker = "o" if len(steps) <= 30 else None
    means = [statistics.fmean(values) for values in curve.values()]
    axes.plot(steps, means, color=color, label=label, marker=marker, markersize=3, linestyle="--" if dashed else "-")
    if shade:
        axes.fill_between(steps, [min(v) for v in curve.values()], [max(v) for v in curve.values()],
                          color=color, alpha=0.13, linewidth=0)  # fmt: skip
    axes.set_xlabel("optimizer step")


def bands(height: float, curves: Mapping[str, tuple[Curve, dict[str, Any]]], **settings: Any) -> Figure | None:
    """Draw named curves with the options of :func:`band` and a legend beside them; None without any curve."""
    if not curves:
        return None
    picture, axes = subplots(height)
    for label, (curve, options) in curves.items():
        band(axes, curve, label=label, **options)
    axes.set(**settings)
    legend_beside(axes)
    return picture


def kinds(axes: Axes, recorded: Recorded, column: str, factor: float = 1.0) -> None:
    """Draw a line for each kind of site; beyond KINDS, those highest at the end, and one line for the rest."""
    rows = by_kind(recorded.having(column))
    curves = {kind: gathered((row["step"], factor * row[column]) for row in own) for kind, own in rows.items()}
    ranked = sorted(curves, key=lambda kind: -statistics.fmean(list(curves[kind].values())[-1]))
    shown = set(ranked[:KINDS]) if len(ranked) > KINDS + 1 else set(ranked)
    for place, kind in enumerate(kind for kind in curves if kind in shown):
        band(axes, curves[kind], PALETTE[place % len(PALETTE)], kind or "(root)", shade=False)
    others = [point for kind in curves if kind not in shown for point in curves[kind].items()]
    if others:
        together = gathered((step, value) for step, values in others for value in values)
        band(axes, together, "#aaaaaa", f"{len(curves) - len(shown)} others", shade=False)


def first_last_histogram(
    axes: Axes, histograms: Iterable[tuple[int, int, Sequence[int]]], low: float, width: float, color: str | None = None
) -> None:
    """Draw the distribution at the last step filled, that at the first step as an outline, in percent.

    Args:
        histograms: steps, each with the number of its first class, and the counts of this class and the following.
        low, width: where class 0 begins, and the width of every class.
    """
    by_step: dict[int, Counter[int]] = defaultdict(Counter)
    for step, first, counts in histograms:
        by_step[step].update(dict(enumerate(counts, first)))
    styles: tuple[dict[str, Any], ...] = (
        {"color": color or PALETTE[0], "fill": True, "alpha": 0.55},
        {"color": color or "#333", "fill": False, "linewidth": 1.4},
    )
    for step, style in zip(sorted({max(by_step), min(by_step)}, reverse=True), styles, strict=False):
        counted = by_step[step]
        places, total = range(min(counted), max(counted) + 1), max(1, counted.total())
        edges = [low + width * place for place in (*places, places.stop)]
        axes.stairs([100 * counted[place] / total for place in places], edges, label=f"step {step:,}", **style)


def legend_beside(axes: Axes, title: str | None = "mean over sites,\nshaded: lowest to highest") -> None:
    axes.legend(title=title, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, alignment="left",
                title_fontsize=8.5)  # fmt: skip


def legend_below(picture: Figure, axes: Axes, columns: int = 3) -> None:
    handles, labels = axes.get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=columns)
