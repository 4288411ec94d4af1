"""The interface of kernels: requests, jobs, results, and the base class of kernels.

A :class:`Request` is data. From it :mod:`fp4graph.kernels.rows` chooses a :class:`Kernel` before anything is computed.
The kernel then runs on a :class:`Job`, which has the tensors.
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

#: The stages outside and inside a call of the quantizer, each with words for what a technique does at the stage.
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
    """The work of techniques that tensor code must do before the kernel runs."""

    NOTHING = "nothing: the kernel needs only the spec"
    BLOCKS = "scales and statistics of blocks, computed by tensor code"
    STAGES = "all stages"


class Layout(StrEnum):
    """The layouts of an operand in memory."""

    DENSE = "as it is given"
    MOVED = "tokens of experts, copied to another layout"
    WEIGHTS = "weights of experts, one after another within their product"


@dataclass(frozen=True)
class Quantizing:
    """The facts about one operand's quantizer that a request holds.

    Attributes:
        acts: the stages at which techniques act, each with the names of these techniques.
        drawn: whether there is a source of random bits.
        shares: the part of an expert's operand that shares one block scale, or None if no blocks share scales.
        stateful: whether a technique of the quantizer has state.
        whole: whether every group scale by which a technique divides is a scale of the whole tensor.
    """

    spec: QuantSpec
    acts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    drawn: bool = False
    shares: Literal["tensor", "row"] | None = None
    stateful: bool = False
    whole: bool = True

    def acting(self, *stages: str) -> str | None:
        """Return words for the first technique that acts at one of the ``stages`` and what it does, or None."""
        names = dict(self.acts)
        return next((f"{names[stage][0]} {_DOES[stage]}" for stage in stages if stage in names), None)

    @property
    def undrawn(self) -> bool:
        """True if the spec needs random bits and there is no source of them."""
        return self.spec.needs_key and not self.drawn


@dataclass(frozen=True)
class Request:
    """A request: one operand to quantize, and the facts by which a kernel accepts or refuses it.

    Attributes:
        source: the dtype of the operand that is read; None if the operand is packed bytes.
        dtype: the dtype of the GEMM.
        columns: the quantizer of the other direction, if both directions are asked for.
        keeps: whether the result of the other direction is asked for as bytes.
        transform: the name of the technique that transforms the operands of the GEMM, or None.
        rotation: the block length of the transform if it is a block rotation, else None.
        observed: whether code other than the kernel needs the whole operand.
        residual: words that name the technique which splits a residual off the other operand, or None.
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
        """Words that name the technique which transforms the operands, or None if there is no transform."""
        return None if self.transform is None else f"{self.transform} transforms the operands"


class Job(NamedTuple):
    """The tensors and arguments of one run of a kernel.

    Attributes:
        x: the operand ``[..., C]``.
        direction: the quantization along C, with the numbers that techniques give for blocks if the kernel needs them.
        dtype: the dtype to which the result will be cast. The kernel may return the result in this dtype.
        rounded: computes the result by tensor code, with the stages of techniques; only tensor code calls it.
        columns: the other direction, if both directions are asked for.
        multiplier: a factor of the result along the columns, by which the GEMM's accumulator will be multiplied.
        keeps: whether to return the result along the columns, or the weights of a product, as bytes.
        sums: whether to return the sums of ``x`` over rows too.
        places: int64 ``[P]``, the rows of ``x`` to read; the number of rows of ``x`` stands for a row of zeros.
        left: the other operand of a product of experts.
        groups: the tokens of each expert in ``left``.
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
        """The operand, which must not be packed."""
        assert isinstance(self.x, Tensor)
        return self.x


class Result(NamedTuple):
    """The result of a kernel.

    Attributes:
        values: the quantized operand, or the product for a product of experts.
        packed: the bytes, or None if no bytes were asked for or bytes cannot hold the numbers that techniques gave.
        columns: the operand quantized along its columns.
        sums: the sums over parts of the rows, fp32 ``[parts, C]``.
    """

    values: Tensor
    packed: PackedOperand | None = None
    columns: Tensor | None = None
    sums: Tensor | None = None


@dataclass(frozen=True)
class Kernel:
    """A row of the list: one way to quantize an operand.

    Attributes:
        name: the name that schedules print.
        place: the position in the list: rows with lower places are asked first.
        asked: the kinds of requests that the kernel can serve.
        product: whether the kernel quantizes the weights of a product of experts and multiplies them.
        needs: the work of techniques that must be done before the kernel, if values are asked for.
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
        """True if the largest magnitude of a tensor is computed from the tensor. Otherwise it is computed from the
        maxima of blocks, which are needed anyway."""
        return False

    def concerns(self, request: Request) -> bool:
        """Return whether ``request`` is of the kind, the device and the layout that the kernel is for."""
        fits = (request.layout is Layout.WEIGHTS) == self.product
        return request.asked in self.asked and request.machine.kind in self.kinds and fits

    def refuses(self, request: Request) -> str | None:
        """Return in a few words why the kernel does not serve a request that :meth:`concerns` accepts, or None if the
        kernel serves it."""
        raise NotImplementedError

    def run(self, job: Job) -> Result:
        """Return the result that the request asked for."""
        raise NotImplementedError
