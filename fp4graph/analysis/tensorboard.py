"""Writes statistics to TensorBoard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from fp4graph.errors import Error

_NUMBERS = (int, float)
#: Numbers that identify a measurement.
_KEYS = frozenset({"step", "window"})


def writer(directory: str | PathLike[str]) -> Any:
    """Return a ``SummaryWriter`` for ``directory``."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise Error("TensorBoard is not installed; pip install 'fp4graph[analysis]'") from None
    return SummaryWriter(str(directory))


def log_to(writer: Any, measurements: Iterable[Mapping[str, Any]]) -> None:
    """Write every number of ``measurements`` as a scalar ``column/site/tensor``, so that one card shows one column.

    Raises:
        Error: the events cannot be written.
    """
    by_step: dict[int, dict[str, float]] = defaultdict(dict)
    for measured in measurements:
        for column, value in measured.items():
            if isinstance(value, _NUMBERS) and column not in _KEYS:
                by_step[measured["step"]][f"{column}/{measured['site']}/{measured['tensor']}"] = value
    try:
        for step, values in by_step.items():
            _add(writer, values, step)
    except OSError as error:
        raise Error(
            f"cannot write TensorBoard's events: {error.strerror or error}; make room, or go without them. What was "
            "written before is readable"
        ) from error


def _add(writer: Any, values: Mapping[str, float], step: int) -> None:
    """Write one event for all values if the writer is torch's: one for each value takes fifty times as long."""
    files = writer.file_writer if type(writer).__module__.startswith("torch.") else None
    if files is None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        return
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
    files.add_summary(summary, step)
