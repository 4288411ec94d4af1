"""Pictures of recorded statistics. Each function returns a matplotlib Figure, or None where nothing was recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp4graph.analysis.metrics import OSCILLATING, RATIO_EDGES
from fp4graph.analysis.panels import (
    band,
    by_kind,
    curve_of,
    drawn,
    first_and_last,
    first_last_histogram,
    gathered,
    grid,
    is_number,
    kinds_of,
    latest,
    legend_below,
    legend_beside,
    log_scale,
    mean_error_bar,
    points_of,
)
from fp4graph.analysis.storage import Measurement, Recorded
from fp4graph.analysis.style import LABELS, OPERANDS, PALETTE, figure
from fp4graph.graph.blocks import pattern_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ------------------------------------------------------------------ the training


@drawn
def losses(metrics: Sequence[Measurement]) -> Figure | None:
    """Training and validation loss over steps."""
    # A line of a validation repeats the training loss, as a mean since the validation before.
    between = [row for row in metrics if row.get("validation_loss") is None and row.get("train_loss") is not None]
    training = points_of(between or metrics, "train_loss")
    curves = {"training": training, "validation": points_of(metrics, "validation_loss")}
    if not any(curves.values()):
        return None
    picture = figure()
    axes = picture.subplots()
    for (name, points), color in zip(curves.items(), (PALETTE[0], PALETTE[1]), strict=True):
        if points:
            steps, values = zip(*points, strict=True)
            last = f"{name}, last {values[-1]:.4g}"
            marker = "o" if name == "validation" and len(steps) <= 40 else None
            axes.plot(steps, values, color=color, marker=marker, markersize=3.5, label=last,
                      linewidth=1.1 if name == "training" else 1.8)  # fmt: skip
    every = [value for points in curves.values() for _, value in points]
    if min(every) > 0 and max(every) > 5 * min(every):
        log_scale(axes)
    axes.set(xlabel="optimizer step", ylabel="loss" + (" (log scale)" if axes.get_yscale() == "log" else ""))
    axes.legend()
    return picture


@drawn
def other_metrics(metrics: Sequence[Measurement]) -> Figure | None:
    """The other metrics of the validations, one panel each."""
    known = {"step", "train_loss", "validation_loss", "lr", "seconds"}
    names = list(dict.fromkeys(k for row in metrics for k, v in row.items() if k not in known and is_number(v)))[:4]
    if not names:
        return None
    picture = figure(2.6)
    for axes, name in zip(picture.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        points = [(row["step"], row[name]) for row in metrics if is_number(row.get(name))]
        axes.plot(*zip(*points, strict=True), color=PALETTE[2], marker="o" if len(points) <= 40 else None, markersize=3)
        axes.set(xlabel="optimizer step", ylabel=name.replace("_", " "))
    return picture


# ------------------------------------------------------------------ operands


@drawn
def snr(recorded: Recorded) -> Figure | None:
    """Signal-to-noise ratio of the six operands over steps: mean over sites, and their range."""
    curves = {o: curve_of(recorded, "snr_db", o) for o in OPERANDS}
    curves = {name: curve for name, curve in curves.items() if curve}
    if not curves:
        return None
    picture = figure(3.8)
    axes = picture.subplots()
    for operand, curve in curves.items():
        band(axes, curve, OPERANDS[operand], LABELS[operand])
    axes.set(xlabel="optimizer step", ylabel="signal-to-noise ratio, dB")
    legend_beside(axes, "mean over sites,\nshaded: lowest to highest")
    return picture


@drawn
def shares(recorded: Recorded) -> Figure | None:
    """Saturated and underflowed shares of the six operands over steps."""
    titles = {"saturated": "saturated", "underflowed": "rounded to zero"}
    found = {c: {o: curve for o in OPERANDS if (curve := curve_of(recorded, c, o))} for c in titles}
    if not any(found.values()):
        return None
    never = [
        column
        for column, curves in found.items()
        if not any(value for curve in curves.values() for values in curve.values() for value in values)
    ]
    found = {column: curves for column, curves in found.items() if column not in never}
    if not found:
        return None
    picture = figure(3.2)
    panels = picture.subplots(1, len(found), squeeze=False)[0]
    for axes, (column, curves) in zip(panels, found.items(), strict=True):
        for operand, curve in curves.items():
            percent = {step: [100 * v for v in values] for step, values in curve.items()}
            band(axes, percent, OPERANDS[operand], LABELS[operand], shade=False)
        axes.set(xlabel="optimizer step", ylabel="% of elements")
        axes.set_title(titles[column] + (" (and nothing is saturated)" if "saturated" in never else ""))
        axes.set_ylim(bottom=0)
    legend_below(picture, panels[0])
    return picture


@drawn
def decomposition(recorded: Recorded) -> Figure | None:
    """Scale bias, dead zone and grid noise of the six operands, at the last recorded step."""
    rows = latest(recorded, "scale_bias")
    operands = [operand for operand in OPERANDS if any(row["tensor"] == operand for row in rows)]
    if not operands:
        return None
    picture = figure(0.55 * len(operands) + 1.5)
    axes = picture.subplots()
    for place, operand in enumerate(operands):
        mean_error_bar(axes, place, [row for row in rows if row["tensor"] == operand])
    axes.set_yticks(range(len(operands)), [LABELS[operand] for operand in operands])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("squared error, % of the signal; mean over sites")
    legend_below(picture, axes, columns=4)
    return picture


@drawn
def decomposition_by_site(recorded: Recorded) -> Figure | None:
    """Scale bias, dead zone and grid noise for each kind of site, one panel per operand."""
    rows = latest(recorded, "scale_bias")
    operands = [operand for operand in OPERANDS if any(row["tensor"] == operand for row in rows)]
    kinds = kinds_of(row["site"] for row in rows)
    if not operands or len(kinds) < 2:
        return None
    picture, panels = grid(len(operands), 0.26 * len(kinds) + 1.15, 0.4, sharex=True, sharey=True)
    for axes, operand in zip(panels.flat, operands, strict=False):
        for place, kind in enumerate(kinds):
            own = [row for row in rows if row["tensor"] == operand and pattern_of(row["site"]) == kind]
            if own:
                mean_error_bar(axes, place, own)
        axes.set_title(LABELS[operand])
        axes.set_yticks(range(len(kinds)), kinds, fontsize=8.5)
        axes.grid(axis="y", visible=False)
    for axes in panels[-1]:
        axes.set_xlabel("% of the signal", fontsize=9)
    panels[0][0].invert_yaxis()
    legend_below(picture, panels[0][0], columns=4)
    return picture


@drawn
def scales(recorded: Recorded) -> Figure | None:
    """Histograms of block scales by exponent at the first and the last recorded step, one panel per operand."""
    rows = [row for row in recorded.rows if row.get("scales", {}).get("counts")]
    operands = [operand for operand in OPERANDS if any(row["tensor"] == operand for row in rows)]
    if not operands:
        return None
    picture, panels = grid(len(operands), 2.1, 0.5)
    for axes, operand in zip(panels.flat, operands, strict=False):
        own = [row for row in rows if row["tensor"] == operand]
        for step, style in first_and_last(own):
            counts: dict[int, int] = defaultdict(int)
            for row in own:
                if row["step"] == step:
                    for place, count in enumerate(row["scales"]["counts"]):
                        counts[row["scales"]["lowest"] + place] += count
            low, high, total = min(counts), max(counts), sum(counts.values())
            edges = [exponent - 0.5 for exponent in range(low, high + 2)]
            heights = [100 * counts.get(exponent, 0) / total for exponent in range(low, high + 1)]
            axes.stairs(heights, edges, label=f"step {step:,}", color=OPERANDS[operand], **style)
        axes.set_title(LABELS[operand])
        axes.set_xlabel("log₂ of the scale", fontsize=9)
        if axes in panels[:, 0]:
            axes.set_ylabel("% of blocks")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=8, handlelength=1.2)
    return picture


# ------------------------------------------------------------------ weights


@drawn
def confidence(recorded: Recorded) -> Figure | None:
    """Quantization confidence: its histogram at the first and the last recorded step, and its mean over steps."""
    rows = [row for row in recorded.rows if row.get("confidence_histogram")]
    if not rows:
        return None
    picture = figure(3.6)
    left, right = picture.subplots(1, 2)
    first_last_histogram(left, rows, lambda row: row["confidence_histogram"], 0.0, lambda row: 1.0)
    left.set(xlabel="quantization confidence", ylabel="% of weights", xlim=(0, 1))
    left.legend()
    by_kind(right, recorded, "confidence")
    right.set(xlabel="optimizer step", ylabel="mean confidence")
    legend_below(picture, right, columns=4)
    return picture


@drawn
def latent(recorded: Recorded) -> Figure | None:
    """Histogram of latent weights w/S at the first and the last recorded step, thresholds of E2M1 dashed."""
    rows = [row for row in recorded.rows if row.get("latent")]
    if not rows:
        return None
    picture = figure(2.9)
    axes = picture.subplots()
    limit = rows[-1]["latent"]["limit"]
    rows = [row for row in rows if row["latent"]["limit"] == limit]
    first_last_histogram(axes, rows, lambda row: row["latent"]["counts"], -limit, lambda row: limit)
    if limit == 6.0:
        for place, threshold in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
            for sign in (-1, 1):
                first = place == 0 and sign == 1
                axes.axvline(sign * threshold, color="#999", linewidth=0.8, linestyle=(0, (4, 3)),
                             label="rounding thresholds" if first else None)  # fmt: skip
    axes.set(xlabel="latent weight, w/S", ylabel="% of weights", xlim=(-limit, limit))
    axes.grid(axis="x", visible=False)
    axes.legend()
    return picture


@drawn
def oscillation(recorded: Recorded) -> Figure | None:
    """Share of oscillating weights over steps, and the distribution of R_w in the last window."""
    rows = [row for row in recorded.rows if row.get("ratio_counts")]
    if not rows:
        return None
    picture = figure(3.8)
    left, right = picture.subplots(1, 2)
    by_kind(left, recorded, "oscillating", factor=100)
    left.set(xlabel="optimizer step", ylabel=f"weights with R_w > {OSCILLATING:g}, %")
    left.set_ylim(bottom=0)
    legend_below(picture, left, columns=4)
    window = rows[-1]["window"]
    names = ["0", *(f"≤{edge:g}" for edge in RATIO_EDGES[1:]), f">{RATIO_EDGES[-1]:g}"]
    steps = sorted({row["step"] for row in rows})
    for step, color, shift in ((steps[0], "#b9c7d6", -0.2), (steps[-1], PALETTE[0], 0.2)):
        if step == steps[-1] or len(steps) > 1:
            counts = [sum(c) for c in zip(*(r["ratio_counts"] for r in rows if r["step"] == step), strict=True)]
            total = sum(counts)
            places = [place + (shift if len(steps) > 1 else 0) for place in range(len(counts))]
            right.bar(places, [100 * count / total for count in counts], width=0.4 if len(steps) > 1 else 0.7,
                      color=color, label=f"steps {step - window:,} to {step:,}")  # fmt: skip
    right.set_xticks(range(len(names)), names, rotation=55, fontsize=8.5)
    right.set_yscale("symlog", linthresh=0.1)
    right.set(xlabel="oscillation ratio R_w", ylabel="% of weights (log scale)")
    right.grid(axis="x", visible=False)
    right.legend()
    return picture


@drawn
def trajectories(recorded: Recorded) -> Figure | None:
    """The weights with the largest oscillation ratios of the last window: w, and Q(w) that jumps."""
    rows = [row for row in recorded.rows if row.get("trajectories")]
    if not rows:
        return None
    step = max(row["step"] for row in rows)
    found = [(t["ratio"], row, t) for row in rows if row["step"] == step for t in row["trajectories"]]
    found = sorted(found, key=lambda each: -each[0])[:3]
    picture = figure(2.6)
    panels = picture.subplots(1, len(found), squeeze=False)[0]
    for axes, (ratio, row, path) in zip(panels, found, strict=True):
        steps = range(row["step"] - row["window"], row["step"] + 1)
        axes.step(steps, path["quantized"], where="post", color=PALETTE[1], label="Q(w)")
        axes.plot(steps, path["weight"], color=PALETTE[0], label="w")
        axes.set_title(f"{row['site']}\nR_w = {ratio:.3g}", fontsize=9)
        axes.set_xlabel("optimizer step", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.locator_params(nbins=4)
    panels[0].set_ylabel("value of one weight")
    legend_below(picture, panels[0], columns=2)
    return picture


@drawn
def rates_of_change(recorded: Recorded) -> Figure | None:
    """Relative change per step of W, of Q(W), and of Y for the same input: mean over sites, and their range."""
    weights = [row for row in recorded.rows if row.get("quantized_rate_of_change") is not None]
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
    axes.set_yscale("log")
    axes.set(xlabel="optimizer step", ylabel="relative change per step (log scale)")
    legend_beside(axes, "mean over sites,\nshaded: lowest to highest")
    return picture


@drawn
def flips(recorded: Recorded) -> Figure | None:
    """Flips per weight and step."""
    if not any(row.get("flips") is not None for row in recorded.rows):
        return None
    picture = figure(2.9)
    axes = picture.subplots()
    by_kind(axes, recorded, "flips", factor=100)
    axes.set(xlabel="optimizer step", ylabel="flips per step, % of weights")
    axes.set_ylim(bottom=0)
    legend_beside(axes, None)
    return picture


# ------------------------------------------------------------------ gradients


@drawn
def gradients(recorded: Recorded) -> Figure | None:
    """Bias and standard deviation of dgrad's and wgrad's results over steps, relative to the exact result."""
    found = {
        (gemm, column): curve
        for gemm in ("dgrad", "wgrad")
        for column in ("bias", "deviation")
        if (curve := curve_of(recorded, column, gemm)) and any(v for values in curve.values() for v in values)
    }
    if not found:
        return None
    picture = figure(3.2)
    axes = picture.subplots()
    for (gemm, column), curve in found.items():
        color = PALETTE[0] if gemm == "dgrad" else PALETTE[1]
        name = "bias" if column == "bias" else "standard deviation"
        band(axes, curve, color, f"{gemm}, {name}", shade=column == "bias", dashed=column == "deviation")
    axes.set(xlabel="optimizer step", ylabel="share of the exact gradient's norm")
    axes.set_ylim(bottom=0)
    legend_beside(axes, "mean over sites,\nshaded: lowest to highest")
    return picture
