"""One HTML page about one run: its curves, its sites, what quantization does to them. It refers to nothing outside."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4graph.errors import Error
from fp4graph.files import write
from fp4graph.lab.pages import rendered
from fp4graph.lab.pictures import plots
from fp4graph.lab.pictures.style import LABELS, svg
from fp4graph.lab.runs.folder import RUN, read_metrics, read_outcome, read_run
from fp4graph.lab.statistics import storage
from fp4graph.lab.statistics.storage import Measurement, Recorded

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """A picture with an explanation."""

    name: str
    title: str
    text: str
    picture: Callable[[Recorded], Figure | None]


PICTURES = (
    Picture("snr", "Signal-to-noise ratio of the six operands",
         "How much of each operand survives its quantizer: 10·log₁₀(‖x‖² / ‖Q(x) − x‖²). Nearest rounding to 4 bits "
         "leaves 15 to 20 dB, stochastic rounding about 3 dB less. An operand that is quantized a second time (double "
         "quantization) is compared with what the first quantizer left, and loses little.",
         plots.snr),
    Picture("decomposition", "Where the error comes from",
         "The squared error of each operand in three parts: grid noise, which 4 bits cost under an ideal scale; scale "
         "bias, which the scale's format costs; dead zone, what is rounded to zero. They add up element by element. "
         "Their squares need not: where scale bias undoes grid noise, the error that is left (black) is smaller than "
         "the bar.", plots.decomposition),
    Picture("decomposition_by_site", "The same, by kind of site", "Averages over blocks, at the last recorded step.",
         plots.decomposition_by_site),
    Picture("shares", "Clipped and lost",
         "Saturated elements lie beyond the largest value that their block's scale can express. Elements rounded to "
         "zero are the dead zone's: their information is gone until the next step.", plots.shares),
    Picture("scales", "Block scales",
         "How many blocks have a scale of which power of two. A wall at either end is a format that runs out of range.",
         plots.scales),
    Picture("gradients", "Bias and noise of the gradients",
         "The results of the two backward products, each against the product of the same factors in high precision. "
         "Bias does not average out over steps; noise (the standard deviation over the random bits of stochastic "
         "rounding) does.", plots.gradients),
    Picture("oscillation", "Oscillation",
         "R_w is the path length of a weight's quantized value over that of the weight. Above 16 the weight sits at a "
         "rounding threshold and its quantized value jumps to and fro.", plots.oscillation),
    Picture("trajectories", "Weights that oscillate",
         "Those with the largest R_w of the last window, among a few hundred of each site that are followed.",
         plots.trajectories),
    Picture("confidence", "Quantization confidence",
         "The distance of each latent weight w/S to the nearest rounding threshold, as a share of the largest: "
         "0 is on a threshold, 1 as far from it as can be. Mass that moves to the left is weight about to flip.",
         plots.confidence),
    Picture("latent", "Latent weights", "Where weights lie among the values that 4 bits have.", plots.latent),
    Picture("rates_of_change", "Rates of change",
         "How far weights, quantized weights and outputs (for the same input) move in one step. At the end of a "
         "training all should fall; quantized weights and outputs that do not are oscillation.",
         plots.rates_of_change),
    Picture("flips", "Flips", "How many quantized weights change their value in a step, on average.", plots.flips),
)  # fmt: skip
#: Symbols of the operands in the table, under a heading that names their GEMM.
_SYMBOLS = {
    operand: f"{label.partition(' ')[0]} {symbol}"
    for (operand, label), symbol in zip(LABELS.items(), ("X", "W", "dY", "W", "dY", "X"), strict=True)
}
#: Settings shown under the title, in this order.
_SETTINGS = (
    "optimizer", "lr", "batch_size", "accumulate", "schedule", "dtype", "autocast", "device", "backend", "seed",
)  # fmt: skip


def write_report(directory: str | PathLike[str], output: str | PathLike[str] | None = None) -> Path:
    """Write the report of the run or the statistics in ``directory`` to ``report.html`` there, or to ``output``.

    Raises:
        Error: there is no run, its files are damaged, or the report cannot be written.
    """
    directory = Path(directory)
    if not directory.exists():
        raise Error(f"{directory}: there is no such folder")
    run = read_run(directory) if (directory / RUN).exists() else None
    metrics, outcome = ([], None) if run is None else (read_metrics(directory), read_outcome(directory))
    has_statistics = any((directory / place).is_file() for place in (storage.FILE, f"statistics/{storage.FILE}"))
    recorded = storage.read(directory) if has_statistics else None
    if run is None and recorded is None:
        raise Error(
            f"{directory}: no run and no statistics there; fp4graph train writes the one, "
            "fp4graph.lab.Statistics the other"
        )
    pictures = []
    if recorded is not None and recorded.rows:
        for part in PICTURES:
            made = part.picture(recorded)
            if made is not None:
                pictures.append({"part": part, "svg": svg(made, part.name)})
    curves = [
        {"name": name, "svg": svg(made, name)}
        for name, made in (("losses", plots.losses(metrics)), ("metrics", plots.other_metrics(metrics)))
        if made is not None
    ]
    page = rendered(
        "report.html.jinja",
        title=_title(run, recorded, directory),
        run=run,
        settings=_settings(run),
        outcome=outcome,
        cards=_cards(run, outcome, metrics, recorded),
        curves=curves,
        pictures=pictures,
        table=_table(recorded) if recorded is not None and recorded.rows else None,
        recorded=recorded,
        labels=LABELS,
        directory=str(directory),
    )
    path = Path(output) if output is not None else directory / "report.html"
    write(path, page)
    return path


def _title(run: Measurement | None, recorded: Recorded | None, directory: Path) -> dict[str, str]:
    policy = recorded.header.get("policy") if recorded is not None else None
    asked: Mapping[str, Any] = (run or {}).get("run", {})
    policy = asked.get("policy") if policy is None else policy
    name = policy if isinstance(policy, str) else "a policy of its own"
    return {"task": str(asked.get("task") or directory.resolve().name), "policy": Path(str(name)).stem}


def _settings(run: Measurement | None) -> list[tuple[str, str]]:
    settings: Mapping[str, Any] = (run or {}).get("settings", {})
    said = {name: value for name in _SETTINGS if (value := settings.get(name)) is not None}
    return [(name.replace("_", " "), f"{v:g}" if isinstance(v, float) else str(v)) for name, v in said.items()]


def _cards(
    run: Measurement | None, outcome: Measurement | None, metrics: Sequence[Measurement], recorded: Recorded | None
) -> list[tuple[str, str, str]]:
    """Return the values that stand out, each with its meaning and its place."""
    cards: list[tuple[str, str, str]] = []
    losses = [row for row in metrics if row.get("validation_loss") is not None]
    if outcome is not None and outcome.get("diverged"):
        cards.append(("diverged", "the loss became NaN or infinite", f"at step {outcome.get('steps'):,}"))
    elif losses:
        best = min(losses, key=lambda row: row["validation_loss"])
        last = losses[-1]
        where = "which is the best" if best is last else f"best {best['validation_loss']:.4g} at step {best['step']:,}"
        when = "at the end" if outcome is not None else f"at step {last['step']:,}"
        cards.append((f"{last['validation_loss']:.4g}", f"validation loss {when}", where))
    if outcome is not None and outcome.get("complexity") is not None:
        quantized = f"{outcome.get('quantized')} of {outcome.get('sites')} matrix products quantized"
        cards.append((f"Ω {outcome['complexity']:g}", "complexity of the recipe", quantized))
    if recorded is None:
        return cards
    for column, what, form in (
        ("snr_db", "lowest mean signal-to-noise ratio", "{:.1f} dB"),
        ("underflowed", "largest mean share rounded to zero", "{:.0%}"),
        ("oscillating", "largest mean share of oscillating weights", "{:.1%}"),
    ):
        if recorded.having(column):
            (row,) = recorded.worst(column, 1)
            where = f"{row['site']}, {LABELS.get(row['tensor'], row['tensor'])}; {form.format(row['worst'])} at step "
            where += f"{row['step']:,}"
            cards.append((form.format(row[column]), what, where))
    return cards


def _table(recorded: Recorded) -> dict[str, Any]:
    """Return the sites with the values that were last recorded for each."""
    shapes = {weight["site"]: "×".join(map(str, weight["shape"])) for weight in recorded.header.get("weights", ())}
    last: dict[str, dict[str, dict[str, Any]]] = {}
    for row in recorded.rows:
        last.setdefault(row["site"], {}).setdefault(row["tensor"], {}).update(row)
    operands = [operand for operand in LABELS if any(operand in own for own in last.values())]
    lines: list[dict[str, Any]] = []
    for site in recorded.sites:
        own = last.get(site, {})
        moving = next((row for row in own.values() if "oscillating" in row), {})
        rows = [own[operand] for operand in operands if operand in own]
        lines.append(
            {
                "site": site,
                "shape": shapes.get(site, ""),
                "snr": [_ratio(own.get(operand, {})) for operand in operands],
                "underflowed": _largest(rows, "underflowed"),
                "saturated": _largest(rows, "saturated"),
                "confidence": own.get("fprop.weight", {}).get("confidence"),
                "oscillating": moving.get("oscillating"),
                "dgrad": own.get("dgrad", {}).get("bias"),
                "wgrad": own.get("wgrad", {}).get("bias"),
            }
        )
    ratios: list[float] = [value for line in lines for value in line["snr"] if value is not None and value < math.inf]
    return {
        "gemms": list(Counter(operand.partition(".")[0] for operand in operands).items()),
        "operands": [_SYMBOLS[operand] for operand in operands],
        "lines": lines,
        "low": min(ratios, default=0.0),
        "high": max(ratios, default=0.0),
        "median": statistics.median(ratios) if ratios else 0.0,
    }


def _ratio(row: Measurement) -> float | None:
    """Return the signal-to-noise ratio in dB, infinite for a signal without an error."""
    exact = row.get("snr_db") is None and row.get("gain") is not None
    return math.inf if exact else row.get("snr_db")


def _largest(rows: Sequence[Measurement], column: str) -> float | None:
    return max((row[column] for row in rows if row.get(column) is not None), default=None)
