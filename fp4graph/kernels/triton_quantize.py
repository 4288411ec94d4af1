"""The plain quantizer on a GPU: the code that the operators of :mod:`fp4graph.kernels.library` run there.

Values are those of :func:`fp4graph.fake_quantize` and :func:`fp4graph.pack`, to the last bit. All operators launch one
kernel, compiled for their inputs and outputs: values or bytes, along rows, along columns, or along both in one read.

On an H200 an earlier version of the kernel gave the bits of tensor code (docs/gpu.md). Tests run the kernel in Triton's
interpreter, and compile it to machine code for compute capability 9.0 and 10.0 (docs/kernels.md).

Tiles have 64 x 64 elements, because both directions need whole blocks, of up to 64 elements. A line of a bf16 tile is
then one cache line of 128 bytes. A line of its codes is one sector of 32 bytes in either direction, so no sector is
fetched or written twice. Each thread of four warps has 32 of the 4096 elements: enough loads in flight to hide latency,
and few enough to stay in registers.

The arithmetic and the names are those of ``numerics/scaling.py``, ``rounding.py`` and ``noise.py``: integer exponents,
no logarithms, and correctly rounded division (by exact reciprocals if scales are powers of two).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4graph.kernels.constants import constants
from fp4graph.kernels.direction import Direction, Packed, Source
from fp4graph.kernels.tiles import TILE, empty_sums
from fp4graph.kernels.triton_kernels import quantize_kernel
from fp4graph.numerics.packing import empty_bytes

WARPS = 4
#: Launch options: no fused multiply-adds, which round once where the numerics round twice; no flushing of subnormals.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False, "enable_reflect_ftz": False}
THROUGH = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_NO_BYTES = (None, None)
_NOTHING = (None, None, None, None)


def quantize(x: Tensor, direction: Direction, dtype: torch.dtype | None = None) -> Tensor:
    """Run the operator ``quantize``. This and the next functions also take CPU tensors, in Triton's interpreter."""
    y = torch.empty_like(x, dtype=dtype)
    if x.is_contiguous() and y.is_contiguous():
        _launch(Source.of(x), rows=_Written(direction, y))
    elif x.dim() > 1 and x.mT.is_contiguous() and y.mT.is_contiguous():
        _launch(Source.of(x.mT), columns=_Written(direction, y.mT))
    else:
        y.copy_(quantize(x.contiguous(), direction, dtype))
    return y


def quantize_and_pack(x: Source, direction: Direction) -> tuple[Tensor, Tensor, Tensor]:
    """Run the operator ``quantize_and_pack``."""
    y = _empty(x)
    own = empty_bytes(y, y.shape, direction.spec)
    _launch(x, rows=_Written(direction, y, own))
    return y, *own


def quantize_both(x: Source, rows: Direction, columns: Direction, with_sums: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Run the operator ``quantize_both``."""
    along_rows, along_columns = _empty(x), _empty(x)
    sums = empty_sums(along_rows, with_sums)
    directions = _Written(rows, along_rows), _Written(columns, along_columns)
    _launch(x, *directions, sums=sums if with_sums else None)
    return along_rows, along_columns, sums


def quantize_and_pack_columns(x: Source, rows: Direction, columns: Direction) -> tuple[Tensor, Tensor, Tensor]:
    """Run the operator ``quantize_and_pack_columns``."""
    y = _empty(x)
    own = empty_bytes(y, y.mT.shape, columns.spec)
    _launch(x, _Written(rows, y), _Written(columns, None, own))
    return y, *own


def requantize(packed: Packed, direction: Direction) -> Tensor:
    """Run the operator ``requantize``."""
    y = packed.codes.new_empty((*packed.codes.shape[:-1], packed.length), dtype=packed.dtype)
    _launch(packed, columns=_Written(direction, y))
    return y.mT


def unpack(packed: Packed, factor: Tensor | None = None) -> Tensor:
    """Run the operator ``unpack``."""
    y = packed.codes.new_empty((*packed.codes.shape[:-1], packed.length), dtype=packed.dtype)
    _launch(packed, rows=_Written(None, y), factor=factor)
    return y


def _empty(x: Source) -> Tensor:
    """Return an empty, contiguous tensor of the shape and dtype of ``x``."""
    first, *others = x.parts
    return first.new_empty((*first.shape[:-1], first.shape[-1] * (1 + len(others))), dtype=x.dtype)


class _Written(NamedTuple):
    """A direction and its outputs. The direction is None if values are written as they are read."""

    direction: Direction | None = None
    values: Tensor | None = None
    bytes: tuple[Tensor | None, Tensor | None] = _NO_BYTES

    @property
    def salts(self) -> tuple[int, ...]:
        return () if self.direction is None or self.direction.draw is None else self.direction.draw.salts

    @property
    def given(self) -> Sequence[Tensor | None]:
        if self.direction is None:
            return _NOTHING
        *given, stored = self.direction.given
        assert stored is None, "no request asks a GPU for another scale than elements were rounded under"
        return given

    @property
    def constants(self) -> Any:
        return None if self.direction is None else constants(self.direction.spec)


_NOT_WRITTEN = _Written()


def _launch(
    x: Source | Packed,
    rows: _Written = _NOT_WRITTEN,
    columns: _Written = _NOT_WRITTEN,
    *,
    sums: Tensor | None = None,
    factor: Tensor | None = None,
) -> None:
    """Run the kernel on ``x [..., M, K]``. If both directions draw, they must have the same key and step."""
    read: tuple[Any, ...]
    if isinstance(x, Packed):
        first, length, width, read = x.codes, x.length, x.length, ((), *x.bytes)
    else:
        first, width = x.parts[0], x.parts[0].shape[-1]
        length = len(x.parts) * width
        read = tuple(part.contiguous() for part in x.parts), *_NO_BYTES
    *leading, m, k = *([1] if first.dim() == 1 else []), *first.shape[:-1], length
    if not math.prod([*leading, m, k]):
        return
    grid = (math.prod(leading) * triton.cdiv(m, TILE) * triton.cdiv(k, TILE),)
    given = *rows.given, *columns.given
    each = tuple(part is not None and part.numel() > 1 for part in given)
    results = rows.values, *rows.bytes, columns.values, *columns.bytes, sums
    draws = [
        one.direction.draw for one in (rows, columns) if one.direction is not None and one.direction.draw is not None
    ]
    key, step = (draws[0].key, draws[0].step) if draws else (None, None)
    formats = {
        "P": constants(x.spec) if isinstance(x, Packed) else None, "R": rows.constants, "C": columns.constants,
    }  # fmt: skip
    options = {"EACH_R": each[:4], "EACH_C": each[4:], "THROUGH": THROUGH[x.dtype], "TILE": TILE, **OPTIONS}
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        quantize_kernel[grid](
            *read, factor, *results, *given, key, step, rows.salts, columns.salts, m, k, width, **formats, **options
        )
