"""Directions, sources and packed operands, and the flat parameters by which operators take them.

A direction describes the quantization of a tensor along one of its axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4graph.numerics.blocking import is_scalar
from fp4graph.numerics.declare import Structure
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
        stored: multiplies the elements in place of the scale under which they were rounded. GPU kernels take none.
    """

    divisor: Tensor | None = None
    statistic: Tensor | None = None
    scale: Tensor | None = None
    factor: Tensor | None = None
    stored: Tensor | None = None


NOTHING_GIVEN = Blocks()


@dataclass(frozen=True, eq=False)
class Direction:
    """The quantization of a tensor along one of its axes.

    Attributes:
        spec: with blocks that kernels know, as of :func:`fp4graph.kernels.devices.by_runs`.
        draw: needed if the spec rounds stochastically.
        given: the numbers that techniques give for the blocks.
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
        factor, given = self.given.factor, (self.given.statistic, self.given.scale, self.given.stored)
        return all(part is None for part in given) and (factor is None or is_scalar(factor))

    def rotated(self, rotation: BlockRotation | None) -> Direction:
        """Return the direction after a rotation of the tensor; None for none."""
        return self if rotation is None else replace(self, rotation=rotation)

    def flat(self, *, given: bool = False, rotation: bool = False) -> tuple[Any, ...]:
        """Return the parameters of an operator that takes :data:`DIRECTION`, or, with ``given`` or ``rotation``, one
        of the structures below. The draw is left out if the spec needs no random bits.

        Raises:
            ValueError: the direction has parts that the operator does not take.
        """
        takes = given or self.given is NOTHING_GIVEN or all(part is None for part in self.given)
        if not takes or (self.rotation is not None and not rotation):
            raise ValueError(f"an operator that does not take all of it was given {self}")
        draw = self.draw if self.spec.needs_key else None
        noise = (None, None, ()) if draw is None else (draw.key, draw.step, draw.salts)
        by = (None, 0) if self.rotation is None else (self.rotation.signs, self.rotation.block)
        return (self.spec.to_text(), *noise, *(self.given if given else ()), *(by if rotation else ()))


def _direction(spec: str, key: Tensor | None, step: Tensor | None, salts: Sequence[int], *rest: Any) -> Direction:
    """Return the direction with these parameters; ``rest`` has those of ``given``, of a rotation, or of both."""
    draw = None if key is None else Draw(key, step, tuple(salts))
    count = len(Blocks._fields)
    given = Blocks(*rest[:count]) if len(rest) >= count else NOTHING_GIVEN
    signs, block = rest[-2:] if len(rest) % count else (None, 0)
    rotation = BlockRotation(block, None if signs is None else signs.contiguous()) if block else None
    return Direction(QuantSpec.from_text(spec), draw, given, rotation)


_DIRECTION = ("str spec", "Tensor? key", "Tensor? step", "int[] salts")
_GIVEN = tuple(f"Tensor? {name}" for name in Blocks._fields)
_ROTATION = ("Tensor? signs", "int block")  # 0 for none
#: How operators take a :class:`Direction`: its spec and draw, then perhaps ``given``, a rotation, or both.
DIRECTION = Structure(_DIRECTION, _direction)
GIVEN = Structure((*_DIRECTION, *_GIVEN), _direction)
ROTATED = Structure((*_DIRECTION, *_ROTATION), _direction)
WHOLE = Structure((*_DIRECTION, *_GIVEN, *_ROTATION), _direction)


class Source(NamedTuple):
    """A tensor to quantize, as it lies in memory.

    Attributes:
        parts: tensors ``[..., C/n]`` that are its columns, side by side.
        dtype: of the tensor, to which values are rounded when they are read.
    """

    parts: Sequence[Tensor]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Source:
        """Return the source that is ``x`` itself."""
        return cls([x], x.dtype)

    def whole(self) -> Tensor:
        """Return the tensor ``[..., C]``."""
        x = self.parts[0] if len(self.parts) == 1 else torch.cat(tuple(self.parts), -1)
        return x.to(self.dtype)


#: How operators take a :class:`Source`.
SOURCE = Structure(("Tensor[] parts", "ScalarType dtype"), Source)


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
        result: Tensor = torch.ops.fp4graph.unpack(*self.flat(), self.factor)
        return result

    def requantized(self, spec: QuantSpec, draw: Draw | None = None) -> Tensor:
        """Return the transpose of the dequantized operand, quantized by ``spec`` along its last axis."""
        result: Tensor = torch.ops.fp4graph.requantize(*self.flat(), *Direction(spec, draw).flat())
        return result

    def flat(self) -> tuple[Any, ...]:
        """Return the bytes as the parameters of an operator that takes :data:`PACKED`."""
        return self.codes, self.scales, self.spec.to_text(), self.length, self.dtype


class Packed(NamedTuple):
    """The fields of a :class:`PackedOperand` that operators take."""

    codes: Tensor
    scales: Tensor
    spec: QuantSpec
    length: int
    dtype: torch.dtype

    @property
    def bytes(self) -> tuple[Tensor, Tensor]:
        """Codes and scales, contiguous."""
        return self.codes.contiguous(), self.scales.contiguous()


def _packed(codes: Tensor, scales: Tensor, spec: str, *about: Any) -> Packed:
    return Packed(codes, scales, QuantSpec.from_text(spec), *about)


#: How operators take a :class:`Packed`.
PACKED = Structure(("Tensor codes", "Tensor scales", "str spec", "SymInt length", "ScalarType dtype"), _packed)
