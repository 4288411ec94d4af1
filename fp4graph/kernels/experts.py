"""Operators for the products of many experts on a CPU: quantizers that also move tokens, products that also quantize.

They save passes over memory. Tokens for wgrad are quantized directly from where they lie, without a copy to their
positions first. The weight of each expert is quantized into a buffer that stays in the cache, multiplied, and then
overwritten by the weight of the next expert. The weight of an expert without tokens is not quantized. Values are those
of :mod:`fp4graph.kernels.operators` and of the products of :mod:`fp4graph.ops.grouped`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp4graph.kernels import cpu
from fp4graph.kernels.cpu_product import product_into
from fp4graph.kernels.direction import DIRECTION, PACKED, ROTATED, WHOLE, Direction, Packed, PackedOperand
from fp4graph.numerics.declare import Structure, operator
from fp4graph.numerics.packing import empty_bytes


def quantize_at(x: Tensor | PackedOperand, places: Tensor, direction: Direction, dtype: torch.dtype) -> Tensor:
    """Return the rows of ``x [T, C]`` at ``places``, transposed and quantized: ``[C, P]``, contiguous along C.

    Args:
        x: has a dtype that the kernels of a CPU read, or is packed.
        places: int64 ``[P]``; the place T stands for a row of zeros.
        direction: blocks along P. A rotation acts along P too, and is not allowed for a packed ``x``.
        dtype: the dtype of the result.
    """
    if isinstance(x, PackedOperand):
        y: Tensor = torch.ops.fp4graph.requantize_at(*x.flat(), places, *direction.flat())
    else:
        # The result for a 16-bit operand is first rounded to the operand's dtype, as elsewhere; a rotation gives fp32.
        wide = direction.rotation is not None or x.dtype is torch.float32
        written = dtype if wide and dtype in cpu.DTYPES else x.dtype
        y = torch.ops.fp4graph.quantize_at(x, places, *direction.flat(rotation=True), written)
    return y.to(dtype)


@dataclass(frozen=True, eq=False)
class Groups:
    """The rows of the left operand that are each expert's tokens.

    Attributes:
        starts, sizes: the first token and the number of tokens of each expert, int32 ``[E]``.
        gamma: the factor of each expert's accumulators, fp32 ``[E]``, or None.
    """

    starts: Tensor
    sizes: Tensor
    gamma: Tensor | None = None

    def flat(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the groups as parameters of an operator."""
        return self.starts, self.sizes, self.gamma


def quantized_product(
    left: Tensor, right: Tensor, groups: Groups, direction: Direction, packs: bool = False
) -> tuple[Tensor, PackedOperand | None]:
    """Return ``left @ Q(right)ᵀ`` of every expert, ``[T, N]``, and the bytes of Q(right) if ``packs``, else None.

    Args:
        left: ``[T, K]``. Q(right) is cast to its dtype and multiplied in it.
        right: ``[E, N, K]``, of a dtype that kernels read; of the dtype of ``left`` if ``packs``.
        direction: quantizes ``right``, blocks along K. If it has a rotation, ``left`` was rotated by the same rotation
            and its K is padded to whole blocks of it; a rotation is not allowed with ``packs``.
    """
    flat = direction.flat(given=True, rotation=True)
    y, codes, scales = torch.ops.fp4graph.quantized_product(left, right, *groups.flat(), *flat, packs)
    return y, PackedOperand(codes, scales, direction.spec, right.shape[-1], right.dtype) if packs else None


def requantized_product(left: Tensor, right: PackedOperand, groups: Groups, direction: Direction) -> Tensor:
    """Return :func:`quantized_product` with the transpose of the operand ``[E, K, N]`` that ``right`` holds."""
    operands = left, *right.flat()
    y: Tensor = torch.ops.fp4graph.requantized_product(*operands, *groups.flat(), *direction.flat())
    return y


def tokens_of_experts(starts: Tensor, sizes: Tensor, tokens: int) -> Iterator[slice]:
    """Yield the slice of each expert's tokens; raise a ValueError if it is not a slice of ``tokens`` tokens."""
    for expert, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        if size < 0 or start < 0 or start + size > tokens:
            raise ValueError(
                f"the group offsets of a grouped product must not decrease, and must not exceed the number of tokens; "
                f"expert {expert} would have {size} tokens from the {start}th on, of {tokens}"
            )
        yield slice(start, start + size)


def zero_others(y: Tensor, experts: Sequence[slice]) -> None:
    """Write zeros to the rows of ``y`` that are not tokens of an expert."""
    written = 0
    for rows in (*experts, slice(y.shape[0], y.shape[0])):
        if written < rows.start:
            y[written : rows.start] = 0
        written = max(written, rows.stop)


# ------------------------------------------------------------------ fake


def _fake_quantize_at(x: Tensor, places: Tensor, direction: Direction, dtype: torch.dtype) -> Tensor:
    return x.new_empty((places.shape[0], x.shape[1]), dtype=dtype).mT


def _fake_requantize_at(packed: Packed, places: Tensor, direction: Direction) -> Tensor:
    return packed.codes.new_empty((places.shape[0], packed.length), dtype=packed.dtype).mT


def _fake_quantized_product(
    left: Tensor, right: Tensor, groups: Groups, direction: Direction, packs: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape = right.shape if packs else (0, *right.shape[1:])
    return left.new_empty((left.shape[0], right.shape[1])), *empty_bytes(right, shape, direction.spec)


def _fake_requantized_product(left: Tensor, packed: Packed, groups: Groups, direction: Direction) -> Tensor:
    return left.new_empty((left.shape[0], packed.length))


# ------------------------------------------------------------------ CPU


def _quantize_at(x: Tensor, places: Tensor, direction: Direction, dtype: torch.dtype) -> Tensor:
    y = _fake_quantize_at(x, places, direction, dtype)
    if y.numel():
        source = (x if x.stride(1) == 1 else x.contiguous()).mT
        cpu.quantize(source.unsqueeze(0), y.unsqueeze(0), direction, places=places.contiguous())
    return y


def _requantize_at(packed: Packed, places: Tensor, direction: Direction) -> Tensor:
    y = _fake_requantize_at(packed, places, direction)
    if y.numel():
        cpu.requantize(packed.bytes, packed.spec, y.unsqueeze(0), direction, places.contiguous())
    return y


def _quantized_product(
    left: Tensor, right: Tensor, groups: Groups, direction: Direction, packs: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, codes, scales = _fake_quantized_product(left, right, groups, direction, packs)
    if right.stride(2) != 1 and (packs or right.stride(1) != 1):
        count, length = right.shape[1:]  # contiguous() leaves the strides of axes of length 1
        right = right.contiguous().as_strided(right.shape, (count * length, length, 1))
    count, length = (
        right.shape[1],
        right.shape[2] if direction.rotation is None else direction.rotation.padded(right.shape[2]),
    )
    along = right.stride(2) == 1
    buffer = left.new_empty((count, length)) if along else left.new_empty((length, count)).mT
    quantize = cpu.matrix_quantizer(right, buffer, direction, (codes, scales) if packs else None)
    for expert in _multiplied(y, left, buffer, groups, quantize):
        if packs:
            codes[expert] = scales[expert] = 0  # nobody reads the bytes of an expert without tokens
    return y, codes, scales


def _requantized_product(left: Tensor, packed: Packed, groups: Groups, direction: Direction) -> Tensor:
    y = _fake_requantized_product(left, packed, groups, direction)
    buffer = torch.empty((packed.codes.shape[1], packed.length), dtype=packed.dtype).mT
    bytes_ = packed.bytes
    _multiplied(y, left, buffer, groups, cpu.matrix_requantizer(bytes_, packed.spec, buffer, direction))
    return y


def _multiplied(y: Tensor, left: Tensor, right: Tensor, groups: Groups, quantize: Callable[[int], None]) -> list[int]:
    """Write the product of every expert into ``y``. Return the experts without tokens; they are not quantized.

    Args:
        right: a buffer into which ``quantize`` writes the matrix of an expert.
    """
    experts = list(tokens_of_experts(groups.starts, groups.sizes, left.shape[0]))
    zero_others(y, experts)
    for expert, rows in enumerate(experts):
        if rows.start < rows.stop:
            quantize(expert)
            product_into(y[rows], left[rows], right, None if groups.gamma is None else groups.gamma[expert])
    return [expert for expert, rows in enumerate(experts) if rows.start == rows.stop]


# ------------------------------------------------------------------ declarations


def _flops(left: torch.Size, right: torch.Size, *rest: Any, out_shape: Any, **options: Any) -> int:
    """Count 2·T·N·K."""
    return 2 * left.numel() * right[1]


def _requantized_flops(left: torch.Size, *rest: Any, out_shape: torch.Size, **options: Any) -> int:
    return 2 * left.numel() * out_shape[1]


_GROUPS = Structure(("Tensor starts", "Tensor sizes", "Tensor? gamma"), Groups)
_EXACT = [torch.Tag.needs_exact_strides]
operator(
    "quantize_at(Tensor x, Tensor places, Direction direction, ScalarType dtype) -> Tensor",
    _fake_quantize_at,
    tags=_EXACT,
    structures={"Direction": ROTATED},
    CPU=_quantize_at,
)
operator(
    "requantize_at(Packed packed, Tensor places, Direction direction) -> Tensor",
    _fake_requantize_at,
    structures={"Packed": PACKED, "Direction": DIRECTION},
    CPU=_requantize_at,
)
operator(
    "quantized_product(Tensor left, Tensor right, Groups groups, Direction direction, bool packs) "
    "-> (Tensor, Tensor, Tensor)",
    _fake_quantized_product,
    tags=_EXACT,
    flops=_flops,
    structures={"Groups": _GROUPS, "Direction": WHOLE},
    CPU=_quantized_product,
)
operator(
    "requantized_product(Tensor left, Packed packed, Groups groups, Direction direction) -> Tensor",
    _fake_requantized_product,
    tags=_EXACT,
    flops=_requantized_flops,
    structures={"Groups": _GROUPS, "Packed": PACKED, "Direction": DIRECTION},
    CPU=_requantized_product,
)
