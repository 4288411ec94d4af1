"""Pictures of recorded statistics. Each function returns a matplotlib Figure, or None where nothing was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp4graph.lab.pictures import panels as p
from fp4graph.lab.pictures.style import LABELS, OPERANDS, PALETTE, styled, subplots
from fp4graph.lab.statistics.metrics import CONFIDENCE_BINS, LATENT_BINS, OSCILLATING, RATIO_EDGES
from fp4graph.lab.statistics.storage import Measurement, Recorded

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled()
def losses(metrics: Sequence[Measurement]) -> Figure | None:
    """Training and validation loss over steps."""
    # A line of a validation repeats the training loss, as a mean since the validation before.
    between = [row for row in metrics if row.get("validation_loss") is None and row.get("train_loss") is not None]
    curves = {"training": _points(between or metrics, "train_loss"), "validation": _points(metrics, "validation_loss")}
    values = [value for points in curves.values() for _, value in points]
    if not values:
        return None
    picture, axes = subplots(3.6)
    for (name, points), color, width in zip(curves.items(), PALETTE, (1.1, 1.8), strict=False):
        if points:
            marker = "o" if name == "validation" and len(points) <= 40 else None
            axes.plot(*zip(*points, strict=True), color=color, linewidth=width, marker=marker, markersize=3.5,
                      label=f"{name}, last {points[-1][1]:.4g}")  # fmt: skip
    p.loss_scale(axes, values)
    axes.set_xlabel("optimizer step")
    axes.legend()
    return picture


@styled()
def other_metrics(metrics: Sequence[Measurement]) -> Figure | None:
    """The other metrics of the validations, one panel each."""
    known = {"step", "train_loss", "validation_loss", "lr", "seconds"}
    names = dict.fromkeys(
        name
        for row in metrics
        for name, value in row.items()
        if name not in known and isinstance(value, int | float) and not isinstance(value, bool)
    )
    if not names:
        return None
    picture, panels = subplots(2.6, 1, min(4, len(names)), squeeze=False)
    for axes, name in zip(panels.flat, names, strict=False):
        points = _points(metrics, name)
        axes.plot(*zip(*points, strict=True), color=PALETTE[2], marker="o" if len(points) <= 40 else None, markersize=3)
        axes.set(xlabel="optimizer step", ylabel=name.replace("_", " "))
    return picture


def _points(metrics: Sequence[Measurement], column: str) -> list[tuple[int, float]]:
    return [(row["step"], row[column]) for row in metrics if row.get(column) is not None]


@styled()
def snr(recorded: Recorded) -> Figure | None:
    """Signal-to-noise ratio of the six operands over steps: mean over sites, and their range."""
    found = p.operand_curves(recorded, "snr_db")
    curves = {LABELS[operand]: (curve, {"color": OPERANDS[operand]}) for operand, curve in found.items()}
    return p.bands(3.8, curves, ylabel="signal-to-noise ratio, dB")


@styled()
def shares(recorded: Recorded) -> Figure | None:
    """Saturated and underflowed shares of the six operands over steps."""
    titles = {"saturated": "saturated", "underflowed": "rounded to zero"}
    found = {column: p.operand_curves(recorded, column, 100) for column in titles}
    found = {
        column: curves
        for column, curves in found.items()
        if any(any(values) for curve in curves.values() for values in curve.values())
    }
    if not found:
        return None
    picture, panels = subplots(3.2, 1, len(found), squeeze=False)
    for axes, (column, curves) in zip(panels.flat, found.items(), strict=True):
        for operand, curve in curves.items():
            p.band(axes, curve, OPERANDS[operand], LABELS[operand], shade=False)
        axes.set(ylabel="% of elements", ylim=(0, None))
        axes.set_title(titles[column] + ("" if "saturated" in found else " (and nothing is saturated)"))
    p.legend_below(picture, panels[0][0])
    return picture


@styled()
def decomposition(recorded: Recorded) -> Figure | None:
    """Scale bias, dead zone and grid noise of the six operands, at the last recorded step."""
    operands = p.by_operand(p.latest(recorded, "scale_bias"))
    if not operands:
        return None
    errors = {LABELS[operand]: p.mean_error(rows) for operand, rows in operands.items()}
    picture, panels = subplots(0.55 * len(errors) + 1.5, squeeze=False)
    p.error_panels(picture, panels, {"": errors}, "squared error, % of the signal; mean over sites", height=0.65)
    return picture


@styled()
def decomposition_by_site(recorded: Recorded) -> Figure | None:
    """Scale bias, dead zone and grid noise for each kind of site, one panel per operand."""
    rows = p.latest(recorded, "scale_bias")
    kinds = list(p.by_kind(rows))
    if len(kinds) < 2:
        return None
    errors = {
        LABELS[operand]: {kind: p.mean_error(p.by_kind(own).get(kind, [])) for kind in kinds}
        for operand, own in p.by_operand(rows).items()
    }
    picture, panels = p.grid(len(errors), 0.26 * len(kinds) + 1.15, 0.4, sharex=True, sharey=True)
    p.error_panels(picture, panels, errors, "% of the signal", height=0.65, small=True)
    return picture


@styled()
def scales(recorded: Recorded) -> Figure | None:
    """Histograms of block scales by exponent at the first and the last recorded step, one panel per operand."""
    operands = p.by_operand([row for row in recorded.rows if row.get("scales", {}).get("counts")])
    if not operands:
        return None
    picture, panels = p.grid(len(operands), 2.1, 0.5)
    for axes, (operand, rows) in zip(panels.flat, operands.items(), strict=False):
        histograms = [(row["step"], row["scales"]["lowest"], row["scales"]["counts"]) for row in rows]
        p.first_last_histogram(axes, histograms, -0.5, 1, OPERANDS[operand])
        axes.set_title(LABELS[operand])
        axes.set_xlabel("log₂ of the scale", fontsize=9)
        if axes in panels[:, 0]:
            axes.set_ylabel("% of blocks")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=8, handlelength=1.2)
    return picture


@styled()
def confidence(recorded: Recorded) -> Figure | None:
    """Quantization confidence: its histogram at the first and the last recorded step, and its mean over steps."""
    histograms = [(row["step"], 0, row["confidence_histogram"]) for row in recorded.having("confidence_histogram")]
    if not histograms:
        return None
    picture, (left, right) = subplots(3.6, 1, 2)
    p.first_last_histogram(left, histograms, 0, 1 / CONFIDENCE_BINS)
    left.set(xlabel="quantization confidence", ylabel="% of weights", xlim=(0, 1))
    left.legend()
    p.kinds(right, recorded, "confidence")
    right.set_ylabel("mean confidence")
    p.legend_below(picture, right, columns=4)
    return picture


@styled()
def latent(recorded: Recorded) -> Figure | None:
    """Histogram of latent weights w/S at the first and the last recorded step, thresholds of E2M1 dashed."""
    rows = recorded.having("latent")
    if not rows:
        return None
    picture, axes = subplots(2.9)
    limit = rows[-1]["latent"]["limit"]
    histograms = [(row["step"], 0, row["latent"]["counts"]) for row in rows if row["latent"]["limit"] == limit]
    p.first_last_histogram(axes, histograms, -limit, 2 * limit / LATENT_BINS)
    if limit == 6.0:
        thresholds = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
        for threshold in (*thresholds, *(-each for each in thresholds)):
            axes.axvline(threshold, color="#999", linewidth=0.8, linestyle=(0, (4, 3)),
                         label="rounding thresholds" if threshold == thresholds[0] else None)  # fmt: skip
    axes.set(xlabel="latent weight, w/S", ylabel="% of weights", xlim=(-limit, limit))
    axes.grid(axis="x", visible=False)
    axes.legend()
    return picture


@styled()
def oscillation(recorded: Recorded) -> Figure | None:
    """Share of oscillating weights over steps, and the distribution of R_w in the last window."""
    rows = recorded.having("ratio_counts")
    if not rows:
        return None
    picture, (left, right) = subplots(3.8, 1, 2)
    p.kinds(left, recorded, "oscillating", factor=100)
    left.set(ylabel=f"weights with R_w > {OSCILLATING:g}, %", ylim=(0, None))
    p.legend_below(picture, left, columns=4)
    window = rows[-1]["window"]
    names = ["0", *(f"≤{edge:g}" for edge in RATIO_EDGES[1:]), f">{RATIO_EDGES[-1]:g}"]
    steps = sorted({rows[0]["step"], rows[-1]["step"]})
    bars = ((-0.2, 0.4, "#b9c7d6"), (0.2, 0.4, PALETTE[0])) if len(steps) > 1 else ((0.0, 0.7, PALETTE[0]),)
    for step, (shift, width, color) in zip(steps, bars, strict=True):
        counts = [sum(c) for c in zip(*(r["ratio_counts"] for r in rows if r["step"] == step), strict=True)]
        right.bar([place + shift for place in range(len(counts))], [100 * count / sum(counts) for count in counts],
                  width=width, color=color, label=f"steps {step - window:,} to {step:,}")  # fmt: skip
    right.set_xticks(range(len(names)), names, rotation=55, fontsize=8.5)
    right.set_yscale("symlog", linthresh=0.1)
    right.set(xlabel="oscillation ratio R_w", ylabel="% of weights (log scale)")
    right.grid(axis="x", visible=False)
    right.legend()
    return picture


@styled()
def trajectories(recorded: Recorded) -> Figure | None:
    """The weights with the largest oscillation ratios of the last window: w, and Q(w) that jumps."""
    rows = [row for row in recorded.rows if row.get("trajectories")]
    if not rows:
        return None
    found = [(path, row) for row in rows if row["step"] == rows[-1]["step"] for path in row["trajectories"]]
    found = sorted(found, key=lambda each: -each[0]["ratio"])[:3]
    picture, panels = subplots(2.6, 1, len(found), squeeze=False)
    for axes, (path, row) in zip(panels.flat, found, strict=True):
        steps = range(row["step"] - row["window"], row["step"] + 1)
        axes.step(steps, path["quantized"], where="post", color=PALETTE[1], label="Q(w)")
        axes.plot(steps, path["weight"], color=PALETTE[0], label="w")
        axes.set_title(f"{row['site']}\nR_w = {path['ratio']:.3g}", fontsize=9)
        axes.set_xlabel("optimizer step", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.locator_params(nbins=4)
    panels[0][0].set_ylabel("value of one weight")
    p.legend_below(picture, panels[0][0], columns=2)
    return picture


@styled()
def rates_of_change(recorded: Recorded) -> Figure | None:
    """Relative change per step of W, of Q(W), and of Y for the same input: mean over sites, and their range."""
    weights = recorded.having("quantized_rate_of_change")
    found = {
        "W": p.gathered((row["step"], row["rate_of_change"]) for row in weights),
        "Q(W)": p.gathered((row["step"], row["quantized_rate_of_change"]) for row in weights),
        "Y": p.curve_of(recorded, "rate_of_change", "output"),
    }
    there = [(name, curve) for name, curve in found.items() if curve]
    curves = {name: (curve, {"color": color}) for (name, curve), color in zip(there, PALETTE, strict=False)}
    return p.bands(3.2, curves, yscale="log", ylabel="relative change per step (log scale)")


@styled()
def flips(recorded: Recorded) -> Figure | None:
    """Flips per weight and step."""
    if not recorded.having("flips"):
        return None
    picture, axes = subplots(2.9)
    p.kinds(axes, recorded, "flips", factor=100)
    axes.set(ylabel="flips per step, % of weights", ylim=(0, None))
    p.legend_beside(axes, None)
    return picture


@styled()
def gradients(recorded: Recorded) -> Figure | None:
    """Bias and standard deviation of dgrad's and wgrad's results over steps, relative to the exact result."""
    curves = {}
    for gemm, color in (("dgrad", PALETTE[0]), ("wgrad", PALETTE[1])):
        for column, name in (("bias", "bias"), ("deviation", "standard deviation")):
            curve, is_noise = p.curve_of(recorded, column, gemm), column == "deviation"
            if any(any(values) for values in curve.values()):
                curves[f"{gemm}, {name}"] = curve, {"color": color, "shade": not is_noise, "dashed": is_noise}
    return p.bands(3.2, curves, ylabel="share of the exact gradient's norm", ylim=(0, None))
