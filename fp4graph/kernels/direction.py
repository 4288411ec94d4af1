"""Directions, sources and packed operands, and the flat parameters in which operators take them.

A direction describes how a tensor is quantized along one of its axes.
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
    """Numbers that techniques give for the blocks of a tensor ``[B, R, C]``: fp32, one for all blocks or one per block.

    Numbers per block are a tensor ``[B, R, n]``, n = ceil(C/block), or ``[B, G, r, n]`` where the r lines of a group
    share numbers; R may be less than G·r. This tensor may have stride 0 along any axis, as ``expand`` makes it.

    Attributes:
        divisor: divides the values, before anything else.
        statistic: replaces the largest magnitude of the divided values.
        scale: replaces the scale that the statistic gives.
        factor: multiplies the result.
        stored: multiplies the rounded elements, in place of the scale that they were rounded by; not for GPU kernels.
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
        spec: has blocks that kernels support, as :func:`fp4graph.kernels.devices.by_runs` returns it.
        draw: needed if the spec rounds stochastically.
        given: the numbers that techniques give for the blocks.
        rotation: is applied to the tensor before it is quantized, along the same axis. Its block length divides the
            spec's.
    """

    spec: QuantSpec
    draw: Draw | None = None
    given: Blocks = NOTHING_GIVEN
    rotation: BlockRotation | None = None

    @property
    def packs(self) -> bool:
        """True if bytes, with one factor for the whole tensor, can stand for the result.

        False if a statistic, a scale or ``stored`` is given: such a number may be finite where its block has a NaN, and
        FP4 has no code for NaN. False too if there is a factor for each block.
        """
        factor, given = self.given.factor, (self.given.statistic, self.given.scale, self.given.stored)
        return all(part is None for part in given) and (factor is None or is_scalar(factor))

    def rotated(self, rotation: BlockRotation | None) -> Direction:
        """Return the direction with ``rotation`` instead of its own, or unchanged if ``rotation`` is None."""
        return self if rotation is None else replace(self, rotation=rotation)

    def flat(self, *, given: bool = False, rotation: bool = False) -> tuple[Any, ...]:
        """Return the parameters for an operator that takes :data:`DIRECTION`; with ``given`` :data:`GIVEN`, with
        ``rotation`` :data:`ROTATED`, with both :data:`WHOLE`. The draw is left out if the spec needs no random bits.

        Raises:
            ValueError: the direction has numbers or a rotation that the operator does not take.
        """
        takes = given or self.given is NOTHING_GIVEN or all(part is None for part in self.given)
        if not takes or (self.rotation is not None and not rotation):
            raise ValueError(f"the operator does not take the given numbers or the rotation of {self}")
        draw = self.draw if self.spec.needs_key else None
        noise = (None, None, ()) if draw is None else (draw.key, draw.step, draw.salts)
        by = (None, 0) if self.rotation is None else (self.rotation.signs, self.rotation.block)
        return (self.spec.to_text(), *noise, *(self.given if given else ()), *(by if rotation else ()))


def _direction(spec: str, key: Tensor | None, step: Tensor | None, salts: Sequence[int], *rest: Any) -> Direction:
    """Return the direction with these parameters; ``rest`` has the numbers of ``given``, then those of a rotation."""
    draw = None if key is None else Draw(key, step, tuple(salts))
    count = len(Blocks._fields)
    given = Blocks(*rest[:count]) if len(rest) >= count else NOTHING_GIVEN
    signs, block = rest[-2:] if len(rest) % count else (None, 0)
    rotation = BlockRotation(block, None if signs is None else signs.contiguous()) if block else None
    return Direction(QuantSpec.from_text(spec), draw, given, rotation)


_DIRECTION = ("str spec", "Tensor? key", "Tensor? step", "int[] salts")
_GIVEN = tuple(f"Tensor? {name}" for name in Blocks._fields)
_ROTATION = ("Tensor? signs", "int block")  # block 0: no rotation
#: How operators take a :class:`Direction`: its spec and draw, then perhaps ``given``, a rotation, or both.
DIRECTION = Structure(_DIRECTION, _direction)
GIVEN = Structure((*_DIRECTION, *_GIVEN), _direction)
ROTATED = Structure((*_DIRECTION, *_ROTATION), _direction)
WHOLE = Structure((*_DIRECTION, *_GIVEN, *_ROTATION), _direction)


class Source(NamedTuple):
    """A tensor ``[..., C]`` to quantize, as it lies in memory.

    Attributes:
        parts: n tensors ``[..., C/n]`` that make the tensor when they are concatenated along the last axis.
        dtype: the dtype of the tensor, to which values are rounded when they are read.
    """

    parts: Sequence[Tensor]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Source:
        """Return the source whose only part is ``x``."""
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
        codes: uint8 ``[..., C/2]`` (``[..., C]`` for codes over 4 bits), C padded to whole blocks, as in
            :func:`fp4graph.pack`.
        scales: ``[..., C/block]``, of the dtype :func:`fp4graph.numerics.packing.scale_storage`.
        spec: the spec by which the operand was quantized, blocks along the last axis.
        length: C without padding.
        dtype: the dtype of the dequantized operand.
        transposed: whether the bytes hold the transposed operand, already quantized for the backward.
        factor: multiplies the values that the bytes stand for, fp32 ``[1]``, or None.
        multiplier: the scalar that multiplies the GEMM's accumulator (:class:`fp4graph.ops.product.Term`), fp32, 0-d,
            or None.
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


def _packed(codes: Tensor, scales: Tensor, spec: str, *rest: Any) -> Packed:
    return Packed(codes, scales, QuantSpec.from_text(spec), *rest)


#: How operators take a :class:`Packed`.
PACKED = Structure(("Tensor codes", "Tensor scales", "str spec", "SymInt length", "ScalarType dtype"), _packed)
