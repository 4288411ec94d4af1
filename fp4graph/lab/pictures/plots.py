"""Pictures of recorded statistics. Each function returns a matplotlib Figure, or None where nothing was recorded.

The docstrings of pictures of a :class:`Recorded` are the titles and the texts of the report.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from fp4graph.graph.blocks import pattern_of
from fp4graph.lab.pictures import panels as p
from fp4graph.lab.pictures.style import COLORS, LABELS, PALETTE, styled, subplots
from fp4graph.lab.statistics.metrics import CONFIDENCE_BINS, LATENT_BINS, OSCILLATING, RATIO_EDGES
from fp4graph.lab.statistics.storage import Measurement, Recorded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[Recorded], "Figure | None"]


def drawn_from(*columns: str) -> Callable[[Draw], Draw]:
    """Decorate a function that draws what was recorded: our style, and None where none of the columns was."""

    def decorated(draw: Draw) -> Draw:
        @functools.wraps(draw)
        def drawn(recorded: Recorded) -> Figure | None:
            with styled():
                return draw(recorded) if any(map(recorded.having, columns)) else None

        return drawn

    return decorated


@styled()
def losses(metrics: Sequence[Measurement]) -> Figure | None:
    # A line of a validation repeats the training loss, as a mean since the validation before.
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
    """The other metrics of the validations, one panel each."""
    known = {"step", "train_loss", "validation_loss", "lr", "seconds"}
    names = [name for name in dict.fromkeys(chain(*metrics)) if name not in known]
    names = [name for name in names if all(type(value) in (int, float) for _, value in _points(metrics, name))]
    names = [name for name in names if _points(metrics, name)][:4]
    if not names:
        return None
    picture, panels = subplots(2.6, 1, len(names), squeeze=False)
    for axes, name in zip(panels.flat, names, strict=True):
        _line(axes, _points(metrics, name), PALETTE[2])
        axes.set_ylabel(name.replace("_", " "))
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
    """Return a picture with up to three panels a row, each ``height`` inches high, and ``more`` inches in all."""
    columns = min(3, count)
    lines = math.ceil(count / columns)
    picture, panels = subplots(lines * height + more, lines, columns, squeeze=False, **options)
    for axes in panels.flat[count:]:
        axes.set_visible(False)
    return picture, panels


@drawn_from("snr_db")
def snr(recorded: Recorded) -> Figure | None:
    """Signal-to-noise ratio of the six operands

    How much of each operand survives its quantizer: 10·log₁₀(‖x‖² / ‖Q(x) − x‖²). Nearest rounding to 4 bits leaves 15
    to 20 dB, stochastic rounding about 3 dB less. An operand that is quantized a second time (double quantization) is
    compared with what the first quantizer left, and loses little.
    """
    return p.curves_picture(3.8, p.operand_curves(recorded, "snr_db"), "signal-to-noise ratio, dB", shade=True)


@drawn_from("scale_bias")
def decomposition(recorded: Recorded) -> Figure | None:
    """Where the error comes from

    The squared error of each operand at the last recorded step, by kind of site. Grid noise is what 4 bits cost under
    an ideal scale; scale bias what the scale's format costs; dead zone what is rounded to zero. These three add up
    element by element. Each bar is divided in the ratio of their squares, which may add up to more than the error:
    scale bias can undo grid noise.
    """
    rows = recorded.latest("scale_bias")
    kinds = list(dict.fromkeys(pattern_of(row["site"]) for row in rows))
    errors = {
        LABELS[operand]: {kind: p.mean_error([row for row in own if pattern_of(row["site"]) == kind]) for kind in kinds}
        | {"all sites": p.mean_error(own)}
        for operand, own in p.by_operand(rows).items()
    }
    picture, panels = _grid(len(errors), 0.26 * len(kinds) + 1.4, 0.4, sharex=True, sharey=True)
    p.error_panels(picture, panels, errors, "% of the signal", small=True)
    return picture


@drawn_from("underflowed", "saturated")
def shares(recorded: Recorded) -> Figure | None:
    """Clipped and lost

    Saturated elements lie beyond the largest value that their block's scale can express. Elements rounded to zero are
    the dead zone's: their information is gone until the next step.
    """
    titles = {"saturated": "saturated elements, %", "underflowed": "rounded to zero, %"}
    found = {column: curves for column in titles if (curves := p.operand_curves(recorded, column, 100))}
    picture, panels = subplots(3.2, 1, len(found), squeeze=False)
    for axes, (column, curves) in zip(panels.flat, found.items(), strict=True):
        p.draw(axes, curves, titles[column])
    p.legend_below(picture, panels[0][0])
    return picture


@drawn_from("scales")
def scales(recorded: Recorded) -> Figure | None:
    """Block scales

    How many blocks have a stored scale of which power of two. Decode scales multiply the 4-bit values, so that large
    blocks have large ones; encode scales are multiplied with the operand, so that large blocks have small ones. A wall
    at either end is a format that runs out of range.
    """
    operands = p.by_operand(row for row in recorded.rows if row.get("scales", {}).get("counts"))
    if not operands:
        return None
    picture, panels = _grid(len(operands), 2.1, 0.5)
    for axes, (operand, rows) in zip(panels.flat, operands.items(), strict=False):
        words = [weight.get("operands", {}).get(operand, "-") for weight in recorded.header.get("weights", ())]
        kinds = {"encode" if "encode" in spec.split() else "decode" for spec in words if spec != "-"}
        histograms = [(row["step"], row["scales"]["lowest"], row["scales"]["counts"]) for row in rows]
        p.first_last_histogram(axes, histograms, -0.5, 1, COLORS[LABELS[operand]])
        axes.set_title(LABELS[operand])
        axes.set_xlabel(f"log₂ of the {' or '.join(sorted(kinds)) or 'stored'} scale", fontsize=9)
        if axes in panels[:, 0]:
            axes.set_ylabel("% of blocks")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=8, handlelength=1.2)
    return picture


@drawn_from("bias")
def gradients(recorded: Recorded) -> Figure | None:
    """Bias and noise of the gradients

    The results of the two backward products, each against the product of the same factors in high precision. Bias does
    not average out over steps; noise (the standard deviation over the random bits of stochastic rounding) does.
    """
    names = {"bias": "bias", "deviation": "standard deviation"}
    curves = {f"{gemm}, {name}": p.curve(recorded, column, gemm)
              for gemm in ("dgrad", "wgrad") for column, name in names.items()}  # fmt: skip
    return p.curves_picture(3.2, curves, "share of the exact gradient's norm", shade=True)


@drawn_from("ratio_counts")
def oscillation(recorded: Recorded) -> Figure | None:
    """Oscillation

    R_w is the path length of a weight's quantized value over that of the weight. Above 16 the weight sits at a rounding
    threshold and its quantized value jumps to and fro.
    """
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
    """Weights that oscillate

    Those with the largest R_w of the last window, among a few hundred of each site that are followed.
    """
    rows = [row for row in recorded.latest("trajectories") if row["trajectories"]]
    if not rows:
        return None
    found = sorted(((path, row) for row in rows for path in row["trajectories"]), key=lambda each: -each[0]["ratio"])
    picture, panels = subplots(2.6, 1, len(found[:3]), squeeze=False)
    for axes, (path, row) in zip(panels.flat, found, strict=False):
        steps = range(row["step"] - row["window"], row["step"] + 1)
        axes.step(steps, path["quantized"], where="post", color=PALETTE[1], label="Q(w)")
        axes.plot(steps, path["weight"], color=PALETTE[0], label="w")
        axes.set_title(f"{row['site']}\nR_w = {path['ratio']:.3g}", fontsize=9)
        axes.set_xlabel("optimizer step", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.locator_params(nbins=4)
    panels[0][0].set_ylabel("value of one weight")
    p.legend_below(picture, panels[0][0])
    return picture


@drawn_from("confidence_histogram")
def confidence(recorded: Recorded) -> Figure | None:
    """Quantization confidence

    The distance of each latent weight w/S to the nearest rounding threshold, as a share of the largest: 0 is on a
    threshold, 100 % as far from it as can be. Mass that moves to the left is weight about to flip.
    """
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
    """Latent weights

    Where weights lie among the values that 4 bits have.
    """
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
    """Rates of change

    How far weights, quantized weights and outputs (for the same input) move in one step. At the end of a training all
    should fall; quantized weights and outputs that do not are oscillation.
    """
    weights = recorded.having("quantized_rate_of_change")
    curves = {
        "W": p.gathered((row["step"], row["rate_of_change"]) for row in weights),
        "Q(W)": p.gathered((row["step"], row["quantized_rate_of_change"]) for row in weights),
        "Y": p.curve(recorded, "rate_of_change", "output"),
    }
    return p.curves_picture(3.2, curves, "relative change per step", shade=True, log=True)


@drawn_from("flips")
def flips(recorded: Recorded) -> Figure | None:
    """Flips

    How many quantized weights change their value in a step, on average.
    """
    return p.curves_picture(2.9, p.by_kind(recorded, "flips"), "flips per step, % of weights")
