"""Operators that measure the rounding of blocks: errors, sums of ratios and elements, choices between element formats.

Techniques choose the scales of blocks by these numbers. Sums are exact (:mod:`fp4graph.numerics.exact`), so the
operators give the same bits as the tensor code, which other devices run. The operators are faster on a CPU, where
Inductor does not vectorize the float64 arithmetic of the tensor code.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from fp4graph.kernels import abi
from fp4graph.kernels.abi import Entry
from fp4graph.kernels.devices import CPU, by_runs
from fp4graph.kernels.machine import Machine
from fp4graph.numerics import quantize, scaling
from fp4graph.numerics.blocking import Blocking, Groups
from fp4graph.numerics.declare import Structure, operator
from fp4graph.numerics.exact import block_error, most_elements, total, units_of
from fp4graph.numerics.noise import Noise
from fp4graph.numerics.rounding import power_of_two, round_nearest
from fp4graph.numerics.spec import QuantSpec, Selector

_SMALLEST_NORMAL = 2.0**-126  # of fp32


class Quotient(NamedTuple):
    """Values in the blocked layout, given as an operand and its divisor. Operators divide while they read.

    Attributes:
        operand: returns the operand in its dtype and in the blocked layout.
        divisor: fp32, one element; None for 1.
    """

    operand: Callable[[], Tensor]
    divisor: Tensor | None = None


def block_errors(
    values: Tensor,
    scale: Tensor,
    z: Tensor,
    spec: QuantSpec,
    measure: Selector,
    blocking: Blocking,
    quotient: Quotient | None = None,
) -> Tensor:
    """Return the error of each block that is rounded to nearest under ``scale``: float64, in the shape of ``scale``.

    Args:
        values: fp32, in the blocked layout.
        z: the largest magnitude of each block; the unit of errors is the power of two above it.
        measure: ``mse`` Σe², ``mae`` Σabs(e), ``amax`` max abs(e).
        quotient: the operand and the divisor of ``values``, which kernels read instead of ``values``; None if blocks
            have different divisors.
    """
    unit, nearest = _unit(z), replace(spec, rounding="nearest")
    if _serves(nearest, values.device):
        text, divided = by_runs(nearest).to_text(), _divided(values, quotient)
        error: Tensor = torch.ops.fp4graph.block_errors(
            *divided, scale, unit, _axes(blocking), text, measure, units_of(most_elements(spec.block))
        )
        return error
    elements = round_nearest(scaling.ratio(values, scale, spec), spec.element, spec.ties)
    errors = (scaling.dequantize(elements, scale, spec).double() - values.double()).abs()
    return block_error(errors / (2 * unit.double()), measure, spec.block, blocking.axes)


def errs_less(
    values: Tensor,
    scales: tuple[Tensor, Tensor],
    z: Tensor,
    spec: QuantSpec,
    measure: Selector,
    blocking: Blocking,
    quotient: Quotient | None = None,
) -> Tensor:
    """Return whether each block has a smaller error under the second of two scales: bool, in the shape of a scale.
    :func:`block_errors` defines the error and the other arguments."""
    nearest = replace(spec, rounding="nearest")
    if not _serves(nearest, values.device):
        first, second = (block_errors(values, scale, z, spec, measure, blocking) for scale in scales)
        return second < first
    arguments = _axes(blocking), by_runs(nearest).to_text(), measure, units_of(most_elements(spec.block))
    less: Tensor = torch.ops.fp4graph.errs_less(*_divided(values, quotient), *scales, _unit(z), *arguments)
    return less


def group_moments(
    values: Tensor,
    scale: Tensor,
    spec: QuantSpec,
    blocking: Blocking,
    largest: float,
    length: int,
    quotient: Quotient | None = None,
) -> tuple[Tensor, Tensor]:
    """Return Σ u²/largest and Σ u·q/largest over the group of each block, float64, in the shape of ``scale``.

    u is the ratio of a value (``values``, fp32 in the blocked layout) to its scale, and q is u rounded to nearest.

    Args:
        largest: a power of two above every u² and u·q.
        length: the number of elements of a group, which are neighbours in a line; a multiple of the block length.
        quotient: as in :func:`block_errors`.

    Raises:
        ValueError: the spec has no block length along a line, or ``length`` is not a multiple of the block length.
    """
    if not isinstance(spec.block, int) or length % spec.block:
        raise ValueError(f"groups of {length} elements do not consist of whole blocks of {spec.block}")
    if _serves(spec, values.device):
        together = length // spec.block
        arguments = _axes(blocking), by_runs(spec).to_text(), together, largest, units_of(length)
        squares, products = torch.ops.fp4graph.group_moments(*_divided(values, quotient), scale, *arguments)
        return squares, products
    ratio, groups = scaling.ratio(values, scale, spec), Groups(blocking, length)
    elements, ratio = round_nearest(ratio, spec.element, spec.ties).double(), ratio.double()
    of_blocks = (total(sums / largest, blocking.axes, length) for sums in (ratio * ratio, ratio * elements))
    squares, products = (groups.reduce(sums, "sum") for sums in of_blocks)
    return squares, products


def round_elements(u: Tensor, spec: QuantSpec, noise: Noise) -> Tensor:
    """Compute :func:`fp4graph.numerics.quantize.round_elements`."""
    chosen = _chosen(_Divided(u, None), None, spec, noise)
    return quantize.round_elements(u, spec, noise) if chosen is None else chosen


def quantize_elements(
    values: Tensor, scale: Tensor, spec: QuantSpec, noise: Noise, quotient: Quotient | None = None
) -> Tensor:
    """Return ``values``, fp32 in the blocked layout, quantized under ``scale`` and dequantized; ``quotient`` as in
    :func:`block_errors`."""
    chosen = _chosen(_divided(values, quotient if spec.others else None), scale, spec, noise)
    if chosen is not None:
        return chosen
    elements = quantize.round_elements(scaling.ratio(values, scale, spec), spec, noise)
    return scaling.dequantize(elements, scale, spec)


def _chosen(x: _Divided, scale: Tensor | None, spec: QuantSpec, noise: Noise) -> Tensor | None:
    """Return ``x`` with each block rounded to the better of two element formats: dequantized, or the elements if
    ``scale`` is None. Return None if no operator supports the spec."""
    singles = [replace(spec, element=element, others=(), selector=None) for element in spec.elements]
    draws, blocking = spec.rounding == "stochastic", noise.blocking
    in_lines = isinstance(spec.block, tuple) or blocking.dim in (-1, len(blocking.shape) - 1)
    known = len(singles) == 2 and (in_lines or spec.block == "tensor") and (spec.block != "row" or x.values.dim() > 1)
    drawn = noise.key is not None  # without a key the tensor code raises an error
    if not known or not all(_serves(single, x.values.device, draws=drawn) for single in singles):
        return None
    texts = [by_runs(single).to_text() for single in singles]
    # If blocks are whole lines, their elements are numbered as if all lines were one long line.
    matrix = [math.prod(blocking.shape[-2:])] if spec.block == "row" else [*blocking.shape[-2:]]
    arguments = spec.selector, units_of(most_elements(spec.block)), matrix
    key = noise.key if draws else None
    result: Tensor = torch.ops.fp4graph.choose(*x, scale, key, _axes(blocking), *texts, *arguments)
    return result


def _unit(z: Tensor) -> Tensor:
    return power_of_two(z).clamp(min=_SMALLEST_NORMAL)


class _Divided(NamedTuple):
    """The values that an operator reads and the divisor that it applies: fp32, one element, or None."""

    values: Tensor
    divisor: Tensor | None


_DIVIDED = Structure(("Tensor values", "Tensor? divisor"), _Divided)


def _divided(values: Tensor, quotient: Quotient | None) -> _Divided:
    if quotient is None or (operand := quotient.operand()).dtype not in CPU.dtypes:
        return _Divided(values, None)
    return _Divided(operand, quotient.divisor)


def _serves(spec: QuantSpec, device: torch.device, *, draws: bool = False) -> bool:
    """Return whether the operators support ``spec`` on ``device``; stochastic rounding only with ``draws``."""
    known = draws or spec.rounding == "nearest"
    return known and CPU.unknown(by_runs(spec)) is None and Machine.of(device).has_cpu_kernels


def _axes(blocking: Blocking) -> int:
    """Return how many of the last axes of the blocked layout a block spans; 0 means all axes."""
    return 0 if blocking.block == "tensor" else 3 if isinstance(blocking.block, tuple) else 1


# ------------------------------------------------------------------ operators


class _Grid(ctypes.Structure):
    """BlockGrid of cpp/measures.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("outer", "lines", "middle", "length")), ("steps", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "together")),
    ]  # fmt: skip


_LONGEST = 64  # equal to LONGEST of cpp/choices.h
_POINTER, _DOUBLE = ctypes.c_void_p, ctypes.c_double
_TAIL = (ctypes.POINTER(_Grid), _DOUBLE, _DOUBLE, ctypes.c_int)


def _entry(name: str, tensors: str, formats: str, *, number: bool = False, file: str = "measures.h") -> Entry:
    """Return an entry of a file in cpp/. It has a variant for blocks whose elements are not contiguous, and one with
    loops of constant length for lines of exactly the spec's block length."""
    apart = f"grid.steps[3] != 1 ? {name}_across<{{S}}, {formats}> : "
    known = f"{apart}grid.length == Q::BLOCK ? {name}<{{S}}, {formats}, Q::BLOCK> : {name}<{{S}}, {formats}, LANES>"
    names = [tensor.rpartition(" ")[2] for tensor in tensors.split(", ")]
    given = ", ".join(["values, divisor", *names, "grid", *["number"] * number, "units, threads"])
    code = (
        f"void run(const {{S}}* values, const float* divisor, {tensors}, const BlockGrid& grid, double number, "
        f"double units, int threads) {{{{ ({known})({given}); }}}}"
    )
    return Entry(code, (*[_POINTER] * (2 + len(names)), *_TAIL), file)


_MOMENTS = _entry("group_moments", "const float* scale, double* squares, double* products", "AnyScale<Q>", number=True)
_ERRORS, _LESS, _CHOICES = {}, {}, {}
for _measure in get_args(Selector):
    _name = _measure.upper()
    _ERRORS[_measure] = _entry(
        "block_errors", "const float* scale, const float* unit, double* error", f"AnyScale<Q>, {_name}"
    )
    _tensors = "const float* scale, const float* other, const float* unit, bool* result"
    _LESS[_measure] = _entry("errs_less", _tensors, f"AnyScale<Q>, {_name}", file="choices.h")
    _tensors = "const float* scale, const i32* key, float* result"
    _CHOICES[_measure] = _entry("choose", _tensors, f"AnyScale<P>, AnyScale<Q>, {_name}", number=True, file="choices.h")


def _run(
    entry: Entry,
    axes: int,
    x: _Divided,
    others: tuple[Tensor | None, ...],
    number: float,
    units: float,
    *,
    together: int = 1,
    matrix: Sequence[int] = (),
    **formats: str,
) -> None:
    """Run an entry on ``x``, of any strides, whose blocks span the last ``axes`` axes, or all axes if ``axes`` is 0.

    ``others`` are contiguous; None becomes a null pointer. Each ``together`` neighbouring blocks of a line share one
    result. ``matrix`` is ``[R, C]`` of the tensor without padding, by which elements are numbered for random bits.
    """
    values = _gridded(x.values, axes)
    steps = (*values.stride()[:3], 1 if values.shape[3] == 1 else values.stride(3))
    grid = _Grid(*values.shape, (ctypes.c_int64 * 4)(*steps), *((1, 1, *matrix)[-2:]), together)
    run = abi.function(entry, torch.float32, values.dtype, **formats)
    run(*map(abi.at, (values, x.divisor, *others)), grid, number, units, torch.get_num_threads())


def _gridded(values: Tensor, axes: int) -> Tensor:
    """Return ``values`` as ``[outer, lines, middle, length]``: one block of ``lines`` by ``length`` elements for each
    pair of outer and middle indices.

    The result is contiguous along ``length``, or along ``outer`` if ``lines`` is 1. Matrices and transposed matrices
    are not copied.
    """
    if not axes:
        return values.contiguous().view(1, 1, 1, -1)
    grid = (values if axes == 3 else values.unsqueeze(-3))[(None,) * max(0, 4 - values.dim() - (axes != 3))]
    grid = grid.flatten(0, -4)
    if grid.stride(3) != 1 and grid.stride(1) == 1 and grid.shape[1] > 1:
        return grid.transpose(1, 3)  # the order of a block's elements changes no sum
    across = grid.stride(0) == 1 and grid.shape[1] == 1
    return grid if grid.stride(3) == 1 or across else grid.contiguous()


def _errors(x: _Divided, scale: Tensor, unit: Tensor, axes: int, spec: str, measure: str, units: float) -> Tensor:
    error = _fake_errors(x, scale)
    _run(_ERRORS[measure], axes, x, (scale.contiguous(), unit.contiguous(), error), 0, units, Q=spec)
    return error


def _fake_errors(x: _Divided, scale: Tensor, *arguments: object) -> Tensor:
    return torch.empty_like(scale, dtype=torch.float64, memory_format=torch.contiguous_format)


def _errs_less(
    x: _Divided, scale: Tensor, other: Tensor, unit: Tensor, axes: int, spec: str, measure: str, units: float
) -> Tensor:
    less = _fake_errs_less(x, scale)
    others = scale.contiguous(), other.contiguous(), unit.contiguous(), less
    _run(_LESS[measure], axes, x, others, 0, units, Q=spec)
    return less


def _fake_errs_less(x: _Divided, scale: Tensor, *arguments: object) -> Tensor:
    return torch.empty_like(scale, dtype=torch.bool, memory_format=torch.contiguous_format)


def _moments(
    x: _Divided, scale: Tensor, axes: int, spec: str, together: int, largest: float, units: float
) -> tuple[Tensor, Tensor]:
    sums = _fake_moments(x, scale)
    _run(_MOMENTS, axes, x, (scale.contiguous(), *sums), largest, units, together=together, Q=spec)
    return sums


def _fake_moments(x: _Divided, scale: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
    return _fake_errors(x, scale), _fake_errors(x, scale)


def _choose(
    x: _Divided,
    scale: Tensor | None,
    key: Tensor | None,
    axes: int,
    first: str,
    second: str,
    measure: str,
    units: float,
    matrix: Sequence[int],
) -> Tensor:
    result, values = _fake_choose(x), x.values
    if values.is_contiguous():
        values = values.flatten().view(values.shape)  # axes of size 1 may have other strides
    grid = _gridded(values, axes)
    in_order = axes == 1 or key is None  # else random bits need contiguous values: see BlockGrid.number
    viewed = grid.data_ptr() == values.data_ptr() and values.stride() == result.stride()
    held = grid.stride(3) == 1 or grid.shape[3] <= _LONGEST
    if not (values.is_contiguous() or (in_order and viewed and held)):
        arguments = scale, key, axes, first, second, measure, units, matrix
        return result.copy_(_choose(_Divided(values.contiguous(), x.divisor), *arguments))
    others = (*(None if each is None else each.contiguous() for each in (scale, key)), result)
    x = _Divided(values, x.divisor)
    _run(_CHOICES[measure], axes, x, others, quantize.EQUAL, units, matrix=matrix, P=first, Q=second)
    return result


def _fake_choose(x: _Divided, *arguments: object) -> Tensor:
    return torch.empty_like(x.values, dtype=torch.float32)


_TEXT = "str measure, float units"
for _schema, _fake, _cpu in (
    (
        f"block_errors(Divided x, Tensor scale, Tensor unit, int axes, str spec, {_TEXT}) -> Tensor",
        _fake_errors,
        _errors,
    ),
    (
        f"errs_less(Divided x, Tensor scale, Tensor other, Tensor unit, int axes, str spec, {_TEXT}) -> Tensor",
        _fake_errs_less,
        _errs_less,
    ),
    (
        "group_moments(Divided x, Tensor scale, int axes, str spec, int together, float largest, float units) -> "
        "(Tensor, Tensor)",
        _fake_moments,
        _moments,
    ),
    (
        f"choose(Divided x, Tensor? scale, Tensor? key, int axes, str first, str second, {_TEXT}, SymInt[] matrix) -> "
        "Tensor",
        _fake_choose,
        _choose,
    ),
):
    operator(_schema, _fake, structures={"Divided": _DIVIDED}, CPU=_cpu)
