"""One operand's quantizer: a spec with the techniques that act on it, as a pure function of tensors.

A program is frozen data: equal specs and techniques make equal programs, which share one compiled function however
many sites use it. Nothing in a program knows its site; whatever differs from site to site (keys, weight state) comes
in as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ldexp

import torch
from torch import Tensor

from fp4graph.kernels import operators
from fp4graph.kernels.devices import by_runs
from fp4graph.kernels.direction import Direction
from fp4graph.kernels.machine import Machine
from fp4graph.kernels.request import INSIDE, Job, Kernel, Needs
from fp4graph.numerics import exact, target
from fp4graph.numerics.blocking import Blocking, is_known, is_scalar
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.rounding import power_of_two
from fp4graph.numerics.segments import Segments
from fp4graph.ops import contract
from fp4graph.ops.contract import Acting, at_stage
from fp4graph.ops.draw import call_draw, part_draw
from fp4graph.ops.facts import OperandFacts
from fp4graph.ops.gradient import jacobian_diagonal
from fp4graph.ops.product import Term, Terms
from fp4graph.ops.quantizer import Quantizer, Scaled
from fp4graph.ops.schedule import Code
from fp4graph.ops.state import OperandState
from fp4graph.technique import BlockScale, Context, Part, Quantization, Wrapper
from fp4graph.technique.context import product_of


@dataclass(frozen=True)
class OperandProgram(OperandFacts):
    """One operand's quantizer.

    A call takes ``x [..., K]``, with blocks along the last axis, and returns the operand's terms in the shape of ``x``.
    Their dtype is the dtype of ``x``; a kernel that can cast gives ``dtype``, to which the caller casts them anyway.
    """

    def __call__(
        self,
        x: Tensor,
        draw: Draw | None = None,
        state: OperandState | None = None,
        segments: Segments | None = None,
        dtype: torch.dtype | None = None,
        code: Code | None = None,
    ) -> Terms:
        if self.spec is None:
            return (Term(x),)
        if code is None:
            code, _ = self.chosen(Machine.of(x.device), x.dtype, dtype or x.dtype, drawn=draw is not None)
        if code.first.needs is Needs.NOTHING and not self.is_wrapped:
            return (Term(code.first.run(Job(x, Direction(self.spec, draw), dtype)).values),)
        kernels = code
        acting = self.acting(x, draw, state, segments)
        part, residuals = _split(x, acting)
        multiplier: Tensor | None = None
        calls = 0
        wrapped = bool(self.at("around") or self.at("after"))

        def quantize(part: Tensor) -> Tensor:
            nonlocal multiplier, calls
            if not (segments is None and self.repeats):
                part = _whole(part, x)
            source, kernel = call_draw(draw, calls), kernels.first if calls == 0 else kernels.again
            if kernel.needs is Needs.NOTHING and self.spec is not None:
                calls += 1
                return kernel.run(Job(part, Direction(self.spec, source))).values
            same_contexts = calls == 0 and _has_shape(part, x)
            parts = acting if same_contexts else self.acting(part, source, state, segments)
            quantizer = self._quantizer(parts, source, segments, kernel, calls > 0)
            calls += 1
            scaled = quantizer.scaled(part)
            if wrapped:
                return quantizer.dequantized(part, scaled, product_of(scaled.group_scales))
            factor, multiplier = _factors(scaled)
            return quantizer.dequantized(part, scaled, factor, dtype)

        inner: Callable[[Tensor], Tensor] = quantize
        for wrapper, context in reversed(list(at_stage("around", acting))):  # a policy's first is outermost
            inner = _wrap(wrapper, inner, context)
        y = inner(part)
        for wrapper, context in at_stage("after", acting):
            y = operators.rounded(y)
            changed = contract.run_like(wrapper, "after", y, y, context)
            y = y if changed is None else changed
        return (Term(y, multiplier, segments), *residuals)

    def direction(
        self,
        x: Tensor,
        draw: Draw | None,
        kernel: Kernel,
        largest: Callable[[], Tensor] | None = None,
        segments: Segments | None = None,
    ) -> tuple[Direction, Tensor | None]:
        """Return the arguments with which ``kernel`` quantizes ``x`` in one read, and the multiplier of the term.

        Args:
            largest: returns the largest magnitude of ``x``, 0-d; None if only the quantizer computes it.
        """
        assert self.spec is not None
        if isinstance(self.spec.block, int) and not any(self.at(stage) for stage in INSIDE):
            return Direction(self.spec, draw), None
        acting = self.acting(x, draw, None, segments)
        quantizer = self._quantizer(acting, draw, segments, kernel, largest=largest)
        scaled = quantizer.scaled(x)
        factor, multiplier = _factors(scaled)
        blocks = quantizer.blocks(scaled, x.device, factor)
        return Direction(by_runs(quantizer.spec), draw, blocks), multiplier

    def quantize(
        self,
        x: Tensor,
        draw: Draw | None = None,
        state: OperandState | None = None,
        segments: Segments | None = None,
    ) -> Quantization:
        """Return the quantization of ``x``, without residuals that techniques split off, and without their wrappers."""
        acting = self.acting(x, draw, state, segments)
        part, _ = _split(x, acting)
        code, _ = self.chosen(Machine.of(x.device), x.dtype, x.dtype, drawn=draw is not None)
        # With the kernel of a call, the largest magnitude is computed as in the call, and a compiler computes it once.
        return self._quantizer(acting, draw, segments, code.first).quantize(part)

    def observe(
        self, x: Tensor, draw: Draw | None, state: OperandState, segments: Segments | None = None
    ) -> dict[tuple[str, str], Tensor]:
        """Return new values, by technique and entry name, of the entries that the graph writes."""
        if not self.observes:
            return {}
        quantization = self.quantize(x, draw, state, segments)
        observed: dict[tuple[str, str], Tensor] = {}
        due: dict[str, set[str]] = {}
        for slot in self.state:
            if slot.written:
                due.setdefault(slot.technique, set()).add(slot.entry.name)
        observers = list(at_stage("observe", self.acting(x, draw, state, segments)))
        for part, context in observers:
            new, names = contract.run(part, "observe", quantization, context), due.get(part.name, set())
            if not isinstance(new, Mapping) or not set(new) <= names:
                got = sorted(map(str, new)) if isinstance(new, Mapping) else type(new).__name__
                raise contract.broken(part, "observe", f"returned {got} where values of {sorted(names)} are due")
            for name, value in new.items():
                like = state[part.name][name]
                observed[part.name, name] = contract.same(part, "observe", value, like)
        for part, _ in observers:
            if missing := sorted(due.get(part.name, set()) - {name for owner, name in observed if owner == part.name}):
                raise contract.broken(part, "observe", f"returned no values of {missing}, which are due")
        return observed

    def gradient_factor(
        self, x: Tensor, draw: Draw | None, state: OperandState | None, segments: Segments | None = None
    ) -> Tensor | None:
        """Return the diagonal of the quantizer's Jacobian at ``x`` by the techniques' surrogates, in the shape of
        ``x``; None stands for 1."""
        if not self.has_gradient_factor:
            return None
        quantization = self.quantize(x, draw, state, segments)
        return quantization.blocking.join(jacobian_diagonal(quantization, self.acting(x, draw, state, segments)))

    def _quantizer(
        self,
        acting: Acting,
        draw: Draw | None,
        segments: Segments | None,
        kernel: Kernel,
        remainder: bool = False,
        largest: Callable[[], Tensor] | None = None,
    ) -> Quantizer:
        assert self.spec is not None, "a high-precision operand has no quantizer"
        return Quantizer(self.spec, acting, kernel, self.state, draw, remainder, segments, self.shares, largest)

    def acting(
        self, x: Tensor, draw: Draw | None, state: OperandState | None, segments: Segments | None = None
    ) -> Acting:
        """Return the parts, each with the context that it reads at this operand."""
        assert self.spec is not None, "a high-precision operand has no quantizer"
        blocking = Blocking(tuple(x.shape), self.spec.block, segments=segments)
        scales = (part for part in self.parts if isinstance(part, BlockScale))
        normalized = next((part.group_granularity for part in scales if part.normalizes), None)
        acting: list[tuple[Part, Context]] = []
        for part in self.parts:
            slots = (slot.entry for slot in self.state if slot.technique == part.name)
            like = {entry.name for entry in slots if entry.weight_like}
            entries = (state or {}).get(part.name, {})
            if not isinstance(part, Wrapper):  # a wrapper sees the operand before it is cut into blocks
                entries = {name: blocking.split(entry) if name in like else entry for name, entry in entries.items()}
            drawn = part_draw(draw, part.key)
            context = contract.context(
                part, drawn, blocking, x.device, state=entries, spec=self.spec, normalized=normalized
            )
            acting.append((part, context))
        return acting


def _factors(scaled: Scaled) -> tuple[Tensor | None, Tensor | None]:
    """Return two factors of γ: one multiplies the quantized operand, the other waits for the GEMM's accumulator.

    If γ is one number for the operand, or one for each expert, its mantissa waits, because an FP4 code times a block
    scale is exact in bf16, and times γ it is not. The power of two of γ multiplies the operand, which is exact too and
    keeps both factors in range: the operand is as large as X, where codes times UE5M3 scales alone would overflow fp16,
    and the product of two multipliers lies in [1, 4), where γ_a·γ_b may underflow fp32.
    """
    gamma = product_of(scaled.group_scales)
    if gamma is None or not _is_shared(gamma, scaled):
        return gamma, None
    factor = power_of_two(gamma)
    if target.kind(gamma.device) == "cuda":  # values may be bf16 there, whose smallest number is above fp32's
        factor = factor.clamp(min=ldexp(1.0, exact.LEAST_FACTOR))
    return factor, _table(gamma / factor, scaled.blocking)


def _is_shared(gamma: Tensor, scaled: Scaled) -> bool:
    """Return whether γ is one number for the operand, or one number for each expert."""
    if is_scalar(gamma) or scaled.blocking.segments is None:
        return is_scalar(gamma)
    return all(is_scalar(p.scale) or (p.groups is not None and p.groups.per_segment) for p in scaled.group_scales)


def _table(x: Tensor, blocking: Blocking) -> Tensor:
    """Return ``x`` as one number, 0-d, or as one for each segment (and one for the positions outside all segments)."""
    segments = blocking.segments
    if segments is None or is_scalar(x):
        return x.reshape(()) if segments is None else x.reshape(1).expand(segments.count + 1)
    return segments.table(x, blocking.position(segments.axis), blocking.step(segments.axis)).reshape(-1)


def _split(x: Tensor, acting: Acting) -> tuple[Tensor, list[Term]]:
    """Return the part of ``x`` to quantize, and the residuals that techniques split off."""
    residuals = []
    for wrapper, context in at_stage("split", acting):
        pair = contract.run(wrapper, "split", x, context)
        if pair is None:
            continue
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise contract.broken(wrapper, "split", "must return (part to quantize, residual or None), or None")
        remainder, residual = pair
        if residual is not None:
            residuals.append(Term(contract.same(wrapper, "split", residual, x, any_float=True).to(x.dtype)))
        x = contract.same(wrapper, "split", remainder, x)
    return x, residuals


def _wrap(wrapper: Wrapper, inner: Callable[[Tensor], Tensor], context: Context) -> Callable[[Tensor], Tensor]:
    def wrapped(x: Tensor) -> Tensor:
        x = _whole(x, context.blocking)

        def quantize(part: Tensor) -> Tensor:
            return operators.rounded(inner(contract.lines(wrapper, "around (what it quantizes)", part, x)))

        result = contract.run(wrapper, "around", quantize, x, context)
        return inner(x) if result is None else contract.same(wrapper, "around", result, x, any_float=True)

    return wrapped


def _whole(x: Tensor, like: Tensor | Blocking) -> Tensor:
    """Return ``x`` in the shape of ``like``: repeated along the axes of size 1, where it stands for equal lines."""
    return x if _has_shape(x, like) else x.expand(like.shape).contiguous()


def _has_shape(x: Tensor, like: Tensor | Blocking) -> bool:
    """Return whether ``x`` has the shape of ``like`` for all values of symbolic sizes, without adding a guard."""
    return all(is_known(size == expected) for size, expected in zip(x.shape, like.shape, strict=True))
