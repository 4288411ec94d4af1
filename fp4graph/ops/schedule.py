"""How a site's product is computed: for each operand the code that quantizes it, and what the forward keeps of it.

A :class:`Schedule` is data, made once by :func:`fp4graph.ops.lower.lower` from a program, which says what is computed,
and a :class:`Setting`. :mod:`fp4graph.ops.matmul` runs it and takes no decision of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch

from fp4graph.ops.code import Machine
from fp4graph.technique.operands import Gemm, Operand


class Way(StrEnum):
    """How one operand of a GEMM comes to be quantized."""

    HIGH = "high precision"
    KERNEL = "a kernel"
    WITHIN = "a kernel, within tensor code"
    GIVEN = "a kernel, scales by tensor code"
    TENSOR = "tensor code"
    PACKS = "a kernel that writes bytes too"
    BOTH = "a kernel for both directions"
    BYTES = "a kernel that reads bytes"
    READY = "bytes of the forward, unpacked"
    PLACES = "a kernel that reads tokens where they lie"
    PRODUCT = "within the product, expert by expert"


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


@dataclass(frozen=True)
class Step:
    """How one operand is quantized.

    Attributes:
        why: the reason, where another way would be shorter; else "".
        keeps: of an operand of fprop.
    """

    way: Way
    why: str = ""
    keeps: frozenset[Keeps] = frozenset()

    def saves_original(self, *, ready: bool) -> bool:
        """Return whether the forward saves the operand as it was given.

        Args:
            ready: whether there are bytes for the backward, which are due where it :attr:`keeps` them.
        """
        return Keeps.ORIGINAL in self.keeps or (Keeps.READY in self.keeps and not ready)

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        kept = f"; keeps {' and '.join(sorted(self.keeps))}" if self.keeps else ""
        return f"{self.way}{why}{kept}"


@dataclass(frozen=True)
class GemmSchedule:
    """How the two operands of one GEMM are quantized.

    Attributes:
        turns: whether what quantizes experts' weights, or tokens where they lie, rotates them itself.
    """

    left: Step
    right: Step
    multiply: Multiply
    turns: bool = False


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

    def steps(self) -> dict[Operand, Step]:
        """Return how each operand of the GEMMs that are needed is quantized."""
        gemms = {Gemm.FPROP: self.fprop, Gemm.DGRAD: self.dgrad, Gemm.WGRAD: self.wgrad}
        return {
            operand: step
            for gemm, own in gemms.items()
            if own is not None
            for operand, step in zip(gemm.operands, (own.left, own.right), strict=True)
        }

    def __str__(self) -> str:
        return "\n".join(f"{operand}: {step}" for operand, step in self.steps().items())
