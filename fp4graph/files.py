"""Writes files so that a killed process leaves the complete old content or the complete new one."""

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
    """Open a temporary file, for reading and writing, that replaces ``path`` when the block ends without an error.

    Until then ``path`` is unchanged. A killed process leaves ``path.tmp`` behind, which the next writer overwrites.
    Concurrent writers use different temporary files; the last to finish determines ``path``. If ``path`` is a symbolic
    link, all of this holds for the file that it points to, and the link stays.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():  # renaming would put a file in the place of a device
        raise OSError(errno.EINVAL, "not a regular file")
    temporary, file = _temporary(path)
    with file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())  # otherwise a power failure could leave an empty file under the new name
            os.replace(temporary, path)  # before the lock is released: no other writer takes the file for a leftover
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _temporary(path: Path) -> tuple[Path, BinaryIO]:
    """Open and lock an empty file beside ``path``: a new one, or the leftover of a dead writer."""
    for number in itertools.count(1):
        name = path.with_name(f"{path.name}.{number}.tmp" if number > 1 else f"{path.name}.tmp")
        file = os.fdopen(os.open(name, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            _lock(file)
            if os.path.samestat(os.stat(name), os.fstat(file.fileno())):  # otherwise another writer just renamed it
                file.truncate()
                return name, file
        except (BlockingIOError, FileNotFoundError):
            pass
        file.close()
    raise AssertionError


def _lock(file: BinaryIO) -> None:
    """Lock ``file`` until it is closed or the process dies; do nothing if its file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
            raise


def write(path: str | PathLike[str], content: str | bytes) -> None:
    """Write all of ``content`` to ``path``, or leave ``path`` unchanged.

    Raises:
        Error: the file cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        problem = f"cannot write {path}: {error.strerror or error}"
        raise Error(f"{problem}. Its old content is unchanged; free disk space or choose another path") from error


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        Error: the file is not JSON.
        OSError: the file cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise Error(f"{path} is not JSON: it is damaged, or another program wrote it; restore it from a copy") from None
