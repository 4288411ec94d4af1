"""The folder of a comparison, which stays readable after a kill at any instant.

``runs.jsonl`` gets a header whenever a comparison begins or resumes, a line at the end of each run, and a line for each
timing. ``POLICY-SEED/`` is the folder of a run: ``log.jsonl`` with its losses, ``statistics/``, and files of the
training. ``comparison.lock`` is locked while a process writes here.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import platform
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from fp4graph.errors import Error
from fp4graph.lab import jsonlines
from fp4graph.lab.runs.run import finite
from fp4graph.policy import Policy

RUNS, LOCK = "runs.jsonl", "comparison.lock"
LOG = "log.jsonl"  # the losses, in a run's folder
_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")  # in capitals on Windows
_UNSAFE = frozenset('/\\:<>"|?*\n')  # in names of files, on one system or another
FORMAT, VERSION = "fp4graph.comparison", 1
Line = Mapping[str, Any]
#: Keys that tell lines of a run and of a timing from those of other programs.
_TIMING = {"kind", "policy"}
_RUN = {*_TIMING, "seed", "state", "fingerprint"}


def name_of(train: Callable[..., Any]) -> str:
    """Return ``module:name`` of a user's function, or ``str(train)`` of another callable.

    The addresses of objects are left out, because they differ between processes.
    """
    if isinstance(train, functools.partial):
        return _ADDRESS.sub("", f"{name_of(train.func)} with {train.args}, {train.keywords}")
    name = getattr(train, "__qualname__", None)
    return _ADDRESS.sub("", str(train)) if name is None else f"{train.__module__}:{name}"


def title_of(train: Callable[..., Any]) -> str:
    """Return the name of a training for pages: that of the function, or of the class of an object.

    An object that writes its settings, as a dataclass does, is named with them if they may stand in a file's name.
    """
    train = train.func if isinstance(train, functools.partial) else train
    text = str(train)
    if not hasattr(train, "__qualname__") and (text == object.__repr__(train) or _UNSAFE & set(text)):
        return type(train).__name__
    return name_of(train).rpartition(":")[2]


def folder_of(train: Callable[..., Any]) -> str:
    """Return the name of the default folder, another one for each setting that the name of the training shows."""
    title, name = title_of(train), name_of(train)
    shown = not isinstance(train, functools.partial) and (name.endswith(title) or str(train) == object.__repr__(train))
    return f"compare-{title}" if shown else f"compare-{title}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def source_of(train: Callable[..., Any]) -> str | None:
    """Return a digest of a function's source, or of an object's settings; None if neither is available."""
    func = getattr(train, "func", train)
    try:
        if is_dataclass(train):
            source = repr(train)
        elif hasattr(func, "__qualname__"):
            source = inspect.getsource(func)
        else:
            source = _ADDRESS.sub("", repr(vars(func)))
    except (OSError, TypeError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:16]


@contextmanager
def locked(file: Path, user: Callable[[], str]) -> Iterator[None]:
    """Lock a file until the context ends; make its folder if necessary.

    Raises:
        Error: another process, which ``user`` names, has locked the file, or the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(file).acquire(timeout=0)
    except Timeout:
        raise Error(f"{file.parent} is in use by {user()}; wait until it ends, or give another folder") from None
    except OSError as error:
        raise Error(f"cannot write {file.parent}: {error.strerror or error}; give another folder") from error
    with lock:
        yield


class Record:
    """The lines of ``runs.jsonl``: the last run of each policy and seed, and the last timing of each policy."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._file = folder, folder / RUNS
        self.runs: dict[tuple[str, int], Line] = {}
        self.timings: dict[str, Line] = {}
        self.header: Line = {}
        for number, line in jsonlines.read(self._file):
            if line.get("format") == FORMAT and line.get("version") == VERSION:
                self.header = line
            elif not self.header or not (_RUN if line.get("kind") == "run" else _TIMING) <= line.keys():
                raise Error(f"{self._file}:{number} is not a line of a comparison; give another folder")
            else:
                self._take(line)

    def finished(self, policy: Policy, seed: int) -> bool:
        """Return whether a run has finished or diverged; a failed run counts as unfinished."""
        return self.runs.get((policy.name, seed), {}).get("state") in ("finished", "diverged")

    def add(self, line: Line) -> None:
        """Write a run or a timing; raise an Error, and keep the earlier lines, if the disk is full."""
        try:
            jsonlines.append(self._file, [finite(line)])
        except OSError as error:
            raise Error(
                f"cannot write {self._file}: {error.strerror or error}. The file holds the finished runs; make room, "
                "and call compare again to continue"
            ) from error
        self._take(finite(line))

    def _take(self, line: Line) -> None:
        if line["kind"] == "run":
            self.runs[line["policy"], line["seed"]] = line
        else:
            self.timings[line["policy"]] = line

    def require_same(self, train: str, source: str | None, policies: Sequence[Policy]) -> None:
        """Raise an Error if the recorded runs are of another training, or of policies that were edited since."""
        recorded = {line["policy"]: line["fingerprint"] for line in self.runs.values()}
        changed = [p.name for p in policies if recorded.get(p.name, p.fingerprint) != p.fingerprint]
        if all(line["state"] == "failed" for line in self.runs.values()):
            return  # failed runs are repeated, and the training may have been corrected
        if self.header["train"] != train:
            why = f"a comparison of {self.header['train']}, not of {train}"
        elif self.header["source"] != source:
            why = f"finished runs of {train} from before its source or its settings were changed"
        elif changed:
            why = f"runs of policy {changed[0]!r} from before the policy was edited"
        else:
            return
        raise Error(f"{self.folder} holds {why}; give another folder, or delete this one")


@contextmanager
def recording(folder: Path, train: Callable[..., Any], policies: Sequence[Policy]) -> Iterator[Record]:
    """Yield the record in ``folder``, locked against other processes until the context ends.

    An error before the first run leaves no new folder behind.

    Raises:
        Error: another process writes there, the folder cannot be written, or it holds another comparison: of another
            training, or of a training or a policy that was edited since.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    with locked(folder / LOCK, lambda: str(Record(folder).header.get("process", "another process"))):
        jsonlines.cut_torn_line(folder / RUNS)
        record = Record(folder)
        name, source = name_of(train), source_of(train)
        record.require_same(name, source, policies)
        header = {
            "format": FORMAT, "version": VERSION, "train": name, "source": source,
            "process": f"process {os.getpid()} on {socket.gethostname()}",
            "versions": {name: version(name) for name in ("fp4graph", "torch")} | {"python": platform.python_version()},
            "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
        }  # fmt: skip
        try:
            jsonlines.append(folder / RUNS, [header])
            yield record
        except BaseException:
            if not record.runs:
                _remove(made, folder)
            raise


def _remove(made: Sequence[Path], folder: Path) -> None:
    """Remove ``folder`` and the parents that were ``made`` for it, if nothing but the record is in the folder."""
    with suppress(OSError):  # the caller has an error to raise
        if made and {path.name for path in folder.iterdir()} <= {LOCK, RUNS}:
            shutil.rmtree(folder)
            for place in made[1:]:
                place.rmdir()
