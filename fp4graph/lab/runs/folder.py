"""The folder of a run, which stays readable after a crash or a kill: docs/tasks.md lists its files.

``run.json`` is written first, ``metrics.jsonl`` line by line, ``outcome.json`` once the run has ended. ``run.lock`` is
locked by the process that writes here, until it ends, however it does. A loss that is not finite is null.
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
from os import PathLike
from pathlib import Path
from typing import Any

from fp4graph.errors import Error
from fp4graph.files import read_json, write
from fp4graph.lab import jsonlines
from fp4graph.lab.comparison.record import locked
from fp4graph.lab.data.extras import needs
from fp4graph.lab.runs.run import Outcome, finite
from fp4graph.lab.statistics import storage

RUN, METRICS, OUTCOME, CHECKPOINT, EVENTS = "run.json", "metrics.jsonl", "outcome.json", "checkpoint.pt", "tensorboard"
LOCK = "run.lock"
FORMAT, VERSION = "fp4graph.run", 1
#: Settings that say where a run takes place, not what it computes, or what is compared as its number of steps.
NOT_COMPARED = ("device", "backend", "mode", "workers", "epochs", "tokens", "validations")


class Ended(Error):
    """The run to resume has ended: nothing of it is left to do."""


class RunFolder:
    """Writes the files of one run into the folder ``path``, which no other process uses until :meth:`close`.

    ``streams``, which are those of :class:`fp4graph.lab.Statistics`, get every line of metrics too. By default these are
    TensorBoard's events below ``path``, where TensorBoard is installed.
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
        """Lock the folder and write ``run.json``, or with ``resume`` check that the run there is this one.

        Raises:
            Error: another process writes here, the folder holds a run, or another one, or cannot be written.
        """
        self._lock.enter_context(locked(self.path / LOCK, self._holder))
        ended, metrics = (self.path / OUTCOME).exists(), self.path / METRICS
        if ended or self.checkpoint.exists() or (metrics.exists() and metrics.stat().st_size):  # not run.json alone
            if not resume:
                raise Error(f"{self.path} holds a run already: resume it, or give another folder")
            if changed := _changes(read_run(self.path), finite(content)):
                raise Error(f"{self.path} holds another run: {'; '.join(changed)}")
            if ended:
                raise Ended(f"{self.path} holds this run, and it has ended: {OUTCOME} says with what")
        started = datetime.now(UTC).isoformat(timespec="seconds")
        process = {"pid": os.getpid(), "host": socket.gethostname()}
        self._replace(RUN, {"format": FORMAT, "version": VERSION, "started": started, "process": process, **content})

    def _holder(self) -> str:
        with suppress(Error, KeyError, TypeError):  # where it has just begun
            return "process {pid} on {host}".format(**read_run(self.path)["process"])
        return "another process"

    def keep_until(self, step: int) -> None:
        """Drop the lines after ``step``, and hide TensorBoard's events: a run that goes on there writes them again."""
        self._first_step = step + 1
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        write(self.path / METRICS, b"".join(map(jsonlines.line, kept)))

    def line(self, step: int, **values: float) -> None:
        """Add a line to ``metrics.jsonl``, and hand its values to the streams."""
        with self._writing(METRICS):
            jsonlines.append(self.path / METRICS, [finite({"step": step, **values})])
        # MLflow's files cannot have gradient_norm beside the gradient_norm/SITE of statistics.
        names = {"gradient_norm": "gradient_norm/all"}
        self.stream(step, {names.get(name, name): value for name, value in values.items()})

    def stream(self, step: int, values: Mapping[str, float]) -> None:
        """Hand values to the streams, which are opened at the first call."""
        with self._writing(EVENTS):
            if self._sinks is None:
                self._sinks = [storage.sink_of(self._opened(each)) for each in self._streams]
            for sink in self._sinks:
                sink(step, values)

    def _opened(self, stream: Any) -> Any:
        if not isinstance(stream, str | PathLike):
            return stream
        needs("tensorboard", "events are written by TensorBoard", "analysis")
        from torch.utils.tensorboard import SummaryWriter

        return self._open.enter_context(SummaryWriter(str(stream), purge_step=self._first_step))

    def end(self, outcome: Outcome) -> None:
        """Write ``outcome.json``."""
        self._replace(OUTCOME, outcome.to_json())

    def close(self) -> None:
        """Flush TensorBoard's events, and let others write."""
        self._open.close()
        self._sinks = None
        self._lock.close()

    def _replace(self, name: str, content: Mapping[str, Any]) -> None:
        write(self.path / name, json.dumps(finite(content), indent=1, ensure_ascii=False) + "\n")

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Turn the system's errors into ours while ``name`` is written."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "make room and resume the run" if full else "see that the folder is one and can be written"
            what = f"cannot write {self.path / name}: {error.strerror or error}"
            raise Error(f"{what}. What was written before is readable; {remedy}") from error


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences of two runs in what they compute, from the contents of ``run.json``."""
    was, is_ = ({**run["settings"], "steps": run.get("steps")} for run in (before, now))
    names = [name for name in is_ if name not in NOT_COMPARED and was.get(name) != is_[name]]
    changed = [f"{name} was {was.get(name)!r}, is {is_[name]!r}" for name in names]
    return changed + (["the policy is another one"] if before["policy"] != now["policy"] else [])


def read_run(folder: Path) -> dict[str, Any]:
    """Read ``run.json``; raise an Error if it is missing, unreadable, or of another version."""
    file = folder / RUN
    try:
        content = read_json(file)
    except OSError as error:
        raise Error(f"{folder} holds no run: {RUN} cannot be read ({error.strerror})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Error(f"{file} is not the record of a run")
    if content.get("version") != VERSION:
        raise Error(f"{file} is of version {content.get('version')}; this fp4graph reads version {VERSION}")
    return content


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of ``metrics.jsonl``, without one that a kill cut off."""
    file = folder / METRICS
    return [line for _, line in jsonlines.read(file)] if file.exists() else []


def read_outcome(folder: Path) -> dict[str, Any] | None:
    """Read ``outcome.json``; None for a run that has not ended."""
    return read_json(folder / OUTCOME) if (folder / OUTCOME).exists() else None
