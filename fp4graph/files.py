"""Files that a kill cannot ruin."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from fp4graph.errors import Error


@contextmanager
def replacing(path: str | PathLike[str], writer: str = "") -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when the block ends without an error.

    Until then ``path`` is unchanged. A kill leaves ``path`` with ``writer`` and ``.tmp`` behind, which the same writer
    overwrites the next time. Processes that may write ``path`` at once each give a ``writer`` of their own.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}{writer}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a power failure could leave the new name on an empty file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write(path: str | PathLike[str], content: str | bytes, writer: str = "") -> None:
    """Write ``content`` to ``path`` whole or not at all; ``writer`` is as for :func:`replacing`.

    Raises:
        Error: it cannot be written; what was there stays.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, writer) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        what = f"cannot write {path}: {error.strerror or error}"
        raise Error(f"{what}. What was there stays; make room, or name another place") from error


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        Error: the file is not JSON.
        OSError: the file cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise Error(f"{path} is not JSON; it was damaged, or something else wrote it") from None
