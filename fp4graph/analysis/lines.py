"""Some lines of an operand with all that its quantizer made of them, and how they are taken out of a training step.

A *line* runs along the contraction axis. A few of them tell as much about a large operand as all of them, at a cost
that does not grow with it. Lines of sites that are alike are quantized side by side, so that a step with statistics
makes a few large calls and not thousands of small ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4graph.analysis.decomposition import ideal_spec, with_ideal_scales
from fp4graph.numerics import noise, scaling
from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.formats import ElementFormat
from fp4graph.numerics.noise import Noise
from fp4graph.numerics.quantize import round_elements
from fp4graph.numerics.rounding import bracket
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.matmul import Seen
from fp4graph.ops.program import OperandProgram, total
from fp4graph.technique import overrides

#: Of a batch of matrices, at most so many are looked at.
MATRICES = 4
#: Of a matrix at least so many lines, however long.
LEAST = 8
#: Stages at which a technique makes one line's outcome depend on others, or replaces the bare quantizer.
_STAGES = ("split", "around", "statistic", "normalizer", "group_statistic", "scale", "round", "after")
_COMPOSING = ("split", "around", "round", "after")


@dataclass(frozen=True)
class Selection:
    """Which lines of an operand ``[..., R, K]`` are looked at: evenly spaced ones of evenly spaced matrices.

    Attributes:
        shape: of the operand. elements: about how many to take; None for all.
    """

    shape: tuple[int, ...]
    elements: int | None

    @property
    def _matrices(self) -> int:
        return math.prod(self.shape[:-2])

    @property
    def _slices(self) -> tuple[slice, slice]:
        """Of the matrices, and of the lines of each."""
        if self.elements is None:
            return slice(None), slice(None)
        looked_at = max(1, min(self._matrices, MATRICES))
        wanted = max(LEAST, self.elements // (max(1, self.shape[-1]) * looked_at))
        return _spaced(self._matrices, looked_at), _spaced(self.shape[-2], wanted)

    def of(self, x: Tensor) -> Tensor:
        """The lines ``[P, n, K]`` of ``x [..., R, K]``, whose K need not be the operand's: a view if it can be one."""
        return x.reshape(-1, *x.shape[-2:])[self._slices]

    def numbers(self, device: torch.device) -> Tensor:
        """Of each line, int32 ``[P, n, 1]``: its place among all lines of the operand."""
        count = self._matrices * self.shape[-2]
        places = torch.arange(count, dtype=torch.int32, device=device)
        return places.reshape(self._matrices, self.shape[-2])[self._slices].unsqueeze(-1)


def _spaced(count: int, wanted: int) -> slice:
    return slice(0, count, max(1, -(-count // wanted)))


@dataclass(frozen=True)
class Moments:
    """Mean and variance of what is multiplied over the random bits of its rounding, fp32 ``[G, P, n, K]``.

    ``mean`` is None where they are not known, ``variance`` where there is nothing random.
    """

    mean: Tensor | None
    variance: Tensor | None = None

    def of(self, place: int) -> Moments:
        """Those of one operand of the G."""
        one = (None if each is None else each[place : place + 1] for each in (self.mean, self.variance))
        return Moments(*one)


@dataclass(frozen=True)
class Lines:
    """Lines of G operands alike, quantized. All fp32, ``[G, P, n, K]``, in the GEMM's basis.

    Attributes:
        x: what was to be multiplied. q: what was. ideal: what would have been under unrounded scales.
        ratio: x divided by its scale, before rounding. scales: as stored, ``[G, blocks]``; 0 of a block of zeros.
        moments: of q. element: the format of the elements.
    """

    x: Tensor
    q: Tensor
    ideal: Tensor
    ratio: Tensor
    scales: Tensor
    moments: Moments
    element: ElementFormat


@dataclass(frozen=True)
class Raw:
    """Lines of one operand whose quantizer treats each line by itself, so that they can be quantized again later.

    Attributes:
        x, q: ``[P, n, K]``. numbers: ``[P, n, 1]``. key: of the elements' random bits, or None. spec: the quantizer.
    """

    x: Tensor
    q: Tensor
    numbers: Tensor
    key: Tensor | None
    spec: QuantSpec

    def alike(self) -> tuple[object, ...]:
        """What must be equal of two for :func:`quantize_together`."""
        return self.spec, tuple(self.x.shape), self.x.device, self.key is None


def taken(seen: Seen, selection: Selection) -> Raw | Lines:
    """The selected lines of a quantized operand: raw where its quantizer allows it, else quantized at once."""
    program = seen.program
    assert program.spec is not None
    q = _copied(selection.of(total(seen.terms)))
    if by_line(program):
        x = _copied(selection.of(seen.x))
        key = None
        if program.spec.needs_key:
            assert seen.draw is not None
            key = noise.derive(seen.draw.varying, 0)
        return Raw(x, q, selection.numbers(x.device), key, program.spec)
    return _quantized_whole(seen, selection, q)


def by_line(program: OperandProgram) -> bool:
    """Whether the outcome for a line depends on that line alone, and the spec says all about it."""
    spec = program.spec
    return (
        spec is not None
        and (isinstance(spec.block, int) or spec.block == "row")
        and spec.scale.rounding != "stochastic"
        and not any(overrides(technique, stage) for technique in program.techniques for stage in _STAGES)
    )


@dataclass(frozen=True, eq=False)
class _LineNoise(Noise):
    """The bits that lines draw as parts of the whole operand."""

    given: Tensor

    def bits(self, salt: int = 0) -> Tensor:
        return self.given


def _line_noise(raw: Sequence[Raw], blocking: Blocking) -> Noise:
    x = raw[0].x
    keys = [each.key for each in raw if each.key is not None]
    if not keys:
        return Noise(None, blocking, x.device)
    numbers = torch.stack([each.numbers for each in raw])
    index = blocking.split(numbers * x.shape[-1] + torch.arange(x.shape[-1], dtype=torch.int32, device=x.device))
    key = torch.stack(keys, dim=1).reshape(2, -1, *[1] * (index.dim() - 1))
    return _LineNoise(None, blocking, x.device, noise.hash_bits(key, index))


def quantize_together(raw: Sequence[Raw]) -> Lines:
    """What the quantizer made of lines that are :meth:`Raw.alike`, along a new first axis."""
    spec = raw[0].spec
    x, q = torch.stack([each.x for each in raw]), torch.stack([each.q for each in raw])
    blocking = Blocking(tuple(x.shape), spec.block)
    bits = _line_noise(raw, blocking)
    values = blocking.split(x)
    z = scaling.amax(values, blocking.axes)
    scale = scaling.block_scale(z, spec.scale, spec.element)
    ratio = scaling.ratio(values, scale, spec)
    of_q = Moments(q)
    if spec.rounding == "stochastic":
        of_q = Moments(*map(blocking.join, moments(ratio, scale, spec)))
    ideal = blocking.join(_under_ideal_scale(values, z, spec, bits))
    return Lines(x, q, ideal, blocking.join(ratio), torch.where(z == 0, 0.0, scale).flatten(1), of_q, spec.element)


def _under_ideal_scale(values: Tensor, z: Tensor, spec: QuantSpec, bits: Noise) -> Tensor:
    ideal = ideal_spec(spec)
    scale = scaling.block_scale(z, ideal.scale, ideal.element)
    return scaling.dequantize(round_elements(scaling.ratio(values, scale, ideal), ideal, bits), scale, ideal)


def _quantized_whole(seen: Seen, selection: Selection, q: Tensor) -> Lines:
    """The same for any program: the whole operand is quantized again, for its lines may depend on each other."""
    program = seen.program
    spec = program.spec
    assert spec is not None
    parts = program.parts(seen.x, seen.draw, seen.state)
    ideal = total(with_ideal_scales(program)(seen.x, seen.draw, seen.state))
    composed = any(overrides(technique, stage) for technique in program.techniques for stage in _COMPOSING)
    of_q = Moments(q[None])
    if program.draws and (composed or spec.scale.rounding == "stochastic"):
        of_q = Moments(None)  # random in more than the rounding of its elements
    elif spec.rounding == "stochastic":
        gamma = torch.ones_like(parts.scale) if parts.gamma is None else parts.gamma
        mean, variance = moments(parts.ratio, parts.scale, spec)
        scaled = mean * gamma, variance * gamma.square()
        of_q = Moments(*(_copied(selection.of(parts.blocking.join(each)))[None] for each in scaled))
    ratio = _copied(selection.of(parts.blocking.join(parts.ratio)))
    x, ideal = _copied(selection.of(seen.x)), _copied(selection.of(ideal))
    scales = torch.where(parts.z == 0, 0.0, parts.scale).reshape(1, -1)
    return Lines(x[None], q[None], ideal[None], ratio[None], scales, of_q, spec.element)


def moments(ratio: Tensor, scale: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Mean and variance of stochastically rounded, dequantized elements over their random bits.

    With lower ≤ abs(u) ≤ upper the neighbours of u and p the probability of the upper one:
    mean = sign(u)·(lower + p·(upper − lower)), variance = p·(1 − p)·(upper − lower)², both in units of the scale.
    p is the fraction of the way, as exactly as the comparison with so many random bits tells it.
    """
    lower, upper = bracket(ratio.abs(), spec.element)
    gap = upper - lower
    way = ratio.abs().clamp(max=spec.element.max) - lower
    fraction = torch.where(gap > 0, way / gap, torch.zeros_like(way))
    steps = 2.0**spec.random_bits
    midpoint = 0.0 if spec.random_bits == 24 else 0.5
    p = ((fraction * steps - midpoint).ceil() / steps).clamp(0, 1)
    unit = scaling.dequantize(torch.ones_like(scale), scale, spec)
    return torch.copysign(lower + p * gap, ratio) * unit, p * (1 - p) * gap.square() * unit.square()


def _copied(x: Tensor) -> Tensor:
    """In fp32, and not a view that would keep the whole operand."""
    return x.to(torch.float32, copy=True)
