"""The experts' operands as operators quantize them, where they lie and one expert after another."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp4graph.kernels import experts
from fp4graph.kernels.direction import Direction, PackedOperand
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.hadamard import BlockRotation
from fp4graph.ops.draw import operand_draw
from fp4graph.ops.gemm import GemmProgram, Side
from fp4graph.ops.grouped import Layout
from fp4graph.ops.observe import BoundOperand
from fp4graph.ops.product import Term, Terms
from fp4graph.technique.operands import Gemm


@dataclass(frozen=True, eq=False)
class ByExpert:
    """The operators of :mod:`fp4graph.kernels.experts` for one GEMM of a grouped product.

    Attributes:
        layout: of the tokens in the operands of ``gemm``.
        dtype: of the GEMM.
        draw: of the site.
    """

    gemm: GemmProgram
    layout: Layout
    dtype: torch.dtype
    draw: Draw | None

    def product(
        self, left: Terms, right: BoundOperand | PackedOperand, *, packs: bool = False
    ) -> tuple[Tensor, PackedOperand | None]:
        """Return the product in the GEMM's layout, and if ``packs`` the bytes of the quantized weights.

        Args:
            right: not quantized yet; its transpose where it is given as bytes.
        """
        (term,) = left
        tokens = self.layout.tokens
        if isinstance(right, PackedOperand):
            spec, draw = self.gemm.right.spec, operand_draw(self.draw, self.gemm.operands[1])
            assert spec is not None
            groups = experts.Groups(*tokens, self.layout.scale(term.multiplier, None))
            return experts.requantized_product(term.values, right, groups, Direction(spec, draw)), None
        how, waiting = right.program.direction(right.x, right.draw, segments=right.segments)
        gamma = self.layout.scale(term.multiplier, waiting)
        groups = experts.Groups(*tokens, gamma)
        return experts.quantized_product(term.values, right.x, groups, replace(how, rotation=right.turn), packs)

    def laid_out(self, left: Tensor, right: Tensor | PackedOperand, *, turns: bool) -> tuple[Terms, Terms]:
        """Return the operands of wgrad, quantized on their way from rows ``[T, C]`` to their positions.

        Args:
            turns: whether they are rotated on that way.
        """
        turn = None
        if turns and isinstance(right, Tensor):
            draw, segments = operand_draw(self.draw, self.gemm.operands[0]), self.layout.segments(Gemm.WGRAD, "left")
            operands = self.layout.lay_out(left).mT, self.layout.lay_out(right).mT
            turn = self.gemm.turn(*operands, draw, segments)
        return self._at_positions("left", left, turn), self._at_positions("right", right, turn)

    def _at_positions(self, side: Side, x: Tensor | PackedOperand, turn: BlockRotation | None) -> Terms:
        own, other = self.gemm.operands
        program, operand = (self.gemm.left, own) if side == "left" else (self.gemm.right, other)
        assert self.layout.source is not None
        assert program.spec is not None
        how = Direction(program.spec, operand_draw(self.draw, operand), rotation=turn)
        return (Term(experts.quantize_at(x, self.layout.source, how, self.dtype)),)
