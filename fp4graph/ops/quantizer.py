"""The stages of one quantizer: block statistic, group scales, block scale, rounding of elements.

A stage at which no technique acts follows the spec. Kernels compute the statistics and the final rounding if there are
any for them, and tensor code otherwise, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from fp4graph.kernels import operators, statistics
from fp4graph.kernels.devices import by_runs
from fp4graph.kernels.direction import Blocks, Direction
from fp4graph.kernels.measures import Quotient, quantize_elements, round_elements
from fp4graph.kernels.request import Job, Kernel, Needs
from fp4graph.numerics import scaling
from fp4graph.numerics.blocking import Blocking, Granularity, Groups, is_scalar
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.noise import Noise
from fp4graph.numerics.segments import Segments
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops import contract
from fp4graph.ops.contract import Acting, at_stage
from fp4graph.ops.state import StateSlot
from fp4graph.technique import BlockScale, Context, GroupScale, Part, Quantization, Rounding
from fp4graph.technique.context import product_of

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Scaled:
    """An operand in the blocked layout before its elements are rounded, with everything that techniques decide.

    The attributes are as in :class:`~fp4graph.technique.Quantization`, except that ``values`` is a function that
    returns the values, because a kernel does not need them, and that ``scale`` is None if the spec decides it.
    ``chosen`` is True if a technique has chosen ``z``, which otherwise is the largest magnitude of the values.
    """

    blocking: Blocking
    values: Callable[[], Tensor]
    z: Tensor
    statistic: Tensor
    scale: Tensor | None
    group_scales: tuple[GroupScale, ...]
    chosen: bool
    quotient: Quotient | None


@dataclass(frozen=True, eq=False)
class Quantizer:
    """One call of an operand's quantizer, without what techniques split off or wrap around it.

    Attributes:
        spec: the spec of the operand.
        acting: the parts that act on the operand, with their contexts.
        kernel: the kernel that rounds: tensor code, or a kernel that takes the numbers that :meth:`blocks` returns.
        slots: the state slots of the techniques.
        draw: the source of the spec's own random bits.
        remainder: True for the remainder of an earlier call, which techniques with state do not round: their state
            describes the weight.
        segments: the segments of the operand, in a grouped product.
        shares: the blocks that share the largest of their statistics, and therefore a scale.
        largest: returns the largest magnitude of the tensor to quantize, 0-d; None if only the quantizer computes it.
    """

    spec: QuantSpec
    acting: Acting
    kernel: Kernel
    slots: tuple[StateSlot, ...] = ()
    draw: Draw | None = None
    remainder: bool = False
    segments: Segments | None = None
    shares: Literal["tensor", "row"] | None = None
    largest: Callable[[], Tensor] | None = None

    def quantize(self, x: Tensor) -> Quantization:
        """Return the complete quantization of ``x [..., K]``."""
        return self._rounded(self.scaled(x))

    def scaled(self, x: Tensor) -> Scaled:
        """Return ``x [..., K]`` with the statistics and scales that techniques decide."""
        spec = self.spec
        blocking = Blocking(tuple(x.shape), spec.block, segments=self.segments)
        values: Callable[[], Tensor] = Once(lambda: blocking.split(x.to(torch.float32)))
        largest = self._largest(x)
        if spec.block == "tensor" and largest is not None:
            z = largest().reshape(blocking.scale_shape)
        else:
            z = operators.amax(x, blocking, values)
        chosen = self.shares is not None
        if self.shares is not None:
            z = Groups(blocking, self.shares).reduce(z, "amax").expand(z.shape)
        for part, context in at_stage("block_statistic", self.acting):
            answer = contract.run_like(part, "block_statistic", z, values(), z, context)
            z, chosen = (z, chosen) if answer is None else (answer, True)
        statistic = z
        group_scales: list[GroupScale] = []
        for part, context in at_stage("group_scale", self.acting):
            asked: list[tuple[Tensor, Groups]] = []
            plain = not (chosen or group_scales) and isinstance(spec.block, int)  # otherwise z is read anyway
            # Only a γ that is proportional to g has a derivative by g, and may have another g than the maximum.
            proportional = isinstance(part, BlockScale) and part.normalizes
            choosing = tuple(at_stage("group_statistic", self.acting)) if proportional else ()
            group = partial(self._group_statistic, values, z, blocking, asked, largest if plain else None, choosing)
            answer = contract.run(part, "group_scale", z, group, context)
            if answer is None:
                continue
            if isinstance(answer, tuple) and len(answer) != 2:
                raise contract.broken(part, "group_scale", "must return γ, (γ, statistic of x/γ) or None")
            gamma, divided_z = answer if isinstance(answer, tuple) else (answer, None)
            gamma = contract.broadcastable(part, "group_scale", gamma, z)
            if proportional and not asked:
                raise contract.broken(part, "group_scale", "normalizes, and asked group() for no g")
            contract.require_granularity(part, gamma, [groups for _, groups in asked], self.segments)
            # Division rounds monotonically, so the largest quotient is the quotient of the largest.
            z = z / gamma if divided_z is None else contract.same(part, "group_scale", divided_z, z)
            chosen = chosen or divided_z is not None
            g, groups = asked[-1] if asked else (None, None)
            group_scales.append(GroupScale(part.name, gamma, g if proportional else None, groups, values))
            values = Once(partial(_divide, values, gamma))
        gammas = [each.scale for each in group_scales]
        scalar = len(gammas) <= 1 and all(map(is_scalar, gammas))
        quotient = Quotient(Once(lambda: blocking.split(x)), *gammas) if scalar else None
        scale: Tensor | None = None
        for part, context in at_stage("scale", self.acting):
            divided = replace(self._divided(part, context, group_scales), quotient=quotient)
            answer = contract.run_like(part, "scale", z, values(), z, divided)
            scale = scale if answer is None else answer
        return Scaled(blocking, values, z, statistic, scale, tuple(group_scales), chosen, quotient)

    def dequantized(self, x: Tensor, scaled: Scaled, factor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Return the dequantized operand divided by γ and multiplied by ``factor``, in the shape and dtype of ``x``.

        Args:
            x: the tensor from which ``scaled`` was made.
            dtype: the dtype to which a kernel casts the result, if it can.
        """
        if self.kernel.needs is Needs.STAGES:

            def rounded() -> Tensor:
                values = self._dequantized(scaled)
                return scaled.blocking.join(values if factor is None else values * factor).to(x.dtype)

            return self.kernel.run(Job(x, Direction(self.spec, self.draw), rounded=rounded)).values
        blocks = self.blocks(scaled, x.device, factor)
        if len(scaled.group_scales) > 1:  # successive divisions round differently from a division by the product
            divided = scaled.blocking.join(scaled.values())
            direction = Direction(by_runs(self.spec), self.draw, blocks._replace(divisor=None))
            return self.kernel.run(Job(divided, direction)).values.to(x.dtype)
        return self.kernel.run(Job(x, Direction(by_runs(self.spec), self.draw, blocks), dtype)).values

    def blocks(self, scaled: Scaled, device: torch.device, factor: Tensor | None) -> Blocks:
        """Return the numbers that a kernel takes for each block, made from ``scaled`` and ``factor``."""
        scale, stored = scaled.scale, None
        if [*at_stage("rescale", self.acting)]:
            scale = self._scale(scaled, device)
            stored = self._rounded(replace(scaled, scale=scale)).scale
        elif not isinstance(self.spec.block, int):
            scale = self._scale(scaled, device)
        statistic = scaled.z if scale is None and scaled.chosen else None
        parts = (product_of(scaled.group_scales), statistic, scale, factor, stored)
        return Blocks(*(None if part is None else operators.by_run(part, scaled.blocking) for part in parts))

    def _largest(self, x: Tensor) -> Callable[[], Tensor] | None:
        """Return a function that returns the largest magnitude of ``x``; None if block maxima are computed anyway."""
        if self.segments is not None or not self.kernel.reads_whole:
            return None
        return self.largest or (lambda: operators.largest_of_all(x))

    def _group_statistic(
        self,
        values: Callable[[], Tensor],
        z: Tensor,
        blocking: Blocking,
        asked: list[tuple[Tensor, Groups]],
        largest: Callable[[], Tensor] | None,
        choosing: Iterable[tuple[Part, Context]],
        granularity: Granularity,
    ) -> Tensor:
        """Return g of the groups of ``granularity``, after the parts in ``choosing``; append both to ``asked``."""
        groups = Groups(blocking, granularity)
        if largest is not None and granularity in ("tensor", "all"):
            g = largest().reshape([1] * z.dim())
        else:
            g = operators.group_amax(z, groups)
        for part, context in choosing:
            chosen = contract.run_like(part, "group_statistic", g, values(), g, groups, context)
            g = g if chosen is None else chosen
        asked.append((g, groups))
        return g

    def _dequantized(self, scaled: Scaled) -> Tensor:
        """Return the dequantized operand divided by γ, fp32, in the blocked layout. Its elements are a tensor only if
        a technique needs them."""
        if self._rounding() or [*at_stage("rescale", self.acting)]:
            return self._rounded(scaled).dequantized()
        values = scaled.values()
        noise = self._noise(scaled.blocking, values.device)
        return quantize_elements(values, self._scale(scaled, values.device), self.spec, noise, scaled.quotient)

    def _rounded(self, scaled: Scaled) -> Quantization:
        values = scaled.values()
        scale = self._scale(scaled, values.device)
        rounding = Once(partial(self._elements, scaled, values, scale))
        origin = scaled.statistic, scaled.group_scales, scaled.quotient
        rounded = Quantization(self.spec, scaled.blocking, values, scaled.z, scale, rounding, *origin)
        for part, context in at_stage("rescale", self.acting):
            other = contract.run_like(part, "rescale", scale, rounded, context)
            rounded = rounded if other is None else replace(rounded, scale=other)
        return rounded

    def _elements(self, scaled: Scaled, values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ratios of ``values`` to ``scale``, and the elements that they are rounded to."""
        ratio = scaling.ratio(values, scale, self.spec)
        elements: Tensor | None = None
        for part, context in self._rounding():
            divided = self._divided(part, context, scaled.group_scales)
            answer = contract.run_like(part, "round", ratio, ratio, scale, divided)
            elements = elements if answer is None else answer
        if elements is None:
            elements = round_elements(ratio, self.spec, self._noise(scaled.blocking, ratio.device))
        return ratio, elements

    def _rounding(self) -> list[tuple[Rounding, Context]]:
        """Return the parts that round elements."""
        return [each for each in at_stage("round", self.acting) if not (self.remainder and each[1].state)]

    def _scale(self, scaled: Scaled, device: torch.device) -> Tensor:
        """Return the block scale that a technique chose, or the scale by the spec's rule."""
        if scaled.scale is not None:
            return scaled.scale
        if self.spec.scale.rounding != "stochastic":
            return statistics.block_scale(scaled.z, self.spec)
        noise = self._noise(scaled.blocking, device)
        return scaling.block_scale(scaled.z, self.spec.scale, self.spec.element, noise)

    def _noise(self, blocking: Blocking, device: torch.device) -> Noise:
        """Return the random bits of the spec's own rounding."""
        if self.draw is None or not self.spec.needs_key:
            return Noise(None, blocking, device)
        return self.draw.noise(blocking, device)

    def _divided(self, part: Part, context: Context, by: Sequence[GroupScale]) -> Context:
        """Return ``context`` with weight-like state divided by γ, like the values that it is compared with."""
        entries = dict(context.state)
        for slot in self.slots:
            if slot.technique == part.name and slot.entry.weight_like:
                for group_scale in by:
                    entries[slot.entry.name] = entries[slot.entry.name] / group_scale.scale
        return replace(context, state=entries)


class Once(Generic[_T]):
    """A function whose value is computed in the first call. Dynamo does not trace functools.cache."""

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._made: _T | None = None

    def __call__(self) -> _T:
        if self._made is None:
            self._made = self._make()
        return self._made


def _divide(values: Callable[[], Tensor], gamma: Tensor) -> Tensor:
    return values() / gamma
