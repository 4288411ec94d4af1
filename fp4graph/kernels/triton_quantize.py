"""The plain quantizer on a GPU: what the operators of :mod:`fp4graph.kernels.library` run there.

Values are those of :func:`fp4graph.fake_quantize` and :func:`fp4graph.pack`, to the last bit. All operators launch one
kernel, compiled for what it reads and writes: values or bytes, along rows, along columns, or along both in one read.

**No GPU has run this kernel.** It is tested in Triton's interpreter, and compiled to machine code for compute
capability 9.0 and 10.0; docs/kernels.md says how.

Why tiles of 64 x 64. Both directions need whole blocks, of up to 64 elements. A line of a bf16 tile is then one cache
line of 128 bytes, and a line of its codes one sector of 32 in either direction, so that no sector is fetched or written
twice. 4096 elements are 32 for each thread of four warps: enough loads in flight to hide each other's latency, and few
enough to stay in a thread's registers.

The numerics and the names of their parts are those of ``numerics/scaling.py``, ``rounding.py`` and ``noise.py``:
exponents as integers, no logarithm, division correctly rounded (or by exact reciprocals, where scales are powers of
two).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4graph.kernels.constants import constants
from fp4graph.kernels.tiles import TILE, empty_sums
from fp4graph.kernels.triton_kernels import quantize_kernel
from fp4graph.numerics.packing import empty_bytes
from fp4graph.numerics.spec import QuantSpec

WARPS = 4
#: Options of the launch: no multiply-adds, which round once where the numerics round twice; no flushing of subnormals.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False, "enable_reflect_ftz": False}
THROUGH = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_NO_BYTES = (None, None)
_NOTHING_GIVEN = (None, None, None, None)
_NO_DIRECTION: tuple[None, None, tuple[()], tuple[()]] = (None, None, (), ())


def quantize(
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
    """Run the operator ``quantize``, like all of these on CPU tensors in Triton's interpreter."""
    y, blocks = torch.empty_like(x, dtype=dtype), (divisor, statistic, scale, factor)
    if x.is_contiguous() and y.is_contiguous():
        _launch(x, _NO_BYTES, None, (y, spec, salts, blocks), None, key, step)
    elif x.dim() > 1 and x.mT.is_contiguous() and y.mT.is_contiguous():
        _launch(x.mT, _NO_BYTES, None, None, (y.mT, spec, salts, blocks), key, step)
    else:
        y.copy_(quantize(x.contiguous(), spec, key, step, salts, *blocks, dtype))
    return y


def quantize_and_pack(
    x: Tensor, spec: str, key: Tensor | None, step: Tensor | None, salts: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the operator ``quantize_and_pack``."""
    y, own = x.new_empty(x.shape), empty_bytes(x, x.shape, QuantSpec.from_text(spec))
    _launch(x.contiguous(), _NO_BYTES, None, (y, spec, salts, ()), None, key, step, row_bytes=own)
    return y, *own


def quantize_both(
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
    """Run the operator ``quantize_both``."""
    along_rows, along_columns, sums = x.new_empty(x.shape), x.new_empty(x.shape), empty_sums(x, with_sums)
    directions = (along_rows, rows, row_salts, row_given), (along_columns, columns, column_salts, column_given)
    _launch(x.contiguous(), _NO_BYTES, None, *directions, key, step, sums=sums if with_sums else None)
    return along_rows, along_columns, sums


def quantize_and_pack_columns(
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
    """Run the operator ``quantize_and_pack_columns``."""
    y, own = x.new_empty(x.shape), empty_bytes(x, x.mT.shape, QuantSpec.from_text(columns))
    directions = (y, rows, row_salts, row_given), (None, columns, column_salts, column_given)
    _launch(x.contiguous(), _NO_BYTES, None, *directions, key, step, column_bytes=own)
    return y, *own


def requantize(
    codes: Tensor,
    scales: Tensor,
    packed: str,
    length: int,
    dtype: torch.dtype,
    spec: str,
    key: Tensor | None,
    step: Tensor | None,
    salts: Sequence[int],
) -> Tensor:
    """Run the operator ``requantize``."""
    y = codes.new_empty((*codes.shape[:-1], length), dtype=dtype)
    _launch(y, (codes.contiguous(), scales.contiguous()), packed, None, (y, spec, salts, ()), key, step)
    return y.mT


def unpack(
    codes: Tensor, scales: Tensor, packed: str, length: int, dtype: torch.dtype, factor: Tensor | None = None
) -> Tensor:
    """Run the operator ``unpack``."""
    y = codes.new_empty((*codes.shape[:-1], length), dtype=dtype)
    source = codes.contiguous(), scales.contiguous()
    _launch(y, source, packed, (y, None, (), ()), None, None, None, factor=factor)
    return y


#: What is written, the spec, the salts, and the four tensors that techniques give or none.
_Direction = tuple[Tensor | None, str | None, Sequence[int], Sequence[Tensor | None]]
_Bytes = tuple[Tensor | None, Tensor | None]


def _launch(
    x: Tensor,
    source: _Bytes,
    packed: str | None,
    rows: _Direction | None,
    columns: _Direction | None,
    key: Tensor | None,
    step: Tensor | None,
    *,
    row_bytes: _Bytes = _NO_BYTES,
    column_bytes: _Bytes = _NO_BYTES,
    sums: Tensor | None = None,
    factor: Tensor | None = None,
) -> None:
    """Run the kernel on ``x [..., M, K]``, or where ``packed`` names a spec, on the ``source`` that has its shape."""
    if not x.numel():
        return
    *leading, m, k = (1, *x.shape) if x.dim() == 1 else x.shape
    grid = (math.prod(leading) * triton.cdiv(m, TILE) * triton.cdiv(k, TILE),)
    row_values, row_spec, row_salts, row_given = rows or _NO_DIRECTION
    column_values, column_spec, column_salts, column_given = columns or _NO_DIRECTION
    given = *(row_given or _NOTHING_GIVEN), *(column_given or _NOTHING_GIVEN)
    each = tuple(part is not None and part.numel() > 1 for part in given)
    results = row_values, *row_bytes, column_values, *column_bytes, sums
    noise = key, step, tuple(row_salts), tuple(column_salts)
    formats = dict(zip("PRC", map(_constants, (packed, row_spec, column_spec)), strict=True))
    options = {"EACH_R": each[:4], "EACH_C": each[4:], "THROUGH": THROUGH[x.dtype], "TILE": TILE, **OPTIONS}
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        quantize_kernel[grid](
            x if packed is None else None, *source, factor, *results, *given, *noise, m, k, **formats, **options
        )


def _constants(spec: str | None) -> Any:
    return None if spec is None else constants(QuantSpec.from_text(spec))
