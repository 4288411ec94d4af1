"""What a kernel is asked for: how to quantize a tensor along one of its axes, and the bytes of an operand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp4graph.numerics.blocking import is_scalar
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.hadamard import BlockRotation
from fp4graph.numerics.spec import QuantSpec


class Blocks(NamedTuple):
    """Numbers that techniques give for the blocks of a tensor ``[B, R, C]``: each fp32, one for all or one per block.

    That is a tensor ``[B, R, n]``, n = ceil(C/block), or of four axes ``[B, G, r, n]`` where groups of r lines share
    theirs; R may be less than G·r. Either may be broadcast along any axis, as by ``expand``.

    Attributes:
        divisor: divides the values, before anything else.
        statistic: replaces the largest magnitude of the divided values.
        scale: replaces the scale that the statistic gives.
        factor: multiplies the result.
    """

    divisor: Tensor | None = None
    statistic: Tensor | None = None
    scale: Tensor | None = None
    factor: Tensor | None = None


NOTHING_GIVEN = Blocks()


@dataclass(frozen=True, eq=False)
class Request:
    """How a kernel quantizes a tensor along one of its axes.

    Attributes:
        spec: with blocks that kernels know, as of :func:`fp4graph.kernels.operators.by_runs`.
        draw: needed if the spec rounds stochastically.
        given: what techniques have made of the blocks.
        rotation: of the tensor before it is quantized, blocks along the same axis, which divide the spec's.
    """

    spec: QuantSpec
    draw: Draw | None = None
    given: Blocks = NOTHING_GIVEN
    rotation: BlockRotation | None = None

    @property
    def packs(self) -> bool:
        """True if bytes with one factor for all of them stand for the result.

        Not where a scale or statistic is given: it may be finite where the block has a NaN, for which FP4 has no code.
        """
        factor = self.given.factor
        own = self.given.scale is None and self.given.statistic is None
        return own and (factor is None or is_scalar(factor))


@dataclass(frozen=True, eq=False)
class PackedOperand:
    """The bytes that stand for a dequantized operand.

    Attributes:
        codes: uint8 ``[..., C/2]`` (``[..., C]`` for wider codes), whole blocks, as of :func:`fp4graph.pack`.
        scales: ``[..., C/block]``, of :func:`fp4graph.numerics.packing.scale_storage`.
        spec: it was quantized by, blocks along the last axis.
        length: C without padding.
        dtype: of the dequantized operand.
        transposed: whether the bytes are those of the transposed operand as the backward multiplies it, quantized for
            the backward already.
        factor: multiplies the values that the bytes stand for, fp32 ``[1]``, or None.
        multiplier: waits for the GEMM's accumulator (:class:`fp4graph.ops.product.Term`), fp32, 0-d, or None.
    """

    codes: Tensor
    scales: Tensor
    spec: QuantSpec
    length: int
    dtype: torch.dtype
    transposed: bool = False
    factor: Tensor | None = None
    multiplier: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device of the bytes."""
        return self.codes.device

    def unpack(self) -> Tensor:
        """Return the dequantized operand, contiguous."""
        packed = self.spec.to_text(), self.length, self.dtype, self.factor
        result: Tensor = torch.ops.fp4graph.unpack(self.codes, self.scales, *packed)
        return result

    def requantized(self, spec: QuantSpec, draw: Draw | None = None) -> Tensor:
        """Return the transpose of the dequantized operand, quantized by ``spec`` along its last axis."""
        packed = self.spec.to_text(), self.length, self.dtype
        drawn = flat(spec, draw)
        result: Tensor = torch.ops.fp4graph.requantize(self.codes, self.scales, *packed, spec.to_text(), *drawn)
        return result


def flat(spec: QuantSpec, draw: Draw | None) -> tuple[Tensor | None, Tensor | None, Sequence[int]]:
    """Return ``draw`` as operators take it: key, step and salts, which are empty where ``spec`` draws nothing."""
    if draw is None or not spec.needs_key:
        return None, None, ()
    return draw.key, draw.step, draw.salts
