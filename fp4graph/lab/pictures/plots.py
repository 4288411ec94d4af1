"""Pictures of recorded statistics. Each function returns a matplotlib Figure, or None if nothing was recorded.

The docstring of a function that draws a :class:`Recorded` is the picture's title in the report.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from fp4graph.lab.pictures import panels as p
from fp4graph.lab.pictures.style import COLORS, LABELS, PALETTE, TERMS, plain, styled, subplots
from fp4graph.lab.statistics.metrics import CONFIDENCE_BINS, LATENT_BINS, OSCILLATING, RATIO_EDGES
from fp4graph.lab.statistics.storage import Measurement, Recorded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[Recorded], "Figure | None"]


def drawn_from(*columns: str) -> Callable[[Draw], Draw]:
    """Decorate a drawing function: apply the pictures' style, and return None if no column was recorded."""

    def decorated(draw: Draw) -> Draw:
        @functools.wraps(draw)
        @styled()
        def drawn(recorded: Recorded) -> Figure | None:
            return draw(recorded) if any(map(recorded.having, columns)) else None

        return drawn

    return decorated


@styled()
def losses(metrics: Sequence[Measurement]) -> Figure | None:
    # The line of a validation has a mean of the training losses before it, which the other lines show already.
    between = [row for row in metrics if row.get("validation_loss") is None and row.get("train_loss") is not None]
    curves = {"training": _points(between or metrics, "train_loss"), "validation": _points(metrics, "validation_loss")}
    if not any(curves.values()):
        return None
    picture, axes = subplots(3.6)
    for (name, points), color, width in zip(curves.items(), PALETTE, (1.1, 1.8), strict=False):
        if points:
            _line(axes, points, color, linewidth=width, label=f"{name}, last {points[-1][1]:.4g}")
    p.loss_scale(axes, [value for points in curves.values() for _, value in points])
    axes.legend()
    return picture


@styled()
def other_metrics(metrics: Sequence[Measurement]) -> Figure | None:
    """Draw the other metrics of the validations, one panel each."""
    excluded = {"step", "train_loss", "validation_loss", "lr", "seconds"}
    points_of = {name: _points(metrics, name) for name in dict.fromkeys(chain(*metrics)) if name not in excluded}
    shown = [name for name, ps in points_of.items() if ps and all(type(v) in (int, float) for _, v in ps)][:4]
    if not shown:
        return None
    picture, panels = subplots(2.6, 1, len(shown), squeeze=False)
    for axes, name in zip(panels.flat, shown, strict=True):
        _line(axes, points_of[name], PALETTE[2])
        axes.set_ylabel(plain(name.replace("_", " ")))
    return picture


def _points(metrics: Sequence[Measurement], column: str) -> list[tuple[int, float]]:
    return [(row["step"], row[column]) for row in metrics if row.get(column) is not None]


def _line(axes: Any, points: Sequence[tuple[int, float]], color: str, **options: Any) -> None:
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, color=color, marker="o" if len(points) <= 40 else None, markersize=3, **options)
    axes.set_xlabel("optimizer step")
    if len(points) == 1 and len(axes.lines) == 1:
        axes.set_xticks(steps)
        axes.set_yticks(values, [f"{values[0]:.4g}"])


def _grid(count: int, height: float, more: float, **options: Any) -> tuple[Figure, Any]:
    """Return a picture with up to three panels per row, each ``height`` inches high, plus ``more`` inches in total."""
    columns = min(3, count)
    lines = math.ceil(count / columns)
    picture, panels = subplots(lines * height + more, lines, columns, squeeze=False, **options)
    for axes in panels.flat[count:]:
        axes.set_visible(False)
    return picture, panels


@drawn_from("snr_db")
def snr(recorded: Recorded) -> Figure | None:
    """Signal-to-noise ratio of the six operands"""
    return p.curves_picture(3.8, p.operand_curves(recorded, "snr_db"), "signal-to-noise ratio, dB", shade=True)


@drawn_from("scale_bias")
def decomposition(recorded: Recorded) -> Figure | None:
    """Where the error comes from"""
    import pandas

    rows = recorded.latest("scale_bias")
    each = pandas.DataFrame.from_records(rows).rename(columns={"relative_error": "total"})
    each["kind"] = list(map(p.kind_of, rows))
    means = pandas.concat([each, each.assign(kind="all sites")]).groupby(["tensor", "kind"])[[*TERMS, "total"]].mean()
    kinds = [*each["kind"].unique(), "all sites"]
    errors = {
        label: {kind: dict(100 * means.loc[operand, kind]) if (operand, kind) in means.index else {} for kind in kinds}
        for operand, label in LABELS.items()
        if operand in means.index
    }
    picture, panels = _grid(len(errors), 0.26 * len(kinds) + 1.14, 0.4, sharex=True, sharey=True)
    p.error_panels(picture, panels, errors, "% of the signal", small=True)
    return picture


@drawn_from("underflowed", "saturated")
def shares(recorded: Recorded) -> Figure | None:
    """Clipped and lost"""
    titles = {"saturated elements, %": "saturated", "rounded to zero, %": "underflowed"}
    shown = {title: curves for title, name in titles.items() if (curves := p.operand_curves(recorded, name, 100))}
    picture, panels = subplots(3.2, 1, len(shown), squeeze=False)
    for axes, (title, curves) in zip(panels.flat, shown.items(), strict=True):
        p.draw(axes, curves, title)
    p.legend_below(picture, panels[0][0])
    return picture


@drawn_from("scales")
def scales(recorded: Recorded) -> Figure | None:
    """Block scales"""
    histograms = defaultdict(list)
    for row in recorded.having("scales"):
        if row["tensor"] in LABELS and row["scales"].get("counts"):
            histograms[row["tensor"]].append((row["step"], row["scales"]["lowest"], row["scales"]["counts"]))
    if not histograms:
        return None
    picture, panels = _grid(len(histograms), 2.1, 0.5)
    for axes, operand in zip(panels.flat, filter(histograms.get, LABELS), strict=False):
        words = [weight.get("operands", {}).get(operand, "-") for weight in recorded.header.get("weights", ())]
        kinds = {"encode" if "encode" in spec.split() else "decode" for spec in words if spec != "-"}
        p.first_last_histogram(axes, histograms[operand], -0.5, 1, COLORS[LABELS[operand]])
        axes.set_title(LABELS[operand])
        axes.set_xlabel(f"log₂ of the {' or '.join(sorted(kinds)) or 'stored'} scale", fontsize=9)
        if axes in panels[:, 0]:
            axes.set_ylabel("% of blocks")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=8, handlelength=1.2)
    return picture


@drawn_from("bias")
def gradients(recorded: Recorded) -> Figure | None:
    """Bias and noise of the gradients"""
    names = {"bias": "bias", "deviation": "standard deviation"}
    by_gemm = {name: p.curves_by(lambda row: row["tensor"], recorded, column) for column, name in names.items()}
    curves = {f"{gemm}, {name}": by_gemm[name].get(gemm, {}) for gemm in ("dgrad", "wgrad") for name in by_gemm}
    return p.curves_picture(3.2, curves, "share of the exact gradient's norm", shade=True)


@drawn_from("ratio_counts")
def oscillation(recorded: Recorded) -> Figure | None:
    """Oscillation"""
    rows = recorded.having("ratio_counts")
    picture, (left, right) = subplots(3.8, 1, 2)
    p.draw(left, p.by_kind(recorded, "oscillating"), f"weights with R_w > {OSCILLATING:g}, %")
    p.legend_below(picture, left)
    names = ["0", *(f"≤{edge:g}" for edge in RATIO_EDGES[1:]), f">{RATIO_EDGES[-1]:g}"]
    steps = sorted({rows[0]["step"], rows[-1]["step"]})
    bars = ((-0.2, 0.4, "#b9c7d6"), (0.2, 0.4, PALETTE[0])) if len(steps) > 1 else ((0.0, 0.7, PALETTE[0]),)
    for step, (shift, width, color) in zip(steps, bars, strict=True):
        counts = [sum(c) for c in zip(*(r["ratio_counts"] for r in rows if r["step"] == step), strict=True)]
        right.bar([place + shift for place in range(len(counts))], [100 * count / sum(counts) for count in counts],
                  width=width, color=color, label=f"steps {step - rows[-1]['window']:,} to {step:,}")  # fmt: skip
    right.set_xticks(range(len(names)), names, rotation=55, fontsize=8.5)
    right.set_yscale("symlog", linthresh=0.1)
    right.yaxis.set_major_formatter("{x:g}")
    right.set(xlabel="oscillation ratio R_w", ylabel="% of weights (log scale)")
    right.grid(axis="x", visible=False)
    right.legend()
    return picture


@drawn_from("trajectories")
def trajectories(recorded: Recorded) -> Figure | None:
    """Weights that oscillate"""
    rows = [row for row in recorded.latest("trajectories") if row["trajectories"]]
    if not rows:
        return None
    ranked = sorted(((path, row) for row in rows for path in row["trajectories"]), key=lambda each: -each[0]["ratio"])
    picture, panels = subplots(2.6, 1, len(ranked[:3]), squeeze=False)
    for axes, (path, row) in zip(panels.flat, ranked, strict=False):
        steps = range(row["step"] - row["window"], row["step"] + 1)
        axes.step(steps, path["quantized"], where="post", color=PALETTE[1], label="Q(w)")
        axes.plot(steps, path["weight"], color=PALETTE[0], label="w")
        axes.set_title(f"{plain(row['site'])}\nR_w = {path['ratio']:.3g}", fontsize=9)
        axes.set_xlabel("optimizer step", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.locator_params(nbins=4)
    panels[0][0].set_ylabel("value of one weight")
    p.legend_below(picture, panels[0][0])
    return picture


@drawn_from("confidence_histogram")
def confidence(recorded: Recorded) -> Figure | None:
    """Quantization confidence"""
    rows = recorded.having("confidence_histogram")
    picture, (left, right) = subplots(3.6, 1, 2)
    histograms = [(row["step"], 0, row["confidence_histogram"]) for row in rows]
    p.first_last_histogram(left, histograms, 0, 100 / CONFIDENCE_BINS)
    left.set(xlabel="quantization confidence, %", ylabel="% of weights", xlim=(0, 100))
    left.legend()
    p.draw(right, p.by_kind(recorded, "confidence"), "mean confidence, %")
    p.legend_below(picture, right)
    return picture


@drawn_from("latent")
def latent(recorded: Recorded) -> Figure | None:
    """Latent weights"""
    rows = recorded.having("latent")
    picture, axes = subplots(2.9)
    limit = rows[-1]["latent"]["limit"]
    histograms = [(row["step"], 0, row["latent"]["counts"]) for row in rows if row["latent"]["limit"] == limit]
    p.first_last_histogram(axes, histograms, -limit, 2 * limit / LATENT_BINS)
    if limit == 6.0:  # E2M1
        thresholds = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
        axes.vlines([*thresholds, *(-each for each in thresholds)], *axes.get_ylim(), color="#999", linewidth=0.8,
                    linestyle=(0, (4, 3)), label="rounding thresholds")  # fmt: skip
    axes.set(xlabel="latent weight, w/S", ylabel="% of weights", xlim=(-limit, limit))
    axes.grid(axis="x", visible=False)
    axes.legend()
    return picture


@drawn_from("rate_of_change")
def rates_of_change(recorded: Recorded) -> Figure | None:
    """Rates of change"""
    rates = p.curves_by(lambda row: "Y" if row["tensor"] == "output" else "W", recorded, "rate_of_change")
    quantized = p.curves_by(lambda row: "Q(W)", recorded, "quantized_rate_of_change")
    curves = {name: {**rates, **quantized}.get(name, {}) for name in ("W", "Q(W)", "Y")}
    return p.curves_picture(3.2, curves, "relative change per step", shade=True, log=True)


@drawn_from("flips")
def flips(recorded: Recorded) -> Figure | None:
    """Flips"""
    return p.curves_picture(2.9, p.by_kind(recorded, "flips"), "flips per step, % of weights")
