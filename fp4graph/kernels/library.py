"""The operators of the kernels: their schemas, the shapes of their results, and their code for CPUs and GPUs.

:mod:`fp4graph.kernels.operators` calls the operators. They take a spec as text, so that a compiled graph in a cache
contains the whole spec, and a draw as its key, step and salts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp4graph.kernels import cpu, tiles
from fp4graph.kernels.direction import DIRECTION, GIVEN, PACKED, SOURCE, Direction, Packed, Source
from fp4graph.numerics.declare import operator
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.packing import empty_bytes

# ------------------------------------------------------------------ fake


def _fake_quantize(x: Tensor, direction: Direction, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _fake_maxima(x: Tensor, block: int, lines: int = 1) -> Tensor:
    along = (x.shape[-1] + block - 1) // block
    across = x.shape[:-1] if lines == 1 else (*x.shape[:-2], (x.shape[-2] + lines - 1) // lines)
    return x.new_empty((*across, along), dtype=torch.float32)


def _fake_elementwise(z: Tensor, *numbers: Any) -> Tensor:
    return torch.empty_like(z, memory_format=torch.contiguous_format)


def _fake_largest(score: Tensor, count: int) -> Tensor:
    return torch.empty_like(score, dtype=torch.bool, memory_format=torch.contiguous_format)


def _fake_quantize_and_pack(source: Source, direction: Direction) -> tuple[Tensor, Tensor, Tensor]:
    x = source.whole()
    return torch.empty_like(x, memory_format=torch.contiguous_format), *empty_bytes(x, x.shape, direction.spec)


def _fake_quantize_both(
    source: Source, rows: Direction, columns: Direction, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    x = source.whole()
    return x.new_empty(x.shape), x.new_empty(x.shape), tiles.empty_sums(x, sums)


def _fake_quantize_and_pack_columns(
    source: Source, rows: Direction, columns: Direction
) -> tuple[Tensor, Tensor, Tensor]:
    x = source.whole()
    return x.new_empty(x.shape), *empty_bytes(x, x.mT.shape, columns.spec)


def _fake_requantize(packed: Packed, direction: Direction) -> Tensor:
    return _fake_unpack(packed, None).mT


def _fake_unpack(packed: Packed, factor: Tensor | None) -> Tensor:
    return packed.codes.new_empty((*packed.codes.shape[:-1], packed.length), dtype=packed.dtype)


def _fake_gaussian(key: Tensor, step: Tensor | None, salts: list[int], count: int) -> Tensor:
    return key.new_empty((count,), dtype=torch.float32)


# ------------------------------------------------------------------ CPU


def _quantize(x: Tensor, direction: Direction, dtype: torch.dtype | None = None) -> Tensor:
    return _quantize_into(torch.empty_like(x, dtype=dtype), x, direction)


def _quantize_into(y: Tensor, x: Tensor, direction: Direction) -> Tensor:
    """Fill ``y``, of any layout, with the quantized ``x``, and return it."""
    if not y.numel():
        return y
    source, target = _matrices(x), _matrices(y)
    if source is not None and target is not None and (source.stride(2) == 1) == (target.stride(2) == 1):
        cpu.quantize(source, target, direction)
    else:
        source = rows_of(x.contiguous())
        target = torch.empty_like(source, dtype=y.dtype)
        cpu.quantize(source, target, direction)
        y.copy_(target.view(x.shape))
    return y


def _maxima(x: Tensor, block: int, lines: int = 1) -> Tensor:
    z = _fake_maxima(x, block, lines)
    if z.numel():
        source = _matrices(x)
        source = rows_of(x.contiguous()) if source is None else source
        cpu.maxima(source, z.view(-1, *_last_two(z)), block, lines)
    return z


def _mantissa(z: Tensor, divisor: float, bits: int) -> Tensor:
    y = _fake_elementwise(z)
    cpu.mantissas(z.contiguous(), y, divisor, bits)
    return y


def _group_maxima(z: Tensor, length: int) -> Tensor:
    y = _fake_elementwise(z)
    if z.numel():
        cpu.group_maxima(z.contiguous().view(-1, z.shape[-1]), y.view(-1, z.shape[-1]), length)
    return y


def _largest(score: Tensor, count: int) -> Tensor:
    chosen = _fake_largest(score, count)
    count = min(count, score.numel())
    if count <= 0:
        return chosen.zero_()
    cpu.largest(score.contiguous(), count, chosen)
    return chosen


def largest(score: Tensor, count: int) -> Tensor:
    """Compute :func:`fp4graph.kernels.operators.largest` in tensor code."""
    flat = score.reshape(-1)
    order = torch.sort(flat, descending=True, stable=True).indices
    place = torch.arange(flat.shape[0], device=score.device)
    return torch.empty_like(order).scatter(0, order, place).reshape(score.shape) < count


def _quantize_and_pack(source: Source, direction: Direction) -> tuple[Tensor, Tensor, Tensor]:
    x = source.whole()
    y, codes, scales = _fake_quantize_and_pack(Source.of(x), direction)
    if y.numel():
        rows = _matrices(x)
        rows = rows_of(x.contiguous()) if rows is None or rows.stride(2) != 1 else rows
        cpu.quantize(rows, rows_of(y), direction, (codes, scales))
    return y, codes, scales


def _quantize_both(
    source: Source, rows: Direction, columns: Direction, with_sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    x = source.whole().contiguous()
    in_rows, in_columns, sums = _fake_quantize_both(Source.of(x), rows, columns, with_sums)
    if sums.numel():
        padded = torch.nn.functional.pad(x.to(torch.float32), (0, 0, 0, -x.shape[-2] % tiles.TILE))
        sums.copy_(padded.view(-1, tiles.TILE, x.shape[-1]).sum(1))
    return _quantize_into(in_rows, x, rows), _quantize_into(in_columns.mT, x.mT, columns).mT, sums


def _quantize_and_pack_columns(source: Source, rows: Direction, columns: Direction) -> tuple[Tensor, Tensor, Tensor]:
    x = source.whole().contiguous()
    _, codes, scales = _quantize_and_pack(Source.of(x.mT), columns)
    return _quantize_into(x.new_empty(x.shape), x, rows), codes, scales


def _requantize(packed: Packed, direction: Direction) -> Tensor:
    y = _fake_requantize(packed, direction)
    if y.numel():
        cpu.requantize(packed.bytes, packed.spec, rows_of(y.mT).mT, direction)
    return y


def _unpack(packed: Packed, factor: Tensor | None) -> Tensor:
    y = _fake_unpack(packed, factor)
    y = y if factor is None else torch.empty_like(y, dtype=torch.float32)
    if y.numel():
        cpu.unpack(packed.bytes, packed.spec, rows_of(y))
    return y if factor is None else (y * factor).to(packed.dtype)


def _gaussian(key: Tensor, step: Tensor | None, salts: list[int], count: int) -> Tensor:
    z = _fake_gaussian(key, step, salts, count)
    cpu.gaussian(z, Draw(key, step, tuple(salts)))
    return z


def _last_two(x: Tensor) -> tuple[int, int]:
    return (1 if x.dim() == 1 else x.shape[-2]), x.shape[-1]


def rows_of(x: Tensor) -> Tensor:
    """Return a contiguous, non-empty ``x`` as ``[B, R, C]``, with contiguous strides even on axes of length 1."""
    rows, columns = _last_two(x)
    return x.as_strided((x.numel() // (rows * columns), rows, columns), (rows * columns, columns, 1))


def _matrices(x: Tensor) -> Tensor | None:
    """Return a view of ``x`` as ``[B, R, C]``, contiguous along R or C, or None if there is no such view."""
    try:
        matrices = x.view(-1, *_last_two(x))
    except RuntimeError:
        return None
    return matrices if 1 in matrices.stride()[1:] else None


# ------------------------------------------------------------------ declarations


def _on_gpu(name: str) -> Callable[..., Any]:
    """Return a function that runs operator ``name`` on a GPU. It imports Triton when it is first called."""

    def run(*arguments: Any) -> Any:
        from fp4graph.kernels import triton_quantize

        return getattr(triton_quantize, name)(*arguments)

    return run


_EXACT = torch.Tag.needs_exact_strides
_TAGS = {
    "quantize": [_EXACT],
    # dY may have any layout. With a fixed layout Inductor would copy dY, because the sum over dY reads it too.
    "quantize_both": [torch.Tag.flexible_layout],
}
for _schema, _fake, _run in (
    ("quantize(Tensor x, Given direction, ScalarType? dtype=None) -> Tensor", _fake_quantize, _quantize),
    (
        "quantize_and_pack(Source x, Direction direction) -> (Tensor, Tensor, Tensor)",
        _fake_quantize_and_pack,
        _quantize_and_pack,
    ),
    (
        "quantize_both(Source x, Given rows, Given columns, bool sums) -> (Tensor, Tensor, Tensor)",
        _fake_quantize_both,
        _quantize_both,
    ),
    (
        "quantize_and_pack_columns(Source x, Given rows, Given columns) -> (Tensor, Tensor, Tensor)",
        _fake_quantize_and_pack_columns,
        _quantize_and_pack_columns,
    ),
    ("requantize(Packed packed, Direction direction) -> Tensor", _fake_requantize, _requantize),
    ("unpack(Packed packed, Tensor? factor) -> Tensor", _fake_unpack, _unpack),
):
    _name = _schema.partition("(")[0]
    _structures = {"Source": SOURCE, "Direction": DIRECTION, "Given": GIVEN, "Packed": PACKED}
    operator(_schema, _fake, tags=_TAGS.get(_name, ()), structures=_structures, CPU=_run, CUDA=_on_gpu(_name))
#: The operators that take a :class:`Source`.
READERS = frozenset(
    getattr(torch.ops.fp4graph, name).default
    for name in ("quantize_and_pack", "quantize_both", "quantize_and_pack_columns")
)
operator("maxima(Tensor x, int block, int lines=1) -> Tensor", _fake_maxima, tags=[_EXACT], CPU=_maxima)
operator("mantissa(Tensor z, float divisor, int bits) -> Tensor", _fake_elementwise, CPU=_mantissa)
operator("group_maxima(Tensor z, int length) -> Tensor", _fake_elementwise, CPU=_group_maxima)
operator("largest(Tensor score, SymInt count) -> Tensor", _fake_largest, CPU=_largest)
operator("rounded(Tensor x) -> Tensor", torch.empty_like, CPU=torch.clone)
operator("gaussian(Tensor key, Tensor? step, int[] salts, SymInt count) -> Tensor", _fake_gaussian, CPU=_gaussian)
