"""Parts of pictures: curves over steps with ranges, histograms of two steps, bars of an error's terms."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fp4graph.graph.blocks import pattern_of
from fp4graph.lab.pictures.style import COLORS, LABELS, PALETTE, TERMS, plain, subplots
from fp4graph.lab.statistics.storage import Measurement, Recorded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The most kinds of sites with separate lines.
KINDS = 7
#: The values of several sites, by step.
Curve = Mapping[int, Sequence[float]]
Curves = Mapping[str, Curve]


def gathered(points: Iterable[tuple[int, float | None]]) -> Curve:
    curve: dict[int, list[float]] = defaultdict(list)
    for step, value in points:
        if value is not None:
            curve[step].append(value)
    return dict(sorted(curve.items()))


def curves_by(name: Callable[[Measurement], str], recorded: Recorded, column: str, factor: float = 1.0) -> Curves:
    """Return the curves of a column by the names of its rows."""
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in recorded.having(column):
        points[name(row)].append((row["step"], factor * row[column]))
    return {name: gathered(of_name) for name, of_name in points.items()}


def operand_curves(recorded: Recorded, column: str, factor: float = 1.0) -> Curves:
    curves = curves_by(lambda row: LABELS.get(row["tensor"], ""), recorded, column, factor)
    return {label: curves[label] for label in LABELS.values() if label in curves}


def kind_of(row: Measurement) -> str:
    """Return the name of a row's site without the numbers of blocks."""
    return pattern_of(row["site"]) or "(root)"


def by_kind(recorded: Recorded, column: str) -> Curves:
    """Return a curve in percent for each kind of site.

    Only the KINDS kinds that are highest at the last step have curves of their own; the others share one.
    """
    curves = curves_by(kind_of, recorded, column, 100)
    ranked = sorted(curves, key=lambda kind: -statistics.fmean(list(curves[kind].values())[-1]))
    if len(others := ranked[KINDS:]) < 2:
        return curves
    label = f"{len(others)} others"
    curves = curves_by(lambda row: label if kind_of(row) in others else kind_of(row), recorded, column, 100)
    return {kind: curve for kind, curve in curves.items() if kind != label} | {label: curves[label]}


def error_panels(
    picture: Figure, panels: Any, errors: Mapping[str, Mapping[str, Mapping[str, float]]], label: str, *,
    small: bool = False,
) -> None:  # fmt: skip
    """Fill each panel with a title and a bar for each of its named errors; ``small`` shrinks texts for many panels.

    An error has its ``total`` and its parts (:data:`TERMS`), in percent of the signal; an unknown error is empty and
    keeps its place. A bar is as long as the total. The parts divide the bar in the ratio of their squares, which may
    add up to more than the total's square, because scale bias and grid noise can cancel.
    """
    ticks, labels = (8.5, 9.0) if small else ("medium", "medium")
    for axes, (title, bars) in zip(panels.flat, errors.items(), strict=False):
        left = dict.fromkeys(range(len(bars)), 0.0)
        for term, (name, color) in TERMS.items():
            for place, shares in enumerate(bars.values()):
                squares = sum(shares[each] for each in TERMS) if shares else 0.0
                width = shares["total"] * shares[term] / squares if squares else 0.0
                axes.barh(place, width, left=left[place], color=color, height=0.65)
                left[place] += width
            axes.barh(0, 0, color=color, label=name)
        axes.set_yticks(range(len(bars)), list(map(plain, bars)), fontsize=ticks)
        axes.grid(axis="y", visible=False)
        axes.set_title(title)
    for axes in panels[-1]:
        axes.set_xlabel(label, fontsize=labels)
    panels[0][0].invert_yaxis()
    legend_below(picture, panels[0][0])


def loss_scale(axes: Axes, values: Sequence[float], quantity: str = "loss") -> None:
    """Label the axis of values; make it logarithmic if they span more than a factor of 5."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = min(values), max(values)
    axes.set_ylabel(f"{quantity} (log scale)" if (logarithmic := low > 0 and high > 5 * low) else quantity)
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter("{x:g}")  # 0.5, not 5·10⁻¹


def band(axes: Axes, curve: Curve, color: str, label: str, *, shade: bool = True, dashed: bool = False) -> None:
    steps, values = list(curve), list(curve.values())
    marker, style = "o" if len(steps) <= 30 else None, "--" if dashed else "-"
    axes.plot(steps, list(map(statistics.fmean, values)), color=color, label=plain(label), marker=marker,
              markersize=3, linestyle=style)  # fmt: skip
    if shade:
        axes.fill_between(steps, list(map(min, values)), list(map(max, values)), color=color, alpha=0.13, linewidth=0)
    axes.set_xlabel("optimizer step")


def draw(axes: Axes, curves: Curves, quantity: str, *, shade: bool = False, log: bool = False) -> None:
    """Draw the curves as lines over steps, or as bars if there is a single step; ``shade`` shows ranges."""
    steps = {step for curve in curves.values() for step in curve}
    values = [value for curve in curves.values() for of_step in curve.values() for value in of_step]
    if not values:
        return
    for place, (label, curve) in enumerate(curves.items()):
        color = COLORS.get(label, PALETTE[place % len(PALETTE)])
        if len(steps) > 1:
            band(axes, curve, color, label, shade=shade)
        else:
            (of_step,) = curve.values()
            axes.barh(plain(label), statistics.fmean(of_step), color=color, height=0.6)
            axes.plot([min(of_step), max(of_step)], [plain(label)] * 2, color="#333", linewidth=1.2 if shade else 0)
    if len(steps) == 1:
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"{quantity}\nat step {steps.pop():,}" + (", line: lowest to highest" if shade else ""))
    elif log:
        loss_scale(axes, values, quantity)
    else:
        axes.set(ylabel=quantity, ylim=(0 if 0 <= min(values) < max(values) / 2 else None, None))


def curves_picture(height: float, curves: Curves, quantity: str, **options: bool) -> Figure | None:
    """Draw curves as means over sites with their range, and a legend beside them; return None without curves."""
    if not any(curves.values()):
        return None
    picture, axes = subplots(height)
    draw(axes, {label: curve for label, curve in curves.items() if curve}, quantity, **options)
    if axes.get_legend_handles_labels()[0]:  # bars have no legend, because the axis names them
        title = "mean over sites,\nshaded: lowest to highest" if options.get("shade") else None
        axes.legend(title=title, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, alignment="left",
                    title_fontsize=8.5)  # fmt: skip
    return picture


def first_last_histogram(
    axes: Axes, histograms: Iterable[tuple[int, int, Sequence[int]]], low: float, width: float, color: str | None = None
) -> None:
    """Draw the distribution at the last step filled, and at the first step as an outline, in percent.

    A histogram has a step, the number of its first class, and the counts of this and the following classes; ``low`` is
    the lower end of class 0, and ``width`` the width of every class.
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


def legend_below(picture: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        picture.legend(handles, labels, loc="outside lower center", ncols=4)
