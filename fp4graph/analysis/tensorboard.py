"""Writes statistics to TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fp4graph.errors import Error

#: Numbers that identify a measurement.
_KEYS = frozenset({"step", "window"})


class Events:
    """TensorBoard's events of a run: by a ``SummaryWriter``, or for a directory by one that is made and closed here."""

    def __init__(self, target: Any) -> None:
        self._writer, self._owns_writer = target, not hasattr(target, "add_scalar")
        if self._owns_writer:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise Error("TensorBoard is not installed; pip install 'fp4graph[analysis]'") from None
            self._writer = SummaryWriter(str(target))

    def add(self, step: int, measurements: Iterable[Mapping[str, Any]]) -> None:
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
            if type(self._writer).__module__.startswith("torch."):
                from tensorboard.compat.proto.summary_pb2 import Summary

                summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
                self._writer.file_writer.add_summary(summary, step)
            else:
                for name, value in values.items():
                    self._writer.add_scalar(name, value, step)
        except OSError as error:
            reason = error.strerror or error
            raise Error(
                f"cannot write TensorBoard's events: {reason}; make room, or go without them. What was written before "
                "is readable"
            ) from error

    def close(self) -> None:
        if self._owns_writer:
            self._writer.close()
