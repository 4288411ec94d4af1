"""Self-contained HTML pages: the frame of all pages, and the page about one run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

from fp4graph.errors import Error, needs
from fp4graph.files import write
from fp4graph.lab.pictures import plots
from fp4graph.lab.pictures.style import LABELS, svg
from fp4graph.lab.runs.folder import RUN, read_metrics, read_outcome, read_run
from fp4graph.lab.statistics import storage
from fp4graph.lab.statistics.storage import Recorded

#: The pictures of the page, in order. Their docstrings are the headings.
PICTURES = (
    plots.snr, plots.decomposition, plots.shares, plots.scales, plots.gradients, plots.oscillation, plots.trajectories,
    plots.confidence, plots.latent, plots.rates_of_change, plots.flips,
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


def rendered(template: str, **values: Any) -> str:
    """Return a template of this package, filled with ``values``."""
    import jinja2

    loader = jinja2.PackageLoader("fp4graph", "lab")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made = f"Written on {date.today():%Y-%m-%d} by fp4graph {version('fp4graph')} with torch {version('torch')}"
    return environment.get_template(template).render(made=made, **values)


def write_report(directory: str | PathLike[str], output: str | PathLike[str] | None = None) -> Path:
    """Write the report of the run or the statistics in ``directory`` to ``report.html`` there, or to ``output``.

    Raises:
        Error: the folder has no run or its files are damaged, a package is missing, or the report cannot be written.
    """
    for package in ("matplotlib", "jinja2", "pandas"):
        needs(package, f"the report is written with {package}", "analysis")
    directory = Path(directory)
    if not directory.exists():
        raise Error(f"{directory} does not exist; give the folder of a run")
    run = read_run(directory) if (directory / RUN).exists() else None
    metrics, outcome = ([], None) if run is None else (read_metrics(directory), read_outcome(directory))
    recorded = storage.read(directory) if storage.find(directory) else None
    if run is None and recorded is None:
        raise Error(
            f"{directory} has neither a run nor statistics; write a run with fp4graph train, or statistics with "
            "fp4graph.lab.Statistics"
        )
    drawn = {draw: picture for draw in PICTURES if recorded and (picture := draw(recorded)) is not None}
    curves = {"losses": plots.losses(metrics), "metrics": plots.other_metrics(metrics)}
    request, settings = ((run or {}).get(part, {}) for part in ("run", "settings"))
    policy = (recorded.header.get("policy") if recorded else None) or request.get("policy")
    page = rendered(
        "report.html.jinja",
        task=request.get("task") or directory.resolve().name,
        policy=Path(policy).stem if isinstance(policy, str) else "a custom policy",
        run=run,
        settings={name: value for name in _SETTINGS if (value := settings.get(name)) is not None},
        outcome=outcome,
        losses=[row for row in metrics if row.get("validation_loss") is not None],
        names=LABELS,
        curves=[svg(picture, name) for name, picture in curves.items() if picture is not None],
        pictures=[(draw.__name__, inspect.getdoc(draw), svg(made, draw.__name__)) for draw, made in drawn.items()],
        table=_table(recorded) if recorded and recorded.rows else None,
        recorded=recorded,
        directory=directory,
    )
    path = Path(output) if output is not None else directory / "report.html"
    write(path, page)
    return path


def _table(recorded: Recorded) -> tuple[str, str]:
    """Return a table of the last recorded values of each site, and the key to its colours."""
    from pandas import DataFrame, MultiIndex

    shapes = {weight["site"]: "×".join(map(str, weight["shape"])) for weight in recorded.header.get("weights", ())}
    last: dict[tuple[str, str], dict[str, Any]] = {}
    for row in recorded.rows:
        last.setdefault((row["site"], row["tensor"]), {}).update(row)
    operands = [operand for operand in LABELS if any(tensor == operand for _, tensor in last)]
    ratios = [(f"{operand.partition('.')[0]}, dB", _SYMBOLS[operand]) for operand in operands]

    def largest(site: str, tensors: Sequence[str], column: str, factor: float = 1) -> float | None:
        values = [last.get((site, tensor), {}).get(column) for tensor in tensors]
        return max((factor * value for value in values if value is not None), default=None)

    lines = {
        site: {
            ("", "weight"): shapes.get(site, "–"),
            **{name: _ratio(last.get((site, operand), {})) for name, operand in zip(ratios, operands, strict=True)},
            ("elements, %", "to zero"): largest(site, operands, "underflowed", 100),
            ("elements, %", "clipped"): largest(site, operands, "saturated", 100),
            ("weights", "confidence, %"): largest(site, ["fprop.weight"], "confidence", 100),
            ("weights", "oscillate, %"): largest(site, [tensor for _, tensor in last], "oscillating", 100),
            ("gradient bias", "dX"): largest(site, ["dgrad"], "bias"),
            ("gradient bias", "dW"): largest(site, ["wgrad"], "bias"),
        }
        for site in recorded.sites
    }
    table = DataFrame.from_dict(lines, orient="index")
    table.columns = MultiIndex.from_tuples(table.columns)
    snr = table[ratios].astype(float)
    finite = snr.where(snr < math.inf).stack([0, 1], future_stack=True) if ratios else snr
    low, middle, high = (finite.min(), finite.median(), finite.max()) if finite.size else (0.0, 0.0, 0.0)
    width = max(middle - low, high - middle)
    numbers = {column: _short if "," in "".join(column) else "{:.2g}" for column in table.columns[1:]}
    styled = table.style.format(numbers, na_rep="–").format_index(escape="html").background_gradient(
        "RdBu", low=0.6, high=0.6, axis=None, subset=ratios, gmap=snr.clip(low, high).fillna(middle),
        vmin=middle - width, vmax=middle + width,
    )  # fmt: skip
    key = f"Signal-to-noise: red {low:.1f} dB, white at the median, {middle:.1f} dB, blue {high:.1f} dB."
    return styled.set_uuid("sites").to_html(), key


def _short(value: float) -> str:
    return "∞" if value == math.inf else f"{value:.1f}" if value >= 0.1 or value <= 0 else f"{value:.2g}"


def _ratio(row: Mapping[str, Any]) -> float | None:
    """Return the signal-to-noise ratio in dB, infinite for a signal without an error."""
    exact = row.get("snr_db") is None and row.get("gain") is not None
    return math.inf if exact else row.get("snr_db")
