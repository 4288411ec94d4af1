"""The experts' operands as operators quantize them, where they lie and one expert after another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from fp4graph.kernels import experts, operators
from fp4graph.kernels.request import PackedOperand, Request
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.hadamard import BlockRotation
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

    def turns(self, right: Tensor) -> int | None:
        """Return the block within which the operator of :meth:`product` rotates the weights ``right`` itself; None
        where it does not."""
        spec = self.gemm.right.spec
        plain = self.serves(right) and self.gemm.right.by_kernel(right.device, self.draw)
        return spec.block if plain and spec is not None and isinstance(spec.block, int) else None

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
            return experts.requantized_product(term.values, right, groups, Request(spec, draw)), None
        how, waiting = right.program.direction(right.x, right.draw, segments=right.segments)
        gamma = self.layout.scale(term.multiplier, waiting)
        groups = experts.Groups(*tokens, gamma)
        return experts.quantized_product(term.values, right.x, groups, replace(how, rotation=right.turn), packs)

    def laid_out(self, left: Tensor, right: Tensor | PackedOperand) -> tuple[Terms, Terms] | None:
        """Return the operands of wgrad, quantized on their way from rows ``[T, C]`` to their positions; or None."""
        direct = self._reads(self.gemm.left, left) and self._reads(self.gemm.right, right)
        if self.layout.source is None or not direct:
            return None
        turn = None
        if self.gemm.transforms and (turn := self._turn(left, right)) is None:
            return None
        return self._at_positions("left", left, turn), self._at_positions("right", right, turn)

    def _turn(self, left: Tensor, right: Tensor | PackedOperand) -> BlockRotation | None:
        """Return the rotation of both operands of wgrad, where a kernel knows it."""
        blocks = [program.spec.block for program in (self.gemm.left, self.gemm.right) if program.spec is not None]
        lengths = [block for block in blocks if isinstance(block, int)]
        if isinstance(right, PackedOperand) or len(lengths) < 2:
            return None
        draw, segments = operand_draw(self.draw, self.gemm.operands[0]), self.layout.segments(self.gemm.gemm, "left")
        operands = self.layout.lay_out(left).mT, self.layout.lay_out(right).mT
        return self.gemm.turn(*operands, draw, segments, gcd(*lengths))

    def _at_positions(self, side: Side, x: Tensor | PackedOperand, turn: BlockRotation | None) -> Terms:
        own, other = self.gemm.operands
        program, operand = (self.gemm.left, own) if side == "left" else (self.gemm.right, other)
        assert self.layout.source is not None
        assert program.spec is not None
        how = Request(program.spec, operand_draw(self.draw, operand), rotation=turn)
        return (Term(experts.quantize_at(x, self.layout.source, how, self.dtype)),)

    def _is_direct(self, program: OperandProgram, x: Tensor | PackedOperand) -> bool:
        """Return whether a kernel quantizes an operand from ``x``, in whose basis the GEMM is."""
        return not self.gemm.transforms and self._reads(program, x)

    def _reads(self, program: OperandProgram, x: Tensor | PackedOperand) -> bool:
        """Return whether a kernel quantizes an operand from ``x``, which nobody else wants to see."""
        unseen = not (self.observed or program.observes)
        return unseen and experts.serves(x.dtype, x.device) and program.by_kernel(x.device, self.draw)
