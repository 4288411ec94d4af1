"""The folder of a run, which stays readable after a crash or a kill.

====================  ==========================================================================================
``run.json``          the run as asked for and as resolved, the policy as YAML, versions, the process; written first
``run.lock``          locked by the process that writes here, until it ends, however it does
``metrics.jsonl``     one JSON object per line, flushed: ``step`` with ``train_loss``, ``lr``, ``seconds``, and after
                      a validation ``step`` with ``train_loss``, ``validation_loss`` and the task's metrics
``checkpoint.pt``     the state after the last validation (:mod:`fp4graph.training.checkpoint`)
``outcome.json``      the outcome, once the run has ended
``tensorboard/``      the same curves as TensorBoard events, where tensorboard is installed
====================  ==========================================================================================

A loss that is not finite is null. Other files in the folder are left alone.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from fp4graph.lab import jsonlines
from fp4graph.errors import Error
from fp4graph.lab.runs.run import Outcome, finite
from fp4graph.files import read_json, replacing

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

RUN, METRICS, OUTCOME, CHECKPOINT, EVENTS = "run.json", "metrics.jsonl", "outcome.json", "checkpoint.pt", "tensorboard"
LOCK = "run.lock"
FORMAT, VERSION = "fp4graph.run", 1


class Ended(Error):
    """The run to resume has ended: nothing of it is left to do."""


class RunFolder:
    """Writes the files of one run into the folder ``path``, which no other process uses from :meth:`begin` to
    :meth:`close`."""

    def __init__(self, path: Path) -> None:
        self.path, self.checkpoint = path, path / CHECKPOINT
        self._events: SummaryWriter | None = None
        self._first_step: int | None = None
        self._lock = FileLock(path / LOCK)

    def begin(self, content: Mapping[str, Any], *, resume: bool) -> None:
        """Write ``run.json``, or with ``resume`` check that the run there is this one.

        Raises:
            Error: another process writes here, or the folder holds a run, or another one than this, or cannot be
                written.
        """
        with self._writing(LOCK):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                raise Error(
                    f"{self.path} is in use by {_holder(self.path)}; let it end, or give another folder"
                ) from None
        metrics = self.path / METRICS  # a folder with run.json alone can be used again
        if self.checkpoint.exists() or (self.path / OUTCOME).exists() or (metrics.exists() and metrics.stat().st_size):
            if not resume:
                raise Error(f"{self.path} holds a run already: resume it, or give another folder")
            before = read_run(self.path)
            changed = [  # without what says where it runs, not what it computes
                f"{name} was {before['settings'].get(name)!r}, is {value!r}"
                for name, value in finite(content["settings"]).items()
                if name not in ("device", "backend", "mode", "workers") and before["settings"].get(name) != value
            ]
            if before["policy"] != content["policy"]:
                changed.append("the policy is another one")
            if changed:
                raise Error(f"{self.path} holds another run: {'; '.join(changed)}")
            if (self.path / OUTCOME).exists():
                raise Ended(f"{self.path} holds this run, and it has ended: {OUTCOME} says with what")
        started = datetime.now(UTC).isoformat(timespec="seconds")
        process = {"pid": os.getpid(), "host": socket.gethostname()}
        self._replace(RUN, {"format": FORMAT, "version": VERSION, "started": started, "process": process, **content})

    def keep_until(self, step: int) -> None:
        """Drop the lines after ``step``, and hide TensorBoard's events: a run that goes on there writes them again."""
        self._first_step = step + 1
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        with self._writing(METRICS), replacing(self.path / METRICS) as file:
            file.writelines(map(jsonlines.line, kept))

    def line(self, step: int, **values: float) -> None:
        """Add a line to ``metrics.jsonl``, and its values to TensorBoard's events."""
        with self._writing(METRICS):
            jsonlines.append(self.path / METRICS, [finite({"step": step, **values})])
        if self.events is not None:
            with self._writing(EVENTS):
                for name, value in values.items():
                    self.events.add_scalar(name, value, step)

    def end(self, outcome: Outcome) -> None:
        """Write ``outcome.json``."""
        self._replace(OUTCOME, outcome.to_json())

    def close(self) -> None:
        """Flush TensorBoard's events, and let others write."""
        if self._events is not None:
            self._events.close()
        self._lock.release()

    @property
    def events(self) -> SummaryWriter | None:
        """The writer of TensorBoard's events, opened at its first use; None where TensorBoard is not installed."""
        if self._events is None and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            with self._writing(EVENTS):
                self._events = SummaryWriter(str(self.path / EVENTS), purge_step=self._first_step)
        return self._events

    def _replace(self, name: str, content: Mapping[str, Any]) -> None:
        with self._writing(name), replacing(self.path / name) as file:
            file.write(json.dumps(finite(content), indent=1, ensure_ascii=False).encode() + b"\n")

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


def _holder(folder: Path) -> str:
    """Name the process that writes in ``folder``."""
    try:
        process = read_run(folder)["process"]
        return f"process {process['pid']} on {process['host']}"
    except (Error, KeyError, TypeError):  # it has just begun
        return "another process"


def read_run(folder: Path) -> dict[str, Any]:
    """Read ``run.json``.

    Raises:
        Error: it is missing, unreadable, or of another version.
    """
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
