"""Groups of lines of a tensor that are quantized separately: the tokens of each expert in a grouped product."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """Assigns every position along one axis of a tensor to a group; statistics of a group read its positions only.

    Attributes:
        axis: the axis, counted from the front.
        count: E, the number of groups.
        ids: int64, the group of each position along the axis, or E for a position outside all groups, such as padding.
            None if position e is group e.
        unpadded_ids: like ``ids``, but E also for the zeros that pad a group; None if no group is padded.
    """

    axis: int
    count: int
    ids: Tensor | None = None
    unpadded_ids: Tensor | None = None

    @property
    def unpadded(self) -> Segments:
        """The same groups without the zeros that pad them; the zeros are then outside all groups."""
        return self if self.unpadded_ids is None else Segments(self.axis, self.count, self.unpadded_ids)

    def table(self, x: Tensor, axis: int, step: int, op: Literal["amax", "sum"] = "amax") -> Tensor:
        """Return ``x`` reduced along ``axis`` to one entry per group, and one for other positions if there are ``ids``.

        Args:
            axis: the axis of ``x`` that corresponds to :attr:`axis`, with one entry for every ``step`` positions.
        """
        if self.ids is None:
            return x
        index = self._index(x, axis, step)
        shape = [*x.shape[:axis], self.count + 1, *x.shape[axis + 1 :]]
        return x.new_full(shape, -torch.inf if op == "amax" else 0.0).scatter_reduce(axis, index, x, op)

    def spread(self, table: Tensor, x: Tensor, axis: int, step: int) -> Tensor:
        """Return the entries of a :meth:`table` of ``x`` at the positions of their groups, in the shape of ``x``."""
        return table if self.ids is None else table.gather(axis, self._index(x, axis, step))

    def at_positions(self, table: Tensor, rank: int) -> Tensor:
        """Return ``table``, one number for each group (and one for positions outside all groups), in a shape that
        broadcasts to a tensor of ``rank`` axes."""
        along = table[: self.count] if self.ids is None else table[self.ids]
        return along.reshape([-1 if axis == self.axis else 1 for axis in range(rank)])

    def order_statistics(self, x: Tensor, share: Fraction) -> tuple[Tensor, Tensor]:
        """Return the elements at places c and n - 1 - c of the n ascending elements of a group, with c = ⌊share·n⌋, at
        the positions of the group, broadcastable to ``x``; -Inf and Inf at positions outside all groups.

        Args:
            x: without NaN.
        """
        ids = self.unpadded_ids if self.unpadded_ids is not None else self.ids
        ids = torch.arange(self.count, device=x.device) if ids is None else ids
        shape = [-1 if axis == self.axis else 1 for axis in range(x.dim())]
        flat = x.reshape(-1)
        # Sorted by value, then by group: two stable sorts, because only the device knows the sizes of groups.
        by_value = flat.sort(stable=True).indices
        order = by_value[ids.reshape(shape).expand(x.shape).reshape(-1)[by_value].sort(stable=True).indices]
        bound = torch.full((1,), torch.inf, dtype=x.dtype, device=x.device)
        ascending = torch.cat([flat[order], bound])  # so that an empty tensor has an element to read
        lines = ids.new_zeros(self.count + 1).scatter_add(0, ids, torch.ones_like(ids))[: self.count]
        sizes = lines * math.prod(size for axis, size in enumerate(x.shape) if axis != self.axis)
        ends, place = sizes.cumsum(0), sizes * share.numerator // share.denominator
        low = ascending[(ends - sizes + place).clamp(max=ascending.shape[0] - 1)]
        high = ascending[(ends - 1 - place).clamp(min=0)]
        along = (torch.cat([table, outside])[ids].reshape(shape) for table, outside in ((low, -bound), (high, bound)))
        return next(along), next(along)

    def largest(self, score: Tensor, axis: int, step: int, share: Fraction) -> Tensor:
        """Return whether each element of ``score`` is among the ⌈share·n⌉ largest of the n elements of its group.

        Of equal elements, the earlier counts as larger. NaN is larger than any number.

        Args:
            axis: the axis of ``score`` that corresponds to :attr:`axis`, with one entry for every ``step`` positions.
        """
        ids = torch.arange(self.count, device=score.device) if self.ids is None else self.ids[::step]
        groups = ids.reshape([-1 if dim == axis else 1 for dim in range(score.dim())]).expand(score.shape).reshape(-1)
        by_value = score.reshape(-1).sort(descending=True, stable=True).indices
        order = by_value[groups[by_value].sort(stable=True).indices]
        sizes = ids.new_zeros(self.count + 1).scatter_add(0, groups, torch.ones_like(groups))
        group, place = groups[order], torch.arange(groups.shape[0], device=score.device)
        rank = place - (sizes.cumsum(0) - sizes)[group]
        chosen = rank < ((sizes * share.numerator + share.denominator - 1) // share.denominator)[group]
        return torch.empty_like(chosen).scatter(0, order, chosen).reshape(score.shape)

    def _index(self, x: Tensor, axis: int, step: int) -> Tensor:
        assert self.ids is not None
        shape = [-1 if position == axis else 1 for position in range(x.dim())]
        return self.ids[::step].reshape(shape).expand(x.shape)
