"""Binds a site's program to the schedule, the source of random bits and the state of one forward or backward.

The bound program runs three GEMMs (:mod:`fp4graph.ops.bound_gemm`), and keeps operands as the schedule says.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fp4graph.kernels import operators
from fp4graph.kernels.direction import Direction, PackedOperand
from fp4graph.kernels.request import Asked, Job, Kernel
from fp4graph.numerics.draw import Draw
from fp4graph.ops.bound_gemm import BoundGemm, MatmulOptions
from fp4graph.ops.gemm import GemmProgram, Rotation, Side
from fp4graph.ops.grouped import Experts, Layout
from fp4graph.ops.observe import BoundOperand
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import Term, Terms, total
from fp4graph.ops.quantizer import Once
from fp4graph.ops.schedule import Keeps, Schedule, Source
from fp4graph.technique.operands import Gemm


class Forward(NamedTuple):
    """The product, the forms of both quantized factors that the backward reads (or None), and the operands of fprop."""

    y: Tensor
    left: Tensor | PackedOperand | None
    right: Tensor | PackedOperand | None
    operands: tuple[BoundOperand, BoundOperand]


class BoundMatmul:
    """A matmul program with the arguments of one forward or backward, run as its schedule says.

    Args:
        experts: the tokens of each expert, for a grouped product.
        channels: the input channels ``[k]`` that are multiplied; None for all channels.
    """

    def __init__(
        self,
        options: MatmulOptions,
        schedule: Schedule,
        draw: Draw | None,
        state: tuple[Tensor | None, ...],
        experts: Experts | None = None,
        channels: Tensor | None = None,
    ) -> None:
        self.program, self.schedule = options.program, schedule
        self._options, self._dtype, self._channels = options, options.dtype, channels
        self._arguments = draw, state, experts
        self._layouts: dict[int, Layout] = {}
        self._gemms: dict[Gemm, BoundGemm] = {}

    def of(self, x: Tensor) -> Tensor:
        """Return the channels of ``x [..., K]`` that are multiplied."""
        return x if self._channels is None else x.index_select(-1, self._channels)

    def gemm(self, gemm: Gemm) -> BoundGemm:
        """Return one of the three GEMMs."""
        if gemm not in self._gemms:
            program: GemmProgram = getattr(self.program, gemm)
            draw, state, experts = self._arguments
            layout = None
            if experts is not None:
                if program.granule not in self._layouts:
                    self._layouts[program.granule] = experts.layout(program.granule)
                layout = self._layouts[program.granule]
            schedule = getattr(self.schedule, gemm)
            self._gemms[gemm] = BoundGemm(program, schedule, self._options, draw, state, layout)
        return self._gemms[gemm]

    def forward(self, a: Tensor, b: Tensor, addend: Tensor | None) -> Forward:
        """Return the result of fprop, and the operands that are kept for the backward."""
        fprop, right_step = self.gemm(Gemm.FPROP), self.schedule.fprop.right
        x = self.of(a)
        rotation = fprop.rotated(x, self.of(b), leaves=right_step.turns)
        operands = left, right = fprop.operands(rotation)
        left_terms, kept_left = self._kept(fprop, left, rotation, "left")
        if right_step.in_product:
            y, kept = fprop.product(left_terms, right, packs=Keeps.BYTES in right_step.keeps)
            return Forward(y, kept_left, kept, operands)
        right_terms, kept_right = self._kept(fprop, right, rotation, "right")
        fprop.show(operands, (x, b), (left_terms, right_terms))  # all of b, with which dgrad.weight is compared
        return Forward(fprop.multiply(left_terms, right_terms, addend), kept_left, kept_right, operands)

    def _kept(
        self, fprop: BoundGemm, operand: BoundOperand, rotation: Rotation, side: Side
    ) -> tuple[Terms, Tensor | PackedOperand | None]:
        """Return the terms of an operand of fprop, and the form in which the backward reads it again: dequantized in
        the original layout and basis, as bytes, as bytes of the operand that the backward multiplies, or None."""
        step = fprop.step(side)
        if step.kernel is not None and step.asked is not Asked.VALUES:
            spec, both = operand.program.spec, step.asked is Asked.BOTH
            assert spec is not None
            direction, multiplier, columns, column_multiplier = Direction(spec, operand.draw), None, None, None
            if both:
                along_columns = self._with_draw(Gemm.WGRAD if side == "left" else Gemm.DGRAD, "right")
                along_rows = operand.program, operand.draw
                directions = _directions(operand.x, step.kernel, along_rows, along_columns)
                (direction, multiplier), (columns, column_multiplier) = directions
            job = Job(operand.x, direction, self._dtype, columns=columns, multiplier=column_multiplier, keeps=both)
            values, packed, *_ = step.kernel.run(job)
            return (Term(values.to(self._dtype), multiplier),), packed
        terms = operand.quantized(self._dtype)
        if Keeps.VALUES not in step.keeps:
            return terms, None
        dequantized = operators.rounded(rotation.undo(total(terms), side).to(self._dtype))
        return terms, fprop.taken_back(dequantized) if side == "left" else dequantized

    def _with_draw(self, gemm: Gemm, side: Side) -> tuple[OperandProgram, Draw | None]:
        return self.gemm(gemm).program.side(side), self.gemm(gemm).operand_draw(side)

    def gradients(self, dy: Tensor, sums: bool) -> tuple[Terms | None, Terms | None, Tensor | None]:
        """Return dY quantized for dgrad and dYᵀ for wgrad; Nones unless one kernel quantizes both in one read.

        Args:
            dy: in the dtype of the GEMMs.
            sums: whether to return the sum of dY over its rows too, fp32.
        """
        step = None if self.schedule.dgrad is None else self.schedule.dgrad.left
        if step is None or step.kernel is None or step.asked is not Asked.BOTH:
            return None, None, None
        dgrad, wgrad = self._with_draw(Gemm.DGRAD, "left"), self._with_draw(Gemm.WGRAD, "left")
        (rows, multiplier), (columns, column_multiplier) = _directions(dy, step.kernel, dgrad, wgrad)
        along_rows, _, along_columns, partial = step.kernel.run(Job(dy, rows, columns=columns, sums=sums))
        assert along_columns is not None
        over_rows = None if partial is None else partial.sum(0)
        return (Term(along_rows, multiplier),), (Term(along_columns.mT, column_multiplier),), over_rows

    def product(
        self, which: Gemm, left: Tensor, source: Tensor | PackedOperand, quantized: Terms | None = None
    ) -> Tensor:
        """Return one backward GEMM of ``left`` with the transpose of ``source``, in the GEMM's dtype.

        Args:
            quantized: ``left`` as :meth:`gradients` quantized it, or None.
        """
        gemm = self.gemm(which)
        step = gemm.step("right")
        if step.in_product:
            return gemm.backward_product(left, source)
        if step.asked is Asked.PLACES:
            return gemm.at_places(left, source)
        if isinstance(source, PackedOperand):
            if step.asked is Asked.FROM_BYTES or step.source is Source.READY:
                return gemm.from_bytes(left, source, quantized)
            source = source.unpack()
        operands = gemm.operands(gemm.rotated(left, source.mT))
        terms = quantized or operands[0].quantized(self._dtype), operands[1].quantized(self._dtype)
        gemm.show(operands, (left, source.mT), terms)
        y = gemm.multiply(*terms)
        gemm.observe(*operands)
        return y

    def with_factors(
        self, a: Tensor, b: Tensor, da: Tensor | None, db: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return ``(dA·R ⊙ f'(A·R))·R⁻¹`` and the same for B, where R is the product of fprop's pair transforms."""
        fprop = self.gemm(Gemm.FPROP)
        rotation = fprop.rotated(a, b)
        left, right = fprop.operands(rotation)
        # The gradient with respect to A·R is dA·R⁻ᵀ, which is the transform of the other side.
        if fprop.layout is not None and da is not None:
            da = fprop.layout.lay_out(da)
        da = _with_factor(da, left, rotation, "right")
        da = None if da is None else fprop.taken_back(da)
        return da, _with_factor(db, right, rotation, "left")


def _directions(
    x: Tensor, kernel: Kernel, rows: tuple[OperandProgram, Draw | None], columns: tuple[OperandProgram, Draw | None]
) -> tuple[tuple[Direction, Tensor | None], tuple[Direction, Tensor | None]]:
    """Return the directions along the rows and along the columns of ``x``, each with the multiplier of its term."""
    largest = Once(lambda: operators.largest_of_all(x))  # it does not depend on the blocks, so both directions share it
    return rows[0].direction(x, rows[1], kernel, largest), columns[0].direction(x.mT, columns[1], kernel, largest)


def _with_factor(gradient: Tensor | None, operand: BoundOperand, rotation: Rotation, side: Side) -> Tensor | None:
    if gradient is None:
        return None
    factor = operand.program.gradient_factor(operand.x, operand.draw, operand.state, operand.segments)
    return gradient if factor is None else rotation.undo(rotation.apply(gradient, side) * factor, side)
