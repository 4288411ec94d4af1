"""Why a training diverged: the first quantity that left its normal range, and the technique that addresses it.

docs/diagnose.md describes the ranges. Each has a middle m and a half-width max(w, 5·1.4826·MAD), where MAD is the
median absolute deviation from m and w the least half-width of the quantity (:data:`QUANTITIES`), in its units.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from fp4graph.errors import Error
from fp4graph.graph.blocks import pattern_of
from fp4graph.lab import jsonlines
from fp4graph.lab.comparison.record import LOG
from fp4graph.lab.runs.folder import read_metrics
from fp4graph.lab.runs.run import finite
from fp4graph.lab.statistics import storage
from fp4graph.lab.statistics.metrics import METRICS
from fp4graph.lab.statistics.storage import Measurement, Recorded

if TYPE_CHECKING:
    from rich.table import Table

#: Losses by step; None is a loss that is not finite.
Losses = Mapping[int, float | None]
#: By field and tensor, by site and by step: values in units of which more is worse.
Curves = dict[tuple[str, str], dict[str, dict[int, float]]]
#: The half-width of a range in median absolute deviations: five robust standard deviations.
DEVIATIONS = 5 * 1.4826
#: The least numbers of records from which a run's own range is taken, and of losses for a running median.
RECORDS, WINDOW = 5, 5


class Units(NamedTuple):
    """The units in which values are compared, and the way back."""

    of: Callable[[float], float]
    back: Callable[[float], float]


_LINEAR = Units(float, float)
_LOG2 = Units(lambda value: math.log2(max(value, 1e-12)), lambda power: 2.0**power)
#: Logits of shares; shares below a tenth are alike, and those above 98 %.
_LOGIT = Units(
    lambda share: math.log((s := min(max(share, 0.1), 0.98)) / (1 - s)), lambda logit: 1 / (1 + math.exp(-logit))
)


class Quantity(NamedTuple):
    """A recorded field that leaves its range above (``sense`` 1) or below (-1)."""

    words: str
    form: str
    sense: int
    units: Units
    width: float
    limit: float | None = None
    tensors: tuple[str, ...] = ("",)  # the ends of the names of the tensors that are judged
    peers: bool = True  # whether sites of one kind are alike

    def badness(self, value: float) -> float:
        return self.sense * self.units.of(value)


#: The fields that are judged (docs/analysis.md). ``underflowed`` is judged of inputs and weights only: as samples are
#: learnt, most gradients become small beside the largest, and ``snr_db`` tells whether their loss matters.
QUANTITIES: dict[str, Quantity] = {
    "nonfinite": Quantity("number of elements that are not finite", "{:.0f}", 1, _LINEAR, 0.5, 0.0),
    "snr_db": Quantity("signal-to-noise ratio", "{:.1f} dB", -1, _LINEAR, 6.0, 3.0),
    "underflowed": Quantity("share rounded to zero", "{:.0%}", 1, _LOGIT, 1.5, None, ("input", "weight")),
    "saturated": Quantity("share clipped", "{:.1%}", 1, _LOGIT, 1.0),
    "limit_blocks": Quantity("share of scales at an end of their format", "{:.0%}", 1, _LOGIT, 3.0),
    "bias": Quantity("bias of the gradient", "{:.0%}", 1, _LOG2, 2.0, 0.9),
    "oscillating": Quantity("share of oscillating weights", "{:.1%}", 1, _LOGIT, 1.5, 0.25),
    "flips": Quantity("share of weights that flip in a step", "{:.1%}", 1, _LOGIT, 1.0),
    "gradient_norm": Quantity("gradient norm", "{:.3g}", 1, _LOG2, math.log2(30), peers=False),
    "loss": Quantity("loss", "{:.4g}", 1, _LINEAR, 0.0),
}


@dataclass(frozen=True)
class Remedy:
    """Techniques that address a finding, the reason, and the sections of docs/findings.md with the evidence."""

    techniques: str
    reason: str
    evidence: str


_ERROR, _SWEEP, _GAUSSIAN = (
    "Where the error of a quantizer comes from", "A sweep over two tasks", "The Gaussian regression",
)  # fmt: skip
_SPIKE = Remedy(
    "a lower learning rate, gradient clipping, or stable_spam",
    "it rises with the gradients; StableSPAM, which clips them, beats Adam in every format with bf16 parameters",
    _GAUSSIAN,
)
_RANGE = Remedy(
    "tensor_scaling or loss_scaling",
    "values below the smallest scale are lost; a tensor scale reduces the error of NVFP4's dY from 12.6 to 0.9 %, loss "
    "scaling the loss on digits from 2.30 to 0.46",
    f"{_ERROR}; {_SWEEP}",
)
_OUTLIERS = Remedy(
    "outlier_clamp, outlier_fallback or hadamard",
    "outliers set the scale of their block, and its other elements become zero; outlier_fallback reduces the dead zone "
    "by a third or more, the others' effect on it was not measured",
    _ERROR,
)
_OSCILLATION = Remedy(
    "freeze, dampen or q_ema",
    "they reduce the share of oscillating weights from 1.8 to 0.4, 0.8 and 1.3 %",
    "Oscillation, with and without its remedies",
)
REMEDIES: dict[str, Remedy] = {
    "loss": _SPIKE,
    "gradient_norm": _SPIKE,
    "nonfinite": replace(_SPIKE, reason="the operand was infinite or NaN before its quantizer"),
    "limit_blocks": _RANGE,
    "underflowed": _OUTLIERS,
    "saturated": Remedy(
        "scales rounded up, as in mxfp4-round-up",
        "decode scales rounded to nearest clip, and the true weights have a loss of 36 under them, 27 under others",
        _GAUSSIAN,
    ),
    "bias": Remedy(
        "stochastic_rounding of gradients",
        "it is unbiased by definition, though the sweep shows no effect of it on the loss",
        _SWEEP,
    ),
    "oscillating": _OSCILLATION,
    "flips": _OSCILLATION,
    # Of an operand's error, by its largest part:
    "dead_zone": _OUTLIERS,
    "scale_bias": Remedy("macro_block_scaling", "it reduces the scale bias by a seventh to two thirds", _ERROR),
    "grid_noise": Remedy("smaller blocks, outlier_fallback", "fallback reduces MXFP4's grid noise by a sixth", _ERROR),
}


@dataclass(frozen=True)
class Finding:
    """A quantity that left its normal range."""

    step: int  # of the first record outside
    site: str  # empty, as the operand, for the loss and the gradient norm of the model
    operand: str
    quantity: str
    value: float | None  # at ``step``; None for one that is not finite
    normal: float  # the end of the range that was passed
    range: str  # the origin of the range: early, peers, baseline or limit
    size: float  # the distance from the middle of the range in half-widths
    stays: bool  # whether the last record is outside too
    remedy: Remedy
    sites: tuple[int, int] = (1, 1)  # where the quantity of this operand left its range at ``step``, and all

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
    """The findings of a run, the first and largest first."""

    run: str
    headline: str  # the first finding and the technique that addresses it
    findings: tuple[Finding, ...]
    baseline: bool | None  # whether the baseline's loss left its range too; None without losses of a baseline
    missing: tuple[str, ...]  # what was not recorded, and so is not judged

    def __str__(self) -> str:
        return "\n".join([self.headline, *map(str, self.findings[:10]), *(f"Not recorded: {m}" for m in self.missing)])

    def to_json(self) -> dict[str, Any]:
        """Return plain data; a number that is not finite is None."""
        return dict(finite(asdict(self)))

    def table(self) -> Table:
        """Return a table of the first findings, with a row for all sites where a quantity left its range at a step."""
        from rich.table import Table

        table = Table(title=f"{self.run}: what left its normal range", title_justify="left")
        for name in ("step", "site", "operand", "quantity", "value", "normal", "range", "technique"):
            table.add_column(name, justify="right" if name in ("step", "value") else "left", overflow="fold")
        grouped = itertools.groupby(self.findings, lambda each: (each.step, each.operand, each.quantity))
        for _, (first, *others) in itertools.islice(grouped, 12):
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
    """Return what left its normal range in a run, in order of time.

    At one step, forward comes before backward and the larger before the smaller. If the loss rises there, operands that
    left their range at less than half of their sites come before the loss and gradient norms, and the others, which
    have a common cause, after these. A spike of the loss that passed comes last.

    Args:
        run: a folder of ``fp4graph train`` or of one run of ``fp4graph.compare``, or one with the ``statistics.jsonl``
            of a :class:`Statistics`.
        baseline: the folder of a run with the same settings, under ``bf16`` for instance; or that run's losses.
        losses: by step, or those of steps 1, 2, ...; by default those of ``metrics.jsonl`` or, from
            :func:`fp4graph.compare`, ``log.jsonl`` in the folder.

    Raises:
        Error: there are no losses and no statistics, or no losses of the baseline.
    """
    folder = Path(run)
    recorded = storage.read(folder) if storage.find(folder) else None
    own, norms = _training(folder, losses)
    if recorded is None and not own:
        raise Error(
            f"{folder}: neither losses nor statistics are there; train with fp4graph train --statistics, or with "
            "fp4graph.lab.Statistics around a loop of your own"
        )
    there = Path(baseline) if isinstance(baseline, str | PathLike) else None
    theirs, their_norms = _training(there, None if isinstance(baseline, str | PathLike) else baseline)
    if there is not None and not theirs:
        raise Error(f"{there}: no losses of a baseline are there; give a folder of fp4graph train, or a list of losses")
    other = storage.read(there) if there is not None and storage.find(there) else None
    findings = loss_findings(own, theirs)
    sick, rises = any(each.stays for each in findings), any(each.stays and each.range == "early" for each in findings)
    comparable = _same_quantizers(recorded, other) if recorded and other else []
    findings += _outside([*norms, *(recorded.rows if recorded else ())], [*their_norms, *comparable], sick)
    findings.sort(key=lambda finding: _place(finding, rises))
    diverged = any(each.stays for each in loss_findings(theirs, {})) if theirs else None
    checked = f"{len(own)} losses and {len(recorded.steps) if recorded else 0} records of operands"
    headline = _headline(findings, diverged) if findings else f"Nothing left its normal range in {checked}."
    return Diagnosis(str(run), headline, tuple(findings), diverged, _missing(recorded, own))


def loss_findings(losses: Losses, baseline: Losses) -> list[Finding]:
    """Return where the loss left its range, and where it left the baseline's.

    With L the least of the first three losses, m_t the least running median before step t and σ the robust standard
    deviation of the losses from their running median until its minimum, at most L/20, a loss is outside

    - above m_t + max(10σ, (L − m_t)/2, L/20) from the fourth on, where it undid half of the progress, and if it is not
      finite (early);
    - if the running median of 50 losses or more never fell by more than max(σ, L/50): it is stuck (limit);
    - if from some step to the end the running median exceeds the baseline's by max(10σ, G/4), a quarter of the progress
      G of the baseline (baseline).
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
    found = []

    def add(i: int, value: float, normal: float, origin: str, size: float, stays: bool) -> None:
        found.append(Finding(steps[i], "", "", "loss", finite(value), normal, origin, size, stays, _SPIKE))

    outside = [i for i, value in enumerate(values) if not (value <= limits[i] and math.isfinite(value))]
    floor = start - max(spread, abs(start) / 50)
    stuck = len(values) >= 50 and min(smooth[-1], smooth[turn] if not outside else math.inf) >= floor
    if outside:
        stays = stuck or not (smooth[-1] <= limits[-1] and math.isfinite(smooth[-1]))
        inside = max((i for i, middle in enumerate(smooth) if middle <= limits[i]), default=-1)
        i = outside[0] if stuck or not stays else next(i for i in outside if i > inside - WINDOW)
        size = (values[i] - least[i]) / max(limits[i] - least[i], 1e-12) if math.isfinite(values[i]) else math.inf
        add(i, values[i], limits[i], "early", size, stays)
    elif stuck:
        add(len(steps) - 1, smooth[-1], floor, "limit", 1.0, True)
    common = [i for i, step in enumerate(steps) if baseline.get(step) is not None]
    if len(common) >= WINDOW and not any(each.stays and each.range == "early" for each in loss_findings(baseline, {})):
        theirs = _running_median([float(baseline[steps[i]] or 0.0) for i in common])
        room = max(10 * spread, (theirs[0] - min(theirs)) / 4)
        n = 1 + max((n for n, i in enumerate(common) if smooth[i] <= theirs[n] + room), default=-1)
        if n < len(common):
            i = common[n]
            add(i, smooth[i], theirs[n] + room, "baseline", (smooth[i] - theirs[n]) / max(room, 1e-12), True)
    return found


def _outside(rows: Sequence[Measurement], baseline: Iterable[Measurement], sick: bool) -> list[Finding]:
    """Return the first record outside of each field, tensor and site, if the next one is outside too.

    The last record counts only if the loss is outside, which ``sick`` says.
    """
    row_at = {(row["site"], row["tensor"], row["step"]): row for row in rows}
    theirs = _curves(baseline)
    found: list[Finding] = []
    for (column, tensor), sites in _curves(rows).items():
        quantity, here = QUANTITIES[column], []
        for site, curve in sites.items():
            ranges = _ranges(quantity, site, sites, theirs.get((column, tensor), {}).get(site, {}), sick)
            sizes = [max([((curve[step] - middle) / half, middle + half, origin) for origin, middle, half in each],
                         default=(0.0, 0.0, "")) for step, each in ranges.items()]  # fmt: skip
            outside = [size > 1 for size, *_ in sizes]
            confirmed = (column == "nonfinite" or following for following in (*outside[1:], sick))
            left = [i for i, pair in enumerate(zip(outside, confirmed, strict=True)) if all(pair)]
            if left:
                i, steps = left[0], list(ranges)
                size, edge, origin = sizes[i]
                row = row_at[site, tensor, steps[i]]
                normal = quantity.units.back(quantity.sense * edge)
                here.append(Finding(steps[i], site, tensor, column, row[column], normal, origin, size, outside[-1],
                                    _remedy(column, row)))  # fmt: skip
        at = Counter(finding.step for finding in here)
        found += [replace(finding, sites=(at[finding.step], len(sites))) for finding in here]
    return found


def _ranges(
    quantity: Quantity, site: str, sites: Mapping[str, Mapping[int, float]], theirs: Mapping[int, float], sick: bool
) -> dict[int, list[tuple[str, float, float]]]:
    """Return the normal ranges of a site at each of its steps, in order: origin, middle and half-width.

    Operands change as a training goes on: unless it is sick, the median drift of all sites is subtracted.
    """
    early = {name: _middle(first, quantity.width) for name, curve in sites.items() if (first := _first(curve))}
    kind = pattern_of(site)
    peers = [curve for name, curve in sites.items() if quantity.peers and name != site and pattern_of(name) == kind]
    ranges: dict[int, list[tuple[str, float, float]]] = {}
    for step in sorted(sites[site]):
        here = ranges[step] = []
        if site in early:
            moved = [sites[name][step] - middle for name, (middle, _) in early.items() if step in sites[name]]
            drift = 0.0 if sick or len(moved) < 3 else median(moved)
            here.append(("early", early[site][0] + drift, early[site][1]))
        others = [curve[step] for curve in peers if step in curve]
        here += [("peers", *_middle(others, quantity.width))] if len(others) > 1 else []
        here += [("baseline", theirs[step], quantity.width)] if step in theirs else []
        if quantity.limit is not None:
            here.append(("limit", quantity.badness(quantity.limit) - quantity.width, quantity.width))
    return ranges


def _first(curve: Mapping[int, float]) -> list[float]:
    """Return the first quarter of a curve, 3 to 10 values; none of a curve that is too short."""
    steps = sorted(curve)
    return [curve[step] for step in steps[: min(max(len(steps) // 4, 3), 10)]] if len(steps) >= RECORDS else []


def _middle(values: Sequence[float], width: float) -> tuple[float, float]:
    middle = median(values)
    return middle, max(width, DEVIATIONS * median(abs(value - middle) for value in values))


def _curves(rows: Iterable[Measurement]) -> Curves:
    curves: Curves = {}
    for row in rows:
        for column, quantity in QUANTITIES.items():
            if row.get(column) is not None and row["tensor"].endswith(quantity.tensors):
                sites = curves.setdefault((column, row["tensor"]), {})
                sites.setdefault(row["site"], {})[row["step"]] = quantity.badness(row[column])
    return curves


def _remedy(column: str, row: Measurement) -> Remedy:
    """Return the remedy of a finding: of an operand's error, that of its largest part."""
    if column != "snr_db":
        return REMEDIES[column]
    if (row.get("limit_blocks") or 0.0) > 0.1:
        return _RANGE
    return REMEDIES[max(("dead_zone", "scale_bias", "grid_noise"), key=lambda part: row.get(part) or 0.0)]


def _place(finding: Finding, rises: bool) -> tuple[float, ...]:
    """Return the place of a finding in the order that :func:`diagnose` describes."""
    count, every_site = finding.sites
    of_training = finding.quantity in ("loss", "gradient_norm")
    level = (1 if rises else 3) if of_training else 2 if rises and 2 * count >= max(every_site, 2) else 0
    backward = finding.operand.startswith(("dgrad", "wgrad"))
    passed = finding.quantity == "loss" and not finding.stays
    return math.inf if passed else finding.step, level, backward, -finding.size


def _headline(findings: Sequence[Finding], diverged: bool | None) -> str:
    first = findings[0]
    operand = next((each for each in findings if each.operand), None)
    sentence = f"{first}. It is addressed by {first.remedy.techniques}: {first.remedy.reason}."
    if operand is None or operand is first:
        sentence += "" if operand else " No operand left its range."
    else:
        sentence += f" The first operand follows: {str(operand)[0].lower()}{str(operand)[1:]}."
    if diverged:
        sentence += " The baseline's loss left its range too: look at what both runs share, the learning rate first."
    elif diverged is False and any(each.quantity == "loss" for each in findings):
        sentence += " The baseline's loss stays in its range: quantization is part of the cause."
    return sentence


def _missing(recorded: Recorded | None, losses: Losses) -> tuple[str, ...]:
    """Return what was not recorded, in words."""
    missing = [] if losses else ["losses: give losses=[...], or train with fp4graph train"]
    if recorded is None:
        return (*missing, "statistics of operands: train with fp4graph train --statistics STEPS")
    if len(recorded.steps) < RECORDS:
        missing.append(f"{RECORDS} steps of operands or more, from which their normal range is taken")
    left_out = METRICS.keys() - {*recorded.header.get("metrics", METRICS)}
    return (*missing, *(f"{name}: {METRICS[name]}" for name in sorted(left_out)))


def _training(
    folder: Path | None, losses: Losses | Sequence[float] | None
) -> tuple[dict[int, float | None], list[Measurement]]:
    """Return the losses by step, and the gradient norms of the model as rows of no site and tensor.

    A run of ``fp4graph.compare`` has its losses in ``log.jsonl``.
    """
    lines = [line for line in read_metrics(folder) if "validation_loss" not in line] if folder is not None else []
    if losses is None:
        losses = {line["step"]: line["train_loss"] for line in lines if "train_loss" in line}
        if folder is not None and not losses and (folder / LOG).is_file():
            losses = {line["step"]: line["loss"] for _, line in jsonlines.read(folder / LOG) if "loss" in line}
    elif not isinstance(losses, Mapping):
        losses = dict(enumerate(losses, 1))
    norms: list[Measurement] = [
        {"site": "", "tensor": "", **line} for line in lines if line.get("gradient_norm") is not None
    ]
    return {step: finite(None if loss is None else float(loss)) for step, loss in losses.items()}, norms


def _same_quantizers(recorded: Recorded, baseline: Recorded) -> list[Measurement]:
    """Return the rows of the baseline whose sites have the same quantizers as in ``recorded``."""
    ours, theirs = ({w["site"]: w["operands"] for w in each.header.get("weights", ())} for each in (recorded, baseline))
    return [row for row in baseline.rows if ours.get(site := row["site"].partition("#")[0], 0) == theirs.get(site, 1)]


def _running_median(values: Sequence[float]) -> list[float]:
    """Return the median of each value and those before it, a twentieth of all and no fewer than WINDOW."""
    width = max(WINDOW, len(values) // 20)
    return [median(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]
