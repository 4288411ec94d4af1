"""Views a tensor as blocks, without transposing it, and without a copy unless an axis needs padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from fp4graph.numerics import symbolic
from fp4graph.numerics.segments import Segments
from fp4graph.numerics.spec import Block

if TYPE_CHECKING:
    from torch import Tensor

#: The blocks that form a group: "tensor", all blocks of the tensor, or of one expert in a grouped product; "all", the
#: blocks of all experts; "row", the blocks of one line along the contraction axis; or a number of elements of a line.
Granularity = Literal["tensor", "all", "row"] | int  # ordered as in tensor_scaling: typing keeps the first order


@dataclass(frozen=True, eq=False)
class Blocking:
    """Describes how a tensor of ``shape`` is cut into blocks that share a scale.

    In the *blocked layout* an axis of n elements cut into blocks of l becomes two axes ``[ceil(n/l), l]``; statistics
    reduce the second. An axis that lies inside one block stays one axis and is reduced. All other axes are kept.
    A ``[R, C]`` tensor with blocks of 32 along dim 0 is seen as ``[R/32, 32, C]`` and reduced over axis 1. A statistic
    keeps the reduced axes with size 1, so that it broadcasts against the elements.

    Attributes:
        shape: the shape of the tensor; sizes may be symbolic.
        block: elements along ``dim``; ``(r, c)`` over the last two axes; "row", one block per line along ``dim``; or
            "tensor".
        dim: the axis that blocks run along; ``(r, c)`` and "tensor" do not depend on it.
        segments: the groups of positions that have separate statistics, or None. No block crosses two groups.

    Raises:
        ValueError: for a 0-d tensor, a ``dim`` out of range, or 2-D blocks of a 1-D tensor.
    """

    shape: Sequence[int]
    block: Block
    dim: int = -1
    segments: Segments | None = None

    def __post_init__(self) -> None:
        rank = len(self.shape)
        if rank == 0:
            raise ValueError("a tensor needs at least one axis to be quantized in blocks")
        if not -rank <= self.dim < rank:
            raise ValueError(f"dim={self.dim} is out of range for a tensor of {rank} axes")
        if isinstance(self.block, tuple) and rank < 2:
            raise ValueError(f"2-D blocks {self.block} need a tensor of two axes or more")

    @property
    def _lengths(self) -> list[int | None]:
        """The length of a block along each axis of the tensor: 0 for the whole axis, None where the axis is not cut."""
        rank = len(self.shape)
        if self.block == "tensor":
            return [0] * rank
        lengths: list[int | None] = [None] * rank
        if isinstance(self.block, tuple):
            lengths[-2], lengths[-1] = self.block
        else:
            lengths[self.dim] = 0 if self.block == "row" else int(self.block)
        return lengths

    @property
    def grid(self) -> list[int]:
        """The number of blocks along each axis of the tensor."""
        pairs = zip(self.shape, self._lengths, strict=True)
        return [size if n is None else 1 if n == 0 else (size + n - 1) // n for size, n in pairs]

    @property
    def padded_shape(self) -> list[int]:
        """The tensor's shape with every axis filled up to whole blocks."""
        sizes: list[int] = []
        for size, length, count in zip(self.shape, self._lengths, self.grid, strict=True):
            if length is None:
                sizes.append(size)
            elif length == 0:  # at least one element: the maximum of an empty axis is undefined
                sizes.append(1 if is_known(size == 0) else size)
            else:
                sizes.append(count * length)
        return sizes

    @property
    def layout(self) -> list[int]:
        """The blocked layout."""
        sizes: list[int] = []
        for size, length, count in zip(self.padded_shape, self._lengths, self.grid, strict=True):
            sizes.extend((count, length) if length else (size,))
        return sizes

    def position(self, axis: int) -> int:
        """Return the axis of the blocked layout that counts the blocks (or elements) along an axis of the tensor."""
        return sum(2 if length else 1 for length in self._lengths[:axis])

    def step(self, axis: int) -> int:
        """Return the number of elements along an axis of the tensor that one entry along :meth:`position` covers."""
        return self._lengths[axis] or 1

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of the blocked layout that lie inside a block."""
        axes: list[int] = []
        position = 0
        for length in self._lengths:
            position += 2 if length else 1
            if length is not None:
                axes.append(position - 1)
        return tuple(axes)

    @property
    def scale_shape(self) -> list[int]:
        """The blocked layout with the axes inside a block reduced to size 1."""
        axes = self.axes
        return [1 if axis in axes else size for axis, size in enumerate(self.layout)]

    def _uneven(self, axis: int) -> bool:
        """True if an axis may need padding. Symbolic sizes are not compared, because that would add a guard."""
        return not is_known(self.padded_shape[axis] == self.shape[axis])

    def split(self, x: Tensor) -> Tensor:
        """Return ``x`` in the blocked layout, zero-padded; a view where every block is full."""
        padded = self.padded_shape
        for axis, length in enumerate(self._lengths):
            if length is not None and self._uneven(axis):
                # Not torch.nn.functional.pad: the width of the padding is symbolic where the size is, and torch guards
                # on widths being 0 or 1.
                full = x.new_zeros([*x.shape[:axis], padded[axis], *x.shape[axis + 1 :]])
                x = full.slice_scatter(x, axis, 0, self.shape[axis])
        return x.reshape(self.layout)

    def join(self, values: Tensor) -> Tensor:
        """Return ``values`` in the tensor's shape, the inverse of :meth:`split`; a strided view skips the padding."""
        padded = self.padded_shape
        x = values.reshape(padded)
        if not any(length is not None and self._uneven(axis) for axis, length in enumerate(self._lengths)):
            return x
        # as_strided, unlike a slice, makes Inductor write the padded tensor before it reads this part of the tensor.
        # If Inductor fuses a slice with the loop over n elements in blocks of l, the loop has n // l blocks, and on the
        # CPU the last n % l elements are never written (pytorch issue 195582).
        strides = [1]
        for size in reversed(padded[1:]):
            strides.insert(0, strides[0] * size)
        return x.contiguous().as_strided(list(self.shape), strides)

    def index(self, device: torch.device | str) -> Tensor:
        """Return the row-major index of every element in the *unpadded* tensor, int32, in the blocked layout.

        The index depends neither on blocks nor on padding, so an element draws the same noise under every blocking.
        Indices wrap around beyond 2^32 elements; the indices of padding are arbitrary.
        """
        index = torch.zeros((), dtype=torch.int32, device=device)
        for axis, (size, padded) in enumerate(zip(self.shape, self.padded_shape, strict=True)):
            # Horner's rule keeps every factor within int32; a stride may exceed it.
            index = index * size + self._spread(torch.arange(padded, dtype=torch.int32, device=device), axis)
        return index

    def block_index(self, device: torch.device | str) -> Tensor:
        """Return the row-major number of every block, int32, in the shape of a statistic."""
        index = torch.zeros((), dtype=torch.int32, device=device)
        for axis, count in enumerate(self.grid):
            along = torch.arange(count, dtype=torch.int32, device=device)
            index = index * count + self._spread(along, axis, blocks=True)
        return index

    def valid(self, device: torch.device | str) -> Tensor | None:
        """Return 1.0 for elements of the tensor and 0.0 for padding: fp32, broadcastable to the blocked layout.

        Return None if no axis is padded.
        """
        mask: Tensor | None = None
        for axis, (size, padded, length) in enumerate(zip(self.shape, self.padded_shape, self._lengths, strict=True)):
            if length is not None and self._uneven(axis):
                along = (self._spread(torch.arange(padded, device=device), axis) < size).to(torch.float32)
                mask = along if mask is None else mask * along
        return mask

    def _spread(self, along: Tensor, axis: int, *, blocks: bool = False) -> Tensor:
        """Return ``along``, which has one number per element (with ``blocks``, per block) of an axis of the padded
        tensor, in a shape that broadcasts in the blocked layout."""
        shape: list[int] = [1] * len(self.layout)
        position, length = self.position(axis), self._lengths[axis]
        if blocks or not length:
            shape[position] = along.shape[0]
        else:
            shape[position : position + 2] = along.shape[0] // length, length
        return along.reshape(shape)


@dataclass(frozen=True, eq=False)
class Groups:
    """Blocks that share a factor on top of their scales.

    Attributes:
        blocking: the blocks of the tensor, along its last axis.
        granularity: the extent of a group: "all", the whole tensor; "tensor", one segment, or the whole tensor without
            segments; "row", one line along the contraction axis, or one row of 2-D blocks; a number of elements along
            the contraction axis, which is a multiple of the block length; or None, one block.
    """

    blocking: Blocking
    granularity: Granularity | None = None

    def __post_init__(self) -> None:
        if isinstance(self.granularity, str) and self.granularity not in ("all", "tensor", "row"):
            raise ValueError(f"unknown granularity {self.granularity!r}; choose all, tensor, row or a number")
        block = self.blocking.block
        if isinstance(self.granularity, int) and not isinstance(block, str) and self.granularity % block_length(block):
            raise ValueError(f"groups of {self.granularity} elements are not made of whole blocks of {block}")

    def reduce(self, x: Tensor, op: Literal["amax", "sum"], fill: float = 0) -> Tensor:
        """Return ``x``, a statistic, reduced over each group; the result broadcasts to a statistic.

        ``fill`` is the value of the missing blocks in an incomplete last group, and the maximum of an empty group.
        """
        if self.granularity is None or (self.granularity == "row" and self.blocking.block in ("row", "tensor")):
            return x
        if isinstance(self.granularity, str) and self._reaches_across:
            return self._by_segment(x, op)
        if isinstance(self.granularity, str):
            along = tuple(range(x.dim()))[-2 if self.granularity == "row" else 0 :]
            return maximum(x, along, fill) if op == "amax" else x.sum(along, keepdim=True)
        lines = x.squeeze(-1)
        runs = Blocking(tuple(lines.shape), self.granularity // block_length(self.blocking.block))
        split = runs.split(lines)
        valid = runs.valid(x.device) if fill else None
        split = split if valid is None else torch.where(valid > 0, split, torch.full_like(split, fill))
        reduced = split.amax(-1, keepdim=True) if op == "amax" else split.sum(-1, keepdim=True)
        return runs.join(reduced.expand(runs.layout).contiguous()).unsqueeze(-1)

    def sparse(self, divisor: float) -> Tensor | None:
        """Return whether each group is less than 1/``divisor`` full of tokens, the rest being padding: broadcastable
        to a statistic. Return None if the groups, of a fixed length, do not run along the tokens of experts."""
        segments, block, length = self.blocking.segments, self.blocking.block, self.granularity
        if segments is None or segments.unpadded_ids is None or segments.axis != len(self.blocking.shape) - 1:
            return None
        assert isinstance(block, int)
        assert isinstance(length, int)
        few = (segments.unpadded_ids < segments.count).reshape(-1, length).sum(1) * divisor < length
        return few[:, None].expand(-1, length // block).reshape(-1, 1)

    @property
    def per_segment(self) -> bool:
        """True if all blocks of a segment share the factor."""
        return self.granularity in ("all", "tensor")

    @property
    def _reaches_across(self) -> bool:
        """True if the blocks of one group may belong to several segments, which then have separate statistics."""
        segments = self.blocking.segments
        return segments is not None and (self.per_segment or segments.axis == len(self.blocking.shape) - 1)

    def _by_segment(self, x: Tensor, op: Literal["amax", "sum"]) -> Tensor:
        segments = self.blocking.segments
        assert segments is not None
        axis, step = self.blocking.position(segments.axis), self.blocking.step(segments.axis)
        across = () if self.granularity == "row" else tuple(dim for dim in range(x.dim()) if dim != axis)
        if across:
            x = x.amax(across, keepdim=True) if op == "amax" else x.sum(across, keepdim=True)
        table = segments.table(x, axis, step, op)
        if self.granularity != "all":
            return segments.spread(table, x, axis, step)
        table = table.narrow(axis, 0, segments.count)
        return table.amax(axis, keepdim=True) if op == "amax" else table.sum(axis, keepdim=True)


def is_known(fact: bool | torch.SymBool) -> bool:
    """Return whether a comparison holds for all values of the symbolic sizes, without adding a guard."""
    return symbolic.statically_known_true(fact)


def maximum(x: Tensor, axes: tuple[int, ...], least: float = 0) -> Tensor:
    """Return the maximum over ``axes``, kept with size 1: NaN if an element is NaN, ``least`` if there are no elements.

    torch has no maximum of an empty axis: to an axis that may be empty, the lowest number of the dtype is appended.
    """
    unsure = [axis for axis in axes if not is_known(x.shape[axis] > 0)]
    lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    for axis in unsure:
        x = torch.cat([x, x.new_full([*x.shape[:axis], 1, *x.shape[axis:][1:]], lowest)], axis)
    largest = x.amax(axes, keepdim=True)
    return torch.where(largest == lowest, least, largest) if unsure else largest


def is_scalar(x: Tensor) -> bool:
    """True if ``x`` is known to hold one element, whatever its rank."""
    return all(is_known(size == 1) for size in x.shape)


def block_length(block: Block) -> int:
    """Return the length of a block along the contraction axis; raise ValueError for "row" and "tensor" blocks."""
    if isinstance(block, str):
        raise ValueError(f"blocks of a {block} have no fixed length along the contraction axis")
    return block[1] if isinstance(block, tuple) else block
