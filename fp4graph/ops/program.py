"""Operand and GEMM programs: what a policy's specs and techniques come to, as pure functions of tensors.

A program is frozen data: equal specs and techniques make equal programs, which share one compiled function however
many sites use it. Nothing in a program knows its site; whatever differs from site to site (keys, weight state) comes
in as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp4graph.kernels import operators
from fp4graph.numerics import noise, scaling
from fp4graph.numerics.blocking import Blocking, Granularity, Groups
from fp4graph.numerics.noise import Noise
from fp4graph.numerics.quantize import round_elements
from fp4graph.numerics.rounding import EXPONENT_MASK
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops import contract, product
from fp4graph.ops.gradient import jacobian_diagonal
from fp4graph.technique import GRADIENT_STAGES, QUANTIZER_STAGES, Context, StateEntry, Technique, overrides
from fp4graph.technique.operands import Gemm, Operand

#: Salts that keep the noise of transforms and techniques apart from the spec's own, which draws from the operand's key
#: as fake_quantize does. Stable: changing one changes every seeded run.
_PAIR = 2  # the i-th transform of a GEMM draws under salt 2 + i
_TECHNIQUE = 16  # the i-th technique of an operand draws under salt 16 + i
_AGAIN = 256  # the i-th further call of the quantizer, under a technique that wraps it, draws under salt 256 + i

#: Techniques with their contexts, in the policy's order. Not a mapping: Dynamo cannot trace a pydantic model's hash.
Acting = Sequence[tuple[Technique, Context]]
#: State of one operand: technique, then entry name.
OperandState = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Draw:
    """Where random bits come from: a site's, or one part's of it.

    Attributes:
        key: int32 ``[2]``, the site's. step: int32 ``[5]``, this forward's (:func:`fp4graph.numerics.noise.make_step`).
        salts: what was derived so far, outermost first.
    """

    key: Tensor
    step: Tensor
    salts: tuple[int, ...] = ()

    def salted(self, *salts: int) -> Draw:
        """An unrelated source for one part."""
        return replace(self, salts=(*self.salts, *salts))

    @property
    def varying(self) -> Tensor:
        """The key of this forward, int32 ``[2]``."""
        return self._derived(noise.mix(self.key, self.step[:2]))

    @property
    def constant(self) -> Tensor:
        """The key that is the same at every forward and on every rank, int32 ``[2]``."""
        return self._derived(noise.mix(self.key, self.step[2:4]))

    @property
    def count(self) -> Tensor:
        """Forwards with gradients so far, int32, 0-d."""
        return self.step[4]

    @property
    def source(self) -> operators.Source:
        """What :attr:`varying` is derived from, for kernels that derive it themselves."""
        return self.key, self.step, self.salts

    def noise(self, blocking: Blocking, device: torch.device) -> Noise:
        """The random bits of a quantizer's own rounding."""
        return Noise(self.varying, blocking, device)

    def _derived(self, key: Tensor) -> Tensor:
        for salt in self.salts:
            key = noise.derive(key, salt)
        return key


@dataclass(frozen=True)
class GroupScale:
    """One technique's group scale γ, and the group statistic g it is proportional to (None: it asked for none)."""

    technique: Technique
    gamma: Tensor
    g: Tensor | None
    groups: Groups | None
    values: Callable[[], Tensor]  # before division by γ


@dataclass(frozen=True)
class Unrounded:
    """The parts of one operand's quantization before its elements are rounded, in the blocked layout.

    Shapes: ``values`` (x/γ) and ``ratio`` alike; ``z``, ``scale`` and ``statistic`` (Z before it was divided by γ) with
    the axes ``axes`` of size 1. All fp32.
    """

    spec: QuantSpec
    blocking: Blocking
    axes: tuple[int, ...]
    values: Tensor
    z: Tensor
    scale: Tensor
    ratio: Tensor
    statistic: Tensor
    group_scales: tuple[GroupScale, ...]

    @property
    def gamma(self) -> Tensor | None:
        """γ, or None where nothing normalizes."""
        return _gamma(self.group_scales)


@dataclass(frozen=True)
class Quantization(Unrounded):
    """All parts of it, for techniques that need to see inside: ``elements`` are of the shape of ``ratio``.

    The dequantized operand is ``γ · elements · S`` (``elements / s`` for an encode scale), γ being the product of the
    group_scales'.
    """

    elements: Tensor

    def dequantized(self) -> Tensor:
        """γ⁻¹ times the dequantized operand: blocked layout, fp32."""
        return scaling.dequantize(self.elements, self.scale, self.spec)


@dataclass(frozen=True)
class _Scaled:
    """One operand in the blocked layout before it is rounded: as :class:`Quantization`, and with the values, which may
    never be needed, made when they are; ``scale`` None is left to the spec."""

    blocking: Blocking
    values: Callable[[], Tensor]
    z: Tensor
    statistic: Tensor
    scale: Tensor | None
    group_scales: tuple[GroupScale, ...]
    acting: Acting

    @property
    def gamma(self) -> Tensor | None:
        """γ, or None where nothing normalizes."""
        return _gamma(self.group_scales)


@dataclass(frozen=True)
class Term:
    """One summand of an operand: ``values`` times a scalar ``multiplier`` that waits for the GEMM's accumulator (or
    None)."""

    values: Tensor
    multiplier: Tensor | None = None

    def product(self) -> Tensor:
        """The summand itself, in the dtype of ``values``."""
        return self.values if self.multiplier is None else (self.values * self.multiplier).to(self.values.dtype)


@dataclass(frozen=True)
class StateSlot:
    """A state tensor that a program takes: a technique's entry for one operand."""

    technique: str
    entry: StateEntry

    @property
    def label(self) -> str:
        """The entry's name among those of its technique: the operand's name goes first unless it is fprop.weight."""
        operand = self.entry.operand
        prefix = "" if operand is Operand.FPROP_WEIGHT else f"{operand.replace('.', '_')}_"
        return prefix + self.entry.name

    @property
    def written(self) -> bool:
        """Whether the graph writes it."""
        return self.entry.writer == "graph"


@dataclass(frozen=True)
class OperandProgram:
    """One operand's quantizer: a spec with the techniques that act on it, in the policy's order.

    Called on ``x [..., K]``, blocks along the last axis; returns the operand's terms in ``dtype``, shape of ``x``.

    Attributes:
        reuses: whether an operand in high precision (``spec`` None) reads the dequantized fprop operand as it is.
    """

    spec: QuantSpec | None
    techniques: tuple[Technique, ...] = ()
    state: tuple[StateSlot, ...] = field(default=())
    reuses: bool = False

    @property
    def draws(self) -> bool:
        """Whether calling it needs a source of noise."""
        return self.spec is not None and (self.spec.needs_key or any(t.draws for t in self.techniques))

    @property
    def from_fprop(self) -> bool:
        """Whether it starts from the dequantized fprop operand."""
        return self.reuses or (self.spec is not None and self.spec.source == "fprop")

    @property
    def from_master(self) -> bool:
        """Whether it quantizes from before autocast's cast."""
        return self.spec is not None and self.spec.from_master

    @cached_property
    def is_plain(self) -> bool:
        """Whether the spec alone says what is computed: no technique changes it."""
        return self.spec is not None and not any(overrides(t, s) for t in self.techniques for s in QUANTIZER_STAGES)

    def by_kernel(self, device: torch.device, draw: Draw | None) -> bool:
        """Whether a kernel computes it on ``device``."""
        if self.spec is None or not self.is_plain or (self.spec.needs_key and draw is None):
            return False
        return operators.runs(self.spec, device)

    @property
    def has_gradient_factor(self) -> bool:
        """Whether a technique replaces the straight-through estimator."""
        return self.spec is not None and any(overrides(t, stage) for t in self.techniques for stage in GRADIENT_STAGES)

    @property
    def observes(self) -> bool:
        """Whether calling it while training changes state."""
        return any(slot.written for slot in self.state)

    def __call__(self, x: Tensor, draw: Draw | None = None, state: OperandState | None = None) -> tuple[Term, ...]:
        if self.spec is None:
            return (Term(x),)
        if self.by_kernel(x.device, draw):
            return (Term(operators.quantize(x, self.spec, self.source(draw))),)
        part, residuals = self._split(x, draw, state)
        return (self._composed(part, draw, state), *residuals)

    def source(self, draw: Draw | None) -> operators.Source:
        """Where its spec draws from, for a kernel."""
        needed = draw is not None and self.spec is not None and self.spec.needs_key
        return draw.source if needed and draw is not None else operators.NO_SOURCE

    def _split(self, x: Tensor, draw: Draw | None, state: OperandState | None) -> tuple[Tensor, list[Term]]:
        residuals = []
        for technique in self.at("split"):
            parts = contract.run(technique, "split", x, self.context(technique, x, draw, state))
            if not (isinstance(parts, tuple) and len(parts) == 2):
                raise contract.broken(technique, "split", "must return (part to quantize, residual or None)")
            part, residual = parts
            if residual is not None:
                residuals.append(Term(contract.same(technique, "split", residual, x, any_float=True).to(x.dtype)))
            x = contract.same(technique, "split", part, x)
        return x, residuals

    def _composed(self, x: Tensor, draw: Draw | None, state: OperandState | None) -> Term:
        """The quantizer inside every technique that wraps it."""
        multiplier: Tensor | None = None
        calls = 0
        wrapped = bool(self.at("around") or self.at("after"))

        def quantize(part: Tensor) -> Tensor:
            nonlocal multiplier, calls
            own = draw if draw is None or calls == 0 else draw.salted(_AGAIN + calls)
            scaled, residual = self._scaled(part, own, state), calls > 0
            calls += 1
            factor = gamma = scaled.gamma
            if gamma is not None and not wrapped and _is_scalar(gamma):
                # A scalar γ multiplies the GEMM's accumulator: FP4 code times block scale is exact in bf16, times γ it
                # is not. Its power of two goes before. That is exact too, and both sides stay in range: the operand
                # is as large as X, where codes times scales of UE5M3 would overflow fp16, and the product of two
                # multipliers lies in [1, 4), where γ_a·γ_b may underflow fp32.
                factor = _power_of_two(gamma)
                multiplier = (gamma / factor).reshape(())
            if self._rounds_by_kernel(part.device, residual):
                return self._by_kernel(part, scaled, factor, own)
            values = self._rounded(scaled, own, residual).dequantized()
            return scaled.blocking.join(values if factor is None else values * factor).to(part.dtype)

        inner: Callable[[Tensor], Tensor] = quantize
        for technique in reversed(self.at("around")):  # the first of the policy is the outermost
            inner = _wrap(technique, inner, self.context(technique, x, draw, state))
        y = inner(x)
        for technique in self.at("after"):
            context = self.context(technique, x, draw, state)
            y = contract.same(technique, "after", contract.run(technique, "after", y, context), y)
        return Term(y, multiplier)

    def quantize(self, x: Tensor, draw: Draw | None = None, state: OperandState | None = None) -> Quantization:
        """The bare quantizer, with its parts: statistic, γ, scale, ratio, codes."""
        return self._rounded(self._scaled(x, draw, state), draw, residual=False)

    def unrounded(self, x: Tensor, draw: Draw | None = None, state: OperandState | None = None) -> Unrounded:
        """The same without the rounding of its elements."""
        return self._unrounded(self._scaled(x, draw, state), draw)

    def _scaled(self, x: Tensor, draw: Draw | None, state: OperandState | None) -> _Scaled:
        """Everything up to the scales, as far as techniques decide it."""
        spec = self.spec
        assert spec is not None, "a high-precision operand has no quantizer"
        blocking = Blocking(tuple(x.shape), spec.block)
        values: Callable[[], Tensor] = _Once(lambda: blocking.split(x.to(torch.float32)))
        if isinstance(spec.block, int) and operators.runs(spec, x.device):
            z = operators.maxima(x, spec.block).reshape(blocking.scale_shape)
        else:
            z = scaling.amax(values(), blocking.axes)
        acting = self.acting(x, draw, state)
        for technique, context in _at("block_statistic", acting):
            chosen = contract.run(technique, "block_statistic", values(), z, context)
            z = contract.same(technique, "block_statistic", chosen, z)
        statistic = z
        group_scales: list[GroupScale] = []
        for technique, context in _at("group_scale", acting):
            asked: list[tuple[Tensor, Groups]] = []
            group = partial(_group_statistic, values, z, blocking, acting, asked)
            answer = contract.run(technique, "group_scale", z, group, context)
            if answer is None:
                continue
            if isinstance(answer, tuple) and len(answer) != 2:
                raise contract.broken(technique, "group_scale", "must return γ, (γ, statistic of x/γ) or None")
            gamma, own = answer if isinstance(answer, tuple) else (answer, None)
            gamma = contract.broadcastable(technique, "group_scale", gamma, z)
            z = z / gamma if own is None else contract.same(technique, "group_scale", own, z)
            g, groups = asked[-1] if asked else (None, None)
            group_scales.append(GroupScale(technique, gamma, g, groups, values))
            values = _Once(partial(_quotient, values, gamma))
        scale: Tensor | None = None
        for technique, context in _at("scale", acting):
            answer = contract.run_like(technique, "scale", z, values(), z, context)
            scale = scale if answer is None else answer
        return _Scaled(blocking, values, z, statistic, scale, tuple(group_scales), acting)

    def _unrounded(self, scaled: _Scaled, draw: Draw | None) -> Unrounded:
        """The scales that techniques left to the spec, and what is rounded under them; as tensor code."""
        spec, blocking, values, scale = self.spec, scaled.blocking, scaled.values(), scaled.scale
        assert spec is not None
        if scale is None:
            bits = self._noise(draw, blocking, values.device)
            scale = scaling.block_scale(scaled.z, spec.scale, spec.element, bits)
        ratio = scaling.ratio(values, scale, spec)
        parts = spec, blocking, blocking.axes, values, scaled.z, scale, ratio, scaled.statistic, scaled.group_scales
        return Unrounded(*parts)

    def _rounded(self, scaled: _Scaled, draw: Draw | None, residual: bool) -> Quantization:
        """The rest of the quantizer, as tensor code.

        Args:
            residual: whether this is what an earlier call left over, which techniques with state do not round.
        """
        parts = self._unrounded(scaled, draw)
        codes: Tensor | None = None
        for technique, context in _at("round", scaled.acting):
            if residual and context.state:
                continue
            normalized = self._normalized(technique, context, scaled.group_scales)
            own = contract.run_like(technique, "round", parts.ratio, parts.ratio, parts.scale, normalized)
            codes = codes if own is None else own
        if codes is None:
            codes = round_elements(parts.ratio, parts.spec, self._noise(draw, parts.blocking, parts.ratio.device))
        return Quantization(**vars(parts), elements=codes)

    def _noise(self, draw: Draw | None, blocking: Blocking, device: torch.device) -> Noise:
        needs = self.spec is not None and self.spec.needs_key
        return draw.noise(blocking, device) if draw is not None and needs else Noise(None, blocking, device)

    def _rounds_by_kernel(self, device: torch.device, residual: bool) -> bool:
        rounding = [t for t in self.at("round") if not (residual and any(s.technique == t.name for s in self.state))]
        return self.spec is not None and not rounding and operators.rounds(self.spec, device)

    def _by_kernel(self, x: Tensor, scaled: _Scaled, factor: Tensor | None, draw: Draw | None) -> Tensor:
        """The rest of the quantizer, by a kernel: dequantized, times ``factor``, dtype of ``x``."""
        spec, blocking = self.spec, scaled.blocking
        assert spec is not None
        divisor = scaled.group_scales[0].gamma if len(scaled.group_scales) == 1 else None
        if len(scaled.group_scales) > 1:
            dtype, x = x.dtype, blocking.join(scaled.values())
            return self._by_kernel(x, replace(scaled, group_scales=()), factor, draw).to(dtype)
        scale = scaled.scale
        if scale is None and not isinstance(spec.block, int):
            bits = self._noise(draw, blocking, x.device)
            scale = scaling.block_scale(scaled.z, spec.scale, spec.element, bits)
        statistic = scaled.z if scale is None else None
        parts = (None if part is None else _by_run(part, blocking) for part in (divisor, statistic, scale, factor))
        return operators.quantize(x, operators.by_runs(spec), self.source(draw), operators.Blocks(*parts))

    def parts(self, x: Tensor, draw: Draw | None, state: OperandState | None) -> Quantization:
        """What the bare quantizer makes of ``x``, without what techniques split off."""
        part, _ = self._split(x, draw, state)
        return self.quantize(part, draw, state)

    def _normalized(self, technique: Technique, context: Context, by: Sequence[GroupScale]) -> Context:
        """``context`` with weight-like state divided by γ, as the values are that it is held against."""
        entries = dict(context.state)
        for slot in self.state:
            if slot.technique == technique.name and slot.entry.weight_like:
                for part in by:
                    entries[slot.entry.name] = entries[slot.entry.name] / part.gamma
        return replace(context, state=entries)

    def observe(self, x: Tensor, draw: Draw | None, state: OperandState) -> dict[tuple[str, str], Tensor]:
        """New values, by technique and entry name, of the entries that the graph writes."""
        if not self.observes:
            return {}
        quantization = self.parts(x, draw, state)
        observed: dict[tuple[str, str], Tensor] = {}
        for technique in self.at("observe"):
            new = contract.run(technique, "observe", quantization, self.context(technique, x, draw, state))
            due = {slot.entry.name for slot in self.state if slot.technique == technique.name and slot.written}
            if not isinstance(new, Mapping) or set(new) != due:
                got = sorted(map(str, new)) if isinstance(new, Mapping) else type(new).__name__
                raise contract.broken(technique, "observe", f"returned {got} where values of {sorted(due)} are due")
            for name, value in new.items():
                like = state[technique.name][name]
                observed[technique.name, name] = contract.same(technique, "observe", value, like)
        return observed

    def gradient_factor(self, x: Tensor, draw: Draw | None, state: OperandState | None) -> Tensor | None:
        """Diagonal of the quantizer's Jacobian at ``x`` by the techniques' surrogates, shape of ``x``; None is 1."""
        if not self.has_gradient_factor:
            return None
        quantization = self.parts(x, draw, state)
        factor = jacobian_diagonal(quantization, self.acting(x, draw, state))
        return quantization.blocking.join(factor)

    def acting(self, x: Tensor, draw: Draw | None, state: OperandState | None) -> Acting:
        """Every technique with what it may read here, in order."""
        return [(technique, self.context(technique, x, draw, state)) for technique in self.techniques]

    def at(self, stage: str) -> list[Technique]:
        """The techniques that act at ``stage``, in order."""
        return [technique for technique in self.techniques if overrides(technique, stage)]

    def context(self, technique: Technique, x: Tensor, draw: Draw | None, state: OperandState | None) -> Context:
        """What ``technique`` may read at this operand."""
        assert self.spec is not None
        blocking = Blocking(tuple(x.shape), self.spec.block)
        entries = (state or {}).get(technique.name, {})
        like = {slot.entry.name for slot in self.state if slot.technique == technique.name and slot.entry.weight_like}
        own = {name: blocking.split(entry) if name in like else entry for name, entry in entries.items()}
        normalized = next((t.divides_by for t in self.techniques if t.divides_by is not None), None)
        salt = _TECHNIQUE + self.techniques.index(technique)
        return replace(_context(technique, salt, blocking, x, draw, own, self.spec), normalized=normalized)


def _at(stage: str, acting: Acting) -> Iterator[tuple[Technique, Context]]:
    return ((technique, context) for technique, context in acting if overrides(technique, stage))


def _gamma(group_scales: Sequence[GroupScale]) -> Tensor | None:
    gamma: Tensor | None = None
    for part in group_scales:
        gamma = _product(gamma, part.gamma)
    return gamma


class _Once:
    """A tensor made when it is first asked for. Not functools.cache, which Dynamo does not trace."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._made: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._made is None:
            self._made = self._make()
        return self._made


def _quotient(values: Callable[[], Tensor], gamma: Tensor) -> Tensor:
    return values() / gamma


def _by_run(part: Tensor, blocking: Blocking) -> Tensor:
    """``part``, broadcastable to a statistic, with one element for each run of a line that lies in one block (see
    :func:`fp4graph.kernels.operators.by_runs`), or with a single element if it has no more."""
    if _is_scalar(part):
        return part.reshape(1)
    part = part.expand(blocking.scale_shape)
    rows, columns = blocking.shape[-2] if len(blocking.shape) > 1 else 1, blocking.shape[-1]
    if isinstance(blocking.block, tuple):
        part = part.expand([*part.shape[:-3], blocking.block[0], *part.shape[-2:]])
        return part.flatten(-4, -3).squeeze(-1)[..., :rows, :].contiguous()
    if isinstance(blocking.block, str):  # one number a line
        part = part.expand([*blocking.shape[:-1], 1])
        return part.expand([*blocking.shape[:-1], (columns + 31) // 32]).contiguous()
    return part.squeeze(-1).contiguous()


def _group_statistic(
    values: Callable[[], Tensor],
    z: Tensor,
    blocking: Blocking,
    acting: Acting,
    asked: list[tuple[Tensor, Groups]],
    granularity: Granularity,
) -> Tensor:
    """g at ``granularity``, by the techniques that relax the maximum; ``asked`` takes down what was asked for."""
    groups = Groups(blocking, granularity)
    g = groups.reduce(z, "amax")
    for technique, context in _at("group_statistic", acting):
        chosen = contract.run(technique, "group_statistic", values(), g, groups, context)
        g = contract.same(technique, "group_statistic", chosen, g)
    asked.append((g, groups))
    return g


@dataclass(frozen=True)
class GemmProgram:
    """One GEMM ``left [..., I, K] @ right [..., J, K]ᵀ``: pair transforms, then each operand's quantizer.

    ``transforms`` act on both operands in order and cancel in the product; they are told which ``gemm`` it is.
    """

    gemm: Gemm
    left: OperandProgram
    right: OperandProgram
    transforms: tuple[Technique, ...] = ()

    @property
    def draws(self) -> bool:
        """Whether calling it needs a key."""
        return self.left.draws or self.right.draws or any(t.draws for t in self.transforms)

    def rotate(self, left: Tensor, right: Tensor, draw: Draw | None) -> Rotation:
        """Both operands in the transforms' basis, with what it takes to come back."""
        contexts: list[tuple[Tensor, ...]] = []
        lengths: list[int | torch.SymInt] = []
        for index, transform in enumerate(self.transforms):
            blocking = Blocking(tuple(left.shape), "tensor")
            own = _context(transform, _PAIR + index, blocking, left, draw, gemm=self.gemm)
            context = contract.run(transform, "pair_context", left, right, own)
            if not (isinstance(context, tuple) and all(isinstance(shared, Tensor) for shared in context)):
                raise contract.broken(transform, "pair_context", "must return a tuple of tensors")
            contexts.append(context)
            lengths.append(left.shape[-1])
            left, right = (
                _transformed(transform, left, "left", context),
                _transformed(transform, right, "right", context),
            )
            if statically_known_true(left.shape[-1] != right.shape[-1]):
                lengths_now = f"{left.shape[-1]} and {right.shape[-1]}"
                raise contract.broken(transform, "transform", f"gave the operands contraction axes of {lengths_now}")
        return Rotation(left, right, self.transforms, tuple(contexts), tuple(lengths))


@dataclass(frozen=True)
class Rotation:
    """The operands of one GEMM after its pair transforms (contraction axis last, perhaps zero-padded by them)."""

    left: Tensor
    right: Tensor
    transforms: tuple[Technique, ...]
    contexts: tuple[tuple[Tensor, ...], ...]
    lengths: tuple[int | torch.SymInt, ...]

    def apply(self, x: Tensor, side: Literal["left", "right"]) -> Tensor:
        """A further tensor of the side's shape, into the transforms' basis."""
        for transform, context in zip(self.transforms, self.contexts, strict=True):
            x = _transformed(transform, x, side, context)
        return x

    def undo(self, x: Tensor, side: Literal["left", "right"]) -> Tensor:
        """Back to the original basis and length."""
        steps = zip(reversed(self.transforms), reversed(self.contexts), reversed(self.lengths), strict=True)
        for transform, context, length in steps:
            back = contract.run(transform, "inverse", x, side, context)
            x = contract.along_last(transform, "inverse", back, x)
            if statically_known_true(x.shape[-1] < length):
                raise contract.broken(
                    transform, "inverse", f"returned a last axis of {x.shape[-1]} where {length} is due"
                )
            x = x[..., :length]
        return x


def multiply(
    left: tuple[Term, ...],
    right: tuple[Term, ...],
    addend: Tensor | None = None,
    alpha: float = 1,
    beta: float = 1,
) -> Tensor:
    """``alpha · Σᵢⱼ γᵢ·γⱼ · leftᵢ @ rightⱼᵀ + beta · addend``, every pair of terms in a GEMM of its own.

    γ are the terms' multipliers. The result has the dtype of the terms. Where a term has a multiplier, everything above
    is computed on the GEMMs' fp32 accumulators and rounded once to that dtype, as hardware does; where none has, every
    operation rounds, as torch's do.

    Args:
        addend: broadcastable to the product.
    """
    dtype = left[0].values.dtype
    pairs = [(a.values, b.values, _product(a.multiplier, b.multiplier)) for a in left for b in right]
    if all(gamma is None for _, _, gamma in pairs):
        return _unscaled([(a, b) for a, b, _ in pairs], addend, alpha, beta)
    addend = None if addend is None else addend.to(dtype)
    scaled = [(a, b, alpha if gamma is None else gamma if alpha == 1 else gamma * alpha) for a, b, gamma in pairs]
    a, b, scale = scaled[0]
    if len(scaled) == 1 and isinstance(scale, Tensor):
        return product.scaled_product(a, b, scale, addend, beta)
    accumulator = _sum([product.accumulated(a, b) * scale for a, b, scale in scaled])
    return product.with_addend(accumulator, addend, beta).to(dtype)


def _unscaled(pairs: list[tuple[Tensor, Tensor]], addend: Tensor | None, alpha: float, beta: float) -> Tensor:
    a, b = pairs[0]
    if addend is not None and addend.dim() == 1 and alpha == beta == 1 and len(pairs) == 1 and a.dim() == 2:
        # The bias rides in the GEMM's epilogue, where hardware adds it before the one rounding to the output dtype.
        return torch.addmm(addend.to(a.dtype), a, b.mT)
    y = _sum([a @ b.mT for a, b in pairs])
    y = y if alpha == 1 else y * alpha
    return y if addend is None else y + (addend if beta == 1 else addend * beta).to(y.dtype)


def total(terms: tuple[Term, ...]) -> Tensor:
    """The operand that ``terms`` stand for, as one tensor in their dtype."""
    return _sum([term.product() for term in terms])


def operand_draw(draw: Draw | None, operand: Operand) -> Draw | None:
    """The source of noise of one of a site's six operands."""
    return None if draw is None else draw.salted(_operand_salt(operand))


def operand_key(key: Tensor, operand: Operand) -> Tensor:
    """The key that one operand's spec draws from, given the site's key for this forward."""
    return noise.derive(key, _operand_salt(operand))


def _operand_salt(operand: Operand) -> int:
    return 1 + list(Operand).index(operand)


def _context(
    technique: Technique,
    salt: int,
    blocking: Blocking,
    x: Tensor,
    draw: Draw | None,
    state: Mapping[str, Tensor] | None = None,
    spec: QuantSpec | None = None,
    gemm: Gemm | None = None,
) -> Context:
    own = draw.salted(salt) if draw is not None and technique.draws else None
    return Context(
        blocking,
        Noise(None if own is None else own.varying, blocking, x.device),
        Noise(None if own is None else own.constant, blocking, x.device),
        None if own is None else own.count,
        state or {},
        spec,
        gemm,
    )


def _power_of_two(x: Tensor) -> Tensor:
    """The largest power of two up to each positive normal fp32; Inf of Inf and NaN."""
    return (x.view(torch.int32) & EXPONENT_MASK).view(torch.float32)


def _is_scalar(gamma: Tensor) -> bool:
    return all(statically_known_true(size == 1) for size in gamma.shape)


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a * b


def _sum(parts: Sequence[Tensor]) -> Tensor:
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result


def _wrap(technique: Technique, inner: Callable[[Tensor], Tensor], context: Context) -> Callable[[Tensor], Tensor]:
    def wrapped(x: Tensor) -> Tensor:
        def quantize(part: Tensor) -> Tensor:
            return inner(contract.same(technique, "around (what it quantizes)", part, x, any_float=True))

        return contract.same(
            technique, "around", contract.run(technique, "around", quantize, x, context), x, any_float=True
        )

    return wrapped


def _transformed(
    transform: Technique, x: Tensor, side: Literal["left", "right"], context: tuple[Tensor, ...]
) -> Tensor:
    return contract.along_last(transform, "transform", contract.run(transform, "transform", x, side, context), x)
