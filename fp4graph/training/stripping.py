"""Strips fp4graph's entries from files of weights."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch

from fp4graph.errors import Error, needs
from fp4graph.files import replacing
from fp4graph.model.state import is_ours
from fp4graph.training import sealed


def strip_file(source: str | Path, target: str | Path) -> int:
    """Write a file of weights without the state of techniques, so that it loads into the plain model.

    Both files are .safetensors, or both are of ``torch.save``. Everything else in the file stays: nested state dicts,
    optimizer, epoch, metadata. Return the number of removed entries.

    Raises:
        Error: the files are of different kinds; ``source`` holds no weights; ``target`` cannot be written.
    """
    source, target = Path(source), Path(target)
    if (source.suffix == ".safetensors") != (target.suffix == ".safetensors"):
        raise Error("source and target must be of the same kind: both .safetensors, or both of torch.save")
    if not source.is_file():
        raise Error(f"file {str(source)!r} does not exist; give a file of weights")
    try:
        return (_strip_safetensors if source.suffix == ".safetensors" else _strip_pickled)(source, target)
    except OSError as error:
        raise Error(f"cannot write {target}: {error.strerror or error}; make room, or give another place") from error


def _strip_safetensors(source: Path, target: Path) -> int:
    needs("safetensors", "such files are read with safetensors", "export")
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save

    try:
        with safe_open(source, "pt") as file:
            keys = list(file.keys())
            kept = {key: file.get_tensor(key) for key in keys if not is_ours(key)}
            content = save(kept, file.metadata())
    except SafetensorError as error:
        raise Error(f"{source} is not a safetensors file ({error})") from error
    with replacing(target) as out:
        out.write(content)
    return len(keys) - len(kept)


def _strip_pickled(source: Path, target: Path) -> int:
    with torch.serialization.safe_globals([argparse.Namespace]):  # the arguments of timm's and DeiT's scripts
        content, digested = sealed.read(source)
    if not isinstance(content, Mapping):
        raise Error(f"{source} holds no weights by name, but one {type(content).__name__}; there is nothing to strip")
    try:
        if not _holds_tensors(content):
            raise Error(f"{source} holds no tensor by name; there is nothing to strip")
        plain, removed = _without_ours(content)
    except RecursionError:
        raise Error(f"{source} is nested too deeply, or holds itself; it is not a file of weights") from None
    with replacing(target) as out:
        (sealed.save if digested else torch.save)(plain, out)
    return removed


def _holds_tensors(value: Any) -> bool:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, torch.Tensor) or any(map(_holds_tensors, parts))


def _without_ours(value: Any) -> tuple[Any, int]:
    """Return ``value`` with every mapping in it stripped, and the number of entries removed."""
    if type(value) in (list, tuple):
        parts = [_without_ours(item) for item in value]
        return type(value)(part for part, _ in parts), sum(number for _, number in parts)
    if not isinstance(value, MutableMapping):
        return value, 0
    plain, removed = copy.copy(value), 0  # a state dict has attributes too
    for key, item in value.items():
        if is_ours(str(key)):
            del plain[key]
            removed += 1
        else:
            plain[key], number = _without_ours(item)
            removed += number
    return plain, removed
