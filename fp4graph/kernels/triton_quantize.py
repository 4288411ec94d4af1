"""The plain quantizer on a GPU: one read of a matrix, quantized along its rows and along its columns.

For ``x [..., M, K]`` and two specs without techniques, :func:`quantize_both` returns ``x`` quantized in blocks along K
and ``x`` quantized in blocks along M, both in the layout of ``x``; :func:`pack_both` gives the bytes of both instead.
Training needs both of an output's gradient (dgrad contracts over its columns, wgrad over its rows), and of a weight or
an input that the backward quantizes again: there ``columns`` has ``source: fprop``, and quantizes the result of
``rows``. Values are those of :func:`fp4graph.fake_quantize` and :func:`fp4graph.pack`, to the last bit.

**Opt-in.** The engine does not call this module: GPUs run the Triton code that Inductor writes. This kernel has never
run on a GPU. It is tested in Triton's interpreter, and compiled to machine code for compute capability 9.0 and 10.0.
docs/kernels.md says so in detail, and counts the bytes that one read saves.

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
from torch import Tensor

from fp4graph.errors import Error
from fp4graph.kernels.constants import constants
from fp4graph.kernels.triton_numerics import quantize_kernel
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.packing import Packed, empty_bytes
from fp4graph.numerics.spec import QuantSpec

TILE = 64
WARPS = 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Options of the launch: no multiply-adds, which round once where the numerics round twice; no flushing of subnormals.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False, "enable_reflect_ftz": False}


def supports(spec: QuantSpec) -> bool:
    """True if the kernel knows ``spec``: blocks of 2, 4, ... or 64 elements, codes of up to a byte."""
    block = spec.block
    return isinstance(block, int) and block > 1 and TILE % block == 0 and spec.element.code_bits <= 8


def quantize_both(
    x: Tensor,
    rows: QuantSpec,
    columns: QuantSpec,
    draw: Draw | None = None,
    row_salts: tuple[int, ...] = (),
    column_salts: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Return ``fake_quantize(x, rows)`` and ``fake_quantize(x.mT, columns).mT``.

    Random bits are drawn for the elements as they are numbered there.

    Args:
        x: ``[..., M, K]`` on a CUDA device, fp32, bf16 or fp16.
        columns: with ``source: fprop`` it quantizes the result of ``rows`` instead of ``x``.
        draw: needed if a spec rounds stochastically.
        row_salts, column_salts: rows draw from ``draw.salted(*row_salts)``, columns likewise.

    Returns:
        Two contiguous tensors of the shape and dtype of ``x``.

    Raises:
        Error: for a spec, dtype or device that the kernel does not know, and if ``draw`` is needed and not given.
    """
    arguments = _arguments(x, (rows, row_salts), (columns, column_salts), draw)
    result: tuple[Tensor, Tensor] = torch.ops.fp4graph.quantize_both(x, *arguments)
    return result


def pack_both(
    x: Tensor,
    rows: QuantSpec,
    columns: QuantSpec,
    draw: Draw | None = None,
    row_salts: tuple[int, ...] = (),
    column_salts: tuple[int, ...] = (),
) -> tuple[Packed, Packed]:
    """Return ``pack(x, rows)`` and ``pack(x.mT, columns)``: the bytes of the results of :func:`quantize_both`."""
    arguments = _arguments(x, (rows, row_salts), (columns, column_salts), draw)
    row_codes, row_scales, column_codes, column_scales = torch.ops.fp4graph.pack_both(x, *arguments)
    along_rows = Packed(row_codes, row_scales, rows, tuple(x.shape), -1, x.dtype)
    return along_rows, Packed(column_codes, column_scales, columns, tuple(x.mT.shape), -1, x.dtype)


_Direction = tuple[QuantSpec, tuple[int, ...]]


def _arguments(x: Tensor, rows: _Direction, columns: _Direction, draw: Draw | None) -> tuple[object, ...]:
    """Return the operators' arguments after x, checked; a direction is a spec and its salts."""
    for spec, _ in (rows, columns):
        if not supports(spec):
            raise Error(
                f"the Triton kernel takes blocks of 2, 4, ... or {TILE} elements and codes of up to 8 bits; got "
                f"{spec.element.name} in blocks of {spec.block}. Use fp4graph.fake_quantize"
            )
        if spec.needs_key and draw is None:
            raise Error(
                "a spec rounds stochastically: pass draw=Draw(key) with a key of fp4graph.numerics.noise.make_key"
            )
    if x.device.type != "cuda" or x.dtype not in DTYPES or x.dim() < 2:
        raise Error(
            "the Triton kernel quantizes matrices of fp32, bf16 or fp16 on a CUDA device; got "
            f"{x.dtype} {list(x.shape)} on {x.device}. Use fp4graph.fake_quantize"
        )
    key, step, salts = (None, None, ()) if draw is None else (draw.key, draw.step, draw.salts)
    return rows[0].to_text(), columns[0].to_text(), key, step, [*salts, *rows[1]], [*salts, *columns[1]]


# ------------------------------------------------------------------ operators, opaque to compilers

_ARGUMENTS = "Tensor x, str rows, str columns, Tensor? key, Tensor? step, int[] row_salts, int[] column_salts"
_library: Any = torch.library.Library("fp4graph", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"quantize_both({_ARGUMENTS}) -> (Tensor, Tensor)")
_library.define(f"pack_both({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)")


def empty_values(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return the tensors that ``quantize_both`` writes to."""
    return x.new_empty(x.shape), x.new_empty(x.shape)


def empty_both(x: Tensor, rows: str, columns: str, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors that ``pack_both`` writes to."""
    *leading, m, k = x.shape
    row_bytes = empty_bytes(x, x.shape, QuantSpec.from_text(rows))
    return *row_bytes, *empty_bytes(x, (*leading, k, m), QuantSpec.from_text(columns))


def run_quantize_both(x: Tensor, rows: str, columns: str, *noise: Any) -> tuple[Tensor, Tensor]:
    """Run the operator ``quantize_both``; on CPU tensors in Triton's interpreter."""
    along_rows, along_columns = empty_values(x)
    _launch(x, (along_rows, x, x), (along_columns, x, x), rows, columns, *noise, pack=False)
    return along_rows, along_columns


def run_pack_both(x: Tensor, rows: str, columns: str, *noise: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the operator ``pack_both``; on CPU tensors in Triton's interpreter."""
    row_codes, row_scales, column_codes, column_scales = result = empty_both(x, rows, columns)
    _launch(x, (x, row_codes, row_scales), (x, column_codes, column_scales), rows, columns, *noise, pack=True)
    return result


def _launch(
    x: Tensor,
    row_results: tuple[Tensor, Tensor, Tensor],
    column_results: tuple[Tensor, Tensor, Tensor],
    rows: str,
    columns: str,
    key: Tensor | None,
    step: Tensor | None,
    row_salts: Sequence[int],
    column_salts: Sequence[int],
    *,
    pack: bool,
) -> None:
    """Run the kernel; a direction's results are (values, codes, scales), with x for those that are not written."""
    if not x.numel():
        return
    x = x.contiguous()
    *leading, m, k = x.shape
    first, second = QuantSpec.from_text(rows), QuantSpec.from_text(columns)
    grid = (math.prod(leading) * triton.cdiv(m, TILE) * triton.cdiv(k, TILE),)
    formats = {"R": constants(first), "C": constants(second), "CHAINED": second.source == "fprop"}
    salts = tuple(row_salts), tuple(column_salts)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        quantize_kernel[grid](
            x, *row_results, *column_results, key, step, *salts, m, k, **formats, PACK=pack, TILE=TILE, **OPTIONS
        )


for _name, _fake, _run in (
    ("quantize_both", empty_values, run_quantize_both),
    ("pack_both", empty_both, run_pack_both),
):
    torch.library.register_fake(f"fp4graph::{_name}", _fake, lib=_library)
    _library.impl(_name, _run, "CUDA")
