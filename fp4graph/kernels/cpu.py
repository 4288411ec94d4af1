"""Functions that run the C++ kernels on CPU tensors. Operators call them; :mod:`fp4graph.kernels.abi` loads the C++."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from fp4graph.kernels import abi, build
from fp4graph.kernels.abi import DTYPES, Call
from fp4graph.kernels.direction import Direction
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.hadamard import BlockRotation
from fp4graph.numerics.spec import QuantSpec

__all__ = ["DTYPES"]


@functools.cache
def available() -> bool:
    """True if the kernels can be compiled and loaded here; warns once where they cannot."""
    try:
        build.require_compiler()  # the cache may have the common library, but not those of all quantizers
        abi.load_common()
    except build.FAILURES as error:
        warnings.warn(
            f"the CPU kernels cannot be built and loaded ({build.reason(error)}); quantizers run as slower tensor "
            "code. Install g++ (the package g++ or build-essential), or name a C++17 compiler in the environment "
            "variable CXX; TORCHINDUCTOR_CACHE_DIR names the folder that libraries are built in and loaded from",
            stacklevel=2,
        )
        return False
    return True


#: The codes and the scales of an operand, in the layout of :func:`fp4graph.pack`.
Bytes = tuple[Tensor, Tensor]


def quantize(
    x: Tensor, y: Tensor, direction: Direction, into: Bytes | None = None, places: Tensor | None = None
) -> None:
    """Quantize ``x`` into ``y``.

    Args:
        x, y: ``[B, R, C]``, blocks along C, dtypes of :data:`DTYPES`; both contiguous along C, or both along R. If
            their dtypes differ, the fp32 results are cast to that of ``y``. With a rotation the C of ``y`` is padded to
            whole blocks of the rotation.
        into: receives the bytes; allowed only if C is contiguous.
        places: int64 ``[P]``, allowed only if R is contiguous and B is 1: ``y [1, R, P]`` is quantized from these
            columns of ``x``; the place C stands for a column of zeros.
    """
    call = _quantization(x, y, direction, into, places)
    call.shape = abi.Shape(*y.shape)
    _quantizer(x, y, direction)(call)


def matrix_quantizer(x: Tensor, y: Tensor, direction: Direction, into: Bytes | None = None) -> Callable[[int], None]:
    """Return a function of n that quantizes matrix n of ``x [B, R, C]`` into ``y [R, C]``, like :func:`quantize`.

    The function keeps no tensor alive.

    Args:
        direction: its ``given`` has numbers for the blocks of the whole batch.
        into: the bytes of the whole batch; the function writes the bytes of matrix n.
    """
    return functools.partial(
        _run_matrix, _quantizer(x, y, direction), _quantization(x, y, direction, into), (y.shape[0], y.shape[1])
    )


def _quantizer(x: Tensor, y: Tensor, direction: Direction) -> Callable[..., None]:
    return abi.function(abi.QUANTIZE, y.dtype, x.dtype, Q=direction.spec.to_text())


def _quantization(
    x: Tensor, y: Tensor, direction: Direction, into: Bytes | None = None, places: Tensor | None = None
) -> Call:
    """Return the call, except for its shape."""
    call = Call(x=abi.matrix(x), y=abi.matrix(y), threads=torch.get_num_threads())
    if direction.draw is not None:
        call.draw = abi.key_parts(direction.draw)
    if any(part is not None for part in direction.given):
        call.given = abi.blockwise(direction.given, *x.shape[:2])
    if direction.rotation is not None:
        call.rotation = abi.rotation(direction.rotation, x.shape[2] if places is None else y.shape[2])
    if into is not None:
        call.codes, call.scales = map(abi.at, into)
    if places is not None:
        call.places = abi.places(places, x.shape[2])
    return call


def _run_matrix(run: Callable[..., None], call: Call, shape: tuple[int, ...], number: int) -> None:
    call.shape = abi.Shape(number + 1, *shape, number)
    run(call)


def requantize(source: Bytes, packed: QuantSpec, y: Tensor, direction: Direction, places: Tensor | None = None) -> None:
    """Quantize the transpose of an operand, packed by the spec ``packed`` along R, into ``y [B, R, C]``.

    Args:
        y: contiguous along R.
        direction: without ``given`` numbers and without a rotation.
        places: int64 ``[P]``, allowed only if B is 1: ``y [1, R, P]`` is quantized from these lines of the packed
            operand; the number of its lines, as a place, stands for a line of zeros.
    """
    call = _requantization(source, y, direction)
    call.shape = abi.Shape(*y.shape)
    if places is not None:
        call.places = abi.places(places, source[0].shape[-2])
    _requantizer(packed, y, direction)(call)


def matrix_requantizer(source: Bytes, packed: QuantSpec, y: Tensor, direction: Direction) -> Callable[[int], None]:
    """Return a function of n that writes matrix n of the result of :func:`requantize` into ``y [R, C]``.

    The function keeps no tensor alive.
    """
    return functools.partial(
        _run_matrix, _requantizer(packed, y, direction), _requantization(source, y, direction), (y.shape[0], y.shape[1])
    )


def _requantizer(packed: QuantSpec, y: Tensor, direction: Direction) -> Callable[..., None]:
    return abi.function(abi.REQUANTIZE, y.dtype, P=packed.to_text(), Q=direction.spec.to_text())


def _requantization(source: Bytes, y: Tensor, direction: Direction) -> Call:
    codes, scales = map(abi.at, source)
    draw, threads = abi.key_parts(direction.draw), torch.get_num_threads()
    return Call(codes=codes, scales=scales, y=abi.matrix(y), draw=draw, threads=threads)


def unpack(source: Bytes, packed: QuantSpec, y: Tensor) -> None:
    """Dequantize an operand, packed by the spec ``packed`` along C, into the contiguous ``y [B, R, C]``."""
    codes, scales = map(abi.at, source)
    shape, threads = abi.Shape(*y.shape), torch.get_num_threads()
    call = Call(codes=codes, scales=scales, y=abi.matrix(y), shape=shape, threads=threads)
    abi.function(abi.UNPACK, y.dtype, P=packed.to_text())(call)


def rotate(x: Tensor, y: Tensor, by: BlockRotation, back: bool) -> None:
    """Write x·S·H, or x·H·S with ``back``, for each block of ``x [B, R, C]`` into ``y [B, R, D]``, fp32.

    Args:
        x, y: both contiguous along their last axis, or both along R. D is C padded to whole blocks; with ``back`` D may
            be less than C, and elements from D on are left out.
        by: has blocks of at most 1024 elements.
    """
    shape, rotation = abi.Shape(*y.shape), abi.rotation(by, x.shape[2])
    threads = torch.get_num_threads()
    call = Call(x=abi.matrix(x), y=abi.matrix(y), rotation=rotation, shape=shape, threads=threads)
    abi.common(f"rotate_{DTYPES[x.dtype]}")(call, back)


def maxima(x: Tensor, z: Tensor, block: int, lines: int = 1) -> None:
    """Write the largest magnitude of every block of ``lines`` rows by ``block`` columns of ``x [B, R, C]`` into ``z``.

    ``z`` is ``[B, ceil(R/lines), ceil(C/block)]``, contiguous fp32. ``block`` and ``lines`` are at most 1024.
    """
    call = Call(x=abi.matrix(x), y=abi.matrix(z), shape=abi.Shape(*x.shape), threads=torch.get_num_threads())
    abi.common(f"maxima_{DTYPES[x.dtype]}")(call, lines, block)


def block_scales(z: Tensor, scale: Tensor, spec: str) -> None:
    """Write the scales by ``spec`` for blocks with the statistics ``z`` into ``scale``, both contiguous fp32."""
    abi.function(abi.SCALES, z.dtype, Q=spec)(abi.at(z), abi.at(scale), z.numel(), torch.get_num_threads())


def order_statistics(x: Tensor, place: int, y: Tensor) -> None:
    """Write the elements at ``place`` and at n - 1 - place of the ascending order of ``x`` into ``y [2]``, fp32.

    ``x`` is contiguous, of a dtype of :data:`DTYPES`, and has n > place elements, none of them NaN.
    """
    abi.common(f"selected_{DTYPES[x.dtype]}")(abi.at(x), x.numel(), place, abi.at(y), torch.get_num_threads())


def largest(score: Tensor, count: int, chosen: Tensor) -> None:
    """Write into ``chosen``, bool, whether each element of ``score``, fp32, is among the ``count`` ≥ 1 largest.

    Both are contiguous. NaN is larger than any number; among equal elements those with lower indices are chosen.
    """
    abi.common("chosen")(abi.at(score), score.numel(), count, abi.at(chosen), torch.get_num_threads())


def means(x: Tensor, y: Tensor) -> None:
    """Write :func:`fp4graph.numerics.exact.mean` over the rows of ``x [R, C]`` into fp32 ``y [C]``; both contiguous."""
    abi.common(f"means_{DTYPES[x.dtype]}")(abi.at(x), *x.shape, abi.at(y), torch.get_num_threads())


def mantissas(z: Tensor, y: Tensor, divisor: float, bits: int) -> None:
    """Write :func:`fp4graph.numerics.scaling.mantissa` of ``z`` into ``y``, both contiguous fp32 of one shape."""
    abi.common("fractions")(abi.at(z), abi.at(y), z.numel(), divisor, bits, torch.get_num_threads())


def group_maxima(z: Tensor, y: Tensor, length: int) -> None:
    """Write into ``y``, for each element of ``z [L, B]``, the maximum of its group: ``length`` neighbours in a line.

    Both are contiguous fp32; ``z`` is non-negative or NaN. The last group of a line may be shorter.
    """
    abi.common("groups")(abi.at(z), abi.at(y), *z.shape, length, torch.get_num_threads())


def gaussian(z: Tensor, draw: Draw) -> None:
    """Write :func:`fp4graph.numerics.noise.gaussian` of the indices 0 to N - 1 into ``z [N]``, contiguous fp32."""
    abi.common("normal")(abi.at(z), len(z), abi.key_parts(draw), torch.get_num_threads())
