"""Statistics on disk: one file of JSON lines, to which lines are only appended (:mod:`fp4graph.lab.jsonlines`).

``statistics.jsonl``: a line with ``"format": "fp4graph.statistics"`` where a training begins or goes on, and one line
for each measurement of a step, site and tensor; docs/analysis.md describes them. A step's lines are written at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from fp4graph.errors import Error
from fp4graph.lab import jsonlines

FORMAT, VERSION = "fp4graph.statistics", 1
FILE = "statistics.jsonl"
#: Named values of one step, site and tensor.
Measurement = Mapping[str, Any]


class Log:
    """The file of one run's statistics, and the same as TensorBoard's events.

    Args:
        directory: created if it is missing.
        header: the fields of the line that marks where this training begins.
        tensorboard: a ``SummaryWriter``, or a directory to make one for.

    Raises:
        Error: the file cannot be written, or TensorBoard is not installed.
    """

    def __init__(self, directory: str | PathLike[str], header: Mapping[str, Any], tensorboard: Any = None) -> None:
        self.path = Path(directory).absolute() / FILE
        self._events = tensorboard
        self._owns_events = tensorboard is not None and not hasattr(tensorboard, "add_scalar")
        if self._owns_events:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise Error("TensorBoard is not installed; pip install 'fp4graph[analysis]'") from None
            self._events = SummaryWriter(str(tensorboard))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            jsonlines.cut_torn_line(self.path)
        except OSError as error:
            raise Error(f"cannot write statistics to {self.path}: {error}") from error
        self._append_lines([{"format": FORMAT, "version": VERSION, **header}])

    def append(self, measurements: Sequence[Measurement]) -> None:
        """Write all measurements of a step or none, so that they are there if the process is killed.

        TensorBoard gets every number as a scalar ``column/site/tensor``, so that one card shows one column.

        Raises:
            Error: the disk is full, say. What was written before is as it was.
        """
        self._append_lines(measurements)
        if self._events is not None:
            try:
                self._add_events(measurements[0]["step"], measurements)
            except OSError as error:
                reason = error.strerror or error
                raise Error(
                    f"cannot write TensorBoard's events: {reason}; make room, or go without them. What was written "
                    "before is readable"
                ) from error

    def close(self) -> None:
        if self._owns_events:
            self._events.close()

    def _append_lines(self, lines: Iterable[Measurement]) -> None:
        try:
            jsonlines.append(self.path, map(_plain, lines))
        except OSError as error:
            raise Error(
                f"cannot write statistics to {self.path}: {error}. What was recorded before is there and readable; "
                "make room, or train without statistics"
            ) from error

    def _add_events(self, step: int, measurements: Iterable[Measurement]) -> None:
        values = {
            f"{column}/{measured['site']}/{measured['tensor']}": value
            for measured in measurements
            for column, value in measured.items()
            if isinstance(value, int | float) and column not in ("step", "window")
        }
        if type(self._events).__module__.startswith("torch."):  # one event for all: one for each takes 50 times as long
            from tensorboard.compat.proto.summary_pb2 import Summary

            summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
            self._events.file_writer.add_summary(summary, step)
        else:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)


@dataclass(frozen=True)
class Recorded:
    """A run's statistics: rows of (step, site, tensor) with named values; ``pandas.DataFrame(rows)`` is a table."""

    header: Mapping[str, Any]  # policy, interval and sites of the latest training that wrote here
    rows: tuple[Measurement, ...]  # in the order of steps

    def having(self, column: str) -> list[Measurement]:
        """Return the rows with a value of ``column``."""
        return [row for row in self.rows if row.get(column) is not None]

    def series(self, column: str, *, tensor: str | None = None, site: str | None = None) -> dict[str, list[Any]]:
        """Return ``{"step": [...], "site": [...], "tensor": [...], "value": [...]}``, lists of equal length.

        They have an item for each row that has ``column``, optionally those of one tensor or site.
        """
        rows = [r for r in self.having(column) if tensor in (None, r["tensor"]) and site in (None, r["site"])]
        keys = {"step": "step", "site": "site", "tensor": "tensor", "value": column}
        return {name: [row[key] for row in rows] for name, key in keys.items()}

    @property
    def sites(self) -> list[str]:
        """The sites that have rows, in the model's order."""
        order = {weight["site"]: place for place, weight in enumerate(self.header.get("weights", ()))}
        found = dict.fromkeys(row["site"] for row in self.rows)
        return sorted(found, key=lambda site: order.get(site.partition("#")[0], len(order)))

    @property
    def steps(self) -> list[int]:
        return sorted({row["step"] for row in self.rows})


def read(path: str | PathLike[str]) -> Recorded:
    """Read the statistics of a run: a ``statistics.jsonl``, or the directory that holds one or its ``statistics/``.

    Where a training was resumed, the former training's rows beyond that step are left out.

    Raises:
        Error: there are none, they are of another version, or a line is damaged.
    """
    path = _found(Path(path))
    header: dict[str, Any] | None = None
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, row in jsonlines.read(path):
        if isinstance(row, dict) and row.get("format") == FORMAT:
            if row.get("version") != VERSION:
                raise Error(f"{path}: written by another version of fp4graph (format {row.get('version')})")
            header = row
            rows = {key: former for key, former in rows.items() if key[0] <= row.get("step", 0)}
        elif header is None or not (isinstance(row, dict) and {"step", "site", "tensor"} <= row.keys()):
            raise Error(f"{path}:{number}: this is not a line of statistics")
        else:
            rows[row["step"], row["site"], row["tensor"]] = row
    if header is None:
        raise Error(f"{path}: no statistics are in it")
    return Recorded(header, tuple(sorted(rows.values(), key=lambda row: row["step"])))


def _found(path: Path) -> Path:
    for candidate in (path, path / FILE, path / "statistics" / FILE):
        if candidate.is_file():
            return candidate
    raise Error(f"{path}: no statistics there; fp4graph.lab.Statistics writes {FILE}")


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON can have it: six significant digits, null for a number that is not finite."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return value if value and isinstance(value[0], int) else [_plain(item) for item in value]
    return value
