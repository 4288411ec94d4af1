"""Some lines of an operand with all that its quantizer made of them, and how they are taken out of a training step.

A *line* runs along the contraction axis. A few of them tell as much about a large operand as all of them, at a cost
that does not grow with it. Lines of sites that are alike are quantized side by side, so that a step with statistics
makes a few large calls and not thousands of small ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
from fp4graph.ops import plain
from fp4graph.ops.matmul import Seen
from fp4graph.ops.program import Draw, OperandProgram, total
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

    @cached_property
    def _matrices(self) -> int:
        return math.prod(self.shape[:-2])

    def of(self, x: Tensor) -> Tensor:
        """The lines of ``x [..., R, K]``, whose K need not be the operand's: a copy in fp32, ``[P, n, K]``."""
        matrices = x.reshape(-1, *x.shape[-2:])
        if self.elements is not None:
            chosen, lines = (each.to(x.device) for each in self._chosen)
            matrices = matrices[chosen] if self._matrices > MATRICES else matrices
            matrices = matrices[:, lines]  # index_select is slow on transposed views
        return matrices.to(torch.float32, copy=self.elements is None)

    def numbers(self, device: torch.device) -> Tensor:
        """Of each line, int32 ``[P, n, 1]``: its place among all lines of the operand."""
        count = self.shape[-2]
        matrices, lines = (torch.arange(self._matrices), torch.arange(count)) if self.elements is None else self._chosen
        return (matrices[:, None] * count + lines).to(device, torch.int32).unsqueeze(-1)

    @cached_property
    def _chosen(self) -> tuple[Tensor, Tensor]:
        """Which matrices, and which lines of each."""
        assert self.elements is not None
        matrices = min(self._matrices, MATRICES)
        lines = max(LEAST, self.elements // (max(1, self.shape[-1]) * max(1, matrices)))
        return _spaced(self._matrices, matrices), _spaced(self.shape[-2], min(lines, self.shape[-2]))


def _spaced(count: int, chosen: int) -> Tensor:
    return torch.arange(chosen) * count // max(1, chosen)


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

    @staticmethod
    def together(several: Sequence[Moments]) -> Moments:
        """Those of several operands of one shape, all known."""
        means, variances = [each.mean for each in several], [each.variance for each in several]
        known = [mean for mean in means if mean is not None], [each for each in variances if each is not None]
        return Moments(torch.cat(known[0]), torch.cat(known[1]) if known[1] else None)


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
        x, q: ``[P, n, K]``. numbers: ``[P, n, 1]``, of the lines. draw: where the elements' random bits come from, or
        None. spec: the quantizer.
    """

    x: Tensor
    q: Tensor
    numbers: Tensor
    draw: Draw | None
    spec: QuantSpec

    def alike(self) -> tuple[object, ...]:
        """What must be equal of two for :func:`quantize_together`."""
        return self.spec, tuple(self.x.shape), self.x.device, self.draw and len(self.draw.salts)


def taken(seen: Seen, selection: Selection) -> Raw | Lines:
    """The selected lines of a quantized operand: raw where its quantizer allows it, else quantized at once."""
    program = seen.program
    assert program.spec is not None
    q = selection.of(total(seen.terms))
    if by_line(program):
        x = selection.of(seen.x)
        draw = seen.draw if program.spec.needs_key else None
        return Raw(x, q, selection.numbers(x.device), draw, program.spec)
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
    x, draws = raw[0].x, [each.draw for each in raw if each.draw is not None]
    if not draws:
        return Noise(None, blocking, x.device)
    numbers = torch.stack([each.numbers for each in raw])
    index = blocking.split(numbers * x.shape[-1] + torch.arange(x.shape[-1], dtype=torch.int32, device=x.device))
    keys = noise.derive_all(_varying(draws), 0)
    return _LineNoise(None, blocking, x.device, noise.hash_bits(keys.reshape(2, -1, *[1] * (index.dim() - 1)), index))


def _varying(draws: Sequence[Draw]) -> Tensor:
    """Their :attr:`Draw.varying`, int32 ``[2, G]``, derived side by side."""
    keys, steps = torch.stack([draw.key for draw in draws], 1), torch.stack([draw.step for draw in draws], 1)
    salts = torch.tensor([draw.salts for draw in draws], dtype=torch.int32, device=keys.device).unbind(1)
    for word in (steps[0], steps[1], *salts):
        keys = noise.derive_all(keys, word)
    return keys


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
    with plain.tensor_code():  # no kernel is to be compiled for it
        ideal = total(with_ideal_scales(program)(seen.x, seen.draw, seen.state))
    composed = any(overrides(technique, stage) for technique in program.techniques for stage in _COMPOSING)
    of_q = Moments(q[None])
    if program.draws and (composed or spec.scale.rounding == "stochastic"):
        of_q = Moments(None)  # random in more than the rounding of its elements
    elif spec.rounding == "stochastic":
        gamma = torch.ones_like(parts.scale) if parts.gamma is None else parts.gamma
        mean, variance = moments(parts.ratio, parts.scale, spec)
        scaled = mean * gamma, variance * gamma.square()
        of_q = Moments(*(selection.of(parts.blocking.join(each))[None] for each in scaled))
    ratio = selection.of(parts.blocking.join(parts.ratio))
    x, ideal = selection.of(seen.x), selection.of(ideal)
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
    fraction = way / gap.clamp(min=2.0**-100)  # 0 at a value, where both are 0
    steps = 2.0**spec.random_bits
    midpoint = 0.0 if spec.random_bits == 24 else 0.5
    p = ((fraction * steps - midpoint).ceil() / steps).clamp(0, 1)
    unit = scaling.dequantize(torch.ones_like(scale), scale, spec)
    return (lower + p * gap) * ratio.sign() * unit, p * (1 - p) * gap.square() * unit.square()
