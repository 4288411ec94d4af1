"""Files that a kill cannot ruin."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from fp4graph.errors import Error


@contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file, to read and write, that takes the place of ``path`` when the block ends without an error.

    Until then ``path`` is unchanged. A kill leaves a file ``path.tmp`` behind, which the next writer overwrites. Of
    several writers at once each has a temporary file of its own; the last to end prevails.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # renaming would put a file in the place of a device
        raise OSError(errno.EINVAL, "it is not a regular file")
    temporary, file = _temporary(path)
    with file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a power failure could leave the new name on an empty file
            os.replace(temporary, path)  # before the lock goes, so that nobody takes the file for a leftover
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _temporary(path: Path) -> tuple[Path, BinaryIO]:
    """Open an empty file beside ``path`` that no other writer uses: a new one, or one that a dead writer left."""
    for number in itertools.count(1):
        name = path.with_name(f"{path.name}.{number}.tmp" if number > 1 else f"{path.name}.tmp")
        file = os.fdopen(os.open(name, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            _lock(file)
            if os.path.samestat(os.stat(name), os.fstat(file.fileno())):  # else it has just been renamed
                file.truncate()
                return name, file
        except (BlockingIOError, FileNotFoundError):
            pass
        file.close()
    raise AssertionError


def _lock(file: BinaryIO) -> None:
    """Lock ``file`` until it is closed or the process dies, unless its file system knows no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
            raise


def write(path: str | PathLike[str], content: str | bytes) -> None:
    """Write ``content`` to ``path`` whole or not at all.

    Raises:
        Error: it cannot be written; what was there stays.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
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
