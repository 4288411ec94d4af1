"""The experts' operands as operators quantize them, where they lie and one expert after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp4graph.kernels import experts, operators
from fp4graph.kernels.operators import PackedOperand
from fp4graph.numerics.draw import Draw
from fp4graph.ops.draw import operand_draw
from fp4graph.ops.gemm import GemmProgram, Side
from fp4graph.ops.grouped import Layout
from fp4graph.ops.observe import BoundOperand
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import Term, Terms


@dataclass(frozen=True, eq=False)
class ByExpert:
    """The operators of :mod:`fp4graph.kernels.experts` for one GEMM of a grouped product.

    Attributes:
        layout: of the tokens in the operands of ``gemm``.
        dtype: of the GEMM. draw: of the site.
        observed: whether operands are shown to an observer, who needs them whole.
    """

    gemm: GemmProgram
    layout: Layout
    dtype: torch.dtype
    draw: Draw | None
    observed: bool

    def serves(self, right: Tensor | PackedOperand, *, packs: bool = False) -> bool:
        """Return whether an operator multiplies experts and quantizes their weights ``right`` one at a time.

        Args:
            packs: whether it is to return the bytes of the weights too.
        """
        program = self.gemm.right
        seen = self.observed or program.observes or bool(self.gemm.left.at("split"))  # residuals are products apart
        if program.spec is None or seen or not experts.serves(right.dtype, right.device):
            return False
        if isinstance(right, PackedOperand):
            return right.dtype is self.dtype and self._is_direct(program, right)
        if packs and not (self._is_direct(program, right) and right.dtype is self.dtype):
            return False
        packs = packs and not operators.packs(program.spec, right.dtype, self.dtype, right.device)
        return not packs and experts.serves(self.dtype, right.device) and program.in_one_read(right.device, self.draw)

    def product(
        self, left: Terms, right: BoundOperand | PackedOperand, *, packs: bool = False
    ) -> tuple[Tensor, PackedOperand | None]:
        """Return the product in the GEMM's layout where the operator :meth:`serves`, and if ``packs`` the bytes of the
        quantized weights.

        Args:
            right: not quantized yet; its transpose where it is given as bytes.
        """
        (term,) = left
        tokens = self.layout.tokens
        if isinstance(right, PackedOperand):
            spec, draw = self.gemm.right.spec, operand_draw(self.draw, self.gemm.operands[1])
            assert spec is not None
            groups = experts.Groups(*tokens, self.layout.scale(term.multiplier, None))
            return experts.requantized_product(term.values, right, groups, spec, draw), None
        how, waiting = right.program.direction(right.x, right.draw, segments=right.segments)
        gamma = self.layout.scale(term.multiplier, waiting)
        return experts.quantized_product(term.values, right.x, experts.Groups(*tokens, gamma), how, packs)

    def laid_out(self, left: Tensor, right: Tensor | PackedOperand) -> tuple[Terms, Terms] | None:
        """Return the operands of wgrad, quantized on their way from rows ``[T, C]`` to their positions; or None."""
        direct = self._is_direct(self.gemm.left, left) and self._is_direct(self.gemm.right, right)
        if self.layout.source is None or not direct:
            return None
        return self._at_positions("left", left), self._at_positions("right", right)

    def _at_positions(self, side: Side, x: Tensor | PackedOperand) -> Terms:
        own, other = self.gemm.operands
        program, operand = (self.gemm.left, own) if side == "left" else (self.gemm.right, other)
        assert self.layout.source is not None
        assert program.spec is not None
        y = experts.quantize_at(x, self.layout.source, program.spec, operand_draw(self.draw, operand))
        return (Term(y.to(self.dtype)),)

    def _is_direct(self, program: OperandProgram, x: Tensor | PackedOperand) -> bool:
        """Return whether a kernel quantizes an operand from ``x``, which nobody else wants to see."""
        unseen = not (self.observed or self.gemm.transforms or program.observes)
        return unseen and experts.serves(x.dtype, x.device) and program.by_kernel(x.device, self.draw)
