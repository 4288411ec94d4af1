"""Statistics on disk: one file of JSON lines that is only ever appended to, and stays readable whatever happens.

``statistics.jsonl``: a line with ``"format": "fp4graph.statistics"`` where a training begins or goes on, and one line
for each (step, site, tensor), an object that docs/analysis.md describes. What was recorded of a step is written at
once. A line that a kill cut off is the last one; it is left out in reading, and cut away before anything is appended.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from fp4graph.errors import Error

FORMAT, VERSION = "fp4graph.statistics", 1
FILE = "statistics.jsonl"
Record = Mapping[str, Any]


class Log:
    """The file of one run's statistics, open for appending.

    Args:
        directory: made if it is not there. header: of the line that marks where this training begins.

    Raises:
        Error: it cannot be written.
    """

    def __init__(self, directory: str | PathLike[str], header: Mapping[str, Any]) -> None:
        self.path = Path(directory) / FILE
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            self._cut_torn_line()
        except OSError as error:
            raise Error(f"cannot write statistics to {self.path}: {error}") from error
        self.append([{"format": FORMAT, "version": VERSION, **header}])

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write all of ``records`` or none, so that they are there if the process is killed.

        Raises:
            Error: it cannot be done, as on a full disk. What was written before is as it was.
        """
        data = b"".join(json.dumps(_plain(record), ensure_ascii=False).encode() + b"\n" for record in records)
        size = self._file.seek(0, os.SEEK_END)
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise Error(
                f"cannot write statistics to {self.path}: {error}. What was recorded before is there and readable; "
                "make room, or train without statistics"
            ) from error

    def close(self) -> None:
        self._file.close()

    def _cut_torn_line(self) -> None:
        with self.path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            whole = end
            while whole and file.seek(whole - 1) >= 0 and file.read(1) != b"\n":
                whole -= 1
        if whole != end:
            self._file.truncate(whole)


@dataclass(frozen=True)
class Recorded:
    """What a run's statistics are: rows of (step, site, tensor) with named values.

    Attributes:
        header: of the latest training that wrote here: policy, interval, sites.
        rows: in the order of steps. ``pandas.DataFrame(recorded.rows)`` is a table of them.
    """

    header: Record
    rows: tuple[Record, ...]

    def series(self, column: str, *, tensor: str | None = None, site: str | None = None) -> dict[str, list[Any]]:
        """``column`` over steps, as lists of steps and values, of the rows that have it (and are of a tensor, a site):
        ``{"step": [...], "site": [...], "tensor": [...], "value": [...]}``."""
        rows = [
            row
            for row in self.rows
            if row.get(column) is not None and tensor in (None, row["tensor"]) and site in (None, row["site"])
        ]
        keys = {"step": "step", "site": "site", "tensor": "tensor", "value": column}
        return {name: [row[key] for row in rows] for name, key in keys.items()}

    @property
    def sites(self) -> list[str]:
        """The sites that there are rows of, in the order of the model."""
        order = {weight["site"]: place for place, weight in enumerate(self.header.get("weights", ()))}
        found = dict.fromkeys(row["site"] for row in self.rows)
        return sorted(found, key=lambda site: order.get(site.partition("#")[0], len(order)))

    @property
    def steps(self) -> list[int]:
        return sorted({row["step"] for row in self.rows})


def read(path: str | PathLike[str]) -> Recorded:
    """The statistics of a run: a ``statistics.jsonl``, or the directory that holds one (perhaps in ``statistics/``).

    Where a training was resumed, what the former one recorded beyond that step is left out.

    Raises:
        Error: there are none, they are of another version, or a line is damaged.
    """
    path = _found(Path(path))
    header: dict[str, Any] | None = None
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, line in _lines(path):
        try:
            row = json.loads(line)
        except ValueError:
            raise Error(f"{path}:{number}: this line is damaged; delete it to read the rest") from None
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
    raise Error(f"{path}: no statistics there; fp4graph.analysis.Statistics writes {FILE}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Whole lines with their numbers."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield number, line.decode("utf-8", "replace")


def _plain(value: Any) -> Any:
    """``value`` in JSON's words: six significant digits, null for what is not finite."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return value if value and isinstance(value[0], int) else [_plain(item) for item in value]
    return value
