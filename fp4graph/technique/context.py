"""The context that the tensor stages of a technique get, and the parts of an operand's quantization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import mul
from typing import TYPE_CHECKING

from fp4graph.kernels import operators, statistics
from fp4graph.numerics import scaling
from fp4graph.numerics.blocking import Blocking, Granularity, Groups
from fp4graph.numerics.spec import QuantSpec
from fp4graph.technique.operands import Gemm

if TYPE_CHECKING:
    from torch import Tensor

    from fp4graph.kernels.measures import Quotient
    from fp4graph.numerics.draw import Draw
    from fp4graph.numerics.noise import Noise


@dataclass(frozen=True, eq=False)
class Context:
    """The data that a tensor stage may read besides its arguments.

    Attributes:
        blocking: how the operand is cut into blocks.
        noise: random bits of this technique at this operand, new at every forward.
        constant: random bits of this technique at this operand, the same at every forward.
        count: forwards with gradients so far, int32, 0-d; None unless the part ``draws``.
        draw: the source of the random bits; None unless the part ``draws``.
        state: the technique's entries for this operand, by name, each in the dtype of its ``init``; ``weight_like``
            entries have the blocked layout or, for a ``Wrapper``, the operand's.
        spec: the operand's spec; None for pair transforms, which serve two operands.
        gemm: the product whose operands a pair transform gets; None for other stages.
        normalized: the granularity of the statistic g by which a part that ``normalizes`` divides this operand, as in
            U = X/g; None if no part does.
        quotient: at a stage ``scale``, the operand and the γ that divides it, which :mod:`fp4graph.kernels.measures`
            reads in place of the values; None where several γ divide, or a γ that is not one number for the tensor.
    """

    blocking: Blocking
    noise: Noise
    constant: Noise
    count: Tensor | None = None
    draw: Draw | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)
    spec: QuantSpec | None = None
    gemm: Gemm | None = None
    normalized: Granularity | None = None
    quotient: Quotient | None = None

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of the blocked layout inside a block."""
        return self.blocking.axes

    def maxima(self, x: Tensor) -> Tensor:
        """Return the largest magnitude of every block of ``x``, a tensor of the operand's shape: fp32, in the shape of
        a statistic; NaN if the block has a NaN."""
        return operators.amax(x, self.blocking)

    def mantissa(self, z: Tensor, divisor: float, bits: int) -> Tensor:
        """Return the mantissa of ``z / divisor``, :func:`fp4graph.numerics.scaling.mantissa`."""
        return operators.mantissa(z, divisor, bits)

    def largest(self, score: Tensor, count: int) -> Tensor:
        """Return whether each element of ``score`` is among the ``count`` largest; of equal elements, earlier win."""
        return operators.largest(score, count)

    def order_statistics(self, x: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """Return the elements of ``x [n]``, without NaN, at ``place`` and at n - 1 - place of the ascending order: 0-d;
        -Inf and Inf if ``x`` is empty."""
        return statistics.order_statistics(x, place)

    def mean(self, x: Tensor, axis: int) -> Tensor:
        """Return the mean of ``x`` over ``axis``, the same on every machine: :func:`fp4graph.numerics.exact.mean`."""
        return statistics.mean(x, axis)

    def bits(self, count: int, constant: bool = False) -> Tensor:
        """Return ``count`` words of 32 random bits, int32: :func:`fp4graph.numerics.noise.hash_bits` of the indices
        below ``count`` under the key of :attr:`noise`, or with ``constant`` under that of :attr:`constant`. Further
        calls return the same bits."""
        return self._source(constant).bits(count)

    def gaussian(self, count: int, constant: bool = False) -> Tensor:
        """Return ``count`` standard normal variates, fp32, with the bits of :func:`fp4graph.numerics.noise.gaussian`;
        indices and keys are as in :meth:`bits`."""
        return operators.gaussian(self._source(constant), count, self.noise.device)

    def _source(self, constant: bool) -> Draw:
        if self.draw is None:
            raise ValueError("random bits need a key: declare draws = True in the part")
        return self.draw.fixed if constant else self.draw


@dataclass(frozen=True, eq=False)
class GroupScale:
    """The group scale γ of one technique.

    Attributes:
        technique: the technique's name.
        scale: γ, fp32, broadcastable to a statistic.
        statistic: g, the group statistic that γ is proportional to; None unless the part ``normalizes``.
        groups: the groups that g was taken over, or None.
        values: returns the operand before its division by γ, fp32, in the blocked layout.
    """

    technique: str
    scale: Tensor
    statistic: Tensor | None
    groups: Groups | None
    values: Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class Quantization:
    """All parts of one operand's quantization: fp32, in the blocked layout.

    The dequantized operand is ``γ · elements · S`` (``γ · elements / s`` for an encode scale).

    Attributes:
        spec, blocking: the spec of the operand, and how the operand is cut into blocks.
        values: x/γ.
        z: the block statistic of ``values``; the axes inside a block have size 1.
        scale: the stored scale, in the spec's convention and the shape of ``z``.
        rounding: returns :attr:`ratio` and :attr:`elements`, which are computed when they are first read.
        statistic: Z before it was divided by γ, in the shape of ``z``.
        group_scales: the group scales of all techniques, in the order in which they divide.
        quotient: ``values`` as in :attr:`Context.quotient`.
    """

    spec: QuantSpec
    blocking: Blocking
    values: Tensor
    z: Tensor
    scale: Tensor
    rounding: Callable[[], tuple[Tensor, Tensor]]
    statistic: Tensor
    group_scales: tuple[GroupScale, ...]
    quotient: Quotient | None = None

    @property
    def ratio(self) -> Tensor:
        """``values`` divided by the scale before ``rescale``, in the shape of ``values``: the input of the rounding."""
        return self.rounding()[0]

    @property
    def elements(self) -> Tensor:
        """The values of the element format that :attr:`ratio` is rounded to, in its shape."""
        return self.rounding()[1]

    @property
    def group_scale(self) -> Tensor | None:
        """γ, the product of all group scales; None where there are none."""
        return product_of(self.group_scales)

    @property
    def undivided(self) -> Tensor:
        """The operand before it was divided by γ, in the shape of ``values``."""
        return self.group_scales[0].values() if self.group_scales else self.values

    def dequantized(self) -> Tensor:
        """Return the dequantized operand divided by γ: fp32, in the blocked layout."""
        return scaling.dequantize(self.elements, self.scale, self.spec)


def product_of(group_scales: tuple[GroupScale, ...]) -> Tensor | None:
    """Return γ, the product of ``group_scales``; None if there are none."""
    return reduce(mul, [part.scale for part in group_scales]) if group_scales else None
