"""The kernels' operators: their schemas, their results' shapes, and what runs on a CPU and on a GPU.

:mod:`fp4graph.kernels.operators` calls them. A spec is passed as text, so that a compiled graph in a cache names it in
full; a draw is passed as its key, step and salts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp4graph.kernels import cpu, tiles
from fp4graph.kernels.request import Blocks, Request
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.packing import empty_bytes
from fp4graph.numerics.spec import QuantSpec

DRAW = "Tensor? key, Tensor? step, int[] salts"
BLOCKS = "Tensor? divisor, Tensor? statistic, Tensor? scale, Tensor? factor"
#: Of two directions; what is given of a direction's blocks is as of ``quantize``, or an empty list.
_BOTH = (
    "Tensor x, str rows, str columns, Tensor? key, Tensor? step, int[] row_salts, int[] column_salts, "
    "Tensor?[] row_given, Tensor?[] column_given"
)
_library: Any = torch.library.Library("fp4graph", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    f"quantize(Tensor x, str spec, {DRAW}, {BLOCKS}, ScalarType? dtype=None) -> Tensor",
    tags=[torch.Tag.needs_exact_strides],
)
_library.define("maxima(Tensor x, int block, int lines=1) -> Tensor", tags=[torch.Tag.needs_exact_strides])
_library.define(f"quantize_and_pack(Tensor x, str spec, {DRAW}) -> (Tensor, Tensor, Tensor)")
_library.define(f"quantize_and_pack_columns({_BOTH}) -> (Tensor, Tensor, Tensor)")
# Any layout will do. For a fixed one Inductor would write a copy of what the sum over dY reads too.
_library.define(f"quantize_both({_BOTH}, bool sums) -> (Tensor, Tensor, Tensor)", tags=[torch.Tag.flexible_layout])
_library.define(
    f"requantize(Tensor codes, Tensor scales, str packed, SymInt length, ScalarType dtype, str spec, {DRAW}) -> Tensor"
)
_library.define(
    "unpack(Tensor codes, Tensor scales, str packed, SymInt length, ScalarType dtype, Tensor? factor) -> Tensor"
)
_library.define("mantissa(Tensor z, float divisor, int bits) -> Tensor")
_library.define("group_maxima(Tensor z, int length) -> Tensor")
_library.define("largest(Tensor score, SymInt count) -> Tensor")
_library.define("gaussian(Tensor key, Tensor? step, int[] salts, SymInt count) -> Tensor")


def drawn(key: Tensor | None, step: Tensor | None, salts: Sequence[int]) -> Draw | None:
    """Return the draw that an operator was given in parts."""
    return None if key is None else Draw(key, step, tuple(salts))


# ------------------------------------------------------------------ fake


def _fake_quantize(
    x: Tensor,
    spec: str,
    key: Tensor | None,
    step: Tensor | None,
    salts: Sequence[int],
    divisor: Tensor | None,
    statistic: Tensor | None,
    scale: Tensor | None,
    factor: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _fake_maxima(x: Tensor, block: int, lines: int = 1) -> Tensor:
    along = (x.shape[-1] + block - 1) // block
    across = x.shape[:-1] if lines == 1 else (*x.shape[:-2], (x.shape[-2] + lines - 1) // lines)
    return x.new_empty((*across, along), dtype=torch.float32)


def _fake_elementwise(z: Tensor, *numbers: Any) -> Tensor:
    return torch.empty_like(z, memory_format=torch.contiguous_format)


def _fake_largest(score: Tensor, count: int) -> Tensor:
    return torch.empty_like(score, dtype=torch.bool, memory_format=torch.contiguous_format)


def _fake_quantize_and_pack(x: Tensor, spec: str, *draw: Any) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, *empty_bytes(x, x.shape, QuantSpec.from_text(spec))


def _fake_quantize_both(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), tiles.empty_sums(x, rest[-1])


def _fake_quantize_and_pack_columns(x: Tensor, rows: str, columns: str, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), *empty_bytes(x, x.mT.shape, QuantSpec.from_text(columns))


def _fake_requantize(
    codes: Tensor, scales: Tensor, packed: str, length: int, dtype: torch.dtype, spec: str, *draw: Any
) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], length), dtype=dtype).mT


def _fake_unpack(
    codes: Tensor, scales: Tensor, packed: str, length: int, dtype: torch.dtype, factor: Tensor | None
) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], length), dtype=dtype)


def _fake_gaussian(key: Tensor, step: Tensor | None, salts: Sequence[int], count: int) -> Tensor:
    return key.new_empty((count,), dtype=torch.float32)


# ------------------------------------------------------------------ CPU


def _quantize(
    x: Tensor,
    spec: str,
    key: Tensor | None,
    step: Tensor | None,
    salts: Sequence[int],
    divisor: Tensor | None = None,
    statistic: Tensor | None = None,
    scale: Tensor | None = None,
    factor: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    blocks = divisor, statistic, scale, factor
    y = torch.empty_like(x, dtype=dtype)
    if not y.numel():
        return y
    how = Request(QuantSpec.from_text(spec), drawn(key, step, salts), Blocks(*blocks))
    source, target = _matrices(x), _matrices(y)
    if source is not None and target is not None and (source.stride(2) == 1) == (target.stride(2) == 1):
        cpu.quantize(source, target, how)
    else:
        source = _rows(x.contiguous())
        target = torch.empty_like(source, dtype=dtype)
        cpu.quantize(source, target, how)
        y.copy_(target.view(x.shape))
    return y


def _maxima(x: Tensor, block: int, lines: int = 1) -> Tensor:
    z = _fake_maxima(x, block, lines)
    if z.numel():
        source = _matrices(x)
        source = _rows(x.contiguous()) if source is None else source
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


def largest(score: Tensor, count: int) -> Tensor:
    """Return :func:`fp4graph.kernels.operators.largest` by tensor code."""
    flat = score.reshape(-1)
    order = torch.sort(flat, descending=True, stable=True).indices
    place = torch.arange(flat.shape[0], device=score.device)
    return torch.empty_like(order).scatter(0, order, place).reshape(score.shape) < count


def _quantize_and_pack(
    x: Tensor,
    spec: str,
    key: Tensor | None,
    step: Tensor | None,
    salts: Sequence[int],
    given: Sequence[Tensor | None] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    y, codes, scales = _fake_quantize_and_pack(x, spec)
    if y.numel():
        source, target = _matrices(x), _rows(y)
        source = _rows(x.contiguous()) if source is None or source.stride(2) != 1 else source
        how = Request(QuantSpec.from_text(spec), drawn(key, step, salts), Blocks(*given))
        cpu.quantize(source, target, how, (codes, scales))
    return y, codes, scales


def _quantize_both(
    x: Tensor,
    rows: str,
    columns: str,
    key: Tensor | None,
    step: Tensor | None,
    row_salts: Sequence[int],
    column_salts: Sequence[int],
    row_given: Sequence[Tensor | None],
    column_given: Sequence[Tensor | None],
    with_sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    along_columns = _quantize(x.mT, columns, key, step, column_salts, *Blocks(*column_given))
    sums = tiles.empty_sums(x, with_sums)
    if sums.numel():
        padded = torch.nn.functional.pad(x.to(torch.float32), (0, 0, 0, -x.shape[-2] % tiles.TILE))
        sums.copy_(padded.view(-1, tiles.TILE, x.shape[-1]).sum(1))
    return _quantize(x, rows, key, step, row_salts, *Blocks(*row_given)), along_columns.mT, sums


def _quantize_and_pack_columns(
    x: Tensor,
    rows: str,
    columns: str,
    key: Tensor | None,
    step: Tensor | None,
    row_salts: Sequence[int],
    column_salts: Sequence[int],
    row_given: Sequence[Tensor | None],
    column_given: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    _, codes, scales = _quantize_and_pack(x.mT, columns, key, step, column_salts, column_given)
    return _quantize(x, rows, key, step, row_salts, *Blocks(*row_given)), codes, scales


def _requantize(
    codes: Tensor, scales: Tensor, packed: str, length: int, dtype: torch.dtype, spec: str, *draw: Any
) -> Tensor:
    y = _fake_requantize(codes, scales, packed, length, dtype, spec)
    if y.numel():
        target = _rows(y.mT).mT
        how = Request(QuantSpec.from_text(spec), drawn(*draw))
        cpu.requantize((codes.contiguous(), scales.contiguous()), QuantSpec.from_text(packed), target, how)
    return y


def _unpack(
    codes: Tensor, scales: Tensor, packed: str, length: int, dtype: torch.dtype, factor: Tensor | None
) -> Tensor:
    y = _fake_unpack(codes, scales, packed, length, dtype if factor is None else torch.float32, factor)
    if y.numel():
        cpu.unpack((codes.contiguous(), scales.contiguous()), QuantSpec.from_text(packed), _rows(y))
    return y if factor is None else (y * factor).to(dtype)


def _gaussian(key: Tensor, step: Tensor | None, salts: Sequence[int], count: int) -> Tensor:
    z = _fake_gaussian(key, step, salts, count)
    cpu.gaussian(z, Draw(key, step, tuple(salts)))
    return z


def _last_two(x: Tensor) -> tuple[int, int]:
    return (1 if x.dim() == 1 else x.shape[-2]), x.shape[-1]


def _rows(x: Tensor) -> Tensor:
    """Return a contiguous, non-empty ``x`` as ``[B, R, C]``, its strides contiguous even where an axis has length 1."""
    rows, columns = _last_two(x)
    return x.as_strided((x.numel() // (rows * columns), rows, columns), (rows * columns, columns, 1))


def _matrices(x: Tensor) -> Tensor | None:
    """Return ``x``, uncopied, as ``[B, R, C]`` contiguous along one of its last two axes; None where it is not."""
    try:
        matrices = x.view(-1, *_last_two(x))
    except RuntimeError:
        return None
    return matrices if 1 in matrices.stride()[1:] else None


def _on_gpu(name: str) -> Callable[..., Any]:
    """Return what runs operator ``name`` on a GPU; Triton is imported when it is first called."""

    def run(*arguments: Any) -> Any:
        from fp4graph.kernels import triton_quantize

        return getattr(triton_quantize, name)(*arguments)

    return run


for _name, _fake, _run in (
    ("quantize", _fake_quantize, _quantize),
    ("maxima", _fake_maxima, _maxima),
    ("mantissa", _fake_elementwise, _mantissa),
    ("group_maxima", _fake_elementwise, _group_maxima),
    ("largest", _fake_largest, largest),
    ("quantize_and_pack", _fake_quantize_and_pack, _quantize_and_pack),
    ("quantize_both", _fake_quantize_both, _quantize_both),
    ("quantize_and_pack_columns", _fake_quantize_and_pack_columns, _quantize_and_pack_columns),
    ("requantize", _fake_requantize, _requantize),
    ("unpack", _fake_unpack, _unpack),
    ("gaussian", _fake_gaussian, _gaussian),
):
    torch.library.register_fake(f"fp4graph::{_name}", _fake, lib=_library)
    _library.impl(_name, _run, "CPU")
for _name in ("quantize", "quantize_and_pack", "quantize_both", "quantize_and_pack_columns", "requantize", "unpack"):
    _library.impl(_name, _on_gpu(_name), "CUDA")
