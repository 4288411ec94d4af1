"""Files of JSON lines that stay readable after a kill: a torn last line is skipped, and cut off later."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fp4graph.errors import Error


def line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def append(file: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Append all lines, or no line if an OSError (a full disk) is raised."""
    unwritten = memoryview(b"".join(map(line, entries)))
    with file.open("ab", buffering=0) as out:  # closing would write a buffer again
        end = out.seek(0, os.SEEK_END)
        try:
            while unwritten:
                unwritten = unwritten[out.write(unwritten) :]
        except OSError:
            with contextlib.suppress(OSError):
                out.truncate(end)
            raise


def cut_torn_line(file: Path) -> None:
    """Remove a torn line that a kill left after the last complete line."""
    if file.exists():
        complete, newline, _ = file.read_bytes().rpartition(b"\n")
        os.truncate(file, len(complete + newline))


def read(file: Path, *keys: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the content of every complete line, if the file exists.

    Raises:
        Error: a line is not JSON, or not an object with ``keys``.
    """
    with file.open("rb") if file.exists() else contextlib.nullcontext(()) as lines:
        for number, text in enumerate(lines, 1):
            if text.endswith(b"\n"):
                remedy = "it was damaged, or something else wrote it; delete this line to read the others"
                try:
                    content = json.loads(text)
                except ValueError:
                    raise Error(f"{file}:{number} is not JSON; {remedy}") from None
                if not isinstance(content, dict) or (missing := [key for key in keys if key not in content]):
                    what = f"has no {missing[0]!r}" if isinstance(content, dict) else "is not an object"
                    raise Error(f"{file}:{number} {what}; {remedy}")
                yield number, content
