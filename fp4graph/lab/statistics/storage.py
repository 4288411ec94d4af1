"""Statistics on disk: an append-only file of JSON lines (:mod:`fp4graph.lab.jsonlines`).

``statistics.jsonl`` gets a header line with ``"format": "fp4graph.statistics"`` when a training begins or resumes, and
a line for each measurement of a step, site and tensor (docs/analysis.md). The lines of a step are written at once.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from fp4graph.errors import Error, needs, suggest
from fp4graph.lab import jsonlines

FORMAT, VERSION = "fp4graph.statistics", 1
FILE = "statistics.jsonl"
#: Fields whose low values are bad.
LOW_IS_BAD = ("snr_db", "gain", "confidence")
#: Named values of one step, site and tensor.
Measurement = Mapping[str, Any]


class Log:
    """The file of one run's statistics in ``directory``, and the streams that get the same numbers.

    ``header`` has the fields of the line that marks the beginning of this training.

    Raises:
        Error: the file cannot be written, or a stream cannot be opened; earlier lines are kept.
    """

    def __init__(self, directory: str | PathLike[str], header: Mapping[str, Any], *streams: Any) -> None:
        self.path, self._open = Path(directory).absolute() / FILE, ExitStack()
        with self._writing("a stream"):
            self._sinks = [sink_of(each, self._open) for each in streams]
        with self._writing():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            jsonlines.cut_torn_line(self.path)
            jsonlines.append(self.path, [_plain({"format": FORMAT, "version": VERSION, **header})])

    def append(self, measurements: Sequence[Measurement]) -> None:
        """Write all measurements of a step or, if the file cannot be written, none; then hand them to the streams.

        Streams get every number as ``column/site/tensor``, so that TensorBoard groups numbers by column. If a stream
        fails, the measurements stay in the file, and an Error is raised.
        """
        with self._writing():
            jsonlines.append(self.path, map(_plain, measurements))
        values = {
            f"{column}/{measured['site']}/{measured['tensor']}": value
            for measured in measurements
            for column, value in measured.items()
            if isinstance(value, int | float) and column not in ("step", "window")
        }
        with self._writing("a stream"):
            for sink in self._sinks:
                sink(measurements[0]["step"], values)

    def close(self) -> None:
        self._open.close()

    @contextmanager
    def _writing(self, stream: str = "") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"cannot write statistics to {stream or self.path}: {error.strerror or error}"
            raise Error(f"{what}. Earlier records are readable; make room, or train without statistics") from error


def sink_of(stream: Any, resources: ExitStack, step: int | None = None) -> Callable[[int, Mapping[str, float]], object]:
    """Return a function of (step, values) that hands a step's values to the stream.

    TensorBoard's events in a folder are closed with ``resources``; earlier events from ``step`` on are hidden.
    """
    if isinstance(stream, str | PathLike):
        needs("tensorboard", "streaming to a folder needs TensorBoard", "analysis")
        from torch.utils.tensorboard import SummaryWriter

        stream = resources.enter_context(SummaryWriter(str(stream), purge_step=step))
    if hasattr(stream, "add_scalar"):
        return lambda step, values: [stream.add_scalar(name, value, step) for name, value in values.items()]
    if hasattr(stream, "log_metrics"):  # MLflow allows fewer characters in names, and only finite numbers
        return lambda step, values: stream.log_metrics(
            {re.sub(r"[^\w\-. /:]", "_", name): v for name, v in values.items() if math.isfinite(v)}, step=step
        )
    if hasattr(stream, "define_metric"):  # wandb's global step belongs to the user
        stream.define_metric("fp4graph/*", step_metric="fp4graph/step")
        return lambda step, values: stream.log({f"fp4graph/{name}": v for name, v in {"step": step, **values}.items()})
    if callable(stream):
        return stream  # type: ignore[no-any-return]
    raise Error(
        f"statistics cannot stream to {stream!r}; give a SummaryWriter or a folder for one, a run of wandb, the module "
        "mlflow, or a function of a step and a dict of values"
    )


@dataclass(frozen=True, repr=False)
class Recorded:
    """A run's statistics: rows of (step, site, tensor) with named values."""

    header: Mapping[str, Any]  # policy, interval and sites of the latest training that wrote here
    rows: tuple[Measurement, ...]  # in the order of steps

    def __repr__(self) -> str:
        steps = f", steps {self.steps[0]} to {self.steps[-1]}" if self.rows else ""
        counts = f"{len(self.rows)} rows, {len(self.sites)} sites, {len(self.steps)} records{steps}"
        return f"Recorded({self.header.get('policy')!r}: {counts})"

    def to_frame(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row for each step, site and tensor, and a column for each field."""
        needs("pandas", "tables need pandas", "analysis")
        import pandas

        return pandas.DataFrame.from_records(self.rows)

    def worst(self, column: str = "snr_db", count: int | None = 10) -> list[dict[str, Any]]:
        """Return the sites and tensors with the worst mean of ``column`` over all records, the worst first.

        Low values are bad for ``snr_db``, ``gain`` and ``confidence``, high values for other columns. Each item has
        ``site``, ``tensor``, the mean under the column's name, the ``worst`` value, and its ``step``.
        """
        places: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
        for row in self.having(column):
            if isinstance(row[column], int | float):
                places[row["site"], row["tensor"]].append(row)
        if not places:
            numbers = {name for row in self.rows for name, value in row.items() if isinstance(value, int | float)}
            raise Error(f"no numbers of {column!r} were recorded; {suggest(column, sorted(numbers - {'step'}))}")
        sign, worst = (1 if column in LOW_IS_BAD else -1), []
        for (site, tensor), rows in places.items():
            row = min(rows, key=lambda row: sign * row[column])
            mean = statistics.fmean(row[column] for row in rows)
            worst.append({"site": site, "tensor": tensor, column: mean, "worst": row[column], "step": row["step"]})
        return sorted(worst, key=lambda item: sign * item[column])[:count]

    def having(self, column: str) -> list[Measurement]:
        """Return the rows with a value of ``column``."""
        return [row for row in self.rows if row.get(column) is not None]

    def latest(self, column: str) -> list[Measurement]:
        """Return the rows of the last step that has ``column``."""
        rows = self.having(column)
        return [row for row in rows if row["step"] == rows[-1]["step"]]

    def series(self, column: str, *, tensor: str | None = None, site: str | None = None) -> dict[str, list[Any]]:
        """Return lists "step", "site", "tensor" and "value" of the rows with ``column``.

        ``tensor`` and ``site`` select the rows of one tensor or site; None selects all.
        """
        rows = [r for r in self.having(column) if tensor in (None, r["tensor"]) and site in (None, r["site"])]
        keys = {"step": "step", "site": "site", "tensor": "tensor", "value": column}
        return {name: [row[key] for row in rows] for name, key in keys.items()}

    @property
    def sites(self) -> list[str]:
        """The sites that have rows, in the model's order."""
        order = {weight["site"]: place for place, weight in enumerate(self.header.get("weights", ()))}
        sites = dict.fromkeys(row["site"] for row in self.rows)
        return sorted(sites, key=lambda site: order.get(site.partition("#")[0], len(order)))

    @property
    def steps(self) -> list[int]:
        return sorted({row["step"] for row in self.rows})


def find(path: str | PathLike[str]) -> Path | None:
    """Return ``path`` if it is a file, else ``statistics.jsonl`` in it or in its folder ``statistics``, else None."""
    path = Path(path)
    return next((file for file in (path, path / FILE, path / "statistics" / FILE) if file.is_file()), None)


def read(path: str | PathLike[str]) -> Recorded:
    """Read the statistics of a run, from a ``statistics.jsonl`` or from a directory where :func:`find` finds it.

    Rows after the step at which a training was resumed are replaced by the resumed training's. Raises an Error if the
    statistics are missing or of another version, or if a line is damaged.
    """
    file = find(path)
    if file is None:
        raise Error(f"{path} has no statistics; record them with fp4graph.lab.Statistics, which writes {FILE}")
    header: dict[str, Any] | None = None
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, row in jsonlines.read(file):
        if row.get("format") == FORMAT:
            if row.get("version") != VERSION:
                raise Error(f"{file} was written by another version of fp4graph (format {row.get('version')})")
            header = row
            rows = {key: earlier for key, earlier in rows.items() if key[0] <= row.get("step", 0)}
        elif header is None or not {"step", "site", "tensor"} <= row.keys():
            raise Error(f"{file}:{number} is not a line of statistics")
        else:
            rows[row["step"], row["site"], row["tensor"]] = row
    if header is None:
        raise Error(f"{file} has no statistics")
    return Recorded(header, tuple(sorted(rows.values(), key=lambda row: row["step"])))


def _plain(value: Any) -> Any:
    """Return ``value`` for JSON: six significant digits, and None for a number that is not finite."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return value if value and isinstance(value[0], int) else [_plain(item) for item in value]
    return value
