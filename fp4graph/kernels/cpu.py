"""The kernels of a CPU on tensors: what the operators run there. :mod:`fp4graph.kernels.abi` has their C++."""

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
        build.require_compiler()  # this library may be in the cache, and those of other quantizers not
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


#: Codes and scales of an operand, laid out as by :func:`fp4graph.pack`.
Bytes = tuple[Tensor, Tensor]


def quantize(
    x: Tensor, y: Tensor, direction: Direction, into: Bytes | None = None, places: Tensor | None = None
) -> None:
    """Quantize ``x`` into ``y``.

    Args:
        x, y: ``[B, R, C]``, blocks along C, of dtypes of :data:`DTYPES`; both contiguous along C, or both along R. A
            ``y`` of another dtype than ``x`` gets the fp32 results cast. With a rotation ``y`` has C padded to whole
            blocks of it.
        into: receives the bytes; only if C is contiguous.
        places: int64 ``[P]``, only if R is contiguous and B is 1: ``y [1, R, P]`` is quantized from these columns of
            ``x``, and from zeros where a place is C.
    """
    call = _quantization(x, y, direction, into, places)
    call.shape = abi.Shape(*y.shape)
    _quantizer(x, y, direction)(call)


def matrix_quantizer(x: Tensor, y: Tensor, direction: Direction, into: Bytes | None = None) -> Callable[[int], None]:
    """Return a function of n that writes matrix n of :func:`quantize` of ``x [B, R, C]`` into ``y [R, C]``.

    It keeps none of the tensors alive.

    Args:
        direction: its ``given`` has numbers for the blocks of the whole batch.
        into: the bytes of the whole batch, of which matrix n's are written.
    """
    return functools.partial(
        _run_matrix, _quantizer(x, y, direction), _quantization(x, y, direction, into), (y.shape[0], y.shape[1])
    )


def _quantizer(x: Tensor, y: Tensor, direction: Direction) -> Callable[..., None]:
    return abi.function(abi.QUANTIZE, y.dtype, x.dtype, Q=direction.spec.to_text())


def _quantization(
    x: Tensor, y: Tensor, direction: Direction, into: Bytes | None = None, places: Tensor | None = None
) -> Call:
    """Return the call but for its shape."""
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
    """Quantize the transpose of what the spec ``packed`` packed along R into ``y [B, R, C]``, contiguous along R.

    Args:
        direction: without anything given, and without a rotation.
        places: int64 ``[P]``, only if B is 1: ``y [1, R, P]`` is quantized from these lines of the packed operand,
            and from zeros where a place is the number of its lines.
    """
    call = _requantization(source, y, direction)
    call.shape = abi.Shape(*y.shape)
    if places is not None:
        call.places = abi.places(places, source[0].shape[-2])
    _requantizer(packed, y, direction)(call)


def matrix_requantizer(source: Bytes, packed: QuantSpec, y: Tensor, direction: Direction) -> Callable[[int], None]:
    """Return a function of n that writes matrix n of what :func:`requantize` makes into ``y [R, C]``.

    It keeps none of the tensors alive.
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
    """Write the operand that the spec ``packed`` packed along C into the contiguous ``y [B, R, C]``."""
    codes, scales = map(abi.at, source)
    shape, threads = abi.Shape(*y.shape), torch.get_num_threads()
    call = Call(codes=codes, scales=scales, y=abi.matrix(y), shape=shape, threads=threads)
    abi.function(abi.UNPACK, y.dtype, P=packed.to_text())(call)


def rotate(x: Tensor, y: Tensor, by: BlockRotation, back: bool) -> None:
    """Write blocks of ``x [B, R, C]``, times S and H, into ``y [B, R, D]``, fp32; with ``back``, times H and S.

    Args:
        x, y: both contiguous along their last axis, or both along R. D is C padded to whole blocks, or with ``back``
            the part of C that is wanted.
        by: of blocks of at most 1024 elements.
    """
    shape, rotation = abi.Shape(*y.shape), abi.rotation(by, x.shape[2])
    threads = torch.get_num_threads()
    call = Call(x=abi.matrix(x), y=abi.matrix(y), rotation=rotation, shape=shape, threads=threads)
    abi.common(f"rotate_{DTYPES[x.dtype]}")(call, back)


def maxima(x: Tensor, z: Tensor, block: int, lines: int = 1) -> None:
    """Write the largest magnitude of every block of ``lines`` rows by ``block`` columns of ``x [B, R, C]`` into ``z``.

    ``z`` is ``[B, ceil(R/lines), ceil(C/block)]``, contiguous fp32. Either number is at most 1024.
    """
    call = Call(x=abi.matrix(x), y=abi.matrix(z), shape=abi.Shape(*x.shape), threads=torch.get_num_threads())
    abi.common(f"maxima_{DTYPES[x.dtype]}")(call, lines, block)


def block_scales(z: Tensor, scale: Tensor, spec: str) -> None:
    """Write the scales by ``spec`` of blocks with the statistics ``z`` into ``scale``, both contiguous fp32."""
    abi.function(abi.SCALES, z.dtype, Q=spec)(abi.at(z), abi.at(scale), z.numel(), torch.get_num_threads())


def order_statistics(x: Tensor, place: int, found: Tensor) -> None:
    """Write the elements at ``place`` and at n - 1 - place of the ascending order of ``x`` into ``found [2]``, fp32.

    ``x`` is contiguous, of a dtype of :data:`DTYPES`, and has n > place elements, none of them NaN.
    """
    abi.common(f"selected_{DTYPES[x.dtype]}")(abi.at(x), x.numel(), place, abi.at(found), torch.get_num_threads())


def largest(score: Tensor, count: int, chosen: Tensor) -> None:
    """Write whether each element of ``score`` is among the ``count`` largest into ``chosen``, bool: from 1 to all.

    Both are contiguous, ``score`` fp32; NaN is largest, and of equal elements the first are.
    """
    abi.common("chosen")(abi.at(score), score.numel(), count, abi.at(chosen), torch.get_num_threads())


def means(x: Tensor, y: Tensor) -> None:
    """Write :func:`fp4graph.numerics.exact.mean` over the rows of ``x [R, C]`` into ``y [C]``, fp32.

    Both are contiguous.
    """
    abi.common(f"means_{DTYPES[x.dtype]}")(abi.at(x), *x.shape, abi.at(y), torch.get_num_threads())


def mantissas(z: Tensor, y: Tensor, divisor: float, bits: int) -> None:
    """Write :func:`fp4graph.numerics.scaling.mantissa` of ``z`` into ``y``, both contiguous fp32 of one shape."""
    abi.common("fractions")(abi.at(z), abi.at(y), z.numel(), divisor, bits, torch.get_num_threads())


def group_maxima(z: Tensor, y: Tensor, length: int) -> None:
    """Write the largest of each ``length`` neighbours in a line of ``z [L, B]`` for each of them into ``y``.

    Both are contiguous fp32; ``z`` is non-negative or NaN. The last group of a line may be shorter.
    """
    abi.common("groups")(abi.at(z), abi.at(y), *z.shape, length, torch.get_num_threads())


def gaussian(z: Tensor, draw: Draw) -> None:
    """Write :func:`fp4graph.numerics.noise.gaussian` of the indices of ``z [N]``, contiguous fp32, under ``draw``."""
    abi.common("normal")(abi.at(z), len(z), abi.key_parts(draw), torch.get_num_threads())
