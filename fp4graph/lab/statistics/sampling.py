"""Samples of operands, with all parts of their quantization. A *line* runs along the contraction axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fp4graph.kernels import operators
from fp4graph.lab.statistics.decomposition import with_ideal_scales
from fp4graph.numerics import noise, scaling
from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.formats import ElementFormat
from fp4graph.numerics.noise import Noise
from fp4graph.numerics.rounding import spacing
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.observe import ObservedOperand
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import total
from fp4graph.technique import QUANTIZER_STAGES, Part, Quantization, Wrapper

#: The most matrices that are sampled from a batch, and the fewest lines from an operand.
MATRICES, LEAST = 4, 8
#: Stages that replace the rounding of an element, or add randomness to it.
_COMPOSING = ("split", "around", "round", "rescale", "after")


@dataclass(frozen=True)
class Selection:
    """The sampled lines of an operand ``[..., R, K]``: evenly spaced lines of evenly spaced matrices."""

    shape: tuple[int, ...]
    elements: int | None  # the approximate number of elements to sample; None for all

    def of(self, x: Tensor) -> Tensor:
        """Return a copy of the sampled lines of ``x [..., R, K']``, fp32 ``[P, n, K']``; K' may differ from K."""
        matrices = x.reshape(-1, *x.shape[-2:])
        if self.elements is None:
            return matrices.to(torch.float32, copy=True)
        chosen, lines = (each.to(x.device) for each in self._chosen)
        # index_select is slow on transposed views.
        taken = matrices[chosen[:, None], lines] if len(matrices) > MATRICES else matrices[:, lines]
        return taken.to(torch.float32)

    def index(self, device: torch.device) -> Tensor:
        """Return the sampled elements' row-major indices, int32 ``[P, n, K]``, wrapping like :meth:`Blocking.index`."""
        count, length = self.shape[-2:]
        matrices, lines = self._chosen
        starts = (matrices[:, None] * count + lines).to(torch.int32) * length
        return (starts[..., None] + torch.arange(length, dtype=torch.int32)).to(device)

    @cached_property
    def _chosen(self) -> tuple[Tensor, Tensor]:
        """The indices of the sampled matrices, and of the sampled lines of each."""
        (count, length), batch = self.shape[-2:], math.prod(self.shape[:-2])
        matrices, lines = batch, count
        if self.elements is not None:
            matrices = min(batch, MATRICES)
            lines = max(-(-LEAST // max(1, matrices)), self.elements // (max(1, length) * max(1, matrices)))
        chosen = ((batch, matrices), (count, min(lines, count)))
        first, second = (torch.arange(samples) * size // max(1, samples) for size, samples in chosen)
        return first, second


class Moments(NamedTuple):
    """Mean and variance of the multiplied values over the random bits of their rounding, fp32 ``[P, n, K]``."""

    mean: Tensor | None  # None if the moments are unknown
    variance: Tensor | None = None  # None if nothing is random


class Sample(NamedTuple):
    """Sampled lines of one operand, quantized: fp32 ``[P, n, K]``, in the GEMM's basis."""

    x: Tensor
    q: Tensor  # the multiplied values
    ideal: Tensor  # the values under unrounded scales
    ratio: Tensor  # x divided by its scale, before rounding; NaN where the block's scale is NaN
    moments: Moments
    element: ElementFormat
    scales: Tensor  # the stored scales, [B], 0 for a block of zeros; of all blocks if blocks depend on each other


@torch.no_grad()
def sample(seen: ObservedOperand, selection: Selection) -> Sample:
    """Quantize the sampled lines of a quantized operand again, with the same random bits, and keep every part.

    The whole operand is quantized again if a block's result depends on other blocks, or on state that does
    not have the operand's shape.
    """
    program, draw, state, segments = seen.program, seen.draw, seen.state, seen.segments
    spec = program.spec
    assert spec is not None
    operand, x, q, picked = seen.x, selection.of(seen.x), selection.of(total(seen.terms)), selection.of
    if by_block(program):
        operand, segments, picked = x, None, lambda x: x
        state = {name: {key: selection.of(value) for key, value in entry.items()} for name, entry in state.items()}
        if draw is not None and spec.needs_key:
            draw = _SampleDraw(draw.key, draw.step, draw.salts, index=selection.index(x.device))
    with operators.tensor_code():  # else a kernel would be compiled for these few calls
        parts = program.quantize(operand, draw, state, segments)
        ideal = picked(total(with_ideal_scales(program)(operand, draw, state, segments)))

    def joined(values: Tensor) -> Tensor:
        return picked(parts.blocking.join(values))

    scales = torch.where(parts.z == 0, 0.0, parts.scale).flatten()
    return Sample(x, q, ideal, joined(parts.ratio), _moments(program, parts, q, joined), spec.element, scales)


def by_block(program: OperandProgram) -> bool:
    """Return whether blocks are independent, so that a few blocks can be quantized without the others."""
    spec = program.spec
    return (
        spec is not None
        and (isinstance(spec.block, int) or spec.block == "row")
        and spec.scale.rounding != "stochastic"
        and all(slot.entry.weight_like for slot in program.state)
        and all(map(_acts_by_block, program.parts))
    )


def _acts_by_block(part: Part) -> bool:
    """Return whether a part treats each block by itself."""
    within_blocks = part.mixes in ("none", "block") and getattr(part, "group_granularity", None) is None
    return not any(map(part.acts_at, QUANTIZER_STAGES)) or (
        within_blocks and not part.draws and not isinstance(part, Wrapper)
    )


@dataclass(frozen=True, eq=False)
class _SampleNoise(Noise):
    """Random bits, indexed by the elements' places in the whole operand."""

    index: Tensor

    def bits(self, salt: int = 0) -> Tensor:
        return noise.hash_bits(self._derived(salt), self.blocking.split(self.index))


@dataclass(frozen=True, eq=False)
class _SampleDraw(Draw):
    """The draw of an operand for its sampled lines; ``index`` is from :meth:`Selection.index`."""

    index: Tensor = field(kw_only=True)

    def noise(self, blocking: Blocking, device: torch.device) -> Noise:
        return _SampleNoise(self.varying, blocking, device, self.index)


def _moments(program: OperandProgram, parts: Quantization, q: Tensor, joined: Callable[[Tensor], Tensor]) -> Moments:
    """Return the moments of ``q``; ``joined`` converts a tensor in the blocked layout to the shape of ``q``."""
    spec = parts.spec
    composed = any(program.at(stage) for stage in _COMPOSING)
    if program.draws and (composed or spec.scale.rounding == "stochastic" or spec.others):
        return Moments(None)  # more than the rounding of elements is random, or elements have several formats
    if spec.rounding != "stochastic":
        return Moments(q)
    mean, variance = rounding_moments(parts.ratio, parts.scale, spec)
    if parts.group_scale is not None:
        mean, variance = mean * parts.group_scale, variance * parts.group_scale.square()
    return Moments(joined(mean), joined(variance))


def rounding_moments(ratio: Tensor, scale: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Return mean and variance of stochastically rounded, dequantized elements over their random bits.

    Let δ be the distance of the grid values around u, n = ⌊abs(u)/δ⌋, and p the probability of rounding to n + 1. Then
    mean = sign(u)·(n + p)·δ and variance = p·(1 − p)·δ², both in units of the scale.
    """
    u = ratio.abs().clamp(max=spec.element.max)
    step, inverse = spacing(u, spec.element.min_exponent, spec.element.mantissa_bits)
    places = u * inverse
    below = places.floor()
    steps = 2.0**spec.random_bits
    midpoint = 0.0 if spec.random_bits == 24 else 0.5
    p = ((places - below) * steps - midpoint).ceil() / steps  # a multiple of 2^-random_bits
    unit = scaling.dequantize(step, scale, spec)
    return (below + p) * unit * ratio.sign(), (1 - p) * p * unit.square()
