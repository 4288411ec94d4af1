"""A site's program in one forward or backward: with its source of random bits and its state.

It quantizes the operands of each GEMM, multiplies them, shows them to an observer, and writes the state that the graph
keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from fp4graph.kernels import operators
from fp4graph.kernels.direction import PackedOperand
from fp4graph.numerics.draw import Draw
from fp4graph.ops.by_expert import ByExpert
from fp4graph.ops.code import Machine
from fp4graph.ops.directions import BothDirections
from fp4graph.ops.draw import operand_draw
from fp4graph.ops.gemm import GemmProgram, MatmulProgram, Rotation, Side
from fp4graph.ops.grouped import Experts, Layout
from fp4graph.ops.observe import BoundOperand, ObservedOperand, OperandObserver
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import Term, Terms, multiply, total
from fp4graph.ops.schedule import GemmSchedule, Keeps, Multiply, Schedule, Setting, Way
from fp4graph.ops.state import OperandState
from fp4graph.technique.operands import Gemm, Operand


@dataclass(frozen=True)
class MatmulOptions:
    """The arguments of a product that are no tensors.

    ``dtype`` is that of the GEMMs, ``training`` allows state to be written, ``site`` is for the errors of plugins, and
    ``observer`` is shown the operands of every GEMM.
    """

    program: MatmulProgram
    dtype: torch.dtype
    training: bool
    site: str | None
    alpha: float = 1
    beta: float = 1
    observer: OperandObserver | None = None

    def setting(
        self,
        a: Tensor,
        b: Tensor,
        key: Tensor | None,
        needs: tuple[bool, bool],
        *,
        experts: bool = False,
    ) -> Setting:
        """Return what the code of a product of ``a`` and ``b`` depends on beside the program.

        Args:
            key: None where there are no random bits.
            needs: whether the gradients of ``a`` and ``b`` are needed.
        """
        about = Machine.of(a.device), (a.dtype, b.dtype), self.dtype, needs
        return Setting(*about, key is not None, self.observer is not None, experts)


class BoundMatmul:
    """A matmul program with what one forward or backward calls it with, run as its schedule says.

    Args:
        experts: the tokens of each expert, of a grouped product.
    """

    def __init__(
        self,
        options: MatmulOptions,
        schedule: Schedule,
        draw: Draw | None,
        state: tuple[Tensor | None, ...],
        experts: Experts | None = None,
    ) -> None:
        self._options, self._dtype, self._draw, self._experts = options, options.dtype, draw, experts
        self._schedule = schedule
        self._layouts: dict[int, Layout] = {}
        self._slots = tuple(zip(options.program.state, state, strict=True))

    def rotated(self, gemm: GemmProgram, left: Tensor, right: Tensor, *, leaves: bool = False) -> Rotation:
        """Return the operands in the dtype they are quantized from and in the GEMM's layout and basis.

        Args:
            leaves: leave it to :meth:`quantized_product` to rotate the right operand.
        """
        left, right = self._cast(left, gemm.left), self._cast(right, gemm.right)
        segments = None
        if (layout := self._layout(gemm)) is not None:
            segments = layout.segments(gemm.gemm, "left")
            if gemm.gemm is Gemm.WGRAD:
                left, right = layout.lay_out(left.mT).mT, layout.lay_out(right.mT).mT
            else:
                left = layout.lay_out(left)
        return gemm.rotate(left, right, operand_draw(self._draw, gemm.operands[0]), segments, leaves=leaves)

    def operands(self, gemm: GemmProgram, rotation: Rotation) -> tuple[BoundOperand, BoundOperand]:
        """Return both operands of ``gemm``."""
        return self._operand(gemm, rotation, "left"), self._operand(gemm, rotation, "right")

    def kept_terms(
        self, operand: BoundOperand, rotation: Rotation, side: Side
    ) -> tuple[Terms, Tensor | PackedOperand | None]:
        """Return an operand of fprop quantized, and what the backward rereads of it: the dequantized operand in the
        original layout and basis, the bytes that stand for it, those of what the backward multiplies, or None."""
        fprop = self._options.program.fprop
        step = self._schedule.fprop.left if side == "left" else self._schedule.fprop.right
        if step.way is Way.PACKS:
            spec = operand.program.spec
            assert spec is not None
            values, packed = operators.quantize_and_pack(operand.x, spec, operand.draw, self._dtype)
            return (Term(values.to(self._dtype)),), packed
        if step.way is Way.BOTH and (terms_and_bytes := self._both().kept(operand, side)) is not None:
            return terms_and_bytes
        terms = operand.quantized(self._dtype)
        if Keeps.VALUES not in step.keeps:
            return terms, None
        dequantized = rotation.undo(total(terms), side).to(self._dtype)
        return terms, self._taken_back(fprop, dequantized) if side == "left" else dequantized

    def _both(self) -> BothDirections:
        """Return what quantizes a tensor both ways in one read."""
        return BothDirections(self._options.program, self._dtype, self._draw)

    def multiply(self, gemm: GemmProgram, left: Terms, right: Terms, addend: Tensor | None = None) -> Tensor:
        """Return ``left @ rightᵀ`` of a GEMM's quantized operands, in the original layout; for fprop with the product's
        alpha and its addend."""
        if (layout := self._layout(gemm)) is not None:
            period = lcm(*(transform.period for transform in gemm.transforms)) if gemm.gemm is Gemm.WGRAD else 1
            return self._taken_back(gemm, layout.multiply(left, right, period))
        narrows = self._of(gemm).multiply is Multiply.NARROW and gemm.is_exact(left, right)
        if gemm.gemm is not Gemm.FPROP:
            return multiply(left, right, narrows=narrows)
        return multiply(left, right, addend, self._options.alpha, self._options.beta, narrows=narrows)

    def gradients(self, dy: Tensor, sums: bool) -> tuple[Terms | None, Terms | None, Tensor | None]:
        """Return dY quantized for dgrad and its transpose for wgrad where one kernel makes both in one read, or Nones.

        Args:
            dy: in the dtype of the GEMMs.
            sums: whether the sum of dY over its rows is returned too, fp32.
        """
        dgrad = self._schedule.dgrad
        if dgrad is None or dgrad.left.way is not Way.BOTH:
            return None, None, None
        return self._both().gradients(dy, sums)

    def product(
        self, gemm: GemmProgram, left: Tensor, source: Tensor | PackedOperand, quantized: Terms | None = None
    ) -> Tensor:
        """Return one backward GEMM of ``left`` with the transpose of ``source``, in the GEMM's dtype.

        Args:
            quantized: what :meth:`gradients` made of ``left``, or None.
        """
        own = self._of(gemm)
        way = own.right.way
        if way is Way.PRODUCT:
            return self._product_of_experts(gemm, left, source, turns=own.turns)
        if way is Way.PLACES:
            tokens = source if isinstance(source, PackedOperand) else self._cast(source, gemm.right)
            rows = self._cast(left, gemm.left).mT
            return self.multiply(gemm, *self._by_expert(gemm).laid_out(rows, tokens, turns=own.turns))
        if isinstance(source, PackedOperand):
            if way in (Way.READY, Way.BYTES):
                return self._product_from_bytes(gemm, self._cast(left, gemm.left), source, quantized)
            source = source.unpack()
        operands = self.operands(gemm, self.rotated(gemm, left, source.mT))
        terms = quantized or operands[0].quantized(self._dtype), operands[1].quantized(self._dtype)
        self.show(operands, (left, source.mT), terms)
        y = self.multiply(gemm, *terms)
        self.observe(*operands)
        return y

    def _of(self, gemm: GemmProgram) -> GemmSchedule:
        """Return the schedule of one GEMM, which is needed."""
        own: GemmSchedule | None = getattr(self._schedule, gemm.gemm)
        assert own is not None
        return own

    def _by_expert(self, gemm: GemmProgram) -> ByExpert:
        """Return the operators for the experts of ``gemm``, a grouped product."""
        layout = self._layout(gemm)
        assert layout is not None
        return ByExpert(gemm, layout, self._dtype, self._draw)

    def quantized_product(
        self, gemm: GemmProgram, left: Terms, right: BoundOperand, *, packs: bool = False
    ) -> tuple[Tensor, PackedOperand | None]:
        """Return a product of experts whose weights an operator quantizes, in the original layout, and if ``packs`` the
        bytes of the weights."""
        y, packed = self._by_expert(gemm).product(left, right, packs=packs)
        return self._taken_back(gemm, y), packed

    def _product_of_experts(
        self, gemm: GemmProgram, left: Tensor, source: Tensor | PackedOperand, *, turns: bool
    ) -> Tensor:
        """Return :meth:`product` of experts whose weights an operator quantizes, one expert's after another's."""
        by_expert = self._by_expert(gemm)
        right: BoundOperand | PackedOperand
        if isinstance(source, PackedOperand):
            laid_out = by_expert.layout.lay_out(self._cast(left, gemm.left))
            own, right = self._operand(gemm, Rotation(laid_out, laid_out), "left"), source
        else:
            own, right = self.operands(gemm, self.rotated(gemm, left, source.mT, leaves=turns))
        y, _ = by_expert.product(own.quantized(self._dtype), right)
        self.observe(own)
        return self._taken_back(gemm, y)

    def _product_from_bytes(
        self, gemm: GemmProgram, left: Tensor, source: PackedOperand, quantized: Terms | None
    ) -> Tensor:
        """Return :meth:`product` with its right operand as the bytes hold it, or quantized again without being
        unpacked."""
        own = self._operand(gemm, Rotation(left, left), "left")
        if source.transposed:
            term = Term(source.unpack(), source.multiplier)
        else:
            assert gemm.right.spec is not None
            draw = operand_draw(self._draw, gemm.operands[1])
            term = Term(source.requantized(gemm.right.spec, draw).to(self._dtype))
        terms = quantized or own.quantized(self._dtype), (term,)
        if self._options.observer is not None:
            x = source.unpack().mT
            self.show(self.operands(gemm, Rotation(left, x)), (left, x), terms)
        self.observe(own)
        return self.multiply(gemm, *terms)

    def show(
        self, operands: tuple[BoundOperand, BoundOperand], given: tuple[Tensor, Tensor], terms: tuple[Terms, Terms]
    ) -> None:
        """Let the observer see what one GEMM multiplies."""
        if self._options.observer is not None:
            shown = zip(operands, given, terms, strict=True)
            left, right = (ObservedOperand(**vars(own), given=x, terms=product) for own, x, product in shown)
            self._options.observer(left, right)

    def observe(self, *operands: BoundOperand) -> None:
        """Write the state that the graph keeps, after everything else has read it."""
        for own in operands:
            if own.program.observes and self._options.training:
                values = own.program.observe(own.x, own.draw, own.state, own.segments)
                for slot, entry in self._slots:
                    if entry is not None and slot.written and slot.entry.operand is own.operand:
                        entry.copy_(values[slot.technique, slot.entry.name])

    def with_factors(
        self, a: Tensor, b: Tensor, da: Tensor | None, db: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return ``(dA·R ⊙ f'(A·R))·R⁻¹`` and the same for B, R being fprop's pair transforms."""
        fprop = self._options.program.fprop
        rotation = self.rotated(fprop, a, b)
        left, right = self.operands(fprop, rotation)
        # The gradient with respect to A·R is dA·R⁻ᵀ: a transform of the other side.
        if (layout := self._layout(fprop)) is not None and da is not None:
            da = layout.lay_out(da)
        da = _with_factor(da, left, rotation, "right")
        da = None if da is None else self._taken_back(fprop, da)
        return da, _with_factor(db, right, rotation, "left")

    def _cast(self, x: Tensor, program: OperandProgram) -> Tensor:
        return x if program.from_master else x.to(self._dtype)

    def _operand(self, gemm: GemmProgram, rotation: Rotation, side: Side) -> BoundOperand:
        left, right = gemm.operands
        operand = left if side == "left" else right
        program, x = (gemm.left, rotation.left) if side == "left" else (gemm.right, rotation.right)
        layout = self._layout(gemm)
        segments = None if layout is None else layout.segments(gemm.gemm, side)
        own_draw, state = operand_draw(self._draw, operand), self._state(operand, rotation)
        turn = None if side == "left" else rotation.turn
        return BoundOperand(operand, program, x, own_draw, state, segments, turn)

    def _layout(self, gemm: GemmProgram) -> Layout | None:
        """Return the places of tokens in the operands of ``gemm``; None for a product without experts."""
        if self._experts is None:
            return None
        if gemm.granule not in self._layouts:
            self._layouts[gemm.granule] = self._experts.layout(gemm.granule)
        return self._layouts[gemm.granule]

    def _taken_back(self, gemm: GemmProgram, x: Tensor) -> Tensor:
        """Return rows of the layout of ``gemm`` as the tokens are given."""
        layout = None if gemm.gemm is Gemm.WGRAD else self._layout(gemm)
        return x if layout is None else layout.take_back(x)

    def _state(self, operand: Operand, rotation: Rotation) -> OperandState:
        """Return an operand's entries, those of the weight's shape laid out as the operand is."""
        result: dict[str, dict[str, Tensor]] = {}
        for slot, tensor in self._slots:
            if slot.entry.operand is operand and tensor is not None:
                if slot.entry.weight_like:
                    tensor = tensor.mT if operand is Operand.DGRAD_WEIGHT else tensor
                    tensor = rotation.apply(tensor, "right")
                result.setdefault(slot.technique, {})[slot.entry.name] = tensor
        return result


def _with_factor(gradient: Tensor | None, own: BoundOperand, rotation: Rotation, side: Side) -> Tensor | None:
    if gradient is None:
        return None
    factor = own.program.gradient_factor(own.x, own.draw, own.state, own.segments)
    return gradient if factor is None else rotation.undo(rotation.apply(gradient, side) * factor, side)
