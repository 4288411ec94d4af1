"""Reads the files of a checkpoint: its configuration, and its tensors by name."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from fp4graph.errors import Error
from fp4graph.files import read_json

_WEIGHTS, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


class Checkpoint:
    """A folder with ``config.json`` and ``model.safetensors``, or with shards and ``model.safetensors.index.json``.

    Opening reads only headers. Leaving the context closes the files.

    Attributes:
        folder: the folder of the checkpoint.
        config: the content of ``config.json``.

    Raises:
        Error: a file is missing, damaged or truncated, or a shard lacks a tensor of the index; the message names the
            file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise Error(f"{folder} is not a folder; give the folder of a checkpoint, with {_CONFIG} and {_WEIGHTS}")
        self.config = self._object(folder / _CONFIG)
        self._files: dict[str, Path] = {}
        self._opened: dict[Path, Any] = {}
        with ExitStack() as stack:
            if (folder / _INDEX).exists():
                self._open_shards(self._object(folder / _INDEX), stack)
            else:
                self._files = dict.fromkeys(self._open(folder / _WEIGHTS, stack), folder / _WEIGHTS)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @staticmethod
    def _object(file: Path) -> dict[str, Any]:
        """Return the object in a JSON file."""
        try:
            content = read_json(file)
        except OSError as error:
            raise Error(f"cannot read {file}: {error.strerror or error}; give the folder of a checkpoint") from error
        if not isinstance(content, dict):
            raise Error(f"{file} is not a JSON object; it was damaged, or something else wrote it")
        return content

    def _open_shards(self, index: dict[str, Any], stack: ExitStack) -> None:
        place, shards = self.folder / _INDEX, index.get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
            raise Error(
                f"{place} has no weight_map from tensors to file names; it was damaged, or something else wrote it"
            )
        held = {name: set(self._open(self.folder / name, stack)) for name in sorted(set(shards.values()))}
        for key, name in shards.items():
            if key not in held[name]:
                where = self.folder / name
                raise Error(f"{where} lacks {key!r}, although {place} lists it there; fetch both files again")
            self._files[key] = self.folder / name

    def _open(self, file: Path, stack: ExitStack) -> list[str]:
        """Open a file of tensors and return its keys."""
        from safetensors import SafetensorError, safe_open

        if not file.is_file():
            raise Error(f"{file} is missing; the checkpoint in {self.folder} is incomplete, fetch or copy it again")
        try:
            content: Any = stack.enter_context(safe_open(str(file), "pt"))
        except (SafetensorError, OSError) as error:
            raise Error(f"{file} is damaged or cut off ({error}); fetch or copy it again") from error
        self._opened[file] = content
        return list(content.keys())

    @property
    def keys(self) -> list[str]:
        """The names of all tensors."""
        return list(self._files)

    def file(self, key: str) -> Path:
        """Return the file that holds tensor ``key``."""
        return self._files[key]

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of tensor ``key``; the tensor is not read."""
        return tuple(self._opened[self._files[key]].get_slice(key).get_shape())

    def dtype(self, key: str) -> str:
        """Return the file's name of the dtype of tensor ``key``, such as ``F8_E4M3``; the tensor is not read."""
        return str(self._opened[self._files[key]].get_slice(key).get_dtype())

    def tensor(self, key: str) -> Tensor:
        """Return tensor ``key``."""
        tensor: Tensor = self._opened[self._files[key]].get_tensor(key)
        return tensor

    def error(self, key: str, what: str) -> Error:
        """Return the error ``FILE: KEY what`` about tensor ``key``."""
        return Error(f"{self.file(key)}: {key!r} {what}")

    def mapping(self, file: str, name: str, value: object) -> dict[str, Any]:
        """Return ``value``, the entry ``name`` of the configuration ``file``; return an empty mapping for None.

        Raises:
            Error: ``value`` is not an object.
        """
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.settings(file, f"{name} must be an object; got {value!r}; the file was damaged")
        return value

    def settings(self, file: str, what: str) -> Error:
        """Return an error about a configuration of the checkpoint."""
        return Error(f"{self.folder / file}: {what}")
