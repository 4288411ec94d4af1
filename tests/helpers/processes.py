"""Starts processes for tests, waits for their end, however busy the machine is, and reports what failed ones said."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Seconds after which a process counts as hanging. A working process ends long before, even if other processes keep
#: every core busy; a broken one takes so long to fail.
PATIENCE = 1800.0
#: Seconds that a rank waits for the other in a collective, and that it may go on once the other has failed.
PARTNER = 300.0
ROOT = Path(__file__).parents[2]
#: Variables by which a process finds the package ``tests`` from any folder.
IMPORTS = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
_SHOWN = 6000  # the most characters of a process's output in an error


def write_whole(file: Path, text: str) -> None:
    """Write ``file`` whole or not at all: if the process is killed meanwhile, the former file stays."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as temporary:
        temporary.write(text)
    os.replace(temporary.name, file)


def run(command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run ``command`` to its end and return what it printed.

    Args:
        env: added to this process's variables.

    Raises:
        AssertionError: it failed, or did not end within :data:`PATIENCE`; with what it said.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            env={**os.environ, **IMPORTS, **(env or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired as error:
        said = _tail((error.stderr or b"").decode(errors="replace"))
        raise AssertionError(f"no end within {PATIENCE:g} s of {words}:\n{said}") from error
    assert done.returncode == 0, f"{words}: {ending(done.returncode)}\n{done.stdout[-2000:]}\n{_tail(done.stderr)}"
    return done.stdout


def run_ranks(command: Sequence[str | Path], folder: Path, ranks: int = 2) -> list[str]:
    """Run ``command`` on every rank of a group, each with RANK and WORLD_SIZE set, and wait for all of them.

    Ranks meet in a file (:func:`rendezvous`), which needs no port. Once one has failed the others get
    :data:`PARTNER` seconds to end by themselves.

    Args:
        folder: where that file and the output of each rank are written.

    Returns:
        How each rank failed, with its output; "" for a rank that did not fail.
    """
    running, logs = [], [folder / f"rank{rank}.log" for rank in range(ranks)]
    for rank, log in enumerate(logs):
        place = {
            **IMPORTS,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": "1",
        }
        with log.open("wb") as said:
            words = [str(word) for word in command]
            running.append(subprocess.Popen(words, env={**os.environ, **place}, stdout=said, stderr=subprocess.STDOUT))
    deadline, stopped = time.monotonic() + PATIENCE, set()
    while any(process.poll() is None for process in running):
        if any(process.poll() for process in running):
            deadline = min(deadline, time.monotonic() + PARTNER)
        if time.monotonic() > deadline:
            stopped = {rank for rank, process in enumerate(running) if process.poll() is None}
            for rank in stopped:
                running[rank].kill()
        time.sleep(0.05)
    failures = []
    for rank, (process, log) in enumerate(zip(running, logs, strict=True)):
        how = "did not end and was killed" if rank in stopped else ending(process.wait())
        printed = _tail(log.read_text(errors="replace"))
        failures.append(f"rank {rank} {how}; it said:\n{printed}" if process.returncode else "")
    return failures


def rendezvous(folder: Path) -> dict[str, object]:
    """Return the arguments of ``init_process_group`` in a process of :func:`run_ranks`."""
    return {
        "init_method": (folder / "rendezvous").absolute().as_uri(),
        "rank": int(os.environ["RANK"]),
        "world_size": int(os.environ["WORLD_SIZE"]),
    }


def ending(code: int) -> str:
    """Return in words how a process ended."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _tail(said: str) -> str:
    return said[-_SHOWN:].strip() or "nothing"


def python(*arguments: str | Path) -> list[str | Path]:
    """Return the command that runs this Python with ``arguments``."""
    return [sys.executable, *arguments]
