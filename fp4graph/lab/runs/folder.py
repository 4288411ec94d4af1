"""The folder of a run, which stays readable after a crash or a kill: docs/tasks.md lists its files.

``run.json`` is written first, ``metrics.jsonl`` line by line, ``outcome.json`` at the end of the run. The writing
process holds a lock on ``run.lock``, which even a kill releases. A loss that is not finite is null.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fp4graph.errors import Error
from fp4graph.files import read_json, write
from fp4graph.lab import jsonlines
from fp4graph.lab.comparison.record import locked
from fp4graph.lab.runs.run import Outcome, finite
from fp4graph.lab.statistics import storage

RUN, METRICS, OUTCOME, CHECKPOINT, EVENTS = "run.json", "metrics.jsonl", "outcome.json", "checkpoint.pt", "tensorboard"
LOCK = "run.lock"
FORMAT, VERSION = "fp4graph.run", 1
#: Settings that do not change the computation (such as the device), or that the number of steps already covers.
NOT_COMPARED = ("device", "backend", "mode", "workers", "epochs", "tokens", "validations")


class Ended(Error):
    """The run to resume has already ended."""


class RunFolder:
    """Writes the files of one run into the folder ``path``, which no other process uses until :meth:`close`.

    ``streams``, as for :class:`fp4graph.lab.Statistics`, get every line of metrics too. By default the stream is
    TensorBoard's events below ``path``, if TensorBoard is installed.
    """

    def __init__(self, path: Path, streams: Any = None) -> None:
        self.path, self.checkpoint = path, path / CHECKPOINT
        if streams is None:
            streams = [path / EVENTS] if importlib.util.find_spec("tensorboard") is not None else []
        self._streams = streams if isinstance(streams, list | tuple) else [streams]
        self._sinks: list[Callable[[int, Mapping[str, float]], object]] | None = None
        self._first_step: int | None = None
        self._lock, self._open = ExitStack(), ExitStack()

    def begin(self, content: Mapping[str, Any], *, resume: bool) -> None:
        """Lock the folder and write ``run.json``; with ``resume``, first check that the folder holds this run.

        Raises:
            Error: another process writes here, the folder holds a run (with ``resume``, another run), or the folder
                cannot be written.
        """
        self._lock.enter_context(locked(self.path / LOCK, self._holder))
        ended, metrics = (self.path / OUTCOME).exists(), self.path / METRICS
        if ended or self.checkpoint.exists() or (metrics.exists() and metrics.stat().st_size):  # not run.json alone
            if not resume:
                raise Error(f"{self.path} already holds a run; resume it, or give another folder")
            if changed := _changes(read_run(self.path), finite(content)):
                raise Error(f"{self.path} holds another run: {'; '.join(changed)}; give another folder")
            if ended:
                raise Ended(f"the run in {self.path} has already ended; {OUTCOME} has its result")
        started = datetime.now(UTC).isoformat(timespec="seconds")
        process = {"pid": os.getpid(), "host": socket.gethostname()}
        self._replace(RUN, {"format": FORMAT, "version": VERSION, "started": started, "process": process, **content})

    def _holder(self) -> str:
        with suppress(Error, KeyError, TypeError):  # the other process has not written run.json yet
            return "process {pid} on {host}".format(**read_run(self.path)["process"])
        return "another process"

    def keep_until(self, step: int) -> None:
        """Drop the lines after ``step``, and hide TensorBoard's later events; the resumed run writes both again."""
        self._first_step = step + 1
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        write(self.path / METRICS, b"".join(map(jsonlines.line, kept)))

    def line(self, step: int, **values: float) -> None:
        """Add a line to ``metrics.jsonl``, and hand its values to the streams."""
        with self._writing(METRICS):
            jsonlines.append(self.path / METRICS, [finite({"step": step, **values})])
        # MLflow's files cannot have both gradient_norm and the gradient_norm/SITE of statistics.
        names = {"gradient_norm": "gradient_norm/all"}
        self.stream(step, {names.get(name, name): value for name, value in values.items()})

    def stream(self, step: int, values: Mapping[str, float]) -> None:
        """Hand values to the streams; the first call opens the streams."""
        with self._writing(EVENTS):
            if self._sinks is None:
                self._sinks = [storage.sink_of(each, self._open, self._first_step) for each in self._streams]
            for sink in self._sinks:
                sink(step, values)

    def end(self, outcome: Outcome) -> None:
        """Write ``outcome.json``."""
        self._replace(OUTCOME, outcome.to_json())

    def close(self) -> None:
        """Flush TensorBoard's events, and unlock the folder."""
        self._open.close()
        self._sinks = None
        self._lock.close()

    def _replace(self, name: str, content: Mapping[str, Any]) -> None:
        write(self.path / name, json.dumps(finite(content), indent=1, ensure_ascii=False) + "\n")

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Convert an OSError while ``name`` is written into an Error that says what to do."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "make room and resume the run" if full else "check that the folder is writable"
            what = f"cannot write {self.path / name}: {error.strerror or error}"
            raise Error(f"{what}. Earlier lines are readable; {remedy}") from error


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that change the computation and differ between two contents of ``run.json``."""
    old, new = ({**run["settings"], "steps": run.get("steps")} for run in (before, now))
    names = [name for name in new if name not in NOT_COMPARED and old.get(name) != new[name]]
    changed = [f"{name} was {old.get(name)!r}, is {new[name]!r}" for name in names]
    return changed + (["the policy differs"] if before["policy"] != now["policy"] else [])


def read_run(folder: Path) -> dict[str, Any]:
    """Read ``run.json``; raise an Error if it is missing, unreadable, or of another version."""
    file = folder / RUN
    try:
        content = read_json(file)
    except OSError as error:
        raise Error(f"{folder} holds no run: cannot read {RUN} ({error.strerror})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Error(f"{file} is not the record of a run; give the folder of a run")
    if content.get("version") != VERSION:
        raise Error(f"{file} has version {content.get('version')}; this fp4graph reads version {VERSION}")
    return content


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the complete lines of ``metrics.jsonl``; without the file, return no lines."""
    return [line for _, line in jsonlines.read(folder / METRICS, "step")]


def read_outcome(folder: Path) -> dict[str, Any] | None:
    """Read ``outcome.json``; None for a run that has not ended."""
    return read_json(folder / OUTCOME) if (folder / OUTCOME).exists() else None
