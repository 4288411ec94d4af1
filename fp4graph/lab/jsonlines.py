"""Files of JSON lines that stay readable whatever stops the process: a torn last line is skipped, and cut off later."""

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


def append(file: Path, several: Iterable[Mapping[str, Any]]) -> None:
    """Append all lines, or none if an OSError is raised, as on a full disk; the former lines are as they were."""
    unwritten = memoryview(b"".join(map(line, several)))
    with file.open("ab", buffering=0) as out:  # a buffer would be written once more when it is closed
        end = out.seek(0, os.SEEK_END)
        try:
            while unwritten:
                unwritten = unwritten[out.write(unwritten) :]
        except OSError:
            with contextlib.suppress(OSError):
                out.truncate(end)
            raise


def cut_torn_line(file: Path) -> None:
    """Remove a torn line that a kill left behind the last whole line."""
    if file.exists():
        whole, newline, _ = file.read_bytes().rpartition(b"\n")
        os.truncate(file, len(whole + newline))


def read(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the content of every whole line, if there is a file; raise an Error for one not in JSON."""
    with file.open("rb") if file.exists() else contextlib.nullcontext(()) as lines:
        for number, text in enumerate(lines, 1):
            if text.endswith(b"\n"):
                try:
                    content = json.loads(text)
                except ValueError:
                    remedy = "it was damaged, or something else wrote it; delete this line to read the rest"
                    raise Error(f"{file}:{number} is not JSON; {remedy}") from None
                yield number, content
