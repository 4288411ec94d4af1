"""Parts of pictures: curves over steps with a range, histograms of two steps, bars of an error's terms, legends."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fp4graph.analysis.storage import Measurement, Recorded
from fp4graph.analysis.style import PALETTE, TERMS, figure, styled
from fp4graph.graph.blocks import pattern_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Kinds of sites that get a line of their own.
KINDS = 7
#: Steps with the values of the sites of one kind.
Curve = Mapping[int, Sequence[float]]


def drawn(make: Callable[..., Figure | None]) -> Callable[..., Figure | None]:
    """Draw a picture in our style."""

    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Figure | None:
        with styled():
            return make(*args, **kwargs)

    return wrapped


def grid(panels: int, height: float, more: float, **options: Any) -> tuple[Figure, Any]:
    """Return a picture with up to three panels a row, each ``height`` inches high, and ``more`` inches in all."""
    columns = min(3, panels)
    lines = math.ceil(panels / columns)
    picture = figure(lines * height + more)
    made = picture.subplots(lines, columns, squeeze=False, **options)
    for axes in itertools.islice(made.flat, panels, None):
        axes.set_visible(False)
    return picture, made


def error_bar(axes: Axes, place: int, shares: Mapping[str, float], total: float, height: float = 0.6) -> None:
    """Draw an error's parts, as TERMS names them, in a row, with a mark at the error they leave together."""
    left = 0.0
    for term, (label, color) in TERMS.items():
        axes.barh(place, shares[term], left=left, color=color, height=height, label=label if place == 0 else None)
        left += shares[term]
    axes.plot([total, total], [place - 0.4, place + 0.4], color="#222", linewidth=2.2, solid_capstyle="butt",
              label="error that is left" if place == 0 else None)  # fmt: skip


def mean_error_bar(axes: Axes, place: int, rows: Sequence[Measurement]) -> None:
    """Draw the error of several sites, in percent of the signal."""
    shares = {term: 100 * statistics.fmean(row[term] for row in rows) for term in TERMS}
    error_bar(axes, place, shares, 100 * statistics.fmean(row["relative_error"] for row in rows), 0.65)


def log_scale(axes: Axes) -> None:
    """Set a logarithmic axis with its numbers written out: 0.5, not 5·10⁻¹."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 1000 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def points_of(rows: Iterable[Measurement], column: str) -> list[tuple[int, float]]:
    return [(row["step"], row[column]) for row in rows if row.get(column) is not None]


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def gathered(points: Iterable[tuple[int, float | None]]) -> dict[int, list[float]]:
    curve: dict[int, list[float]] = defaultdict(list)
    for step, value in points:
        if value is not None:
            curve[step].append(value)
    return dict(sorted(curve.items()))


def curve_of(recorded: Recorded, column: str, tensor: str) -> dict[int, list[float]]:
    series = recorded.series(column, tensor=tensor)
    return gathered(zip(series["step"], series["value"], strict=True))


def latest(recorded: Recorded, column: str) -> list[Measurement]:
    """Return the rows of the last step that has ``column``."""
    rows = [row for row in recorded.rows if row.get(column) is not None]
    last = max((row["step"] for row in rows), default=None)
    return [row for row in rows if row["step"] == last]


def kinds_of(sites: Iterable[str]) -> list[str]:
    """Return the sites' names without the numbers of blocks, each once."""
    return list(dict.fromkeys(pattern_of(site) for site in sites))


def band(axes: Axes, curve: Curve, color: str, label: str, *, shade: bool = True, dashed: bool = False) -> None:
    steps = list(curve)
    marker = "o" if len(steps) <= 30 else None
    means = [statistics.fmean(values) for values in curve.values()]
    axes.plot(steps, means, color=color, label=label, marker=marker, markersize=3, linestyle="--" if dashed else "-")
    if shade:
        axes.fill_between(steps, [min(v) for v in curve.values()], [max(v) for v in curve.values()],
                          color=color, alpha=0.13, linewidth=0)  # fmt: skip


def by_kind(axes: Axes, recorded: Recorded, column: str, factor: float = 1.0) -> None:
    """Draw a line for each kind of site; beyond KINDS, those highest at the end, and one line for the rest."""
    rows = [row for row in recorded.rows if row.get(column) is not None]
    curves = {
        kind: gathered((row["step"], factor * row[column]) for row in rows if pattern_of(row["site"]) == kind)
        for kind in kinds_of(row["site"] for row in rows)
    }
    ranked = sorted(curves, key=lambda kind: -statistics.fmean(list(curves[kind].values())[-1]))
    shown = set(ranked[:KINDS]) if len(ranked) > KINDS + 1 else set(ranked)
    for place, kind in enumerate(kind for kind in curves if kind in shown):
        band(axes, curves[kind], PALETTE[place % len(PALETTE)], kind or "(root)", shade=False)
    others = [point for kind in curves if kind not in shown for point in curves[kind].items()]
    if others:
        together = gathered((step, value) for step, values in others for value in values)
        band(axes, together, "#aaaaaa", f"{len(curves) - len(shown)} others", shade=False)


def first_and_last(rows: Sequence[Measurement]) -> list[tuple[int, dict[str, Any]]]:
    """Return the last and the first step, with the styles of their histograms."""
    steps = sorted({row["step"] for row in rows})
    last: tuple[int, dict[str, Any]] = (steps[-1], {"fill": True, "alpha": 0.55})
    return [last] if len(steps) == 1 else [last, (steps[0], {"fill": False, "linewidth": 1.4})]


def first_last_histogram(
    axes: Axes,
    rows: Sequence[Measurement],
    counts_of: Callable[[Measurement], Sequence[int]],
    low: float,
    high_of: Callable[[Measurement], float],
) -> None:
    for step, style in first_and_last(rows):
        own = [row for row in rows if row["step"] == step]
        counts = [sum(column) for column in zip(*map(counts_of, own), strict=True)]
        width = (high_of(own[0]) - low) / len(counts)
        edges = [low + width * place for place in range(len(counts) + 1)]
        total = max(1, sum(counts))
        color = PALETTE[0] if style["fill"] else "#333"
        axes.stairs([100 * c / total for c in counts], edges, color=color, label=f"step {step:,}", **style)


def legend_beside(axes: Axes, title: str | None) -> None:
    axes.legend(title=title, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, alignment="left",
                title_fontsize=8.5)  # fmt: skip


def legend_below(picture: Figure, axes: Axes, columns: int = 3) -> None:
    handles, labels = axes.get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=columns)
