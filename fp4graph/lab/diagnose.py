"""Finds why a training diverged: the first quantity that left its normal range, and the technique that addresses it.

docs/diagnose.md describes the ranges. Each range has a middle m and a half-width max(w, 5·1.4826·MAD), where MAD is the
median absolute deviation from m, and w the least half-width of the quantity in its units (:mod:`fp4graph.lab.checks`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from fp4graph.errors import Error, needs
from fp4graph.graph.blocks import pattern_of
from fp4graph.lab import jsonlines
from fp4graph.lab.checks import DIVERGENCE, OF_ERROR, QUANTITIES, SCALES, Quantity, Remedy
from fp4graph.lab.comparison.record import LOG
from fp4graph.lab.runs.folder import read_metrics
from fp4graph.lab.runs.run import finite
from fp4graph.lab.statistics import storage
from fp4graph.lab.statistics.metrics import METRICS
from fp4graph.lab.statistics.storage import Measurement, Recorded
from fp4graph.model.html import html

if TYPE_CHECKING:
    from rich.table import Table

#: Losses by step; None is a loss that is not finite.
Losses = Mapping[int, float | None]
#: The half-width of a range in median absolute deviations: five robust standard deviations.
DEVIATIONS = 5 * 1.4826
#: The least number of records for a range from the run itself, and the least number of losses in a running median.
RECORDS, WINDOW = 5, 5


@dataclass(frozen=True)
class Finding:
    """A quantity that left its normal range."""

    step: int  # the step of the first record outside the range
    site: str  # empty for the model's loss and gradient norm, as is ``operand``
    operand: str
    quantity: str
    value: float | None  # the value at ``step``; None if it is not finite
    normal: float  # the end of the range that the value passed
    range: str  # the origin of the range: early, peers, baseline or limit
    size: float  # the distance from the middle of the range in half-widths
    stays: bool  # whether the last record is outside too
    remedy: Remedy
    sites: tuple[int, int] = (1, 1)  # how many sites left this range at ``step``, and how many there are

    def words(self) -> tuple[str, str]:
        """Return the value and the normal range in words."""
        quantity = QUANTITIES[self.quantity]
        value = "not finite" if self.value is None else quantity.form.format(self.value)
        return value, f"{'at least' if quantity.sense < 0 else 'at most'} {quantity.form.format(self.normal)}"

    def __str__(self) -> str:
        place = f" of {self.operand} at {self.site}" if self.site else ""
        value, normal = self.words()
        quantity = f"{QUANTITIES[self.quantity].words}{place}"
        return f"At step {self.step} the {quantity} is {value}; normal is {normal} ({self.range})"


@dataclass(frozen=True)
class Diagnosis:
    """The findings of a run, by step and then by size."""

    run: str
    headline: str  # the first finding and the technique that addresses it
    findings: tuple[Finding, ...]
    baseline: bool | None  # whether the baseline's loss left its range too; None without losses of a baseline
    missing: tuple[str, ...]  # quantities that were not recorded, and so not judged

    def __str__(self) -> str:
        return "\n".join([self.headline, *map(str, self.findings[:10]), *self._missing])

    def _repr_html_(self) -> str:
        return html(self.headline, self.table(), *self._missing)

    @property
    def _missing(self) -> list[str]:
        return [f"Not recorded: {name}" for name in self.missing]

    def to_json(self) -> dict[str, Any]:
        """Return plain data; a number that is not finite is None."""
        return dict(finite(asdict(self)))

    def table(self) -> Table:
        """Return a table of the first findings, where sites that left one range at the same step share a row."""
        from rich.table import Table

        table = Table(title=f"{self.run}: what left its normal range", title_justify="left")
        for name in ("step", "site", "operand", "quantity", "value", "normal", "range", "technique"):
            table.add_column(name, justify="right" if name in ("step", "value") else "left", overflow="fold")
        grouped: defaultdict[tuple[int, str, str], list[Finding]] = defaultdict(list)
        for each in self.findings:
            grouped[each.step, each.operand, each.quantity].append(each)
        for first, *others in itertools.islice(grouped.values(), 12):
            site = (first.site or "the model") + (f" and {len(others)} more" if others else "")
            table.add_row(str(first.step), site, first.operand, QUANTITIES[first.quantity].words, *first.words(),
                          first.range, first.remedy.techniques)  # fmt: skip
        return table


def diagnose(
    run: str | PathLike[str],
    baseline: str | PathLike[str] | Losses | Sequence[float] | None = None,
    *,
    losses: Losses | Sequence[float] | None = None,
) -> Diagnosis:
    """Return the quantities that left their normal range in a run, by step.

    Within a step, forward precedes backward, operands precede the bias of a gradient, and larger findings precede
    smaller ones. If the loss rises, the order within a step is: operands that left their range at less than half of
    their sites, the loss and the gradient norm, then operands that left it at more sites, which share a cause. A spike
    of the loss that passed comes last.

    Args:
        run: a folder of ``fp4graph train``, of one run of ``fp4graph.compare``, or of a :class:`Statistics`.
        baseline: the folder of a run with the same settings, under ``bf16`` for instance; or that run's losses.
        losses: losses by step, or a list of the losses of steps 1, 2, ...; by default the losses in the folder.

    Raises:
        Error: the run has neither losses nor statistics, the baseline has no losses, or pandas is not installed.
    """
    needs("pandas", "diagnoses need pandas", "analysis")
    if not Path(run).exists():
        raise Error(f"there is no folder {str(run)!r}; give a folder of fp4graph train or of a run of fp4graph.compare")
    record = _read(Path(run), losses)
    if record.recorded is None and not record.losses:
        raise Error(f"{run} has neither losses nor statistics; train with fp4graph train --statistics, or with "
                    "fp4graph.lab.Statistics around your loop")  # fmt: skip
    folder, values = (Path(baseline), None) if isinstance(baseline, str | PathLike) else (None, baseline)
    reference = _read(folder, values)
    if folder is not None and not reference.losses:
        raise Error(f"{folder} has no losses of a baseline; give a folder of fp4graph train, or a list of losses")
    findings = loss_findings(record.losses, reference.losses)
    diverging = any(each.stays for each in findings)
    rises = any(each.stays and each.range == "early" for each in findings)
    alike = {site for site, words in record.quantizers.items() if reference.quantizers.get(site, 0) == words}
    comparable = [row for row in reference.rows if row["site"].partition("#")[0] in alike]
    findings += _outside(record.rows, comparable, diverging)
    findings.sort(key=lambda finding: _place(finding, rises))
    diverged = None
    if reference.losses:  # NaN ends a training, before the running median shows it
        ends = reference.losses[max(reference.losses)] is None
        diverged = ends or any(each.stays for each in loss_findings(reference.losses, {}))
    records = len(record.recorded.steps) if record.recorded else 0
    headline = f"Nothing left its normal range in {len(record.losses)} losses and {records} records of operands."
    if findings:
        headline = _headline(findings, diverged)
    missing = [] if record.losses else ["losses: give losses=[...], or train with fp4graph train"]
    if record.recorded is None:
        missing.append("statistics of operands: train with fp4graph train --statistics STEPS")
    else:
        few = f"{RECORDS} records of operands or more, from which their normal ranges are taken"
        missing += [few] if records < RECORDS else []
        left_out = METRICS.keys() - {*record.recorded.header.get("metrics", METRICS)}
        missing += [f"{name}: {METRICS[name]}" for name in sorted(left_out)]
    return Diagnosis(str(run), headline, tuple(findings), diverged, tuple(missing))


class _Read(NamedTuple):
    """The losses of a run by step, its statistics, and the rows of the statistics and of the model's gradient norms."""

    losses: Losses
    recorded: Recorded | None
    rows: list[Measurement]  # gradient norms have an empty site and tensor

    @property
    def quantizers(self) -> dict[str, Any]:
        """The quantizers of each site in words; None for the model itself, whose site is empty."""
        weights = self.recorded.header.get("weights", ()) if self.recorded else ()
        return {"": None, **{weight["site"]: weight["operands"] for weight in weights}}


def _read(folder: Path | None, losses: Losses | Sequence[float] | None) -> _Read:
    """Read a folder; ``losses`` replace the folder's losses, which ``fp4graph.compare`` writes to ``log.jsonl``."""
    lines = [line for line in read_metrics(folder) if "validation_loss" not in line] if folder is not None else []
    if losses is None:
        losses = {line["step"]: line["train_loss"] for line in lines if "train_loss" in line}
        if folder is not None and not losses and (folder / LOG).is_file():
            losses = {line["step"]: line["loss"] for _, line in jsonlines.read(folder / LOG, "step") if "loss" in line}
    elif not isinstance(losses, Mapping):
        losses = dict(enumerate(losses, 1))
    numbers = {step: finite(None if loss is None else float(loss)) for step, loss in losses.items()}
    norms = [{"site": "", "tensor": "", **line} for line in lines if line.get("gradient_norm") is not None]
    recorded = storage.read(folder) if folder is not None and storage.find(folder) else None
    rows: list[Measurement] = [*norms, *(recorded.rows if recorded else ())]
    return _Read(numbers, recorded, rows)


def loss_findings(losses: Losses, baseline: Losses) -> list[Finding]:
    """Return where the loss left the ranges of its run (early, limit) and of the baseline.

    L is the least of the first three losses, m_t the least running median before step t, and σ the robust standard
    deviation of the losses from their running median until its minimum, but at most L/20. A loss is outside

    - if it is not finite, or if from the fourth loss on it exceeds m_t + max(10σ, (L − m_t)/2, L/20): it undid half of
      the progress (early);
    - if the running median of 50 losses or more never fell by more than max(σ, L/50): it is stuck (limit);
    - if from some step to the end the running median exceeds the baseline's by max(10σ, G/4), where G is the progress
      of the baseline (baseline).
    """
    steps = sorted(losses)
    values = [math.inf if (value := losses[step]) is None else value for step in steps]
    if not values:
        return []
    smooth = _running_median(values)
    start, turn = min(values[:3]), smooth.index(min(smooth))
    apart = [abs(value - middle) for value, middle in zip(values, smooth, strict=True)][: max(turn, WINDOW)]
    spread = min(1.4826 * median(filter(math.isfinite, [*apart, math.inf, 0.0])), abs(start) / 20)
    least = list(itertools.accumulate([start, *smooth[:-1]], min))
    limits = [low + max(10 * spread, (start - low) / 2, abs(start) / 20) for low in least]
    limits[:3] = [math.inf] * min(3, len(values))  # a quick training falls far in its first steps
    findings = []

    def add(i: int, value: float, normal: float, origin: str, size: float, stays: bool) -> None:
        findings.append(Finding(steps[i], "", "", "loss", finite(value), normal, origin, size, stays, DIVERGENCE))

    outside = [i for i, value in enumerate(values) if not value <= limits[i] or math.isinf(value)]
    floor = start - max(spread, abs(start) / 50)
    stuck = len(values) >= 50 and min(smooth[-1], smooth[turn] if not outside else math.inf) >= floor
    if outside:
        stays = stuck or not smooth[-1] <= limits[-1] or math.isinf(smooth[-1])
        inside = max((i for i, middle in enumerate(smooth) if middle <= limits[i]), default=-1)
        i = outside[0] if stuck or not stays else next(i for i in outside if i > inside - WINDOW)
        size = (values[i] - least[i]) / max(limits[i] - least[i], 1e-12) if math.isfinite(values[i]) else math.inf
        add(i, values[i], limits[i], "early", size, stays)
    elif stuck:
        add(len(steps) - 1, smooth[-1], floor, "limit", 1.0, True)
    common = [i for i, step in enumerate(steps) if baseline.get(step) is not None]
    if len(common) >= WINDOW and not any(each.stays and each.range == "early" for each in loss_findings(baseline, {})):
        reference = _running_median([float(baseline[steps[i]] or 0.0) for i in common])
        room = max(10 * spread, (reference[0] - min(reference)) / 4)
        n = 1 + max((n for n, i in enumerate(common) if smooth[i] <= reference[n] + room), default=-1)
        if n < len(common):
            i = common[n]
            add(i, smooth[i], reference[n] + room, "baseline", (smooth[i] - reference[n]) / max(room, 1e-12), True)
    return findings


def _running_median(values: Sequence[float]) -> list[float]:
    """Return the median of the window that ends at each value: a twentieth of all values, but at least WINDOW."""
    width = max(WINDOW, len(values) // 20)
    return [median(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def _outside(rows: Sequence[Measurement], baseline: Sequence[Measurement], diverging: bool) -> list[Finding]:
    """Return, for each field, tensor and site, the first record that is outside and is followed by another outside.

    The last record counts if the loss is outside (``diverging``), a record with non-finite elements always.
    """
    row_at = {(row["site"], row["tensor"], row["step"]): row for row in rows}
    reference = _tables(baseline)
    findings: list[Finding] = []
    for (column, tensor), table in _tables(rows).items():
        quantity, outliers = QUANTITIES[column], []
        for site, sizes, edges in _sizes(table, reference.get((column, tensor)), quantity, diverging):
            outside = sizes.max(axis=1) > 1
            confirmed = outside if column == "nonfinite" else outside & outside.shift(-1, fill_value=diverging)
            if confirmed.any():
                step = int(confirmed.idxmax())
                row, origin = row_at[site, tensor, step], sizes.loc[step].idxmax()
                size, edge = float(sizes.at[step, origin]), float(edges.at[step, origin])
                normal, remedy = quantity.units.inverse(quantity.sense * edge), quantity.remedy or _of_error(row)
                outliers.append(Finding(step, site, tensor, column, row[column], normal, origin, size,
                                        bool(outside.iloc[-1]), remedy))  # fmt: skip
        at = Counter(finding.step for finding in outliers)
        findings += [replace(finding, sites=(at[finding.step], len(table.columns))) for finding in outliers]
    return findings


def _tables(rows: Sequence[Measurement]) -> dict[tuple[str, str], Any]:
    """Return the badness of each field and tensor: frames with a row for each step and a column for each site."""
    from pandas import DataFrame

    recorded = DataFrame(list(rows), columns=["step", "site", "tensor", *QUANTITIES])
    tables = {}
    for column, quantity in QUANTITIES.items():
        for tensor, part in recorded.dropna(subset=column).groupby("tensor", sort=False):
            if tensor.endswith(quantity.tensors):
                table = part.pivot_table(column, "step", "site", "last", sort=False).sort_index()
                tables[column, tensor] = table.map(quantity.badness, na_action="ignore")
    return tables


def _sizes(table: Any, reference: Any, quantity: Quantity, diverging: bool) -> Iterator[tuple[str, Any, Any]]:
    """Yield each site, its distances from the middles of its normal ranges in half-widths, and the ends of the ranges.

    Distances and ends are frames with a row for each step and a column for each origin of a range. Operands drift in a
    training, so the median drift of all sites is subtracted, unless the training is diverging.
    """
    from pandas import DataFrame

    counts, kinds = table.count(), table.columns.map(pattern_of)
    first = table.where((table.notna().cumsum() <= (counts // 4).clip(3, 10)) & (counts >= RECORDS))
    early, early_half = _middle(first.T, quantity.width)
    moved = table - early
    drift = 0.0 if diverging else moved.median(axis=1).where(moved.count(axis=1) >= 3, 0.0)
    limit = None if quantity.limit is None else quantity.badness(quantity.limit) - quantity.width
    for site, kind in zip(table.columns, kinds, strict=True):
        curve = table[site].dropna()
        peers = table.loc[:, quantity.peers & (kinds == kind) & (table.columns != site)]
        middle, half = _middle(peers[peers.count(axis=1) > 1], quantity.width)
        baseline = reference[site] if reference is not None and site in reference else None
        middles = {"peers": middle, "limit": limit, "early": early[site] + drift, "baseline": baseline}
        halves = {"peers": half, "limit": quantity.width, "early": early_half[site], "baseline": quantity.width}
        middle, half = (DataFrame(each, curve.index, dtype=float) for each in (middles, halves))
        yield site, (middle.rsub(curve, axis=0) / half).fillna(-math.inf), middle + half


def _middle(values: Any, width: float) -> tuple[Any, Any]:
    """Return the middle and half-width of the range of each row of a frame, as series."""
    middle = values.median(axis=1)
    return middle, (DEVIATIONS * values.sub(middle, axis=0).abs().median(axis=1)).clip(lower=width)


def _of_error(row: Measurement) -> Remedy:
    """Return the remedy of a low signal-to-noise ratio, by the largest part of the error."""
    if (row.get("limit_blocks") or 0.0) > 0.1:
        return SCALES
    return OF_ERROR[max(OF_ERROR, key=lambda part: row.get(part) or 0.0)]


def _place(finding: Finding, rises: bool) -> tuple[float, ...]:
    """Return the place of a finding in the order that :func:`diagnose` describes."""
    count, every_site = finding.sites
    of_training = finding.quantity in ("loss", "gradient_norm")
    level = (1 if rises else 3) if of_training else 2 if rises and 2 * count >= max(every_site, 2) else 0
    backward = finding.operand.startswith(("dgrad", "wgrad"))
    passed = finding.quantity == "loss" and not finding.stays
    follows = finding.quantity == "bias"  # the bias of a GEMM's result follows from the errors of its operands
    return math.inf if passed else finding.step, level, backward, follows, -finding.size


def _headline(findings: Sequence[Finding], diverged: bool | None) -> str:
    first = findings[0]
    operand = next((each for each in findings if each.operand), None)
    sentence = f"{first}. It is addressed by {first.remedy.techniques}: {first.remedy.reason}."
    if operand is None:
        sentence += " No operand left its range."
    elif operand is not first:
        sentence += f" The first operand follows: at{str(operand).removeprefix('At')}."
    if diverged:
        sentence += " The baseline's loss left its range too: look at what both runs share, the learning rate first."
    elif diverged is False and any(each.quantity == "loss" for each in findings):
        sentence += " The baseline's loss stays in its range: quantization is part of the cause."
    return sentence
