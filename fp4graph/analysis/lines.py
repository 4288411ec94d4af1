"""Some lines of an operand with all that its quantizer made of them, and how they are taken out of a training step.

A *line* runs along the contraction axis. A few of them tell as much about a large operand as all of them, at a cost
that does not grow with it. Where each block is quantized by itself, lines of all operands with one quantizer are cut
into *rows* of a block each and quantized together, so that a step with statistics makes a few large calls and not
thousands of small ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from fp4graph.analysis.decomposition import with_ideal_scales
from fp4graph.kernels import operators
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
from fp4graph.ops.state import OperandState
from fp4graph.technique import QUANTIZER_STAGES, Technique, Unrounded, overrides

_T = TypeVar("_T")
#: Of a batch of matrices, at most so many are looked at.
MATRICES = 4
#: Of an operand at least so many lines, however long.
LEAST = 8
#: Stages at which a technique makes an element's outcome random in more than its rounding, or replaces that.
_COMPOSING = ("split", "around", "round", "after")


@dataclass(frozen=True)
class Selection:
    """Which lines of an operand ``[..., R, K]`` are looked at: evenly spaced ones of evenly spaced matrices.

    Attributes:
        shape: of the operand. elements: about how many to take; None for all.
    """

    shape: tuple[int, ...]
    elements: int | None
    _made: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def _matrices(self) -> int:
        return math.prod(self.shape[:-2])

    def of(self, x: Tensor) -> Tensor:
        """The lines of ``x [..., R, K]``, whose K need not be the operand's: a copy in fp32, ``[P, n, K]``."""
        matrices = x.reshape(-1, *x.shape[-2:])
        if self.elements is None:
            return matrices.to(torch.float32, copy=True)
        chosen, lines = self._once(x.device, lambda: tuple(each.to(x.device) for each in self._chosen))
        # index_select is slow on transposed views.
        taken = matrices[chosen[:, None], lines] if self._matrices > MATRICES else matrices[:, lines]
        return taken.to(torch.float32)

    def starts(self, width: int, device: torch.device) -> Tensor:
        """Of each of the rows of ``width`` that the lines are cut into, in order, the index of its first element in the
        operand: int32 ``[rows]``. They wrap around beyond 2^32 elements."""

        def make() -> Tensor:
            count, length = self.shape[-2:]
            every = torch.arange(self._matrices), torch.arange(count)
            matrices, lines = every if self.elements is None else self._chosen
            numbers = (matrices[:, None] * count + lines).to(torch.int32).flatten()
            offsets = torch.arange(0, length, width, dtype=torch.int32)
            return (numbers[:, None] * length + offsets).flatten().to(device)

        return self._once((width, device), make)

    def _once(self, key: object, make: Callable[[], _T]) -> _T:
        if key not in self._made:
            self._made[key] = make()
        made: _T = self._made[key]
        return made

    @cached_property
    def _chosen(self) -> tuple[Tensor, Tensor]:
        """Which matrices, and which lines of each."""
        assert self.elements is not None
        matrices = min(self._matrices, MATRICES)
        lines = max(-(-LEAST // max(1, matrices)), self.elements // (max(1, self.shape[-1]) * max(1, matrices)))
        return _spaced(self._matrices, matrices), _spaced(self.shape[-2], min(lines, self.shape[-2]))


def _spaced(count: int, chosen: int) -> Tensor:
    return torch.arange(chosen) * count // max(1, chosen)


@dataclass(frozen=True)
class Moments:
    """Mean and variance of what is multiplied over the random bits of its rounding, fp32 ``[..., P, n, K]``.

    ``mean`` is None where they are not known, ``variance`` where there is nothing random.
    """

    mean: Tensor | None
    variance: Tensor | None = None

    @staticmethod
    def together(several: Sequence[Moments]) -> Moments:
        """Those of several operands of one shape, all known, along a new first axis."""
        means, variances = [each.mean for each in several], [each.variance for each in several]
        known = [mean for mean in means if mean is not None], [each for each in variances if each is not None]
        return Moments(torch.stack(known[0]), torch.stack(known[1]) if known[1] else None)


@dataclass(frozen=True)
class Rows:
    """How lines of operands lie below each other in rows: each line is cut into rows of ``width``, the last one filled
    up, and those of an operand follow those of the one before.

    Attributes:
        shapes: of each operand's lines, ``(P, n, K)``. width: elements of a row.
    """

    shapes: tuple[tuple[int, ...], ...]
    width: int

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Rows of each operand."""
        return tuple(math.prod(shape[:-1]) * -(-shape[-1] // self.width) for shape in self.shapes)

    @property
    def padded(self) -> bool:
        """Whether any row is not full."""
        return any(shape[-1] % self.width for shape in self.shapes)

    def stack(self, lines: Sequence[Tensor]) -> Tensor:
        """Lines ``[P, n, K]`` of each operand as rows ``[R, width]``; filled up with zeros."""
        return torch.cat([_filled(each, self.width).reshape(-1, self.width) for each in lines])

    def held(self, device: torch.device) -> Tensor:
        """Of each place in the rows, whether it holds an element: bool ``[R, width]``."""
        return self.stack([torch.ones(shape, device=device) for shape in self.shapes]) > 0

    def of(self, rows: Tensor, place: int) -> Tensor:
        """The lines ``[P, n, K]`` of one operand: a view."""
        shape = self.shapes[place]
        first = sum(self.counts[:place])
        whole = rows[first : first + self.counts[place]].reshape(*shape[:-1], -1)
        return whole[..., : shape[-1]]

    def chosen(self, places: Sequence[int]) -> Rows:
        """Those of some operands."""
        return Rows(tuple(self.shapes[place] for place in places), self.width)

    def choose(self, rows: Tensor, places: Sequence[int]) -> Tensor:
        """Their rows."""
        parts = rows.split_with_sizes(self.counts)
        return torch.cat([parts[place] for place in places])


def _filled(lines: Tensor, width: int) -> Tensor:
    missing = -lines.shape[-1] % width
    return torch.nn.functional.pad(lines, (0, missing)) if missing else lines


@dataclass(frozen=True)
class Lines:
    """Lines of G operands, quantized. ``[R, width]`` and fp32, in the GEMM's basis, laid out as :class:`Rows`.

    Attributes:
        x: what was to be multiplied. q: what was. ideal: what would have been under unrounded scales.
        ratio: x divided by its scale, before rounding. All four are 0 in what rows are filled up with, or NaN where the
            block's scale is.
        mean, variance: of q, as :class:`Moments`. rows: the layout. element: the format of the elements.
        scales: as stored, those of one operand after those of the other; 0 of a block of zeros. blocks: of each.
    """

    x: Tensor
    q: Tensor
    ideal: Tensor
    ratio: Tensor
    mean: Tensor | None
    variance: Tensor | None
    rows: Rows
    element: ElementFormat
    scales: Tensor
    blocks: tuple[int, ...]

    def moments(self, place: int) -> Moments:
        """Those of q of one operand."""
        one = (None if each is None else self.rows.of(each, place) for each in (self.mean, self.variance))
        return Moments(*one)


@dataclass(frozen=True, eq=False)
class Raw:
    """Lines of one operand whose quantizer treats each block by itself, so that they can be quantized again later.

    Attributes:
        x, q: ``[P, n, K]``. selection: which lines they are. program: the quantizer. draw: where the elements' random
            bits come from, or None. state: of the quantizer's techniques, the same lines of it.
    """

    x: Tensor
    q: Tensor
    selection: Selection
    program: OperandProgram
    draw: Draw | None
    state: OperandState

    @property
    def width(self) -> int:
        """Elements of a row."""
        return row_width(self.program, self.x)

    def alike(self) -> tuple[object, ...]:
        """What must be equal of two for :func:`quantize_together`."""
        return id(self.program), self.width, self.x.device, self.draw and len(self.draw.salts)


class Quantizers:
    """Programs that are equal but for where their operand comes from are one: to compare them takes many times longer
    than to take a few lines down."""

    def __init__(self) -> None:
        self._by_identity: dict[int, tuple[OperandProgram, OperandProgram]] = {}
        self._equal: dict[OperandProgram, OperandProgram] = {}

    def one(self, program: OperandProgram) -> OperandProgram:
        """The same object for all that are equal."""
        if id(program) not in self._by_identity:
            assert program.spec is not None
            spec = dataclasses.replace(program.spec, source="original", from_master=False)
            own = dataclasses.replace(program, spec=spec, reuses=False)
            self._by_identity[id(program)] = program, self._equal.setdefault(own, own)
        return self._by_identity[id(program)][1]


def taken(seen: ObservedOperand, selection: Selection, quantizers: Quantizers) -> Raw | Lines:
    """The selected lines of a quantized operand: raw where its quantizer allows it, else quantized at once."""
    program = quantizers.one(seen.program)
    assert program.spec is not None
    q = selection.of(total(seen.terms))
    if by_block(program):
        state = {
            technique: {name: selection.of(entry) for name, entry in entries.items()}
            for technique, entries in seen.state.items()
        }
        return Raw(selection.of(seen.x), q, selection, program, seen.draw if program.spec.needs_key else None, state)
    return _quantized_whole(seen, selection, q)


def by_block(program: OperandProgram) -> bool:
    """Whether the outcome for a block depends on that block alone, and it can be had of a few blocks."""
    spec = program.spec
    return (
        spec is not None
        and (isinstance(spec.block, int) or spec.block == "row")
        and spec.scale.rounding != "stochastic"
        and all(slot.entry.weight_like for slot in program.state)
        and all(_acts_by_block(technique) for technique in program.techniques)
    )


def _acts_by_block(technique: Technique) -> bool:
    """Whether it says so itself: a class derived from one that does may do more."""
    if not any(overrides(technique, stage) for stage in QUANTIZER_STAGES):
        return True
    says_so = vars(type(technique)).get("by_block", False)
    return says_so and not technique.draws and not any(overrides(technique, s) for s in ("split", "around", "after"))


def row_width(program: OperandProgram, lines: Tensor) -> int:
    """Elements of a block of a quantizer that treats each by itself, and so of a row of ``lines [..., K]``."""
    assert program.spec is not None
    block = program.spec.block
    return block if isinstance(block, int) else int(lines.shape[-1])


def stacked(rows: Rows, states: Sequence[OperandState]) -> OperandState:
    """State of several operands, lines of weight-like entries, as rows."""
    return {
        technique: {name: rows.stack([state[technique][name] for state in states]) for name in entries}
        for technique, entries in states[0].items()
    }


@dataclass(frozen=True, eq=False)
class _RowNoise(Noise):
    """The bits that rows draw as parts of whole operands."""

    given: Tensor

    def bits(self, salt: int = 0) -> Tensor:
        return self.given


@dataclass(frozen=True, eq=False)
class _RowDraw(Draw):
    """That of several operands whose rows lie below each other; ``bits`` are those of their elements' rounding."""

    bits: Tensor = field(kw_only=True)

    def noise(self, blocking: Blocking, device: torch.device) -> Noise:
        return _RowNoise(None, blocking, device, self.bits.reshape(blocking.layout))


def _row_draw(raw: Sequence[Raw], rows: Rows) -> _RowDraw | None:
    draws = [each.draw for each in raw if each.draw is not None]
    if not draws:
        return None
    device = raw[0].x.device
    keys = torch.stack([draw.key for draw in draws], 1)
    steps = torch.stack([draw.step for draw in draws if draw.step is not None], 1)
    salts = torch.tensor([draw.salts for draw in draws], dtype=torch.int32, device=device).unbind(1)
    # Draw.varying, derived side by side, and of that the elements'.
    own = noise.derive_all(keys, steps[0], steps[1], *salts, 0)[:, owners(rows.counts, device)]
    starts = torch.cat([each.selection.starts(rows.width, device) for each in raw])
    index = starts[:, None] + torch.arange(rows.width, dtype=torch.int32, device=device)
    return _RowDraw(draws[0].key, draws[0].step, draws[0].salts, bits=noise.hash_bits(own[..., None], index))


def quantize_together(raw: Sequence[Raw]) -> Lines:
    """What one quantizer made of lines that are :meth:`Raw.alike`."""
    program = raw[0].program
    spec = program.spec
    assert spec is not None
    rows = Rows(tuple(tuple(each.x.shape) for each in raw), raw[0].width)
    x, q = rows.stack([each.x for each in raw]), rows.stack([each.q for each in raw])
    state = stacked(rows, [each.state for each in raw])
    draw = _row_draw(raw, rows)
    with operators.tensor_code():  # no kernel is to be compiled for it
        parts = program.unrounded(x, draw, state)
        under_ideal = with_ideal_scales(program).quantize(x, draw, state)
    ideal = under_ideal.dequantized()
    if under_ideal.group_scale is not None:
        ideal = ideal * under_ideal.group_scale
    joined = parts.blocking.join
    of_q = _moments(program, parts, q, joined)
    return Lines(x, q, joined(ideal), joined(parts.ratio), *of_q, rows, spec.element, _scales(parts), rows.counts)


def _quantized_whole(seen: ObservedOperand, selection: Selection, q: Tensor) -> Lines:
    """The same for any program: the whole operand is quantized again, for its blocks may depend on each other."""
    program = seen.program
    spec = program.spec
    assert spec is not None
    parts = program.quantize(seen.x, seen.draw, seen.state)
    with operators.tensor_code():
        ideal = total(with_ideal_scales(program)(seen.x, seen.draw, seen.state))

    def lines(values: Tensor) -> Tensor:
        return selection.of(values).reshape(-1, seen.x.shape[-1])

    def joined(values: Tensor) -> Tensor:
        return lines(parts.blocking.join(values))

    rows, scales = Rows((tuple(q.shape),), q.shape[-1]), _scales(parts)
    q = q.reshape(-1, q.shape[-1])
    moments_of_q = _moments(program, parts, q, joined)
    whole = (lines(seen.x), q, lines(ideal), joined(parts.ratio))
    return Lines(*whole, *moments_of_q, rows, spec.element, scales, (len(scales),))


def _scales(parts: Unrounded) -> Tensor:
    """As stored, one after the other; 0 of a block of zeros."""
    return torch.where(parts.z == 0, 0.0, parts.scale).flatten()


def _moments(
    program: OperandProgram, parts: Unrounded, q: Tensor, joined: Callable[[Tensor], Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Mean and variance of ``q``; ``joined`` brings what is in the blocked layout into the shape of it."""
    spec = parts.spec
    composed = any(program.at(stage) for stage in _COMPOSING)
    if program.draws and (composed or spec.scale.rounding == "stochastic"):
        return None, None  # random in more than the rounding of its elements
    if spec.rounding != "stochastic":
        return q, None
    mean, variance = moments(parts.ratio, parts.scale, spec)
    if parts.group_scale is not None:
        mean, variance = mean * parts.group_scale, variance * parts.group_scale.square()
    return joined(mean), joined(variance)


def owners(counts: Sequence[int], device: torch.device) -> Tensor:
    """Of rows of which each operand has so many, whose they are: int64 ``[R]``."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device)


def moments(ratio: Tensor, scale: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Mean and variance of stochastically rounded, dequantized elements over their random bits.

    With δ the distance of the values around u, and abs(u)/δ between the integers n and n + 1, of which rounding takes
    the upper one with probability p: mean = sign(u)·(n + p)·δ, variance = p·(1 − p)·δ², both in units of the scale.
    p is the fraction of the way, as exactly as the comparison with so many random bits tells it.
    """
    # In place where it can be: fresh memory costs more than the arithmetic.
    u = ratio.abs().clamp_(max=spec.element.max)
    step, inverse = spacing(u, spec.element.min_exponent, spec.element.mantissa_bits)
    places = u.mul_(inverse)
    below = places.floor()
    steps = 2.0**spec.random_bits
    midpoint = 0.0 if spec.random_bits == 24 else 0.5
    p = places.sub_(below).mul_(steps).sub_(midpoint).ceil_().div_(steps)
    unit = scaling.dequantize(step, scale, spec)
    mean = below.add_(p).mul_(unit).mul_(ratio.sign())
    return mean, (1 - p).mul_(p).mul_(unit.square_())
