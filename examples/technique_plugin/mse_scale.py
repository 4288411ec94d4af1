"""A technique and an element format for fp4graph: block scales of least squared error, and E1M2."""

from typing import ClassVar

import torch
from pydantic import Field, PositiveFloat

import fp4graph
from fp4graph.numerics.rounding import round_nearest
from fp4graph.numerics.scaling import block_scale, dequantize, ratio
from fp4graph.technique import BlockScale, Operands

E1M2 = fp4graph.formats.ElementFormat("e1m2", exponent_bits=1, mantissa_bits=2, bias=0, max=3.5)  # 0, 0.5, 1, ..., 3.5


class MseScale(fp4graph.Technique):
    """Chooses each block's scale in fprop among those for c·Z, with a few factors c, by the least Σ(Q(x) - x)².

    Use it if one value of a block is much larger than the others: clipping it gives the others a finer grid.
    """

    name: ClassVar[str] = "mse_scale"
    overhead: ClassVar[fp4graph.Overhead] = fp4graph.Overhead("O(n)", "O(1)", fusable=True)
    complexity: ClassVar[float] = 0.5  # fusable and O(n): Table 2 of "Elucidating the Design Space of FP4 Training"
    factors: tuple[PositiveFloat, ...] = Field((1.0, 0.875, 0.75, 2.0), min_length=1, description="Factors c to try.")
    operands: Operands = Field(("forward",), description="Operands, or groups of them, whose blocks choose.")

    def parts(self, site):
        return (LeastError(options=self),)


class LeastError(BlockScale):
    """Chooses the scale of each block."""

    mixes = "block"

    def scale(self, values, z, context):  # values [..., blocks, block], z [..., blocks, 1]
        spec, best, least = context.spec, None, torch.full_like(z, torch.inf)
        for factor in self.options.factors:
            scale = block_scale(z * factor, spec.scale, spec.element)
            elements = round_nearest(ratio(values, scale, spec), spec.element, spec.ties)
            error = (dequantize(elements, scale, spec) - values).square().sum(context.axes, keepdim=True)
            best = scale if best is None else torch.where(error < least, scale, best)
            least = torch.minimum(error, least)
        return best


@fp4graph.hookimpl
def fp4graph_techniques():
    return [MseScale]


@fp4graph.hookimpl
def fp4graph_formats():
    return [E1M2]
