"""Operators for what rounding does to blocks: their errors, sums that make up for them, choices between elements.

Techniques choose the scales of blocks by these numbers. Sums are exact (:mod:`fp4graph.numerics.exact`), so the
operators give the bits of the tensor code, which runs on other devices. On a CPU Inductor makes no vector instructions
of that code's float64 arithmetic.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from fp4graph.kernels import abi
from fp4graph.kernels.abi import Entry
from fp4graph.kernels.devices import CPU, by_runs
from fp4graph.kernels.machine import Machine
from fp4graph.numerics import quantize, scaling
from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.declare import operator
from fp4graph.numerics.exact import block_error, most_elements, total, units_of
from fp4graph.numerics.noise import Noise
from fp4graph.numerics.rounding import power_of_two, round_nearest
from fp4graph.numerics.spec import QuantSpec, Selector

_SMALLEST_NORMAL = 2.0**-126  # of fp32


def block_errors(
    values: Tensor, scale: Tensor, z: Tensor, spec: QuantSpec, measure: Selector, blocking: Blocking
) -> Tensor:
    """Return the error of each block that is rounded to nearest under ``scale``: float64, in the shape of ``scale``.

    Args:
        values: fp32, in the blocked layout.
        z: the largest magnitude of each block; errors are in units of the power of two above it.
        measure: ``mse`` Σe², ``mae`` Σabs(e), ``amax`` max abs(e).
    """
    unit, nearest = power_of_two(z).clamp(min=_SMALLEST_NORMAL), replace(spec, rounding="nearest")
    if _serves(nearest, values.device):
        text = by_runs(nearest).to_text()
        error: Tensor = torch.ops.fp4graph.block_errors(
            values, scale, unit, _axes(blocking), text, measure, units_of(most_elements(spec.block))
        )
        return error
    elements = round_nearest(scaling.ratio(values, scale, spec), spec.element, spec.ties)
    errors = (scaling.dequantize(elements, scale, spec).double() - values.double()).abs()
    return block_error(errors / (2 * unit.double()), measure, spec.block, blocking.axes)


def block_moments(
    values: Tensor, scale: Tensor, spec: QuantSpec, blocking: Blocking, largest: float, most: int
) -> tuple[Tensor, Tensor]:
    """Return Σ u²/largest and Σ u·q/largest of each block, float64, in the shape of ``scale``.

    u are the ratios of ``values``, fp32 in the blocked layout, to ``scale``, and q the elements nearest to them.

    Args:
        largest: a power of two above every u² and u·q.
        most: a bound of the number of elements whose sums are added up.
    """
    if _serves(spec, values.device):
        about = _axes(blocking), by_runs(spec).to_text(), largest, units_of(most)
        squares, products = torch.ops.fp4graph.block_moments(values, scale, *about)
        return squares, products
    ratio = scaling.ratio(values, scale, spec)
    elements, ratio = round_nearest(ratio, spec.element, spec.ties).double(), ratio.double()
    squares, products = (total(sums / largest, blocking.axes, most) for sums in (ratio * ratio, ratio * elements))
    return squares, products


def round_elements(u: Tensor, spec: QuantSpec, noise: Noise) -> Tensor:
    """Return :func:`fp4graph.numerics.quantize.round_elements`."""
    singles = [replace(spec, element=element, others=(), selector=None) for element in spec.elements]
    draws, blocking = spec.rounding == "stochastic", noise.blocking
    in_lines = isinstance(spec.block, tuple) or blocking.dim in (-1, len(blocking.shape) - 1)
    known = len(singles) == 2 and (in_lines or spec.block == "tensor") and (spec.block != "row" or u.dim() > 1)
    drawn = noise.key is not None  # without a key the tensor code raises
    if not known or not all(_serves(single, u.device, draws=drawn) for single in singles):
        return quantize.round_elements(u, spec, noise)
    texts = [by_runs(single).to_text() for single in singles]
    # Blocks that are whole lines are numbered as parts of one long line.
    matrix = [math.prod(blocking.shape[-2:])] if spec.block == "row" else [*blocking.shape[-2:]]
    about = spec.selector, units_of(most_elements(spec.block)), matrix
    key = noise.key if draws else None
    elements: Tensor = torch.ops.fp4graph.choose_elements(u, key, _axes(blocking), *texts, *about)
    return elements


def _serves(spec: QuantSpec, device: torch.device, *, draws: bool = False) -> bool:
    """Return whether the operators round by ``spec`` on ``device``.

    Args:
        draws: whether the operator may round stochastically.
    """
    known = draws or spec.rounding == "nearest"
    return known and CPU.unknown(by_runs(spec)) is None and Machine.of(device).has_cpu_kernels


def _axes(blocking: Blocking) -> int:
    """Return how many axes at the end of the blocked layout a block reaches over; 0 for all."""
    return 0 if blocking.block == "tensor" else 3 if isinstance(blocking.block, tuple) else 1


# ------------------------------------------------------------------ operators


class _Grid(ctypes.Structure):
    """BlockGrid of cpp/measures.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("outer", "lines", "middle", "length")), ("steps", ctypes.c_int64 * 4),
        ("rows", ctypes.c_int64), ("columns", ctypes.c_int64),
    ]  # fmt: skip


_LONGEST = 64  # of cpp/choices.h
_AT, _DOUBLE = ctypes.c_void_p, ctypes.c_double
_TAIL = (ctypes.POINTER(_Grid), _DOUBLE, _DOUBLE, ctypes.c_int)
_PARAMETERS = "const BlockGrid& grid, double number, double units, int threads"


def _entry(tensors: str, call: str, formats: str, file: str = "measures.h") -> Entry:
    """Return an entry of a file in cpp/, with a variant for blocks whose elements are not contiguous. Its loops have a
    constant length where the lines of blocks have that length."""
    name, _, arguments = call.partition("(")
    apart = f"grid.steps[3] != 1 ? {name}_across<{formats}> : "
    known = f"({apart}grid.length == Q::BLOCK ? {name}<{formats}, Q::BLOCK> : {name}<{formats}, LANES>)({arguments}"
    code = f"void run({tensors}, {_PARAMETERS}) {{{{ {known}; }}}}"
    return Entry(code, (*[_AT] * (tensors.count(",") + 1), *_TAIL), file)


_MOMENTS = _entry(
    "const {T}* values, const float* scale, double* squares, double* products",
    "block_moments(values, scale, squares, products, grid, number, units, threads)",
    "Q",
)
_ERRORS = {
    measure: _entry(
        "const {T}* values, const float* scale, const float* unit, double* error",
        "block_errors(values, scale, unit, error, grid, units, threads)",
        f"Q, {measure.upper()}",
    )
    for measure in get_args(Selector)
}
_CHOICES = {
    measure: _entry(
        "const {T}* ratios, const i32* key, float* elements",
        "choose_elements(ratios, key, elements, grid, number, units, threads)",
        f"P, Q, {measure.upper()}",
        "choices.h",
    )
    for measure in get_args(Selector)
}


def _run(
    entry: Entry,
    axes: int,
    values: Tensor,
    others: tuple[Tensor | None, ...],
    number: float,
    units: float,
    matrix: Sequence[int] = (),
    **formats: str,
) -> None:
    """Run an entry on ``values``, of any strides, whose blocks span the last ``axes`` axes, or all axes for 0.

    The other tensors are contiguous; None is a null pointer. ``matrix`` is ``[R, C]`` of the tensor without padding,
    which numbers elements for their random bits.
    """
    values = _gridded(values, axes)
    steps = (*values.stride()[:3], 1 if values.shape[3] == 1 else values.stride(3))
    grid, at = (
        _Grid(*values.shape, (ctypes.c_int64 * 4)(*steps), *((1, 1, *matrix)[-2:])),
        map(abi.at, (values, *others)),
    )
    abi.function(entry, torch.float32, **formats)(*at, grid, number, units, torch.get_num_threads())


def _gridded(values: Tensor, axes: int) -> Tensor:
    """Return ``values`` as ``[outer, lines, middle, length]``: one block of ``lines`` by ``length`` elements for each
    outer and middle.

    Elements along ``length`` lie side by side, or where ``lines`` is 1 those along ``outer``. A matrix and a transposed
    matrix are not copied.
    """
    if not axes:
        return values.contiguous().view(1, 1, 1, -1)
    grid = (values if axes == 3 else values.unsqueeze(-3))[(None,) * max(0, 4 - values.dim() - (axes != 3))]
    grid = grid.flatten(0, -4)
    if grid.stride(3) != 1 and grid.stride(1) == 1 and grid.shape[1] > 1:
        return grid.transpose(1, 3)  # the order of a block's elements changes no sum
    across = grid.stride(0) == 1 and grid.shape[1] == 1
    return grid if grid.stride(3) == 1 or across else grid.contiguous()


def _errors(values: Tensor, scale: Tensor, unit: Tensor, axes: int, spec: str, measure: str, units: float) -> Tensor:
    error = _fake_errors(values, scale)
    _run(_ERRORS[measure], axes, values, (scale.contiguous(), unit.contiguous(), error), 0, units, Q=spec)
    return error


def _fake_errors(values: Tensor, scale: Tensor, *about: object) -> Tensor:
    return torch.empty_like(scale, dtype=torch.float64, memory_format=torch.contiguous_format)


def _moments(
    values: Tensor, scale: Tensor, axes: int, spec: str, largest: float, units: float
) -> tuple[Tensor, Tensor]:
    squares, products = _fake_moments(values, scale)
    _run(_MOMENTS, axes, values, (scale.contiguous(), squares, products), largest, units, Q=spec)
    return squares, products


def _fake_moments(values: Tensor, scale: Tensor, *about: object) -> tuple[Tensor, Tensor]:
    return _fake_errors(values, scale), _fake_errors(values, scale)


def _choose(
    ratios: Tensor,
    key: Tensor | None,
    axes: int,
    first: str,
    second: str,
    measure: str,
    units: float,
    matrix: Sequence[int],
) -> Tensor:
    elements = _fake_choose(ratios)
    if ratios.is_contiguous():
        ratios = ratios.flatten().view(ratios.shape)  # axes of size 1 may have other strides
    grid = _gridded(ratios, axes)
    in_order = axes == 1 or key is None  # else the grid's order of elements must be theirs
    viewed = grid.data_ptr() == ratios.data_ptr() and ratios.stride() == elements.stride()
    held = grid.stride(3) == 1 or grid.shape[3] <= _LONGEST
    if not (ratios.is_contiguous() or (in_order and viewed and held)):
        return elements.copy_(_choose(ratios.contiguous(), key, axes, first, second, measure, units, matrix))
    others = None if key is None else key.contiguous(), elements
    _run(_CHOICES[measure], axes, ratios, others, quantize.EQUAL, units, matrix, P=first, Q=second)
    return elements


def _fake_choose(ratios: Tensor, *about: object) -> Tensor:
    return torch.empty_like(ratios)


operator(
    "block_errors(Tensor values, Tensor scale, Tensor unit, int axes, str spec, str measure, float units) -> Tensor",
    _fake_errors,
    CPU=_errors,
)
operator(
    "block_moments(Tensor values, Tensor scale, int axes, str spec, float largest, float units) -> (Tensor, Tensor)",
    _fake_moments,
    CPU=_moments,
)
operator(
    "choose_elements(Tensor ratios, Tensor? key, int axes, str first, str second, str measure, float units, "
    "SymInt[] matrix) -> Tensor",
    _fake_choose,
    CPU=_choose,
)
