"""The operators that the engine calls for quantizers, statistics and noise. Hand-written kernels run them.

Compilers do not see inside an operator, so it does not fuse with its neighbours. That is intended: on a CPU the kernel
of :mod:`fp4graph.kernels.cpu` takes a fraction of the time of Inductor's code, and is compiled once for all sites and
shapes, where Inductor compiles code for each. On a GPU the Triton kernel reads and writes less memory than Inductor's
code, and writes packed bytes for the backward; docs/gpu.md has its times. Values are those of
:func:`fp4graph.fake_quantize`. :mod:`fp4graph.kernels.library` has the schemas and implementations of the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp4graph.kernels import gpu, library, machine, switches
from fp4graph.kernels.devices import DEVICES, RUN
from fp4graph.kernels.direction import NOTHING_GIVEN, Blocks, Direction, PackedOperand, Source
from fp4graph.kernels.machine import Machine
from fp4graph.numerics import noise, scaling, target
from fp4graph.numerics.blocking import Blocking, Groups, block_length, is_scalar, maximum
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.spec import QuantSpec

_LONGEST = 1024  # a 2-D block with a longer side needs a second maximum, over its lines


def tensor_code() -> AbstractContextManager[None]:
    """Return a context in which quantizers are traced and run as tensor code, which any device's compiler can read."""
    return switches.using(quantizers=False, products=0)


def largest_of_all(x: Tensor) -> Tensor:
    """Return the largest magnitude of ``x``, fp32, 0-d: NaN if a value is NaN, 0 if ``x`` is empty.

    The maximum of each line is taken first, because Inductor fuses it with the code that computes the line.
    """
    if x.dim() > 1 and statically_known_true(x.stride(-1) != 1):
        x = x.mT
    axes = tuple(range(x.dim()))
    return maximum(maximum(x.abs(), axes[-1:]), axes).reshape(()).to(torch.float32)


def by_run(part: Tensor, blocking: Blocking) -> Tensor:
    """Return ``part`` as kernels take :class:`Blocks`; it may have any shape that broadcasts to a statistic.

    The result has one element for all blocks, or one for each block of :func:`fp4graph.kernels.devices.by_runs`. CPU
    kernels take it with any strides; GPU kernels need it contiguous.
    """
    if is_scalar(part):
        return part.reshape(1)
    part = part.expand(blocking.scale_shape)
    rows, columns = blocking.shape[-2] if len(blocking.shape) > 1 else 1, blocking.shape[-1]
    in_place = target.kind(part.device) == "cpu"
    if isinstance(blocking.block, tuple):
        part = part.expand([*part.shape[:-3], blocking.block[0], *part.shape[-2:]]).squeeze(-1)
        if in_place:
            return _batched(part, 4)
        return part.flatten(-3, -2)[..., :rows, :].contiguous()
    if isinstance(blocking.block, str):  # one number for each line
        part = part.expand([*blocking.shape[:-1], 1])
        part = part.expand([*blocking.shape[:-1], (columns + RUN - 1) // RUN])
    else:
        part = part.squeeze(-1)
    return _batched(part, 3) if in_place else part.contiguous()


def _batched(x: Tensor, axes: int) -> Tensor:
    """Return ``x`` with ``axes`` axes: leading axes are flattened into one, or new ones of length 1 are added."""
    return x.flatten(0, x.dim() - axes) if x.dim() > axes else x[(None,) * (axes - x.dim())]


def multiplies(left: Tensor, right: Tensor, addend: Tensor | None) -> bool:
    """Return whether this project's GPU kernel computes the product of ``left [..., I, K]`` and ``right [..., J, K]``.
    That kernel also multiplies the accumulator by a scalar, and adds ``addend``."""
    wanted = switches.current().products > 0 and target.kind(left.device) == "cuda"
    return wanted and machine.available_on_gpu() and gpu.multiplies(left, right, addend)


def _dtypes(device: torch.device) -> frozenset[torch.dtype]:
    return DEVICES[target.kind(device)].dtypes


def quantize(
    x: Tensor,
    spec: QuantSpec,
    draw: Draw | None = None,
    given: Blocks | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``x [..., C]`` quantized by ``spec`` along its last axis, in the memory layout of ``x``.

    Args:
        draw: needed if ``spec`` rounds stochastically.
        given: the numbers that techniques give for the blocks of ``x [B, R, C]``, all leading axes flattened to B. A
            tensor of four axes is ``[B, G, r, n]``, never ``[..., R, n]``; :func:`by_run` makes what kernels take.
        dtype: the dtype to which the result is cast if ``x`` is fp32 and kernels write ``dtype``; otherwise the result
            has the dtype of ``x``.
    """
    if x.dtype not in _dtypes(x.device):
        return quantize(x.to(torch.float32), spec, draw, given).to(x.dtype)
    # Every code rounds the result for a 16-bit x to the dtype of x first, so only the result for fp32 is cast here.
    casts = x.dtype is torch.float32 and dtype is not x.dtype and dtype in _dtypes(x.device)
    direction = Direction(spec, draw, given or NOTHING_GIVEN)
    result: Tensor = torch.ops.fp4graph.quantize(x, *direction.flat(given=True), *((dtype,) if casts else ()))
    return result


def maxima(x: Tensor, block: int, lines: int = 1) -> Tensor:
    """Return the largest magnitude of every block, ``lines`` rows by ``block`` columns, of ``x [..., R, C]``: fp32,
    ``[..., ceil(R/lines), ceil(C/block)]``. With more than one line neither side may exceed 1024."""
    z: Tensor = torch.ops.fp4graph.maxima(x if x.dtype in _dtypes(x.device) else x.to(torch.float32), block, lines)
    return z


def amax(x: Tensor, blocking: Blocking, values: Callable[[], Tensor] | None = None) -> Tensor:
    """Return the largest magnitude of every block of ``x``, fp32, in the shape of a statistic; NaN if a value is NaN.

    On a GPU, tensor code computes it, and Inductor fuses this code with the producer of ``x``.

    Args:
        values: returns ``x`` in the blocked layout, if another computation needs ``x`` in that layout too.
    """
    if isinstance(blocking.block, str) or not Machine.of(x.device).has_cpu_kernels:
        return scaling.amax(blocking.split(x) if values is None else values(), blocking.axes)
    if isinstance(blocking.block, int):
        return maxima(x, blocking.block).reshape(blocking.scale_shape)
    rows, columns = blocking.block
    if max(rows, columns) <= _LONGEST:
        return maxima(x, columns, rows).reshape(blocking.scale_shape)
    z = maxima(x, columns)
    across = Blocking(tuple(z.shape), (rows, 1))
    return across.split(z).amax(across.axes, keepdim=True)


def group_amax(z: Tensor, groups: Groups) -> Tensor:
    """Return the largest statistic of every group, broadcastable to ``z``. Both are fp32, non-negative or NaN."""
    if not isinstance(groups.granularity, int) or not Machine.of(z.device).has_cpu_kernels:
        return groups.reduce(z, "amax")
    length = groups.granularity // block_length(groups.blocking.block)
    g: Tensor = torch.ops.fp4graph.group_maxima(z.squeeze(-1), length).reshape(z.shape)
    return g


def mantissa(z: Tensor, divisor: float, bits: int) -> Tensor:
    """Return :func:`fp4graph.numerics.scaling.mantissa` of the same arguments."""
    if not Machine.of(z.device).has_cpu_kernels:
        return scaling.mantissa(z, divisor, bits)
    y: Tensor = torch.ops.fp4graph.mantissa(z, divisor, bits)
    return y


def largest(score: Tensor, count: int) -> Tensor:
    """Return whether each element of ``score`` is among the ``count`` largest. Among equal elements those with lower
    indices are chosen; NaN is larger than any number."""
    if score.dtype is not torch.float32 or not Machine.of(score.device).has_cpu_kernels:
        return library.largest(score, count)
    chosen: Tensor = torch.ops.fp4graph.largest(score, count)
    return chosen


def quantize_and_pack(
    x: Tensor, spec: QuantSpec, draw: Draw | None, dtype: torch.dtype
) -> tuple[Tensor, PackedOperand]:
    """Return the result of :func:`quantize`, contiguous, and the bytes that stand for this result cast to ``dtype``."""
    values, codes, scales = torch.ops.fp4graph.quantize_and_pack(*Source.of(x), *Direction(spec, draw).flat())
    return values, PackedOperand(codes, scales, spec, x.shape[-1], dtype)


def quantize_both(
    x: Tensor, rows: Direction, columns: Direction, sums: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ``x [..., M, K]`` quantized by ``rows`` along K and by ``columns`` along M, in one read.

    Args:
        rows, columns: if both draw, they have one key and step, and perhaps different salts.
        sums: whether to return a third tensor: the sums of ``x`` over the rows of each tile
            (:mod:`fp4graph.kernels.tiles`), fp32 ``[tiles, K]``.
    """
    both = *rows.flat(given=True), *columns.flat(given=True)
    along_rows, along_columns, partial = torch.ops.fp4graph.quantize_both(*Source.of(x), *both, sums)
    return along_rows, along_columns, partial if sums else None


def quantize_and_pack_columns(
    x: Tensor, rows: Direction, columns: Direction, dtype: torch.dtype, multiplier: Tensor | None = None
) -> tuple[Tensor, PackedOperand]:
    """Return the results of :func:`quantize_both`, the second as the bytes of its transpose, cast to ``dtype``.

    Args:
        columns: a direction whose :attr:`Direction.packs` is true.
        multiplier: the packed operand's scalar for the GEMM's accumulator, or None.
    """
    both = *rows.flat(given=True), *columns.flat(given=True)
    values, codes, scales = torch.ops.fp4graph.quantize_and_pack_columns(*Source.of(x), *both)
    arguments = columns.spec, x.shape[-2], dtype
    return values, PackedOperand(codes, scales, *arguments, True, columns.given.factor, multiplier)


def rounded(x: Tensor) -> Tensor:
    """Return ``x``; compiled code that reads the result reads values that were rounded to the dtype of ``x``.

    Inductor drops a cast to 16 bits that a cast back to fp32 follows in one loop, unless ``emulate_precision_casts`` is
    set. On a CPU the option slows the model's own code down (1.7 times, for a norm and a GELU), so an operator, which
    Inductor does not look into, stands between the casts. On GPUs the option is set.
    """
    if x.dtype not in (torch.bfloat16, torch.float16) or target.kind(x.device) != "cpu":
        return x
    result: Tensor = torch.ops.fp4graph.rounded(x)
    return result


def gaussian(draw: Draw, count: int, device: torch.device) -> Tensor:
    """Return :func:`fp4graph.numerics.noise.gaussian` of the first ``count`` indices: standard normal variates, fp32.

    On a CPU a kernel computes them: Inductor's code for the hashes takes half a minute to compile.
    """
    if not Machine.of(device).has_cpu_kernels:
        return noise.gaussian(draw.varying, torch.arange(count, dtype=torch.int32, device=device))
    result: Tensor = torch.ops.fp4graph.gaussian(draw.key, draw.step, draw.salts, count)
    return result
