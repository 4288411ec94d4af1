"""Pictures of recorded statistics. Each function returns a matplotlib Figure, or None where nothing was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp4graph.analysis.metrics import CONFIDENCE_BINS, LATENT_BINS, OSCILLATING, RATIO_EDGES
from fp4graph.analysis.panels import (
    band,
    by_kind,
    curve_of,
    curves_of,
    error_bars,
    first_last_histogram,
    gathered,
    grid,
    kinds_of,
    latest,
    legend_below,
    legend_beside,
    log_scale,
    mean_error,
)
from fp4graph.analysis.storage import Measurement, Recorded
from fp4graph.analysis.style import LABELS, OPERANDS, PALETTE, figure, styled
from fp4graph.graph.blocks import pattern_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ------------------------------------------------------------------ the training


@styled()
def losses(metrics: Sequence[Measurement]) -> Figure | None:
    """Training and validation loss over steps."""
    # A line of a validation repeats the training loss, as a mean since the validation before.
    between = [row for row in metrics if row.get("validation_loss") is None and row.get("train_loss") is not None]
    curves = {
        name: [(row["step"], row[column]) for row in rows if row.get(column) is not None]
        for name, column, rows in (
            ("training", "train_loss", between or metrics),
            ("validation", "validation_loss", metrics),
        )
    }
    if not any(curves.values()):
        return None
    picture = figure()
    axes = picture.subplots()
    for (name, points), color, width in zip(curves.items(), PALETTE, (1.1, 1.8), strict=False):
        if points:
            marker = "o" if name == "validation" and len(points) <= 40 else None
            axes.plot(*zip(*points, strict=True), color=color, linewidth=width, marker=marker, markersize=3.5,
                      label=f"{name}, last {points[-1][1]:.4g}")  # fmt: skip
    every = [value for points in curves.values() for _, value in points]
    if min(every) > 0 and max(every) > 5 * min(every):
        log_scale(axes)
    axes.set(xlabel="optimizer step", ylabel="loss" + (" (log scale)" if axes.get_yscale() == "log" else ""))
    axes.legend()
    return picture


@styled()
def other_metrics(metrics: Sequence[Measurement]) -> Figure | None:
    """The other metrics of the validations, one panel each."""
    known = {"step", "train_loss", "validation_loss", "lr", "seconds"}
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in metrics:
        for name, value in row.items():
            if name not in known and isinstance(value, int | float) and not isinstance(value, bool):
                curves.setdefault(name, []).append((row["step"], value))
    if not curves:
        return None
    picture = figure(2.6)
    panels = picture.subplots(1, min(4, len(curves)), squeeze=False)[0]
    for axes, (name, points) in zip(panels, curves.items(), strict=False):
        axes.plot(*zip(*points, strict=True), color=PALETTE[2], marker="o" if len(points) <= 40 else None, markersize=3)
        axes.set(xlabel="optimizer step", ylabel=name.replace("_", " "))
    return picture


# ------------------------------------------------------------------ operands


@styled()
def snr(recorded: Recorded) -> Figure | None:
    """Signal-to-noise ratio of the six operands over steps: mean over sites, and their range."""
    curves = curves_of(recorded, "snr_db", OPERANDS)
    if not curves:
        return None
    picture = figure(3.8)
    axes = picture.subplots()
    for operand, curve in curves.items():
        band(axes, curve, OPERANDS[operand], LABELS[operand])
    axes.set(xlabel="optimizer step", ylabel="signal-to-noise ratio, dB")
    legend_beside(axes)
    return picture


@styled()
def shares(recorded: Recorded) -> Figure | None:
    """Saturated and underflowed shares of the six operands over steps."""
    titles = {"saturated": "saturated", "underflowed": "rounded to zero"}
    found = {column: curves_of(recorded, column, OPERANDS, 100) for column in titles}
    found = {
        column: curves
        for column, curves in found.items()
        if any(value for curve in curves.values() for values in curve.values() for value in values)
    }
    if not found:
        return None
    picture = figure(3.2)
    panels = picture.subplots(1, len(found), squeeze=False)[0]
    for axes, (column, curves) in zip(panels, found.items(), strict=True):
        for operand, curve in curves.items():
            band(axes, curve, OPERANDS[operand], LABELS[operand], shade=False)
        axes.set(xlabel="optimizer step", ylabel="% of elements", ylim=(0, None))
        axes.set_title(titles[column] + ("" if "saturated" in found else " (and nothing is saturated)"))
    legend_below(picture, panels[0])
    return picture


@styled()
def decomposition(recorded: Recorded) -> Figure | None:
    """Scale bias, dead zone and grid noise of the six operands, at the last recorded step."""
    rows = latest(recorded, "scale_bias")
    errors = {label: mean_error([row for row in rows if row["tensor"] == name]) for name, label in LABELS.items()}
    errors = {label: error for label, error in errors.items() if error}
    if not errors:
        return None
    picture = figure(0.55 * len(errors) + 1.5)
    axes = picture.subplots()
    error_bars(axes, errors, 0.65)
    axes.invert_yaxis()
    axes.set_xlabel("squared error, % of the signal; mean over sites")
    legend_below(picture, axes, columns=4)
    return picture


@styled()
def decomposition_by_site(recorded: Recorded) -> Figure | None:
    """Scale bias, dead zone and grid noise for each kind of site, one panel per operand."""
    rows = latest(recorded, "scale_bias")
    operands = [operand for operand in OPERANDS if any(row["tensor"] == operand for row in rows)]
    kinds = kinds_of(row["site"] for row in rows)
    if not operands or len(kinds) < 2:
        return None
    picture, panels = grid(len(operands), 0.26 * len(kinds) + 1.15, 0.4, sharex=True, sharey=True)
    for axes, operand in zip(panels.flat, operands, strict=False):
        own = [row for row in rows if row["tensor"] == operand]
        errors = {kind: mean_error([row for row in own if pattern_of(row["site"]) == kind]) for kind in kinds}
        error_bars(axes, errors, 0.65, fontsize=8.5)
        axes.set_title(LABELS[operand])
    for axes in panels[-1]:
        axes.set_xlabel("% of the signal", fontsize=9)
    panels[0][0].invert_yaxis()
    legend_below(picture, panels[0][0], columns=4)
    return picture


@styled()
def scales(recorded: Recorded) -> Figure | None:
    """Histograms of block scales by exponent at the first and the last recorded step, one panel per operand."""
    rows = [row for row in recorded.rows if row.get("scales", {}).get("counts")]
    operands = [operand for operand in OPERANDS if any(row["tensor"] == operand for row in rows)]
    if not operands:
        return None
    picture, panels = grid(len(operands), 2.1, 0.5)
    for axes, operand in zip(panels.flat, operands, strict=False):
        own = [row for row in rows if row["tensor"] == operand]
        first_last_histogram(
            axes, own, lambda row: (row["scales"]["lowest"], row["scales"]["counts"]), -0.5, 1, OPERANDS[operand]
        )
        axes.set_title(LABELS[operand])
        axes.set_xlabel("log₂ of the scale", fontsize=9)
        if axes in panels[:, 0]:
            axes.set_ylabel("% of blocks")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=8, handlelength=1.2)
    return picture


# ------------------------------------------------------------------ weights


@styled()
def confidence(recorded: Recorded) -> Figure | None:
    """Quantization confidence: its histogram at the first and the last recorded step, and its mean over steps."""
    rows = recorded.having("confidence_histogram")
    if not rows:
        return None
    picture = figure(3.6)
    left, right = picture.subplots(1, 2)
    first_last_histogram(left, rows, lambda row: (0, row["confidence_histogram"]), 0, 1 / CONFIDENCE_BINS)
    left.set(xlabel="quantization confidence", ylabel="% of weights", xlim=(0, 1))
    left.legend()
    by_kind(right, recorded, "confidence")
    right.set(xlabel="optimizer step", ylabel="mean confidence")
    legend_below(picture, right, columns=4)
    return picture


@styled()
def latent(recorded: Recorded) -> Figure | None:
    """Histogram of latent weights w/S at the first and the last recorded step, thresholds of E2M1 dashed."""
    rows = recorded.having("latent")
    if not rows:
        return None
    picture = figure(2.9)
    axes = picture.subplots()
    limit = rows[-1]["latent"]["limit"]
    rows = [row for row in rows if row["latent"]["limit"] == limit]
    first_last_histogram(axes, rows, lambda row: (0, row["latent"]["counts"]), -limit, 2 * limit / LATENT_BINS)
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
    picture = figure(3.8)
    left, right = picture.subplots(1, 2)
    by_kind(left, recorded, "oscillating", factor=100)
    left.set(xlabel="optimizer step", ylabel=f"weights with R_w > {OSCILLATING:g}, %", ylim=(0, None))
    legend_below(picture, left, columns=4)
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
    picture = figure(2.6)
    panels = picture.subplots(1, len(found), squeeze=False)[0]
    for axes, (path, row) in zip(panels, found, strict=True):
        steps = range(row["step"] - row["window"], row["step"] + 1)
        axes.step(steps, path["quantized"], where="post", color=PALETTE[1], label="Q(w)")
        axes.plot(steps, path["weight"], color=PALETTE[0], label="w")
        axes.set_title(f"{row['site']}\nR_w = {path['ratio']:.3g}", fontsize=9)
        axes.set_xlabel("optimizer step", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.locator_params(nbins=4)
    panels[0].set_ylabel("value of one weight")
    legend_below(picture, panels[0], columns=2)
    return picture


@styled()
def rates_of_change(recorded: Recorded) -> Figure | None:
    """Relative change per step of W, of Q(W), and of Y for the same input: mean over sites, and their range."""
    weights = recorded.having("quantized_rate_of_change")
    curves = {
        "W": gathered((row["step"], row["rate_of_change"]) for row in weights),
        "Q(W)": gathered((row["step"], row["quantized_rate_of_change"]) for row in weights),
        "Y": curve_of(recorded, "rate_of_change", "output"),
    }
    curves = {name: curve for name, curve in curves.items() if curve}
    if not curves:
        return None
    picture = figure(3.2)
    axes = picture.subplots()
    for (name, curve), color in zip(curves.items(), PALETTE, strict=False):
        band(axes, curve, color, name)
    axes.set(yscale="log", xlabel="optimizer step", ylabel="relative change per step (log scale)")
    legend_beside(axes)
    return picture


@styled()
def flips(recorded: Recorded) -> Figure | None:
    """Flips per weight and step."""
    if not recorded.having("flips"):
        return None
    picture = figure(2.9)
    axes = picture.subplots()
    by_kind(axes, recorded, "flips", factor=100)
    axes.set(xlabel="optimizer step", ylabel="flips per step, % of weights", ylim=(0, None))
    legend_beside(axes, None)
    return picture


# ------------------------------------------------------------------ gradients


@styled()
def gradients(recorded: Recorded) -> Figure | None:
    """Bias and standard deviation of dgrad's and wgrad's results over steps, relative to the exact result."""
    found = {
        (gemm, column): curve
        for gemm in ("dgrad", "wgrad")
        for column in ("bias", "deviation")
        for curve in [curve_of(recorded, column, gemm)]
        if any(any(values) for values in curve.values())
    }
    if not found:
        return None
    picture = figure(3.2)
    axes = picture.subplots()
    for (gemm, column), curve in found.items():
        color = PALETTE[0] if gemm == "dgrad" else PALETTE[1]
        name = "bias" if column == "bias" else "standard deviation"
        band(axes, curve, color, f"{gemm}, {name}", shade=column == "bias", dashed=column == "deviation")
    axes.set(xlabel="optimizer step", ylabel="share of the exact gradient's norm", ylim=(0, None))
    legend_beside(axes)
    return picture
