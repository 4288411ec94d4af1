"""Notes what a test costs beyond its own process, so that its markers can be checked.

``make check`` leaves out tests with one of these markers:

- ``inductor``: Inductor compiles in it, at about a second a kernel.
- ``process``: it starts another Python process, which imports torch again.
- ``service``: it talks to a database server or a browser.
"""

from __future__ import annotations

import multiprocessing.process
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

COSTS = ("inductor", "process", "service")
_PYTHON = os.path.basename(sys.executable)
_noticed: set[str] = set()


def _of_command(executable: object, words: object) -> str | None:
    """Return the marker of a test that starts this command; None for commands such as a compiler."""
    first = executable or (words[0] if isinstance(words, (list, tuple)) and words else words)
    name = os.path.basename(os.fsdecode(first)) if isinstance(first, (str, bytes, os.PathLike)) else ""
    if name in ("postgres", "initdb", "pg_ctl") or "chrom" in name:
        return "service"
    return "process" if name == _PYTHON or name.startswith("python") or name == "torchrun" else None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        found = _of_command(arguments[0], arguments[1])
        if found:
            _noticed.add(found)


def install() -> None:
    """Begin to note costs. This lasts until the process ends, because an audit hook cannot be removed."""
    sys.addaudithook(_audit)
    start: Callable[..., None] = multiprocessing.process.BaseProcess.start

    def noticed(self: multiprocessing.process.BaseProcess) -> None:
        _noticed.add("process")
        start(self)

    multiprocessing.process.BaseProcess.start = noticed  # type: ignore[method-assign]


@contextmanager
def noticing() -> Iterator[set[str]]:
    """Yield a set; when the block ends, the set holds the markers of what the block did."""
    _noticed.clear()
    before = _inductor()
    found: set[str] = set()
    yield found
    found |= _noticed
    if _inductor() != before:
        found.discard("process")  # Inductor's own workers
        found.add("inductor")


def _inductor() -> tuple[int, ...]:
    """Return how often Inductor looked up a graph in its cache, as it does before each compilation."""
    utilities = sys.modules.get("torch._dynamo.utils")
    if utilities is None:
        return (0, 0, 0)
    counted = utilities.counters["inductor"]
    return tuple(counted.get(f"fxgraph_cache_{how}", 0) for how in ("hit", "miss", "bypass"))
