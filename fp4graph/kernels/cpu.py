"""The plain quantizer on a CPU: compiles ``quantize.cpp`` once per quantizer and calls it on tensors.

A library is built from the C++ source and the quantizer's numbers in a fraction of a second, for all shapes, and kept
in Inductor's cache directory. Quantizers are named by their text (:meth:`QuantSpec.to_text`), as the operators that
call this are (:mod:`fp4graph.kernels.operators`).
"""

from __future__ import annotations

import ctypes
import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4graph.errors import Error
from fp4graph.kernels import build
from fp4graph.kernels.constants import constants
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.packing import scale_storage
from fp4graph.numerics.spec import QuantSpec

#: Dtypes that the kernels read and write; others go through fp32.
DTYPES = {torch.float32: "float", torch.bfloat16: "bf16"}
_STORED = {torch.uint8: "u8", torch.bfloat16: "u16", torch.float32: "float"}
_LANES = 64  # of quantize.cpp

_QUANTIZE = """
extern "C" void run(const {S}* x, Strides from, Places places, {T}* y, Strides to, u8* codes, Q::Stored* scales,
                    BlockwiseParts given, Turn turn, KeyParts draw, Shape shape, int threads) {{
    quantize<Q, {S}, {T}>(x, from, places, y, to, codes, scales, given, turn, draw, shape, threads);
}}
"""
_REQUANTIZE = """
extern "C" void run(const u8* codes, const P::Stored* scales, Places places, {T}* y, Strides to, KeyParts draw,
                    Shape shape, int threads) {{
    requantize<P, Q, {T}>(codes, scales, places, y, to, draw, shape, threads);
}}
"""
_UNPACK = """
extern "C" void run(const u8* codes, const P::Stored* scales, {T}* y, Shape shape, int threads) {{
    unpack<P, {T}>(codes, scales, y, shape, threads);
}}
"""

_SCALES = """
extern "C" void run(const {T}* z, {T}* scale, i64 count, int threads) {{ block_scales<Q>(z, scale, count, threads); }}
"""

# Functions that depend on no quantizer, in one library.
_COMMON = """
extern "C" void maxima_float(const float* x, Strides from, float* z, Shape shape, i64 lines, i64 length,
                             int threads) {
    maxima<float>(x, from, z, shape, lines, length, threads);
}
extern "C" void maxima_bf16(const bf16* x, Strides from, float* z, Shape shape, i64 lines, i64 length,
                             int threads) {
    maxima<bf16>(x, from, z, shape, lines, length, threads);
}
extern "C" void groups(const float* z, float* y, i64 lines, i64 blocks, i64 length, int threads) {
    group_maxima(z, y, lines, blocks, length, threads);
}
extern "C" void fractions(const float* z, float* y, i64 count, float divisor, int bits, int threads) {
    mantissas(z, y, count, divisor, bits, threads);
}
extern "C" void selected_float(const float* x, i64 count, i64 place, float* found) {
    order_statistics(x, count, place, found);
}
extern "C" void selected_bf16(const bf16* x, i64 count, i64 place, float* found) {
    order_statistics(x, count, place, found);
}
extern "C" void rotate_float(const float* x, Strides from, const float* signs, float* y, Strides to, Shape shape, i64 g,
                             i64 length, int back, float unit, int threads) {
    rotate<float>(x, from, signs, y, to, shape, g, length, back, unit, threads);
}
extern "C" void rotate_bf16(const bf16* x, Strides from, const float* signs, float* y, Strides to, Shape shape, i64 g,
                            i64 length, int back, float unit, int threads) {
    rotate<bf16>(x, from, signs, y, to, shape, g, length, back, unit, threads);
}
extern "C" void normal(float* z, i64 count, KeyParts draw, int threads) { gaussian(z, count, draw, threads); }
"""


# The structures mirror those of the same names in quantize.cpp, field by field.


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "row", "column")]


class _Places(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("none", ctypes.c_int64)]


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batches", "rows", "columns", "first")]


class _Blockwise(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "group", "line", "block", "lines")),
    ]


class _BlockwiseParts(ctypes.Structure):
    _fields_ = [(name, _Blockwise) for name in ("divisor", "statistic", "scale", "factor")]


class _Turn(ctypes.Structure):
    _fields_ = [
        ("signs", ctypes.c_void_p),
        ("g", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("unit", ctypes.c_float),
    ]


class _KeyParts(ctypes.Structure):
    _fields_ = [
        ("key", ctypes.c_void_p),
        ("step", ctypes.c_void_p),
        ("salts", ctypes.POINTER(ctypes.c_int32)),
        ("count", ctypes.c_int64),
    ]


class Blocks(NamedTuple):
    """Numbers that techniques give for the blocks of a tensor ``[B, R, C]``: each fp32, one for all or one per block.

    That is a tensor ``[B, R, n]``, n = ceil(C/block), or of four axes ``[B, G, r, n]`` where groups of r lines share
    theirs; R may be less than G·r. Either may be broadcast along any axis, as by ``expand``.

    Attributes:
        divisor: divides the values, before anything else.
        statistic: replaces the largest magnitude of the divided values.
        scale: replaces the scale that the statistic gives.
        factor: multiplies the result.
    """

    divisor: Tensor | None = None
    statistic: Tensor | None = None
    scale: Tensor | None = None
    factor: Tensor | None = None


class Turn(NamedTuple):
    """A rotation of what a kernel is about to quantize: times S and H on blocks of its contraction axis, in fp32.

    Attributes:
        block: elements of a block, a power of two that divides the quantizer's.
        signs: the diagonal of S, contiguous fp32 ``[block]``; None for the identity.
    """

    block: int
    signs: Tensor | None = None

    def padded(self, length: int) -> int:
        """Return the length of a rotated line of ``length`` elements, which is filled up to whole blocks."""
        return (length + self.block - 1) // self.block * self.block


def supports(spec: QuantSpec) -> bool:
    """True if the kernels know ``spec``: blocks of a fixed length along the contraction axis, one element format with
    codes of up to a byte."""
    return isinstance(spec.block, int) and spec.block <= 1024 and spec.element.code_bits <= 8 and not spec.others


def packs(spec: QuantSpec) -> bool:
    """True if the result of ``spec`` can be kept as bytes and quantized again from them."""
    return supports(spec) and isinstance(spec.block, int) and spec.block % 2 == 0 and _LANES % spec.block == 0


@functools.cache
def available() -> bool:
    """True if the kernels can be compiled and loaded here; warns once where they cannot."""
    try:
        build.require_compiler()  # this library may be in the cache, and those of other quantizers not
        _load(_COMMON)
    except build.FAILURES as error:
        warnings.warn(
            f"the CPU kernels cannot be built and loaded ({build.reason(error)}); quantizers run as slower tensor "
            "code. Install g++ (the package g++ or build-essential), or name a C++17 compiler in the environment "
            "variable CXX; TORCHINDUCTOR_CACHE_DIR names the folder that libraries are built in and loaded from",
            stacklevel=2,
        )
        return False
    return True


def quantize(
    x: Tensor,
    y: Tensor,
    spec: str,
    draw: Draw | None,
    given: Blocks,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    places: Tensor | None = None,
    turn: Turn | None = None,
) -> None:
    """Quantize ``x`` into ``y``.

    Args:
        x, y: ``[B, R, C]``, blocks along C, of dtypes of :data:`DTYPES`; both contiguous along C, or both along R. A
            ``y`` of another dtype than ``x`` gets the fp32 results cast.
        codes, scales: receive the bytes, laid out as by :func:`fp4graph.pack`; only if C is contiguous.
        places: int64 ``[P]``, only if R is contiguous and B is 1: ``y [1, R, P]`` is quantized from these columns of
            ``x``, and from zeros where a place is C.
        turn: rotates ``x`` first; ``y`` has C padded to whole blocks of it.
    """
    run = _function(_QUANTIZE, y.dtype, x.dtype, Q=spec)
    source, target = (_at(x), _Strides(*x.stride()), _places(places, x.shape[2])), (_at(y), _Strides(*y.stride()))
    blocks, shape = _blockwise_parts(given, *x.shape[:2]), _Shape(*y.shape)
    columns = x.shape[2] if places is None else y.shape[2]
    rest = blocks, _turn(turn, columns), _key_parts(draw), shape, torch.get_num_threads()
    run(*source, *target, _at(codes), _at(scales), *rest)


def matrix_quantizer(
    x: Tensor,
    y: Tensor,
    spec: str,
    draw: Draw | None,
    given: Blocks,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    turn: Turn | None = None,
) -> Callable[[int], None]:
    """Return a function of n that writes matrix n of what :func:`quantize` makes of ``x [B, R, C]`` into ``y [R, C]``.

    It keeps none of the tensors alive.

    Args:
        given: of the blocks of the whole batch.
        codes, scales: those of the whole batch, of which matrix n's are written.
    """
    run, shape = _function(_QUANTIZE, y.dtype, x.dtype, Q=spec), _Shape(0, *y.shape, 0)
    source, target = (_at(x), _Strides(*x.stride()), _Places()), (_at(y), _Strides(0, *y.stride()))
    parts = _blockwise_parts(given, *x.shape[:2]), _turn(turn, x.shape[2]), _key_parts(draw)
    rest = *parts, shape, torch.get_num_threads()
    return functools.partial(_run_matrix, run, (*source, *target, _at(codes), _at(scales), *rest), shape)


def _run_matrix(run: Callable[..., None], arguments: tuple[Any, ...], shape: _Shape, number: int) -> None:
    shape.batches, shape.first = number + 1, number
    run(*arguments)


def maxima(x: Tensor, z: Tensor, block: int, lines: int = 1) -> None:
    """Write the largest magnitude of every block of ``lines`` rows by ``block`` columns of ``x [B, R, C]`` into ``z``.

    ``z`` is ``[B, ceil(R/lines), ceil(C/block)]``, contiguous fp32. Either number is at most 1024.
    """
    shape = _Shape(*x.shape), ctypes.c_int64(lines), ctypes.c_int64(block)
    run = _common(f"maxima_{DTYPES[x.dtype]}")
    run(_at(x), _Strides(*x.stride()), _at(z), *shape, torch.get_num_threads())


def block_scales(z: Tensor, scale: Tensor, spec: str) -> None:
    """Write the scales by ``spec`` of blocks with the statistics ``z`` into ``scale``, both contiguous fp32."""
    _function(_SCALES, z.dtype, Q=spec)(_at(z), _at(scale), ctypes.c_int64(z.numel()), torch.get_num_threads())


def order_statistics(x: Tensor, place: int, found: Tensor) -> None:
    """Write the elements at ``place`` and at n - 1 - place of the ascending order of ``x`` into ``found [2]``, fp32.

    ``x`` is contiguous, of a dtype of :data:`DTYPES`, and has n > place elements, none of them NaN.
    """
    run = _common(f"selected_{DTYPES[x.dtype]}")
    run(_at(x), ctypes.c_int64(x.numel()), ctypes.c_int64(place), _at(found))


def requantize(
    codes: Tensor,
    scales: Tensor,
    packed: str,
    y: Tensor,
    spec: str,
    draw: Draw | None,
    places: Tensor | None = None,
) -> None:
    """Quantize the transpose of what the spec ``packed`` packed along R into ``y [B, R, C]``, contiguous along R.

    Args:
        places: int64 ``[P]``, only if B is 1: ``y [1, R, P]`` is made of these lines of what was packed, and of zeros
            where a place is their number.
    """
    run = _function(_REQUANTIZE, y.dtype, P=packed, Q=spec)
    tensors = _at(codes), _at(scales), _places(places, codes.shape[-2]), _at(y), _Strides(*y.stride())
    run(*tensors, _key_parts(draw), _Shape(*y.shape), torch.get_num_threads())


def matrix_requantizer(
    codes: Tensor, scales: Tensor, packed: str, y: Tensor, spec: str, draw: Draw | None
) -> Callable[[int], None]:
    """Return a function of n that writes matrix n of what :func:`requantize` makes into ``y [R, C]``.

    It keeps none of the tensors alive.
    """
    run, shape = _function(_REQUANTIZE, y.dtype, P=packed, Q=spec), _Shape(0, *y.shape, 0)
    tensors = _at(codes), _at(scales), _Places(), _at(y), _Strides(0, *y.stride())
    return functools.partial(_run_matrix, run, (*tensors, _key_parts(draw), shape, torch.get_num_threads()), shape)


def unpack(codes: Tensor, scales: Tensor, packed: str, y: Tensor) -> None:
    """Write the operand that the spec ``packed`` packed along C into the contiguous ``y [B, R, C]``."""
    run = _function(_UNPACK, y.dtype, P=packed)
    run(_at(codes), _at(scales), _at(y), _Shape(*y.shape), torch.get_num_threads())


def mantissas(z: Tensor, y: Tensor, divisor: float, bits: int) -> None:
    """Write :func:`fp4graph.numerics.scaling.mantissa` of ``z`` into ``y``, both contiguous fp32 of one shape."""
    numbers = ctypes.c_int64(z.numel()), ctypes.c_float(divisor), ctypes.c_int(bits)
    _common("fractions")(_at(z), _at(y), *numbers, torch.get_num_threads())


def group_maxima(z: Tensor, y: Tensor, length: int) -> None:
    """Write the largest of each ``length`` neighbours in a line of ``z [L, B]`` for each of them into ``y``.

    Both are contiguous fp32; ``z`` is non-negative or NaN. The last group of a line may be shorter.
    """
    shape = *map(ctypes.c_int64, z.shape), ctypes.c_int64(length)
    _common("groups")(_at(z), _at(y), *shape, torch.get_num_threads())


def rotate(x: Tensor, y: Tensor, block: int, signs: Tensor | None, back: bool) -> None:
    """Write blocks of ``x [B, R, C]``, times S and H, into ``y [B, R, D]``, fp32; with ``back``, times H and S.

    Args:
        x, y: both contiguous along their last axis, or both along R. D is C padded to whole blocks, or with ``back``
            the part of C that is wanted.
        block: a power of two, at most 1024.
        signs: the diagonal of S, contiguous fp32 ``[block]``; None for the identity.
    """
    numbers = ctypes.c_int64(block), ctypes.c_int64(y.shape[2]), int(back), ctypes.c_float(1 / math.sqrt(block))
    matrices = (_at(x), _Strides(*x.stride())), (_at(y), _Strides(*y.stride()))
    run = _common(f"rotate_{DTYPES[x.dtype]}")
    run(*matrices[0], _at(signs), *matrices[1], _Shape(*x.shape), *numbers, torch.get_num_threads())


def gaussian(z: Tensor, draw: Draw) -> None:
    """Write :func:`fp4graph.numerics.noise.gaussian` of the indices of ``z [N]``, contiguous fp32, under ``draw``."""
    _common("normal")(_at(z), ctypes.c_int64(len(z)), _key_parts(draw), torch.get_num_threads())


def _key_parts(draw: Draw | None) -> _KeyParts:
    """Return ``draw`` as the kernels take it; the structure keeps the array of salts alive."""
    if draw is None:
        return _KeyParts()
    salts = (ctypes.c_int32 * len(draw.salts))(*draw.salts)
    return _KeyParts(_at(draw.key), _at(draw.step), salts, len(draw.salts))


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _places(places: Tensor | None, none: int) -> _Places:
    return _Places() if places is None else _Places(places.data_ptr(), none)


def _turn(turn: Turn | None, columns: int) -> _Turn:
    if turn is None:
        return _Turn()
    return _Turn(_at(turn.signs), turn.block, columns, 1 / math.sqrt(turn.block))


def _blockwise_parts(given: Blocks, batches: int, rows: int) -> _BlockwiseParts:
    """Return ``given`` as the kernels take it; it must live as long as they run."""
    return _BlockwiseParts(*(_blockwise(part, batches, rows) for part in given))


def _blockwise(part: Tensor | None, batches: int, rows: int) -> _Blockwise:
    if part is None:
        return _Blockwise()
    if part.numel() == 1:
        return _Blockwise(part.data_ptr(), 0, 0, 0, 0, 1)
    if part.dim() != 4:
        part = part.view(batches, rows, 1, -1)
    return _Blockwise(part.data_ptr(), *part.stride(), part.shape[2])


@functools.cache
def _function(
    template: str, dtype: torch.dtype, source: torch.dtype | None = None, **formats: str
) -> Callable[..., None]:
    structs = "".join(_struct(name, QuantSpec.from_text(text)) for name, text in formats.items())
    return _named(structs + template.format(T=DTYPES[dtype], S=DTYPES[source or dtype]), "run")


@functools.cache
def _common(name: str) -> Callable[..., None]:
    """Return a function that depends on no quantizer: in the library that :func:`available` builds."""
    return _named(_COMMON, name)


def _named(entry: str, name: str) -> Callable[..., None]:
    """Return a function of the library with ``entry`` at its end.

    Raises:
        Error: the library cannot be built or loaded, although that of :func:`available` was.
    """
    try:
        function: Any = _load(entry)[name]
    except build.FAILURES as error:
        raise Error(
            f"a CPU kernel cannot be built and loaded, although others were: {build.reason(error)}. Start again with "
            "the environment variable FP4GRAPH_KERNELS=0, under which quantizers run as slower tensor code"
        ) from error
    function.restype = None
    return function  # type: ignore[no-any-return]


@functools.cache
def _load(entry: str) -> ctypes.CDLL:
    return build.load(build.amalgamated(resources.files(__package__).joinpath("cpp"), "quantize.cpp") + entry)


def _struct(name: str, spec: QuantSpec) -> str:
    """Return the numbers of ``spec`` as quantize.cpp reads them."""
    numbers = constants(spec)
    values = {key.upper(): value for key, value in asdict(numbers).items() if not isinstance(value, str)}
    values |= {f"TIES_{ties.upper()}": numbers.ties == ties for ties in ("even", "up")}
    values["S_TOWARD_POSITIVE"] = numbers.s_rounding == "toward_positive"
    lines = "".join(f"    static constexpr {_typed(key, value)};\n" for key, value in values.items())
    return f"struct {name} {{\n{lines}    using Stored = {_STORED[scale_storage(spec.scale.format)]};\n}};\n"


def _typed(name: str, value: bool | int | float) -> str:
    if isinstance(value, bool):
        return f"bool {name} = {str(value).lower()}"
    return f"int {name} = {value}" if isinstance(value, int) else f"float {name} = {value.hex()}f"
