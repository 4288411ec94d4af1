"""Operators for the products of many experts on a CPU: quantizers that lay tokens out, and products that quantize.

They save passes over memory. The tokens of wgrad are read where they lie while they are quantized, and not copied to
their positions first. The weight of one expert is quantized into a buffer that stays in the cache, multiplied, and
overwritten by the next expert's; an expert without tokens is not quantized. Values are those of the quantizers of
:mod:`fp4graph.kernels.operators` and of the products of :mod:`fp4graph.ops.grouped`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fp4graph.kernels import cpu
from fp4graph.kernels.cpu_product import product_into
from fp4graph.kernels.library import BLOCKS, DRAW, drawn
from fp4graph.kernels.request import Blocks, PackedOperand, Request, flat
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.hadamard import BlockRotation
from fp4graph.numerics.packing import empty_bytes
from fp4graph.numerics.spec import QuantSpec

_library: Any = torch.library.Library("fp4graph", "FRAGMENT")  # type: ignore[no-untyped-call]
_PACKED = "str packed, SymInt length, ScalarType dtype"
_EXACT = [torch.Tag.needs_exact_strides]
_TURN = "Tensor? signs, int turn"  # of BlockRotation; 0 for none
_library.define(
    f"quantize_at(Tensor x, Tensor places, str spec, {DRAW}, {_TURN}, ScalarType dtype) -> Tensor", tags=_EXACT
)
_library.define(f"requantize_at(Tensor codes, Tensor scales, {_PACKED}, Tensor places, str spec, {DRAW}) -> Tensor")
_library.define(
    f"quantized_product(Tensor left, Tensor right, Tensor starts, Tensor sizes, Tensor? gamma, str spec, {DRAW},"
    f" {BLOCKS}, {_TURN}, bool packs) -> (Tensor, Tensor, Tensor)",
    tags=_EXACT,
)
_library.define(
    f"requantized_product(Tensor left, Tensor codes, Tensor scales, {_PACKED}, Tensor starts, Tensor sizes,"
    f" Tensor? gamma, str spec, {DRAW}) -> Tensor",
    tags=_EXACT,
)


def serves(dtype: torch.dtype, kind: str) -> bool:
    """True if these operators take tensors of ``dtype`` on devices of a ``kind``."""
    return kind == "cpu" and dtype in cpu.DTYPES


def quantize_at(
    x: Tensor | PackedOperand,
    places: Tensor,
    spec: QuantSpec,
    draw: Draw | None,
    dtype: torch.dtype,
    turn: BlockRotation | None = None,
) -> Tensor:
    """Return rows of ``x [T, C]`` at ``places``, transposed and quantized by ``spec``: ``[C, P]``, contiguous along C.

    Args:
        x: of a dtype that :func:`serves` knows.
        places: int64 ``[P]``; T stands for zeros.
        dtype: of the result.
        turn: rotates the rows at their places first, blocks along P, which they divide. Not of a packed ``x``.
    """
    to = places, spec.to_text(), *flat(spec, draw)
    if not isinstance(x, PackedOperand):
        # 16-bit operands are rounded to their own dtype first, as elsewhere; rotated ones are fp32.
        written = dtype if dtype in cpu.DTYPES and (turn is not None or x.dtype is torch.float32) else x.dtype
        y: Tensor = torch.ops.fp4graph.quantize_at(x, *to, *_flat_turn(turn), written)
    else:
        y = torch.ops.fp4graph.requantize_at(x.codes, x.scales, x.spec.to_text(), x.length, x.dtype, *to)
    return y.to(dtype)


def _flat_turn(turn: BlockRotation | None) -> tuple[Tensor | None, int]:
    return (None, 0) if turn is None else (turn.signs, turn.block)


def _turn(signs: Tensor | None, block: int) -> BlockRotation | None:
    return BlockRotation(block, None if signs is None else signs.contiguous()) if block else None


@dataclass(frozen=True, eq=False)
class Groups:
    """Which rows of the left operand are the tokens of which expert.

    Attributes:
        starts, sizes: the first token and the number of tokens of each expert, int32 ``[E]``.
        gamma: multiplies the accumulators of each expert, fp32 ``[E]``, or None.
    """

    starts: Tensor
    sizes: Tensor
    gamma: Tensor | None = None


def quantized_product(
    left: Tensor, right: Tensor, groups: Groups, how: Request, packs: bool = False, turn: BlockRotation | None = None
) -> tuple[Tensor, PackedOperand | None]:
    """Return ``left @ Q(right)ᵀ`` of every expert ``[T, N]``, and if ``packs`` the bytes of Q(right).

    Args:
        left: ``[T, K]``, of the dtype in which Q(right) is multiplied.
        right: ``[E, N, K]``, of a dtype that kernels read; that of ``left`` if ``packs``.
        how: ``right`` is quantized, blocks along K.
        turn: rotates ``right`` first, as ``left`` was, whose K is then filled up to whole blocks. Not if ``packs``.
    """
    quantizer = how.spec.to_text(), *flat(how.spec, how.draw), *how.given, *_flat_turn(turn)
    product = torch.ops.fp4graph.quantized_product
    y, codes, scales = product(left, right, groups.starts, groups.sizes, groups.gamma, *quantizer, packs)
    return y, PackedOperand(codes, scales, how.spec, right.shape[-1], right.dtype) if packs else None


def requantized_product(
    left: Tensor, right: PackedOperand, groups: Groups, spec: QuantSpec, draw: Draw | None
) -> Tensor:
    """Return :func:`quantized_product` with the transpose of what ``right`` holds, ``[E, K, N]``."""
    packed = right.spec.to_text(), right.length, right.dtype
    of_experts = groups.starts, groups.sizes, groups.gamma
    text, drawing = spec.to_text(), flat(spec, draw)
    y: Tensor = torch.ops.fp4graph.requantized_product(
        left, right.codes, right.scales, *packed, *of_experts, text, *drawing
    )
    return y


def tokens_of_experts(starts: Tensor, sizes: Tensor, tokens: int) -> Iterator[slice]:
    """Yield the tokens of each expert; raise ValueError where the offsets cannot be those of ``tokens`` tokens."""
    for expert, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        if size < 0 or start < 0 or start + size > tokens:
            raise ValueError(
                f"the group offsets of a grouped product must not decrease, and must not exceed the number of tokens; "
                f"expert {expert} would have {size} tokens from the {start}th on, of {tokens}"
            )
        yield slice(start, start + size)


def zero_others(y: Tensor, experts: Sequence[slice]) -> None:
    """Write zeros to the rows of ``y`` that are no expert's."""
    written = 0
    for own in (*experts, slice(y.shape[0], y.shape[0])):
        if written < own.start:
            y[written : own.start] = 0
        written = max(written, own.stop)


# ------------------------------------------------------------------ fake


def _fake_quantize_at(x: Tensor, places: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((places.shape[0], x.shape[1]), dtype=rest[-1]).mT


def _fake_requantize_at(
    codes: Tensor, scales: Tensor, packed: str, length: int, dtype: torch.dtype, places: Tensor, *rest: Any
) -> Tensor:
    return codes.new_empty((places.shape[0], length), dtype=dtype).mT


def _fake_quantized_product(
    left: Tensor,
    right: Tensor,
    starts: Tensor,
    sizes: Tensor,
    gamma: Tensor | None,
    spec: str,
    key: Tensor | None,
    step: Tensor | None,
    salts: Sequence[int],
    divisor: Tensor | None,
    statistic: Tensor | None,
    scale: Tensor | None,
    factor: Tensor | None,
    signs: Tensor | None,
    block: int,
    packs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = right.shape if packs else (0, *right.shape[1:])
    return left.new_empty((left.shape[0], right.shape[1])), *empty_bytes(right, shape, QuantSpec.from_text(spec))


def _fake_requantized_product(
    left: Tensor, codes: Tensor, scales: Tensor, packed: str, length: int, *rest: Any
) -> Tensor:
    return left.new_empty((left.shape[0], length))


# ------------------------------------------------------------------ CPU


def _quantize_at(
    x: Tensor,
    places: Tensor,
    spec: str,
    key: Tensor | None,
    step: Tensor | None,
    salts: Sequence[int],
    signs: Tensor | None,
    block: int,
    dtype: torch.dtype,
) -> Tensor:
    y = _fake_quantize_at(x, places, dtype)
    if y.numel():
        source = (x if x.stride(1) == 1 else x.contiguous()).mT
        how = Request(QuantSpec.from_text(spec), drawn(key, step, salts), rotation=_turn(signs, block))
        cpu.quantize(source.unsqueeze(0), y.unsqueeze(0), how, places=places.contiguous())
    return y


def _requantize_at(
    codes: Tensor,
    scales: Tensor,
    packed: str,
    length: int,
    dtype: torch.dtype,
    places: Tensor,
    spec: str,
    *draw: Any,
) -> Tensor:
    y = _fake_requantize_at(codes, scales, packed, length, dtype, places)
    if y.numel():
        bytes_ = codes.contiguous(), scales.contiguous()
        how = Request(QuantSpec.from_text(spec), drawn(*draw))
        cpu.requantize(bytes_, QuantSpec.from_text(packed), y.unsqueeze(0), how, places.contiguous())
    return y


def _quantized_product(
    left: Tensor,
    right: Tensor,
    starts: Tensor,
    sizes: Tensor,
    gamma: Tensor | None,
    spec: str,
    key: Tensor | None,
    step: Tensor | None,
    salts: Sequence[int],
    divisor: Tensor | None,
    statistic: Tensor | None,
    scale: Tensor | None,
    factor: Tensor | None,
    signs: Tensor | None,
    block: int,
    packs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    given = Blocks(divisor, statistic, scale, factor)
    turn, about = _turn(signs, block), (gamma, spec, key, step, salts, *given, signs, block, packs)
    y, codes, scales = _fake_quantized_product(left, right, starts, sizes, *about)
    how = Request(QuantSpec.from_text(spec), drawn(key, step, salts), given, turn)
    if right.stride(2) != 1 and (packs or right.stride(1) != 1):
        count, length = right.shape[1:]  # contiguous() leaves the strides of axes of length 1
        right = right.contiguous().as_strided(right.shape, (count * length, length, 1))
    count, length = right.shape[1], right.shape[2] if turn is None else turn.padded(right.shape[2])
    along = right.stride(2) == 1
    buffer = left.new_empty((count, length)) if along else left.new_empty((length, count)).mT
    quantize = cpu.matrix_quantizer(right, buffer, how, (codes, scales) if packs else None)
    experts = list(tokens_of_experts(starts, sizes, left.shape[0]))
    zero_others(y, experts)
    for expert, own in enumerate(experts):
        if own.start == own.stop:
            if packs:
                codes[expert] = scales[expert] = 0  # nobody reads them
            continue
        quantize(expert)
        product_into(y[own], left[own], buffer, None if gamma is None else gamma[expert])
    return y, codes, scales


def _requantized_product(
    left: Tensor,
    codes: Tensor,
    scales: Tensor,
    packed: str,
    length: int,
    dtype: torch.dtype,
    starts: Tensor,
    sizes: Tensor,
    gamma: Tensor | None,
    spec: str,
    *draw: Any,
) -> Tensor:
    y = _fake_requantized_product(left, codes, scales, packed, length)
    bytes_ = codes.contiguous(), scales.contiguous()
    buffer = torch.empty((codes.shape[1], length), dtype=dtype).mT
    how = Request(QuantSpec.from_text(spec), drawn(*draw))
    requantize = cpu.matrix_requantizer(bytes_, QuantSpec.from_text(packed), buffer, how)
    experts = list(tokens_of_experts(starts, sizes, left.shape[0]))
    zero_others(y, experts)
    for expert, own in enumerate(experts):
        if own.start < own.stop:
            requantize(expert)
            product_into(y[own], left[own], buffer, None if gamma is None else gamma[expert])
    return y


for _name, _fake, _run in (
    ("quantize_at", _fake_quantize_at, _quantize_at),
    ("requantize_at", _fake_requantize_at, _requantize_at),
    ("quantized_product", _fake_quantized_product, _quantized_product),
    ("requantized_product", _fake_requantized_product, _requantized_product),
):
    torch.library.register_fake(f"fp4graph::{_name}", _fake, lib=_library)
    _library.impl(_name, _run, "CPU")


@register_flop_formula(torch.ops.fp4graph.quantized_product)
def _flops(left: torch.Size, right: torch.Size, *rest: Any, out_shape: Any, **options: Any) -> int:
    """Count 2·T·N·K."""
    return 2 * left.numel() * right[1]


@register_flop_formula(torch.ops.fp4graph.requantized_product)
def _requantized_flops(left: torch.Size, *rest: Any, out_shape: torch.Size, **options: Any) -> int:
    return 2 * left.numel() * out_shape[1]
