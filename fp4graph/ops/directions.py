"""The two quantizations of one tensor by one kernel that reads it once: along its rows and along its columns.

A site multiplies X and W in fprop and again in the backward, and dY in dgrad and in wgrad, contracted over the other
axis. On a GPU one operator quantizes both ways where the backward starts from the original.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp4graph.kernels import operators
from fp4graph.kernels.direction import Direction, PackedOperand
from fp4graph.numerics.draw import Draw
from fp4graph.ops.draw import operand_draw
from fp4graph.ops.gemm import MatmulProgram, Side
from fp4graph.ops.observe import BoundOperand
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import Term, Terms
from fp4graph.ops.quantizer import Once


@dataclass(frozen=True, eq=False)
class BothDirections:
    """What one read quantizes of a site without experts whose operands nobody else wants to see.

    Attributes:
        dtype: of the GEMMs.
        draw: of the site.
    """

    program: MatmulProgram
    dtype: torch.dtype
    draw: Draw | None

    def kept(self, operand: BoundOperand, side: Side) -> tuple[Terms, PackedOperand] | None:
        """Return an operand of fprop, which no transform changes, and the bytes of what the backward multiplies of it;
        None where a technique's scales turn out to be such as no bytes hold."""
        gemm = self.program.wgrad if side == "left" else self.program.dgrad
        other = gemm.right, operand_draw(self.draw, gemm.operands[1])
        (rows, multiplier), (columns, waiting) = _directions(operand.x, (operand.program, operand.draw), other)
        if not columns.packs:
            return None
        values, packed = operators.quantize_and_pack_columns(operand.x, rows, columns, self.dtype, waiting)
        return (Term(values.to(self.dtype), multiplier),), packed

    def gradients(self, dy: Tensor, sums: bool) -> tuple[Terms, Terms, Tensor | None]:
        """Return dY quantized for dgrad, its transpose for wgrad, and if ``sums`` its sum over rows, fp32.

        Args:
            dy: in the dtype of the GEMMs.
        """
        own, other = (
            (gemm.left, operand_draw(self.draw, gemm.operands[0])) for gemm in (self.program.dgrad, self.program.wgrad)
        )
        (rows, multiplier), (columns, waiting) = _directions(dy, own, other)
        along_rows, along_columns, partial = operators.quantize_both(dy, rows, columns, sums)
        total = None if partial is None else partial.sum(0)
        return (Term(along_rows, multiplier),), (Term(along_columns.mT, waiting),), total


def _directions(
    x: Tensor, rows: tuple[OperandProgram, Draw | None], columns: tuple[OperandProgram, Draw | None]
) -> tuple[tuple[Direction, Tensor | None], tuple[Direction, Tensor | None]]:
    """Return how ``x`` is quantized along its rows and along its columns, each with a multiplier."""
    largest = Once(lambda: operators.largest_of_all(x))  # of the tensor, whichever way it is cut into blocks
    return rows[0].direction(x, rows[1], largest), columns[0].direction(x.mT, columns[1], largest)
