"""The interface of kernels: what they are asked for, what they are run on, and the base class of the rows.

A :class:`Request` is data, from which :mod:`fp4graph.kernels.rows` chooses a :class:`Kernel` before anything is
computed. The kernel then runs on a :class:`Job`, the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fp4graph.kernels.direction import Direction, PackedOperand
from fp4graph.kernels.experts import Groups
from fp4graph.kernels.machine import Machine
from fp4graph.numerics.spec import QuantSpec

#: The stages of techniques outside one call of the quantizer, and inside, with what a technique does there.
OUTSIDE = {"split": "splits the operand", "around": "calls the quantizer", "after": "changes the result"}
INSIDE = {
    "block_statistic": "chooses the statistic of blocks",
    "group_statistic": "chooses the statistic of groups",
    "group_scale": "divides by a scale of groups",
    "scale": "chooses the scale of blocks",
    "round": "rounds elements",
    "rescale": "replaces scales",
}
_DOES = OUTSIDE | INSIDE


class Asked(StrEnum):
    """The kinds of requests."""

    VALUES = "values"
    BYTES = "values and bytes"
    BOTH = "both directions"
    FROM_BYTES = "from bytes"
    PLACES = "at places"


class Needs(Enum):
    """The parts of techniques' work that tensor code must do before the kernel."""

    NOTHING = "nothing: the spec is all"
    BLOCKS = "scales and statistics of blocks, computed by tensor code"
    STAGES = "all stages"


class Layout(StrEnum):
    """The layouts of an operand in memory."""

    DENSE = "as it is given"
    MOVED = "tokens of experts, copied to another layout"
    WEIGHTS = "weights of experts, one after another within their product"


@dataclass(frozen=True)
class Quantizing:
    """One operand's quantizer as kernels are asked about it.

    Attributes:
        acts: the stages at which techniques act, each with their names.
        drawn: whether there is a source of random bits.
        shares: the blocks that share a scale, of experts.
        stateful: whether techniques have state.
        whole: whether the scales of groups that techniques divide by are those of the whole tensor.
    """

    spec: QuantSpec
    acts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    drawn: bool = False
    shares: Literal["tensor", "row"] | None = None
    stateful: bool = False
    whole: bool = True

    def acting(self, *stages: str) -> str | None:
        """Return the first technique that acts at one of the ``stages``, as words; None where none does."""
        names = dict(self.acts)
        return next((f"{names[stage][0]} {_DOES[stage]}" for stage in stages if stage in names), None)

    @property
    def undrawn(self) -> bool:
        """True if the spec draws, and there is nothing to draw from."""
        return self.spec.needs_key and not self.drawn


@dataclass(frozen=True)
class Request:
    """A request: one operand to quantize, and the facts by which a kernel accepts or refuses it.

    Attributes:
        source: the dtype that is read; None for bytes.
        dtype: of the GEMM.
        columns: the quantizer of the other direction, where both are asked for.
        keeps: whether the other direction is asked for as bytes.
        transform: the name of the technique that transforms the operands of the GEMM, or None.
        rotation: the block length of the transform if it is a block rotation, else None.
        observed: whether somebody else needs the operand as a whole.
        residual: what splits a residual off the other operand, in words; None where nothing does.
    """

    asked: Asked
    machine: Machine
    quantizing: Quantizing
    source: torch.dtype | None
    dtype: torch.dtype
    layout: Layout = Layout.DENSE
    columns: Quantizing | None = None
    keeps: bool = False
    transform: str | None = None
    rotation: int | None = None
    observed: bool = False
    residual: str | None = None

    @property
    def transformed(self) -> str | None:
        """The sentence that a technique transforms the operands; None if none does."""
        return None if self.transform is None else f"{self.transform} transforms the operands"


class Job(NamedTuple):
    """The tensors and arguments of one run of a kernel.

    Attributes:
        x: the operand ``[..., C]``.
        direction: it is quantized, along C, with what techniques give of blocks where the kernel needs that.
        dtype: that the result will be cast to; the kernel may return it.
        rounded: returns what tensor code computes, stages of techniques included, where the kernel is tensor code.
        columns: the other direction, where both are asked for.
        multiplier: of the columns, which waits for the accumulator.
        keeps: whether the columns, or the weights of a product, are to be returned as bytes.
        sums: whether to return the sums of ``x`` over rows too.
        places: int64 ``[P]``, rows of ``x`` to read; its length stands for zeros.
        left: the other operand of a product of experts, and groups: the tokens of each expert in it.
    """

    x: Tensor | PackedOperand
    direction: Direction
    dtype: torch.dtype | None = None
    rounded: Callable[[], Tensor] | None = None
    columns: Direction | None = None
    multiplier: Tensor | None = None
    keeps: bool = False
    sums: bool = False
    places: Tensor | None = None
    left: Tensor | None = None
    groups: Groups | None = None

    @property
    def tensor(self) -> Tensor:
        """The operand, which is not packed."""
        assert isinstance(self.x, Tensor)
        return self.x


class Result(NamedTuple):
    """The result of a kernel. ``values`` are the quantized operand; for a product of experts, the product.

    Attributes:
        packed: bytes, or None where the numbers that techniques gave are such as no bytes hold.
        columns: values along the columns.
        sums: of parts of the rows, fp32 ``[parts, C]``.
    """

    values: Tensor
    packed: PackedOperand | None = None
    columns: Tensor | None = None
    sums: Tensor | None = None


@dataclass(frozen=True)
class Kernel:
    """A row of the list: one way to quantize an operand.

    Attributes:
        name: as schedules print it.
        place: rows are asked in the order of their places.
        asked: what the kernel can be asked for.
        product: whether the kernel quantizes the weights of a product of experts, and multiplies.
        needs: what it needs of techniques, where values are asked for.
        turns: whether the kernel rotates the operand.
    """

    name: ClassVar[str]
    place: ClassVar[int] = 50
    asked: ClassVar[Sequence[Asked]] = (Asked.VALUES,)
    product: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs.NOTHING
    turns: ClassVar[bool] = False

    @property
    def kinds(self) -> Sequence[str]:
        """The kinds of devices that the kernel runs on."""
        return ("cpu", "cuda")

    @property
    def reads_whole(self) -> bool:
        """True if the largest magnitude of a whole tensor is found from the tensor, because nobody else reads the
        maxima of its blocks."""
        return False

    def concerns(self, request: Request) -> bool:
        """Return whether ``request`` is of the sort that the kernel can be asked for."""
        within = request.layout is Layout.WEIGHTS
        return request.asked in self.asked and request.machine.kind in self.kinds and within == self.product

    def refuses(self, request: Request) -> str | None:
        """Return why the kernel does not serve a request that it :meth:`concerns`, in a few words; None where it
        does."""
        raise NotImplementedError

    def run(self, job: Job) -> Result:
        """Return what was asked for."""
        raise NotImplementedError
