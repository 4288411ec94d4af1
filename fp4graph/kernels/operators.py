"""The operators that the engine calls for plain quantizers and for noise: opaque to compilers, run by hand-written
kernels.

An operator does not fuse with its neighbours, and that is intended: on a CPU the kernel of
:mod:`fp4graph.kernels.cpu` takes a fraction of the time of the code that Inductor generates, and is compiled once for
all sites and shapes, where Inductor compiles each. Values are those of :func:`fp4graph.fake_quantize`.

A spec is passed as text, so that a compiled graph in a cache names it in full; a draw is passed as its key, step and
salts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp4graph.kernels import cpu
from fp4graph.numerics import noise, scaling, target
from fp4graph.numerics.blocking import Blocking, Groups, block_length, is_scalar
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.packing import empty_bytes
from fp4graph.numerics.spec import QuantSpec

DRAW = "Tensor? key, Tensor? step, int[] salts"
_library: Any = torch.library.Library("fp4graph", "FRAGMENT")  # type: ignore[no-untyped-call]
_BLOCKS = "Tensor? divisor, Tensor? statistic, Tensor? scale, Tensor? factor"
_library.define(f"quantize(Tensor x, str spec, {DRAW}, {_BLOCKS}) -> Tensor", tags=[torch.Tag.needs_exact_strides])
_library.define("maxima(Tensor x, int block) -> Tensor", tags=[torch.Tag.needs_exact_strides])
_library.define(f"quantize_and_pack(Tensor x, str spec, {DRAW}) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"requantize(Tensor codes, Tensor scales, str packed, SymInt length, ScalarType dtype, str spec, {DRAW}) -> Tensor"
)
_library.define("unpack(Tensor codes, Tensor scales, str packed, SymInt length, ScalarType dtype) -> Tensor")
_library.define("mantissa(Tensor z, float divisor, int bits) -> Tensor")
_library.define("group_maxima(Tensor z, int length) -> Tensor")
_library.define("largest(Tensor score, SymInt count) -> Tensor")
_library.define("gaussian(Tensor key, Tensor? step, int[] salts, SymInt count) -> Tensor")

#: Dtypes that kernels read and write; others go through fp32.
DTYPES = frozenset(cpu.DTYPES)
Blocks = cpu.Blocks
_RUN = 32  # elements of a run where one block is a whole line or more
_enabled = os.environ.get("FP4GRAPH_KERNELS", "1") != "0"


def enabled() -> bool:
    """True if kernels are used where there are any."""
    return _enabled


@contextmanager
def tensor_code() -> Iterator[None]:
    """Trace and run quantizers as tensor code in this context, as compilers for other devices are given them."""
    global _enabled
    former, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = former


def runs(spec: QuantSpec, device: torch.device) -> bool:
    """True if a kernel quantizes by ``spec`` on ``device``."""
    return cpu.supports(spec) and _on(device)


def rounds(spec: QuantSpec, device: torch.device) -> bool:
    """True if a kernel rounds to the elements of ``spec`` on ``device``, given the scales of its blocks."""
    return cpu.supports(by_runs(spec)) and _on(device)


def by_runs(spec: QuantSpec) -> QuantSpec:
    """Return ``spec`` with each block cut into runs along the contraction axis, as kernels need it."""
    if isinstance(spec.block, int):
        return spec
    return replace(spec, block=_RUN if isinstance(spec.block, str) else spec.block[1])


def by_run(part: Tensor, blocking: Blocking) -> Tensor:
    """Return ``part``, broadcastable to a statistic, as kernels take what is given of blocks.

    It has one element for each run of a line that lies in one block of :func:`by_runs`, or one element for all.
    """
    if is_scalar(part):
        return part.reshape(1)
    part = part.expand(blocking.scale_shape)
    rows, columns = blocking.shape[-2] if len(blocking.shape) > 1 else 1, blocking.shape[-1]
    if isinstance(blocking.block, tuple):
        part = part.expand([*part.shape[:-3], blocking.block[0], *part.shape[-2:]])
        return part.flatten(-4, -3).squeeze(-1)[..., :rows, :].contiguous()
    if isinstance(blocking.block, str):  # one number a line
        part = part.expand([*blocking.shape[:-1], 1])
        return part.expand([*blocking.shape[:-1], (columns + _RUN - 1) // _RUN]).contiguous()
    return part.squeeze(-1).contiguous()


def _on(device: torch.device) -> bool:
    return _enabled and target.kind(device) == "cpu" and _available()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _available() -> bool:
    """Return ``cpu.available()``; Dynamo does not trace it, because in torch 2.11 tracing the build fails."""
    return cpu.available()


def packs(spec: QuantSpec, source: torch.dtype, target: torch.dtype, device: torch.device) -> bool:
    """True if an operand of dtype ``source``, quantized by ``spec`` and cast to ``target``, can be kept as bytes."""
    return runs(spec, device) and cpu.packs(spec) and {source, target} <= DTYPES


@dataclass(frozen=True, eq=False)
class PackedOperand:
    """The bytes that stand for a dequantized operand.

    Attributes:
        codes: uint8 ``[..., C/2]`` (``[..., C]`` for wider codes), whole blocks, as of :func:`fp4graph.pack`.
        scales: ``[..., C/block]``, of :func:`fp4graph.numerics.packing.scale_storage`.
        spec: it was quantized by, blocks along the last axis.
        length: C without padding.
        dtype: of the dequantized operand.
    """

    codes: Tensor
    scales: Tensor
    spec: QuantSpec
    length: int
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """The device of the bytes."""
        return self.codes.device

    def unpack(self) -> Tensor:
        """Return the dequantized operand, contiguous."""
        packed = self.spec.to_text(), self.length, self.dtype
        result: Tensor = torch.ops.fp4graph.unpack(self.codes, self.scales, *packed)
        return result

    def requantized(self, spec: QuantSpec, draw: Draw | None = None) -> Tensor:
        """Return the transpose of the dequantized operand, quantized by ``spec`` along its last axis."""
        packed = self.spec.to_text(), self.length, self.dtype
        drawn = flat(spec, draw)
        result: Tensor = torch.ops.fp4graph.requantize(self.codes, self.scales, *packed, spec.to_text(), *drawn)
        return result


def quantize(x: Tensor, spec: QuantSpec, draw: Draw | None = None, given: Blocks | None = None) -> Tensor:
    """Return ``x [..., C]`` quantized by ``spec`` along its last axis, in its dtype and layout.

    Args:
        draw: needed if ``spec`` rounds stochastically.
        given: what techniques have made of the blocks, ``[..., ceil(C/block)]`` or of one element.
    """
    if x.dtype not in DTYPES:
        return quantize(x.to(torch.float32), spec, draw, given).to(x.dtype)
    result: Tensor = torch.ops.fp4graph.quantize(x, spec.to_text(), *flat(spec, draw), *(given or Blocks()))
    return result


def maxima(x: Tensor, block: int) -> Tensor:
    """Return the largest magnitude of every block of ``x [..., C]`` along C: ``[..., ceil(C/block)]``, fp32."""
    z: Tensor = torch.ops.fp4graph.maxima(x if x.dtype in DTYPES else x.to(torch.float32), block)
    return z


def amax(x: Tensor, blocking: Blocking) -> Tensor:
    """Return the largest magnitude of every block of ``x``, fp32, in the shape of a statistic; NaN if a value is."""
    if not isinstance(blocking.block, int) or not _on(x.device):
        return scaling.amax(blocking.split(x), blocking.axes)
    return maxima(x, blocking.block).reshape(blocking.scale_shape)


def group_amax(z: Tensor, groups: Groups) -> Tensor:
    """Return the largest statistic of every group, broadcastable to ``z``: fp32, non-negative or NaN."""
    if not isinstance(groups.granularity, int) or not _on(z.device):
        return groups.reduce(z, "amax")
    length = groups.granularity // block_length(groups.blocking.block)
    g: Tensor = torch.ops.fp4graph.group_maxima(z.squeeze(-1), length).reshape(z.shape)
    return g


def mantissa(z: Tensor, divisor: float, bits: int) -> Tensor:
    """Return :func:`fp4graph.numerics.scaling.mantissa`."""
    if not _on(z.device):
        return scaling.mantissa(z, divisor, bits)
    y: Tensor = torch.ops.fp4graph.mantissa(z, divisor, bits)
    return y


def largest(score: Tensor, count: int) -> Tensor:
    """Return whether each element of ``score`` is among the ``count`` largest; of equal ones the first are. NaN is
    larger than any number."""
    if not _on(score.device):
        return _largest(score, count)
    chosen: Tensor = torch.ops.fp4graph.largest(score, count)
    return chosen


def quantize_and_pack(
    x: Tensor, spec: QuantSpec, draw: Draw | None, dtype: torch.dtype
) -> tuple[Tensor, PackedOperand]:
    """Return :func:`quantize`, contiguous, and the same as bytes, which stand for the result cast to ``dtype``."""
    values, codes, scales = torch.ops.fp4graph.quantize_and_pack(x, spec.to_text(), *flat(spec, draw))
    return values, PackedOperand(codes, scales, spec, x.shape[-1], dtype)


def gaussian(draw: Draw, count: int, device: torch.device) -> Tensor:
    """Return ``count`` standard normal variates, fp32, :func:`fp4graph.numerics.noise.gaussian` of the first indices.

    A kernel where there is one: what Inductor makes of the hashes takes half a minute to compile.
    """
    if not _on(device):
        return noise.gaussian(draw.varying, torch.arange(count, dtype=torch.int32, device=device))
    result: Tensor = torch.ops.fp4graph.gaussian(draw.key, draw.step, draw.salts, count)
    return result


def flat(spec: QuantSpec, draw: Draw | None) -> tuple[Tensor | None, Tensor | None, Sequence[int]]:
    """Return ``draw`` as operators take it: key, step and salts, which are empty where ``spec`` draws nothing."""
    if draw is None or not spec.needs_key:
        return None, None, ()
    return draw.key, draw.step, draw.salts


def drawn(key: Tensor | None, step: Tensor | None, salts: Sequence[int]) -> Draw | None:
    """Return the inverse of :func:`flat`."""
    return None if key is None else Draw(key, step, tuple(salts))


# ------------------------------------------------------------------ fake


def _fake_quantize(x: Tensor, spec: str, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def _fake_maxima(x: Tensor, block: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], (x.shape[-1] + block - 1) // block), dtype=torch.float32)


def _fake_elementwise(z: Tensor, *numbers: Any) -> Tensor:
    return torch.empty_like(z, memory_format=torch.contiguous_format)


def _fake_largest(score: Tensor, count: int) -> Tensor:
    return torch.empty_like(score, dtype=torch.bool, memory_format=torch.contiguous_format)


def _fake_quantize_and_pack(x: Tensor, spec: str, *draw: Any) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, *empty_bytes(x, x.shape, QuantSpec.from_text(spec))


def _fake_requantize(
    codes: Tensor, scales: Tensor, packed: str, length: int, dtype: torch.dtype, spec: str, *draw: Any
) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], length), dtype=dtype).mT


def _fake_unpack(codes: Tensor, scales: Tensor, packed: str, length: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], length), dtype=dtype)


def _fake_gaussian(key: Tensor, step: Tensor | None, salts: Sequence[int], count: int) -> Tensor:
    return key.new_empty((count,), dtype=torch.float32)


# ------------------------------------------------------------------ CPU


def _quantize(
    x: Tensor, spec: str, key: Tensor | None, step: Tensor | None, salts: Sequence[int], *blocks: Tensor | None
) -> Tensor:
    y = torch.empty_like(x)
    if not y.numel():
        return y
    draw, given = drawn(key, step, salts), Blocks(*blocks)
    source, target = _matrices(x), _matrices(y)
    if source is not None and target is not None and (source.stride(2) == 1) == (target.stride(2) == 1):
        cpu.quantize(source, target, spec, draw, given)
    else:
        source = _rows(x.contiguous())
        target = torch.empty_like(source)
        cpu.quantize(source, target, spec, draw, given)
        y.copy_(target.view(x.shape))
    return y


def _maxima(x: Tensor, block: int) -> Tensor:
    z = _fake_maxima(x, block)
    if z.numel():
        source = _matrices(x)
        source = _rows(x.contiguous()) if source is None else source
        cpu.maxima(source, z.view(-1, *_last_two(z)), block)
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
    flat = score.reshape(-1)
    order = torch.sort(flat, descending=True, stable=True).indices
    place = torch.arange(flat.shape[0], device=score.device)
    return torch.empty_like(order).scatter(0, order, place).reshape(score.shape) < count


def _quantize_and_pack(x: Tensor, spec: str, *draw: Any) -> tuple[Tensor, Tensor, Tensor]:
    y, codes, scales = _fake_quantize_and_pack(x, spec)
    if y.numel():
        source, target = _matrices(x), _rows(y)
        source = _rows(x.contiguous()) if source is None or source.stride(2) != 1 else source
        cpu.quantize(source, target, spec, drawn(*draw), Blocks(), codes, scales)
    return y, codes, scales


def _requantize(
    codes: Tensor, scales: Tensor, packed: str, length: int, dtype: torch.dtype, spec: str, *draw: Any
) -> Tensor:
    y = _fake_requantize(codes, scales, packed, length, dtype, spec)
    if y.numel():
        target = _rows(y.mT).mT
        cpu.requantize(codes.contiguous(), scales.contiguous(), packed, target, spec, drawn(*draw))
    return y


def _unpack(codes: Tensor, scales: Tensor, packed: str, length: int, dtype: torch.dtype) -> Tensor:
    y = _fake_unpack(codes, scales, packed, length, dtype)
    if y.numel():
        cpu.unpack(codes.contiguous(), scales.contiguous(), packed, _rows(y))
    return y


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


for _name, _fake, _run in (
    ("quantize", _fake_quantize, _quantize),
    ("maxima", _fake_maxima, _maxima),
    ("mantissa", _fake_elementwise, _mantissa),
    ("group_maxima", _fake_elementwise, _group_maxima),
    ("largest", _fake_largest, _largest),
    ("quantize_and_pack", _fake_quantize_and_pack, _quantize_and_pack),
    ("requantize", _fake_requantize, _requantize),
    ("unpack", _fake_unpack, _unpack),
    ("gaussian", _fake_gaussian, _gaussian),
):
    torch.library.register_fake(f"fp4graph::{_name}", _fake, lib=_library)
    _library.impl(_name, _run, "CPU")
