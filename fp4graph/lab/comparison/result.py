"""The result of a comparison: a row for each policy, and a verdict in words."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fp4graph.errors import needs
from fp4graph.lab.pictures.style import LABELS
from fp4graph.lab.statistics import storage
from fp4graph.model.html import html
from fp4graph.policy import Policy

Row = Mapping[str, Any]


def paired(differences: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean d̄ of paired differences, and the half-width of its 95 % confidence interval.

    The half-width is t · s/√n, with s² = Σ(d_i − d̄)²/(n − 1) and t the quantile 0.975 of Student's distribution with
    n − 1 degrees of freedom (Student 1908); it is None for n = 1.
    """
    from scipy.stats import t

    count = len(differences)
    if count < 2:
        return fmean(differences), None
    return fmean(differences), float(t.ppf(0.975, count - 1)) * stdev(differences) / math.sqrt(count)


@dataclass(frozen=True)
class Comparison:
    """Policies side by side. ``print(comparison)`` shows a table and the verdict; a notebook also shows the curves.

    Attributes:
        folder: has the files ``report.html``, ``table.csv``, ``table.tex``, ``loss.svg``, ``loss.pdf``, ``runs.jsonl``.
        name: the name of the training.
        baseline: the name of the policy that the others are compared with.
        policies: all policies, the baseline first.
        seeds: the requested seeds.
        runs: the lines of ``runs.jsonl`` about the runs that have ended.
        timings: the time of each policy, measured in alternation with the baseline.
        notes: sentences about failed checks and measurements.
    """

    folder: Path
    name: str
    baseline: str
    policies: tuple[Policy, ...]
    seeds: tuple[int, ...]
    runs: tuple[Row, ...]
    timings: Mapping[str, Row]
    notes: tuple[str, ...] = ()

    def of(self, policy: str, state: str = "finished") -> list[Row]:
        """Return the runs of a policy that ended in ``state``: finished, diverged or failed."""
        return [run for run in self.runs if run["policy"] == policy and run["state"] == state]

    def differences(self, policy: str, other: str) -> list[float]:
        """Return the loss of ``policy`` minus the loss of ``other`` for each seed that both have finished."""
        losses = {run["seed"]: run["loss"] for run in self.of(other)}
        return [run["loss"] - losses[run["seed"]] for run in self.of(policy) if run["seed"] in losses]

    @property
    def others(self) -> list[str]:
        """The names of the policies except the baseline."""
        return [policy.name for policy in self.policies if policy.name != self.baseline]

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics except the loss."""
        return list(dict.fromkeys(name for run in self.runs for name in run["metrics"]))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each policy, as plain data; unknown values are None.

        ``difference`` is the mean over seeds of the loss minus the baseline's, for the seeds that both have finished;
        ``low`` to ``high`` is its 95 % confidence interval. ``ratio`` is the time of a step divided by the baseline's,
        measured in alternation, and ``ms_per_step`` is this ratio times the baseline's time.
        """
        return [self._row(policy) for policy in self.policies]

    @property
    def cells(self) -> list[dict[str, str]]:
        """The rows as text, by the headings of their columns; without the columns of times if no time was measured."""
        untimed = () if self.timings else ("ms/step", "ratio")
        rows = (_shown(row, self.metrics) for row in self.rows)
        return [{heading: cell for heading, cell in row.items() if heading not in untimed} for row in rows]

    def _row(self, policy: Policy) -> dict[str, Any]:
        finished = self.of(policy.name)
        losses = [run["loss"] for run in finished]
        differences = [] if policy.name == self.baseline else self.differences(policy.name, self.baseline)
        mean, half = paired(differences) if differences else (None, None)
        low, high = (None, None) if mean is None or half is None else (mean - half, mean + half)
        model: Row = next((run["model"] for run in self.runs if run["policy"] == policy.name and run["model"]), {})
        ratio = 1.0 if policy.name == self.baseline and self.timings else self.timings.get(policy.name, {}).get("ratio")
        baseline_times = [timing["baseline_ms_per_step"] for timing in self.timings.values()]
        return {
            "policy": policy.name,
            "loss": _mean(losses),
            "deviation": stdev(losses) if len(losses) > 1 else None,
            "difference": mean,
            "low": low,
            "high": high,
            **{name: _mean([run["metrics"].get(name) for run in finished]) for name in self.metrics},
            "complexity": policy.complexity,
            "ms_per_step": None if ratio is None else ratio * median(baseline_times),
            "ratio": ratio,
            **{name: model.get(name) for name in ("fp4_flops", "bits_per_weight", "quantized", "sites")},
            "finished": len(finished),
            "diverged": [[run["seed"], run["step"]] for run in self.of(policy.name, "diverged")],
            "failed": [[run["seed"], run["error"]] for run in self.of(policy.name, "failed")],
        }

    @property
    def verdict(self) -> str:
        """The result in words: a paragraph for each policy, which also says if the seeds are too few to tell."""
        rows = [row for row in self.rows if row["policy"] != self.baseline]
        compared = [row for row in rows if row["difference"] is not None]
        paragraphs = [self._ranking(compared), *map(self._paragraph, rows)]
        finished = len(self.of(self.baseline))
        if finished < len(self.seeds):
            paragraphs.insert(0, f"Only {finished} of {len(self.seeds)} runs of the baseline {self.baseline} finished.")
        return "\n".join(filter(None, paragraphs))

    def _ranking(self, rows: Sequence[Row]) -> str:
        """Name the policy with the lowest loss, and the policies that the seeds cannot distinguish from it."""
        if len(rows) < 2:
            return ""
        best, *others = sorted(rows, key=lambda row: row["difference"])
        tied = []
        for name in (row["policy"] for row in others):
            mean, half = paired(self.differences(name, best["policy"]) or [0.0])
            if half is None or mean - half <= 0:
                tied.append(name)
        lowest = f"{best['policy']} has the lowest loss ({_signed(best['difference'])})"
        text = f"Among the policies beside {self.baseline}, {lowest}."
        if not tied:
            return text + " The loss of every other policy is measurably higher."
        seeds = "These seeds cannot" if len(self.seeds) > 1 else "One seed cannot"
        return f"{text} {seeds} tell it from {', '.join(tied)}."

    def _paragraph(self, row: Row) -> str:
        """Return a paragraph on the difference of one policy's loss from the baseline's."""
        sentences, mean, pairs = [], row["difference"], len(self.differences(row["policy"], self.baseline))
        if row["low"] is not None:
            half = row["high"] - mean
            low, middle, high = (_signed(row[column], half) for column in ("low", "difference", "high"))
            interval = f"95 % interval {low} to {high}, {pairs} seeds"
            if half == mean == 0:
                sentences += [f"its losses equal the baseline's, in all {pairs} seeds."]
            elif abs(mean) > half:
                sentences += [f"its loss is {'higher' if mean > 0 else 'lower'} by {middle[1:]} ({interval})."]
            else:
                few = f"{pairs} seeds are too few to tell it from {self.baseline}"
                sentences += [f"{few}: the difference is {middle} ({interval})."]
                sentences += [f"More seeds are needed to see a difference of less than {half:.2g}."]
        elif mean is not None:
            chance = "one seed cannot show whether that is chance; use three"
            sentences += [f"the difference is {_signed(mean)}, and {chance}."]
        elif not row["diverged"] and not row["failed"]:
            sentences += ["it and the baseline have no finished seed in common."]
        if row["diverged"]:
            places = ", ".join(f"seed {seed} at step {step:,}" for seed, step in row["diverged"])
            count = f"{len(row['diverged'])} of {len(self.seeds)}"
            sentences += [f"Its loss became NaN or infinite in {count} runs: {places}."]
        if row["failed"]:
            sentences += [f"It failed in {len(row['failed'])} of {len(self.seeds)} runs: {row['failed'][0][1]}."]
        return f"{row['policy']}: {' '.join(sentences)}"

    def worst(self, policy: str) -> list[dict[str, Any]]:
        """Return the operands with the lowest signal-to-noise ratio in the last record of the first seed.

        Each item has a site, an operand, the ratio in dB, and the shares of elements rounded to zero and clipped.
        """
        folder = self.folder / f"{policy}-{self.seeds[0]}" / "statistics"
        rows = storage.read(folder).having("snr_db") if storage.find(folder) else []
        last = {(row["site"], row["tensor"]): row for row in rows}
        ranked = sorted(last.values(), key=lambda row: row["snr_db"])[:6]
        names = ("snr_db", "underflowed", "saturated")
        places = [{"step": row["step"], "site": row["site"], "operand": LABELS[row["tensor"]]} for row in ranked]
        return [place | {name: row.get(name) for name in names} for place, row in zip(places, ranked, strict=True)]

    def table(self) -> Table:
        """Return the rows as a table for a terminal."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        cells = self.cells
        for place, column in enumerate(cells[0]):
            table.add_column(column, justify="right" if place else "left", no_wrap=True)
        for row in cells:
            table.add_row(*row.values())
        return table

    def print(self, console: Console) -> None:
        """Print the table, the verdict and the notes."""
        console.print(self.table())
        for line in (*self.verdict.split("\n"), *self.notes, f"page: {self.folder / 'report.html'}"):
            console.print(line, soft_wrap=True)

    def __str__(self) -> str:
        text = io.StringIO()
        self.print(Console(file=text, width=160, no_color=True, highlight=False, markup=False, emoji=False))
        return text.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        picture = self.folder / "loss.svg"
        data = base64.b64encode(picture.read_bytes()).decode() if picture.exists() else ""
        curves = f'\n<img alt="losses by step" src="data:image/svg+xml;base64,{data}">' if data else ""
        return html(self.table(), *self.verdict.split("\n"), *self.notes) + curves

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        plain = {"training": self.name, "baseline": self.baseline, "seeds": list(self.seeds), "rows": self.rows}
        return plain | {"verdict": self.verdict, "notes": list(self.notes), "folder": str(self.folder)}

    def to_frame(self) -> Any:
        """Return the rows as a ``pandas.DataFrame``."""
        needs("pandas", "tables are made with pandas", "analysis")
        import pandas as pd

        return pd.DataFrame(self.rows)


def _shown(row: Row, metrics: Sequence[str]) -> dict[str, str]:
    """Return a row as text, by the headings of its columns."""
    loss = "–" if row["loss"] is None else f"{row['loss']:.4g}"
    spread = f" ± {row['deviation']:.2g}" if row["deviation"] is not None else ""
    half = 0.0 if row["low"] is None else row["high"] - row["difference"]
    difference = "–" if row["difference"] is None else _signed(row["difference"], half)
    interval = f" [{_signed(row['low'], half)}, {_signed(row['high'], half)}]" if row["low"] is not None else ""
    bad = [f"{len(row[state])} {state}" for state in ("diverged", "failed") if row[state]]
    return {
        "policy": row["policy"],
        "loss": loss + spread,
        "difference, 95 %": difference + interval,
        **{name: _text(row[name], "{:.4g}") for name in metrics},
        "Ω": f"{row['complexity']:g}",
        "ms/step": _text(row["ms_per_step"], "{:.3g}" if (row["ms_per_step"] or 0) < 100 else "{:.0f}"),
        "ratio": _text(row["ratio"], "{:.2f}×"),
        "FP4 FLOPs": _text(row["fp4_flops"], "{:.0%}"),
        "bits/weight": _text(row["bits_per_weight"], "{:.2f}"),
        "sites": "–" if row["sites"] is None else f"{row['quantized']}/{row['sites']}",
        "runs": ", ".join([str(row["finished"]), *bad]),
    }


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _signed(value: float, half: float = 0.0) -> str:
    """Return a difference with its sign, rounded so that the half-width of its interval would have two digits."""
    if not value:
        return "0"
    has_interval = half > 1e-6 * abs(value)
    return f"{value:+.{max(0, 1 - math.floor(math.log10(half)))}f}" if has_interval else f"{value:+.3g}"


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None
