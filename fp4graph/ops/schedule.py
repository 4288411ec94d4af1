"""How a site's product is computed: for each operand the kernel that quantizes it, and what the forward keeps of it.

A :class:`Schedule` is data, made once by :func:`fp4graph.ops.lower.lower` from a program, which says what is computed,
and a :class:`Setting`. :mod:`fp4graph.ops.matmul` runs it and takes no decision of its own.
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
    """What an operand is quantized from."""

    TENSOR = "the tensor that the GEMM is given"
    BYTES = "bytes of the forward"
    READY = "bytes of the forward, unpacked"


class Keeps(StrEnum):
    """What the forward keeps of an operand of fprop for the backward."""

    ORIGINAL = "original"
    VALUES = "quantized values"
    BYTES = "bytes"
    READY = "bytes for the backward"


class Multiply(StrEnum):
    """How the quantized operands of a GEMM are multiplied."""

    DTYPE = "in the dtype of the model"
    NARROW = "as bf16, which the operands are exactly, into fp32"
    EXPERTS = "expert by expert"


@dataclass(frozen=True)
class Setting:
    """What the code of a site depends on beside the program.

    Attributes:
        dtypes: of the two factors.
        dtype: of the GEMMs.
        needs: whether the gradients of the two factors are needed.
        drawn: whether there is a source of random bits.
        observed: whether somebody is shown the operands.
        experts: whether the product is one of experts, each with tokens of its own.
        part: of a product whose input channels go apart, the rest or the chosen ones; None for the whole product.
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
    """The kernels of the calls of an operand's quantizer: of the first, and of those that techniques around it make
    after it, in which techniques with state do not round."""

    first: Kernel
    again: Kernel


@dataclass(frozen=True)
class Step:
    """How one operand is quantized.

    Attributes:
        kernel: that quantizes it; None leaves it in high precision.
        asked: what the kernel is asked for.
        code: of the operand's values, should they be asked for alone; None in high precision.
        source: what it is quantized from.
        keeps: of an operand of fprop.
        why: why the kernels before do not; else "".
    """

    kernel: Kernel | None
    asked: Asked = Asked.VALUES
    code: Code | None = None
    source: Source = Source.TENSOR
    keeps: frozenset[Keeps] = frozenset()
    why: str = ""

    def by_kernel(self, kernel: Kernel, asked: Asked) -> Step:
        """Return the step with another kernel, which is asked for more than values."""
        return replace(self, kernel=kernel, asked=asked, why="")

    def saves_original(self, *, ready: bool) -> bool:
        """Return whether the forward saves the operand as it was given.

        Args:
            ready: whether there are bytes for the backward, which are due where it :attr:`keeps` them.
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
        """The code that quantizes the operand, as people read it."""
        if self.source is Source.READY:
            return self.source.value
        return "high precision" if self.kernel is None else self.kernel.name


@dataclass(frozen=True)
class GemmSchedule:
    """How the two operands of one GEMM are quantized, and multiplied."""

    left: Step
    right: Step
    multiply: Multiply


class Line(NamedTuple):
    """A line of a schedule as people read it: of an operand, or of how GEMMs multiply."""

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
    """How the GEMMs of a site are computed; None stands for one that is not needed.

    Attributes:
        apart: of the input channels that are multiplied apart, where some are; the rest are computed as this says.
    """

    fprop: GemmSchedule
    dgrad: GemmSchedule | None
    wgrad: GemmSchedule | None
    apart: Schedule | None = None

    def gemms(self) -> dict[Gemm, GemmSchedule]:
        """Return how the GEMMs that are needed are computed."""
        each = {Gemm.FPROP: self.fprop, Gemm.DGRAD: self.dgrad, Gemm.WGRAD: self.wgrad}
        return {gemm: own for gemm, own in each.items() if own is not None}

    def steps(self) -> dict[Operand, Step]:
        """Return how each operand of the GEMMs that are needed is quantized."""
        return {
            operand: step
            for gemm, own in self.gemms().items()
            for operand, step in zip(gemm.operands, (own.left, own.right), strict=True)
        }

    def lines(self, of: str = "") -> Iterator[Line]:
        """Yield what people read: the operands, how GEMMs multiply, and the same of channels apart."""
        for operand, step in self.steps().items():
            yield Line(f"{operand}{of}", step.by, step.why, tuple(sorted(step.keeps)))
        ways: dict[Multiply, list[str]] = {}
        for gemm, own in self.gemms().items():
            ways.setdefault(own.multiply, []).append(gemm.value)
        for way, names in ways.items():
            yield Line(f"{', '.join(names)}{of}", f"multiplied {way}")
        if self.apart is not None:
            yield from self.apart.lines(" of channels apart")

    def to_json(self) -> dict[str, Any]:
        """Return the schedule as plain data: each operand, how each GEMM multiplies, and the same of channels apart."""
        steps = {
            operand.value: {"by": step.by, "because": step.why, "keeps": sorted(step.keeps)}
            for operand, step in self.steps().items()
        }
        multiply = {gemm.value: own.multiply.value for gemm, own in self.gemms().items()}
        return {**steps, "multiply": multiply, **({} if self.apart is None else {"apart": self.apart.to_json()})}

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines()))
