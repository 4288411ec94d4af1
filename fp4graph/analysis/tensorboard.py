"""Writes statistics to TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from fp4graph.errors import Error

#: Numbers that identify a measurement.
_KEYS = frozenset({"step", "window"})


def writer(directory: str | PathLike[str]) -> Any:
    """Return a ``SummaryWriter`` for ``directory``."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise Error("TensorBoard is not installed; pip install 'fp4graph[analysis]'") from None
    return SummaryWriter(str(directory))


def log_to(writer: Any, step: int, measurements: Iterable[Mapping[str, Any]]) -> None:
    """Write every number of ``measurements`` as a scalar ``column/site/tensor``, so that one card shows one column.

    Torch's writer gets one event for all numbers: one for each takes fifty times as long.

    Raises:
        Error: the events cannot be written.
    """
    values = {
        f"{column}/{measured['site']}/{measured['tensor']}": value
        for measured in measurements
        for column, value in measured.items()
        if isinstance(value, int | float) and column not in _KEYS
    }
    try:
        if type(writer).__module__.startswith("torch."):
            from tensorboard.compat.proto.summary_pb2 import Summary

            summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
            writer.file_writer.add_summary(summary, step)
        else:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
    except OSError as error:
        raise Error(
            f"cannot write TensorBoard's events: {error.strerror or error}; make room, or go without them. What was "
            "written before is readable"
        ) from error
