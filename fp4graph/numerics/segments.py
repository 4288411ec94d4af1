"""Groups of lines of a tensor that are quantized apart: the tokens of each expert in a product of many experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """Assigns every position along one axis of a tensor to a group; statistics of a group read its positions alone.

    Attributes:
        axis: the axis, counted from the front.
        count: E, the number of groups.
        ids: int64, one number for each position along the axis: its group, or E for a position of none, such as
            padding. None where position e is group e.
    """

    axis: int
    count: int
    ids: Tensor | None = None

    def table(self, x: Tensor, axis: int, step: int, op: Literal["amax", "sum"] = "amax") -> Tensor:
        """Return ``x`` reduced over the positions of each group, with E (+ 1, where there are ``ids``) along ``axis``.

        Args:
            axis: of ``x``, standing for :attr:`axis`, with one number for every ``step`` positions.
        """
        if self.ids is None:
            return x
        index = self._index(x, axis, step)
        shape = [*x.shape[:axis], self.count + 1, *x.shape[axis + 1 :]]
        return x.new_full(shape, -torch.inf if op == "amax" else 0.0).scatter_reduce(axis, index, x, op)

    def spread(self, table: Tensor, x: Tensor, axis: int, step: int) -> Tensor:
        """Return the entries of ``table`` at the positions of their groups, in the shape of ``x``, which it was made
        from."""
        return table if self.ids is None else table.gather(axis, self._index(x, axis, step))

    def at_positions(self, table: Tensor, rank: int) -> Tensor:
        """Return ``table``, one number for each group (and one for none), in a shape that broadcasts to a tensor of
        ``rank`` axes."""
        along = table[: self.count] if self.ids is None else table[self.ids]
        return along.reshape([-1 if axis == self.axis else 1 for axis in range(rank)])

    def _index(self, x: Tensor, axis: int, step: int) -> Tensor:
        assert self.ids is not None
        shape = [-1 if position == axis else 1 for position in range(x.dim())]
        return self.ids[::step].reshape(shape).expand(x.shape)
