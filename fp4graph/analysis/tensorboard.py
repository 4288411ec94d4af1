"""Statistics in TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from fp4graph.errors import Error

_NUMBERS = (int, float)
#: Numbers that say what a record is of.
_KEYS = frozenset({"step", "window"})


def writer(directory: str | PathLike[str]) -> Any:
    """A ``SummaryWriter`` for ``directory``."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise Error("TensorBoard is not installed; pip install 'fp4graph[analysis]'") from None
    return SummaryWriter(str(directory))


def log_to(writer: Any, records: Iterable[Mapping[str, Any]]) -> None:
    """Every number of ``records`` as a scalar ``column/site/tensor``, so that one card shows a column of one kind.

    Raises:
        Error: the events cannot be written.
    """
    try:
        for record in records:
            for column, value in record.items():
                if isinstance(value, _NUMBERS) and column not in _KEYS:
                    writer.add_scalar(f"{column}/{record['site']}/{record['tensor']}", value, record["step"])
    except OSError as error:
        raise Error(
            f"cannot write TensorBoard's events: {error.strerror or error}; make room, or go without them. What was "
            "written before is readable"
        ) from error
