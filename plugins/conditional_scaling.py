"""Conditional block-wise scaling: moves block scales into the scale format's range; a published negative result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from fp4graph import Context, Overhead, Technique, hookimpl
from fp4graph.numerics.blocking import Granularity, Groups
from fp4graph.numerics.exact import root
from fp4graph.numerics.formats import FP32
from fp4graph.technique import BlockScale, Operands, OperandSpecs, Part, SiteView

if TYPE_CHECKING:
    from torch import Tensor


class ConditionalScaling(Technique):
    """Centres block scales in the scale format's range if they fit; otherwise maps them linearly into the range.

    With m_p the block statistics, s_p = Qmax/m_p the encode scales, g = max_p m_p, g̃ = min_p m_p over the blocks that
    are not zero, T the scale format's largest value, t its smallest positive one (E4M3: 448 and 2^-9), q its rounding:

    Case 1, g/g̃ <= T/t: C = √(T·t·g·g̃)/Qmax, h(X) = C/q(C·s_p) · Q(q(C·s_p)/C · X).

    Case 2, otherwise: a = (T − t)/(Qmax/g̃ − Qmax/g), b = T − a·Qmax/g̃, s̃_p = a·s_p + b,
    h(X) = γ/q(s̃_p) · Q(q(s̃_p)/γ · X) with γ = g·T/Qmax.

    Both cases are h(X) = γ·f(X/γ) with an encode quantizer f and a group scale γ. In case 1 γ = C, and f computes its
    block scales from the amax of X/γ; in case 2 f receives the statistic Qmax/s̃_p. In case 2 every element becomes
    zero. For a block with r = g/m_p, in [1, g/g̃], the largest abs(x/γ)·s̃_p is
    Qmax/T·(t/r + (T − t)·(1 − 1/r)/(g/g̃ − 1)) < 2·Qmax·t/T. For E2M1 and E4M3 this is 5e-5, and E2M1 rounds numbers
    below a quarter to zero. An operand of zeros stays zero.

    Source: "Elucidating the design space of FP4 training", A.13, among the attempts that did not work: training on
    CIFAR-10 came nowhere near convergence.

    Stage: scale (group scale).

    Cost: the maximum and the minimum of n/l block statistics, before quantization, and one multiplication of the
    result by γ. The complexity weight is ours: 0.5, as Tables 2 and 9 give for tensor scaling, which does the same
    work.

    Use it to reproduce the negative result; ``tensor_scaling`` works.
    """

    name: ClassVar[str] = "conditional_scaling"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=True)
    complexity: ClassVar[float] = 0.5
    #: The first two choose group scales as well; smooth_max differentiates the block scale, which case 2 replaces.
    conflicts: ClassVar[frozenset[str]] = frozenset({"tensor_scaling", "macro_block_scaling", "smooth_max"})

    operands: Operands = Field(("forward", "backward"), description="Operands, or groups of them, that are scaled.")

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Refuse decode scales, because the formulas are for encode scales."""
        for operand, spec in self.specs_listed(specs).items():
            if spec.scale.convention != "encode":
                raise ValueError(f"it needs encode scales: write scale: {{convention: encode}} for {operand}")

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return (TwoCaseScale(options=self),)


class TwoCaseScale(BlockScale):
    """Chooses γ and the block statistics by case 1 or case 2."""

    mixes = "expert"
    group_granularity = "tensor"
    options: ConditionalScaling

    def group_scale(self, z: Tensor, group: Callable[[Granularity], Tensor], context: Context) -> tuple[Tensor, Tensor]:
        """Return γ of the tensor, and the block statistic whose encode scale is C·s_p or s̃_p."""
        assert context.spec is not None
        qmax, scales = context.spec.element.max, context.spec.scale.format
        tensor = Groups(context.blocking, "tensor")
        g = tensor.reduce(z, "amax")
        # Inf if every block statistic is zero.
        smallest = -tensor.reduce(-torch.where(z > 0, z, torch.inf), "amax", fill=-torch.inf)
        data_range = g / smallest
        centred = root(g) * root(smallest) * (math.sqrt(scales.max * scales.min) / qmax)
        # s̃_p is computed as t + a·(s_p - Qmax/g) and not as a·s_p + b, because b is a difference of nearly equal
        # numbers. s_p is in units of Qmax/g, because Qmax/m_p overflows for a small m_p.
        span = data_range.clamp(max=FP32.max) - 1
        affine = scales.min + (scales.max - scales.min) * (((g / z).clamp(max=FP32.max) - 1) / span)
        fits = data_range <= scales.max / scales.min
        gamma = torch.where(g == 0, 1.0, torch.where(fits, centred, g * (scales.max / qmax)))
        return gamma, torch.where((z == 0) | fits, z / gamma, torch.full_like(affine, qmax) / affine)


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [ConditionalScaling]
