"""Writes and reads files of ``torch.save`` with a digest, so that a flipped bit is found before the file is loaded.

The file stays a zip archive that ``torch.load`` reads. The archive's comment, the end of the file, is a mark and the
SHA-256 of all bytes before the digest, the mark included. torch does not check the archive's own checksums.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import warnings
from os import PathLike
from typing import Any, BinaryIO

import torch

from fp4graph.errors import Error

MARK = b"fp4graph sha256 "
_DIGITS = 2 * hashlib.sha256().digest_size


def save(content: Any, file: BinaryIO) -> None:
    """Write ``content`` and its digest to ``file``, which is empty and open to read and write."""
    torch.save(content, file)
    file.seek(-2, os.SEEK_END)  # the length of the archive's comment
    file.write((len(MARK) + _DIGITS).to_bytes(2, "little") + MARK)
    digest = _digest(file, file.tell())
    file.seek(0, os.SEEK_END)
    file.write(digest.encode())


def _digest(file: BinaryIO, size: int) -> str:
    """Return the digest of the first ``size`` bytes."""
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(min(size, 1 << 20)):
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest()


def read(path: str | PathLike[str]) -> tuple[Any, bool]:
    """Return the tensors and plain data in a file of ``torch.save``, and whether the file has a digest.

    Nothing in the file is executed.

    Raises:
        Error: the file cannot be read, was not written by torch.save, or does not match its digest.
    """
    try:
        with open(path, "rb") as file:  # opened once, because another file may take its name meanwhile
            digested = _check(path, file)
            file.seek(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's guesses at what else the file may be
                return torch.load(file, map_location="cpu", weights_only=True), digested
    except Error:
        raise
    except OSError as error:
        raise Error(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # damaged bytes raise anything
        raise Error(
            f"{path} cannot be read as tensors and plain data: it is truncated, damaged, or not written by "
            f"torch.save ({_cause(error)})"
        ) from error


def require_readable(value: Any, where: str) -> None:
    """Raise an Error, which names ``where``, if :func:`read` could not read ``value`` back."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the user's class may raise anything
        raise Error(
            f"{where}, of type {type(value).__name__}, could not be read back without running code ({_cause(error)}); "
            "save its plain value (of a tensor x: x.as_subclass(torch.Tensor)), or leave it out"
        ) from error


def _cause(error: Exception) -> str:
    cause = re.search(r"WeightsUnpickler error: (.*)", str(error))  # torch first advises to run the file's code
    return f"{type(error).__name__}: {cause[1] if cause else ''.join(str(error).strip().splitlines()[:1])[:300]}"


def _check(path: str | PathLike[str], file: BinaryIO) -> bool:
    """Return whether ``file`` has a digest; raise an Error if the file does not match it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _DIGITS - len(MARK)))
    mark, stored = file.read(len(MARK)), file.read()
    if mark != MARK:
        return False
    digest = _digest(file, size - _DIGITS)
    if digest.encode() != stored:
        raise Error(
            f"{path} is damaged: its bytes differ from those written (its SHA-256 is {digest[:12]}..., not "
            f"{ascii(stored[:12])[2:-1]}...). Use a copy or an earlier file, and check the disk"
        )
    return True
