"""Operators for numbers that many elements share: scales of blocks, order statistics and means.

Without these operators Inductor's code would compute a block's scale again for every vector of its elements, sort to
select, and read distant lines of memory for exact sums. Other devices than CPUs run tensor code, which gives the same
bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp4graph.kernels import cpu
from fp4graph.kernels.devices import CPU, by_runs
from fp4graph.kernels.machine import Machine
from fp4graph.numerics import exact, scaling
from fp4graph.numerics.declare import operator
from fp4graph.numerics.spec import QuantSpec


def block_scale(z: Tensor, spec: QuantSpec) -> Tensor:
    """Return :func:`fp4graph.numerics.scaling.block_scale` of ``z``, fp32, by a rule without stochastic rounding."""
    runs = by_runs(spec)
    if not (CPU.unknown(runs) is None and Machine.of(z.device).has_cpu_kernels):
        return scaling.block_scale(z, spec.scale, spec.element)
    scale: Tensor = torch.ops.fp4graph.block_scale(z, runs.to_text())
    return scale


def order_statistics(x: Tensor, place: int) -> tuple[Tensor, Tensor]:
    """Return the elements of ``x [n]`` at ``place`` and at n - 1 - place of the ascending order, counted from 0.

    Both are 0-d and of the dtype of ``x``, which must not have NaN. For an empty ``x`` they are -Inf and Inf.
    """
    if x.dtype in cpu.DTYPES and Machine.of(x.device).has_cpu_kernels:
        low, high = torch.ops.fp4graph.order_statistics(x, place)
        return low, high
    bound = torch.full((1,), math.inf, dtype=x.dtype, device=x.device)  # for an empty tensor
    count = torch.sym_min(place + 1, math.prod(x.shape))
    smallest = x.topk(count, largest=False, sorted=False).values
    largest = x.topk(count, sorted=False).values
    return torch.cat([smallest, -bound]).amax(), torch.cat([largest, bound]).amin()


def mean(x: Tensor, axis: int) -> Tensor:
    """Return :func:`fp4graph.numerics.exact.mean` of ``x`` over ``axis``."""
    known = x.dim() == 2 and axis in (0, 1, -1, -2)
    if not (known and x.dtype in cpu.DTYPES and Machine.of(x.device).has_cpu_kernels):
        return exact.mean(x, axis)
    means: Tensor = torch.ops.fp4graph.mean(x if axis in (0, -2) else x.mT)
    return means.unsqueeze(axis)


def _block_scale(z: Tensor, spec: str) -> Tensor:
    scale = _fake_block_scale(z, spec)
    cpu.block_scales(z.contiguous(), scale, spec)
    return scale


def _fake_block_scale(z: Tensor, spec: str) -> Tensor:
    return torch.empty_like(z, memory_format=torch.contiguous_format)


def _order_statistics(x: Tensor, place: int) -> tuple[Tensor, Tensor]:
    if not x.numel():
        return x.new_tensor(-math.inf), x.new_tensor(math.inf)
    both = torch.empty(2)
    cpu.order_statistics(x.contiguous(), min(place, x.numel() - 1), both)
    low, high = both.to(x.dtype).unbind()
    return low.clone(), high.clone()


def _fake_order_statistics(x: Tensor, place: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(()), x.new_empty(())


def _mean(x: Tensor) -> Tensor:
    means = _fake_mean(x)
    cpu.means(x.contiguous(), means)
    return means


def _fake_mean(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], dtype=torch.float32)


operator("block_scale(Tensor z, str spec) -> Tensor", _fake_block_scale, CPU=_block_scale)
operator("order_statistics(Tensor x, SymInt place) -> (Tensor, Tensor)", _fake_order_statistics, CPU=_order_statistics)
operator("mean(Tensor x) -> Tensor", _fake_mean, CPU=_mean)
