"""The interface of Python to the C++ CPU kernels: structures of arguments, entry points, and compiled libraries.

A library is compiled from the C++ source and the constants of a quantizer, within a fraction of a second. It serves all
shapes and stays in Inductor's cache directory. Functions take a spec as text (:meth:`QuantSpec.to_text`), like the
operators (:mod:`fp4graph.kernels.library`).
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from fp4graph.errors import Error
from fp4graph.kernels import build
from fp4graph.kernels.constants import constants
from fp4graph.kernels.direction import Blocks
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.hadamard import BlockRotation
from fp4graph.numerics.packing import scale_storage
from fp4graph.numerics.spec import QuantSpec

#: Dtypes that the kernels read and write, by their names in C++; others go through fp32.
DTYPES = {torch.float32: "float", torch.bfloat16: "bf16"}
_STORED = {torch.uint8: "u8", torch.bfloat16: "u16", torch.float32: "float"}
_POINTER, _I64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int

# Each structure lies in memory like its C++ counterpart in cpp/, field by field.


class Matrix(ctypes.Structure):
    _fields_ = [("data", _POINTER), *((name, _I64) for name in ("batch", "row", "column"))]


class Places(ctypes.Structure):
    _fields_ = [("at", _POINTER), ("none", _I64)]


class Shape(ctypes.Structure):
    _fields_ = [(name, _I64) for name in ("batches", "rows", "columns", "first")]


class Blockwise(ctypes.Structure):
    _fields_ = [("data", _POINTER), *((name, _I64) for name in ("batch", "group", "line", "block", "lines"))]


class BlockwiseParts(ctypes.Structure):
    _fields_ = [(name, Blockwise) for name in ("divisor", "statistic", "scale", "factor", "stored")]


class Rotation(ctypes.Structure):
    _fields_ = [("signs", _POINTER), ("g", _I64), ("columns", _I64), ("unit", ctypes.c_float)]


class KeyParts(ctypes.Structure):
    _fields_ = [("key", _POINTER), ("step", _POINTER), ("salts", ctypes.POINTER(ctypes.c_int32)), ("count", _I64)]


class Call(ctypes.Structure):
    """The arguments of a kernel. The structure keeps no tensor alive; fields that are left out are zeros."""

    _fields_ = [
        ("x", Matrix),
        ("places", Places),
        ("y", Matrix),
        ("codes", _POINTER),
        ("scales", _POINTER),
        ("given", BlockwiseParts),
        ("rotation", Rotation),
        ("draw", KeyParts),
        ("shape", Shape),
        ("threads", _INT),
    ]


def at(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's first element."""
    return None if tensor is None else tensor.data_ptr()


def matrix(x: Tensor) -> Matrix:
    """Return the address and the strides of ``x [B, R, C]`` or ``[R, C]``."""
    return Matrix(x.data_ptr(), *x.stride()) if x.dim() == 3 else Matrix(x.data_ptr(), 0, *x.stride())


def places(indices: Tensor | None, none: int) -> Places:
    """Return the source columns: ``indices``, where the index ``none`` means zeros, or all columns in order."""
    return Places() if indices is None else Places(indices.data_ptr(), none)


def rotation(by: BlockRotation | None, columns: int) -> Rotation:
    """Return a rotation of lines of ``columns`` elements, which kernels pad to whole blocks with zeros."""
    return Rotation() if by is None else Rotation(at(by.signs), by.block, columns, 1 / math.sqrt(by.block))


def blockwise(given: Blocks, batches: int, rows: int) -> BlockwiseParts:
    """Return the numbers ``given`` by techniques for the blocks of a tensor ``[batches, rows, C]``."""
    return BlockwiseParts(*(_blockwise(part, batches, rows) for part in given))


def _blockwise(part: Tensor | None, batches: int, rows: int) -> Blockwise:
    if part is None:
        return Blockwise()
    if part.numel() == 1:
        return Blockwise(part.data_ptr(), 0, 0, 0, 0, 1)
    if part.dim() != 4:
        part = part.view(batches, rows, 1, -1)
    return Blockwise(part.data_ptr(), *part.stride(), part.shape[2])


def key_parts(draw: Draw | None) -> KeyParts:
    """Return the key, step and salts of a draw; the structure keeps the array of salts alive."""
    if draw is None:
        return KeyParts()
    return KeyParts(at(draw.key), at(draw.step), _array(draw.salts), len(draw.salts))


@functools.lru_cache(1024)
def _array(salts: tuple[int, ...]) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(salts))(*salts)


# ------------------------------------------------------------------ entry points

_CALL = ctypes.POINTER(Call)


@dataclass(frozen=True, eq=False)
class Entry:
    """The template of a C++ function ``run``. Specs P, Q and dtypes S, T instantiate it, each time in a new library."""

    code: str
    parameters: tuple[Any, ...] = (_CALL,)
    file: str = "quantizer.h"


QUANTIZE = Entry("void run(const Call& call) {{ quantize<Q, {S}, {T}>(call); }}")
REQUANTIZE = Entry("void run(const Call& call) {{ requantize<P, Q, {T}>(call); }}")
UNPACK = Entry("void run(const Call& call) {{ unpack<P, {T}>(call); }}")
SCALES = Entry(
    "void run(const {T}* z, {T}* scale, i64 count, int threads) {{ block_scales<Q>(z, scale, count, threads); }}",
    (_POINTER, _POINTER, _I64, _INT),
)
#: The functions of cpp/common.cpp and their parameters.
_COMMON: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("maxima_float", "maxima_bf16"), (_CALL, _I64, _I64)),
    **dict.fromkeys(("rotate_float", "rotate_bf16"), (_CALL, _INT)),
    "groups": (_POINTER, _POINTER, _I64, _I64, _I64, _INT),
    "fractions": (_POINTER, _POINTER, _I64, ctypes.c_float, _INT, _INT),
    **dict.fromkeys(("selected_float", "selected_bf16", "chosen"), (_POINTER, _I64, _I64, _POINTER, _INT)),
    **dict.fromkeys(("means_float", "means_bf16"), (_POINTER, _I64, _I64, _POINTER, _INT)),
    "normal": (_POINTER, _I64, KeyParts, _INT),
}


@functools.cache
def function(
    entry: Entry, dtype: torch.dtype, source: torch.dtype | None = None, **formats: str
) -> Callable[..., None]:
    """Return ``run`` of an entry, compiled for sources of dtype ``source`` (None: ``dtype``) and results of ``dtype``.

    Args:
        formats: the texts of the specs P and Q.

    Raises:
        Error: the library cannot be built or loaded.
    """
    structs = "".join(_struct(name, QuantSpec.from_text(text)) for name, text in formats.items())
    code = entry.code.format(T=DTYPES[dtype], S=DTYPES[source or dtype])
    return _named(entry.file, f'{structs}extern "C" {code}\n', "run", entry.parameters)


@functools.cache
def common(name: str) -> Callable[..., None]:
    """Return a function that depends on no quantizer."""
    return _named("common.cpp", "", name, _COMMON[name])


def load_common() -> None:
    """Build and load the library of :func:`common`, or raise one of :data:`fp4graph.kernels.build.FAILURES`."""
    _load("common.cpp", "")


def _named(file: str, code: str, name: str, parameters: tuple[Any, ...]) -> Callable[..., None]:
    try:
        symbol: Any = _load(file, code)[name]
    except build.FAILURES as error:
        raise Error(
            f"a CPU kernel cannot be built and loaded, although others were: {build.reason(error)}. Start again with "
            "the environment variable FP4GRAPH_KERNELS=0, under which quantizers run as slower tensor code"
        ) from error
    symbol.restype, symbol.argtypes = None, parameters
    return symbol  # type: ignore[no-any-return]


@functools.cache
def _load(file: str, code: str) -> ctypes.CDLL:
    """Return the library compiled from a file of cpp/ followed by ``code``."""
    return build.load(build.amalgamated(resources.files(__package__).joinpath("cpp"), file) + code)


def _struct(name: str, spec: QuantSpec) -> str:
    """Return the C++ struct ``name`` with the constants of ``spec``."""
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
