"""Schedules: the kernel that quantizes each operand of a site, and the form in which the forward keeps the operand.

A program says what is computed. :func:`fp4graph.ops.lower.lower` makes a :class:`Schedule` of it once for each
:class:`Setting`: frozen data, which :mod:`fp4graph.ops.matmul` runs without further decisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import torch

from fp4graph.kernels.machine import Machine
from fp4graph.kernels.request import Asked, Kernel
from fp4graph.technique.operands import Gemm, Operand


class Source(StrEnum):
    """The data that an operand is quantized from."""

    TENSOR = "the tensor that the GEMM is given"
    BYTES = "bytes of the forward"
    READY = "bytes of the forward, unpacked"


class Keeps(StrEnum):
    """The forms in which the forward keeps an operand of fprop for the backward."""

    ORIGINAL = "original"
    VALUES = "quantized values"
    BYTES = "bytes"
    READY = "bytes for the backward"


class Multiply(StrEnum):
    """The ways to multiply the quantized operands of a GEMM."""

    DTYPE = "in the dtype of the model"
    NARROW = "as bf16, which the operands are exactly, into fp32"
    EXPERTS = "expert by expert"


@dataclass(frozen=True)
class Setting:
    """The facts, besides the program, that decide which code computes a site.

    Attributes:
        dtypes: the dtypes of the two factors.
        dtype: the dtype of the GEMMs.
        needs: whether the gradients of the two factors are needed.
        drawn: whether there is a source of random bits.
        observed: whether an observer sees the operands.
        experts: whether the product is a grouped product.
        part: the input channels that are lowered: the ``chosen`` ones, which are multiplied apart, or the ``rest``;
            None for all channels, multiplied together.
    """

    machine: Machine
    dtypes: tuple[torch.dtype, torch.dtype]
    dtype: torch.dtype
    needs: tuple[bool, bool]
    drawn: bool
    observed: bool = False
    experts: bool = False
    part: Literal["rest", "chosen"] | None = None


class Code(NamedTuple):
    """The kernels of an operand's quantizer: of its first call, and of the calls ``again`` that techniques around the
    quantizer make, in which techniques with state do not round."""

    first: Kernel
    again: Kernel


@dataclass(frozen=True)
class Step:
    """The quantization of one operand.

    Attributes:
        kernel: the kernel that quantizes the operand; None leaves it in high precision.
        asked: the request that the kernel serves.
        code: the kernels for the operand's values alone; None in high precision.
        source: the data that the operand is quantized from.
        keeps: the forms in which the forward keeps an operand of fprop.
        why: why the kernels earlier in the list refuse; "" if none does.
    """

    kernel: Kernel | None
    asked: Asked = Asked.VALUES
    code: Code | None = None
    source: Source = Source.TENSOR
    keeps: frozenset[Keeps] = frozenset()
    why: str = ""

    def by_kernel(self, kernel: Kernel, asked: Asked) -> Step:
        """Return the step with ``kernel``, which serves a request for more than values."""
        return replace(self, kernel=kernel, asked=asked, why="")

    def saves_original(self, *, ready: bool) -> bool:
        """Return whether the forward saves the operand as it was given.

        Args:
            ready: whether the kernel gave bytes for the backward, which replace the original if :attr:`keeps` asks so.
        """
        return Keeps.ORIGINAL in self.keeps or (Keeps.READY in self.keeps and not ready)

    @property
    def in_product(self) -> bool:
        """True if the kernel quantizes the weights of experts, and multiplies."""
        return self.kernel is not None and self.kernel.product

    @property
    def turns(self) -> bool:
        """True if the kernel rotates the operand."""
        return self.kernel is not None and self.kernel.turns

    @property
    def by(self) -> str:
        """The code that quantizes the operand, in words."""
        if self.source is Source.READY:
            return self.source.value
        return "high precision" if self.kernel is None else self.kernel.name


@dataclass(frozen=True)
class GemmSchedule:
    """The steps of a GEMM's two operands, and their multiplication."""

    left: Step
    right: Step
    multiply: Multiply


class Line(NamedTuple):
    """A line of a printed schedule: one operand, or the multiplication of GEMMs."""

    what: str
    by: str
    why: str = ""
    keeps: tuple[str, ...] = ()

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        kept = f"; keeps {' and '.join(self.keeps)}" if self.keeps else ""
        return f"{self.what}: {self.by}{why}{kept}"


@dataclass(frozen=True)
class Schedule:
    """The schedules of a site's GEMMs; None for a GEMM that is not needed.

    Attributes:
        apart: the schedule of the input channels that are multiplied apart, or None. With it, the other attributes are
            the schedules of the other channels.
    """

    fprop: GemmSchedule
    dgrad: GemmSchedule | None
    wgrad: GemmSchedule | None
    apart: Schedule | None = None

    def gemms(self) -> dict[Gemm, GemmSchedule]:
        """Return the schedules of the needed GEMMs."""
        each = {Gemm.FPROP: self.fprop, Gemm.DGRAD: self.dgrad, Gemm.WGRAD: self.wgrad}
        return {gemm: schedule for gemm, schedule in each.items() if schedule is not None}

    def steps(self) -> dict[Operand, Step]:
        """Return the step of each operand of the needed GEMMs."""
        return {
            operand: step
            for gemm, schedule in self.gemms().items()
            for operand, step in zip(gemm.operands, (schedule.left, schedule.right), strict=True)
        }

    def lines(self, of: str = "") -> Iterator[Line]:
        """Yield the printed lines: operands, multiplications, and the same for channels that are multiplied apart."""
        for operand, step in self.steps().items():
            yield Line(f"{operand}{of}", step.by, step.why, tuple(sorted(step.keeps)))
        ways: dict[Multiply, list[str]] = {}
        for gemm, schedule in self.gemms().items():
            ways.setdefault(schedule.multiply, []).append(gemm.value)
        for way, names in ways.items():
            yield Line(f"{', '.join(names)}{of}", f"multiplied {way}")
        if self.apart is not None:
            yield from self.apart.lines(" of channels apart")

    def to_json(self) -> dict[str, Any]:
        """Return the schedule as plain data: operands, multiplications, and the same for channels apart."""
        steps = {
            operand.value: {"by": step.by, "because": step.why, "keeps": sorted(step.keeps)}
            for operand, step in self.steps().items()
        }
        multiply = {gemm.value: schedule.multiply.value for gemm, schedule in self.gemms().items()}
        return {**steps, "multiply": multiply, **({} if self.apart is None else {"apart": self.apart.to_json()})}

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines()))
