"""Runs one GEMM of a site: quantizes its operands as the schedule says, and multiplies them.

The GEMM shows its operands to an observer, and writes the state that the graph keeps. Nothing is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from fp4graph.kernels.direction import Direction, PackedOperand
from fp4graph.kernels.experts import Groups
from fp4graph.kernels.machine import Machine
from fp4graph.kernels.request import Job
from fp4graph.numerics.draw import Draw
from fp4graph.ops.draw import operand_draw
from fp4graph.ops.gemm import GemmProgram, MatmulProgram, Rotation, Side
from fp4graph.ops.grouped import Layout
from fp4graph.ops.observe import BoundOperand, ObservedOperand, OperandObserver
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import Term, Terms, multiply
from fp4graph.ops.schedule import GemmSchedule, Multiply, Setting, Source, Step
from fp4graph.ops.state import OperandState, in_dtype
from fp4graph.technique.operands import Gemm, Operand


@dataclass(frozen=True)
class MatmulOptions:
    """The arguments of a product, without its tensors.

    ``dtype`` is the dtype of the GEMMs. ``training`` allows state to be written. Errors of plugins name ``site``.
    ``observer`` sees the operands of every GEMM.
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
        """Return the setting in which the product of ``a`` and ``b`` is lowered.

        Args:
            key: the site's key; None if nothing draws.
            needs: whether the gradients of ``a`` and ``b`` are needed.
        """
        drawn, observed = key is not None, self.observer is not None
        return Setting(Machine.of(a.device), (a.dtype, b.dtype), self.dtype, needs, drawn, observed, experts)


@dataclass(frozen=True, eq=False)
class BoundGemm:
    """One GEMM of a site with the arguments of one forward or backward.

    Attributes:
        schedule: the GEMM's schedule; None if the GEMM is not computed.
        draw: the site's source of random bits.
        state: the site's state, in the order of the program's slots.
        layout: the places of tokens in the operands of a grouped product; else None.
    """

    program: GemmProgram
    schedule: GemmSchedule | None
    options: MatmulOptions
    draw: Draw | None
    state: tuple[Tensor | None, ...]
    layout: Layout | None

    def step(self, side: Side) -> Step:
        """Return the schedule's step of an operand."""
        assert self.schedule is not None
        return self.schedule.left if side == "left" else self.schedule.right

    def operand_draw(self, side: Side) -> Draw | None:
        """Return an operand's source of random bits."""
        return operand_draw(self.draw, self.program.operands[side == "right"])

    def rotated(self, left: Tensor, right: Tensor, *, leaves: bool = False) -> Rotation:
        """Return the operands in the dtypes that they are quantized from, and in the GEMM's layout and basis.

        Args:
            leaves: whether to leave the rotation of the right operand to a kernel.
        """
        left, right = self._cast(left, self.program.left), self._cast(right, self.program.right)
        segments = None
        if self.layout is not None:
            segments = self.layout.segments(self.program.gemm, "left")
            if self.program.gemm is Gemm.WGRAD:
                left, right = self.layout.lay_out(left.mT).mT, self.layout.lay_out(right.mT).mT
            else:
                left = self.layout.lay_out(left)
        return self.program.rotate(left, right, self.operand_draw("left"), segments, leaves=leaves)

    def operands(self, rotation: Rotation) -> tuple[BoundOperand, BoundOperand]:
        """Return both operands."""
        return self.operand(rotation, "left"), self.operand(rotation, "right")

    def operand(self, rotation: Rotation, side: Side) -> BoundOperand:
        """Return one operand."""
        operand, program = self.program.operands[side == "right"], self.program.side(side)
        x, turn = (rotation.left, None) if side == "left" else (rotation.right, rotation.turn)
        segments = None if self.layout is None else self.layout.segments(self.program.gemm, side)
        state, code = self._state_of(operand, rotation), self.step(side).code
        return BoundOperand(operand, program, x, self.operand_draw(side), state, segments, turn, code)

    def multiply(self, left: Terms, right: Terms, addend: Tensor | None = None) -> Tensor:
        """Return ``left @ rightᵀ`` of the quantized operands, in the original layout; for fprop with the alpha, the
        beta and the addend of the product."""
        assert self.schedule is not None
        gemm = self.program.gemm
        if self.layout is not None:
            period = lcm(*(transform.period for transform in self.program.transforms)) if gemm is Gemm.WGRAD else 1
            return self.taken_back(self.layout.multiply(left, right, period))
        narrows = self.schedule.multiply is Multiply.NARROW and self.program.is_exact(left, right)
        if gemm is not Gemm.FPROP:
            return multiply(left, right, narrows=narrows)
        return multiply(left, right, addend, self.options.alpha, self.options.beta, narrows=narrows)

    def product(
        self, left: Terms, right: BoundOperand | PackedOperand, *, packs: bool = False
    ) -> tuple[Tensor, PackedOperand | None]:
        """Return a grouped product, in the original layout, whose kernel quantizes the weights; if ``packs`` also the
        bytes of the weights.

        Args:
            right: the weights, not quantized yet, or the bytes of their transpose.
        """
        (term,), kernel = left, self.step("right").kernel
        assert self.layout is not None
        assert kernel is not None
        x: Tensor | PackedOperand
        if isinstance(right, PackedOperand):
            x, direction, multiplier = right, self._plain("right"), None
        else:
            x = right.x
            direction, multiplier = right.program.direction(x, right.draw, kernel, segments=right.segments)
            direction = direction.rotated(right.turn)
        groups = Groups(*self.layout.tokens, self.layout.scale(term.multiplier, multiplier))
        y, packed, *_ = kernel.run(Job(x, direction, self.options.dtype, keeps=packs, left=term.values, groups=groups))
        return self.taken_back(y), packed

    def backward_product(self, left: Tensor, source: Tensor | PackedOperand) -> Tensor:
        """Return ``left`` times the transpose of ``source``, which the kernel quantizes within the product."""
        right: BoundOperand | PackedOperand
        if isinstance(source, PackedOperand):
            assert self.layout is not None
            laid_out = self.layout.lay_out(self._cast(left, self.program.left))
            gradient, right = self.operand(Rotation(laid_out, laid_out), "left"), source
        else:
            gradient, right = self.operands(self.rotated(left, source.mT, leaves=self.step("right").turns))
        y, _ = self.product(gradient.quantized(self.options.dtype), right)
        self.observe(gradient)
        return y

    def at_places(self, left: Tensor, source: Tensor | PackedOperand) -> Tensor:
        """Return ``left`` times the transpose of ``source``, where kernels read both from the places of the tokens."""
        assert self.layout is not None
        places = self.layout.source
        tokens = source if isinstance(source, PackedOperand) else self._cast(source, self.program.right)
        rows, turn = self._cast(left, self.program.left).mT, None
        if self.step("right").turns and isinstance(tokens, Tensor):
            segments = self.layout.segments(Gemm.WGRAD, "left")
            operands = self.layout.lay_out(rows).mT, self.layout.lay_out(tokens).mT
            turn = self.program.turn(*operands, self.operand_draw("left"), segments)

        def quantized(side: Side, x: Tensor | PackedOperand) -> Terms:
            kernel, direction = self.step(side).kernel, self._plain(side).rotated(turn)
            assert kernel is not None
            return (Term(kernel.run(Job(x, direction, self.options.dtype, places=places)).values),)

        return self.multiply(quantized("left", rows), quantized("right", tokens))

    def from_bytes(self, left: Tensor, source: PackedOperand, quantized: Terms | None) -> Tensor:
        """Return ``left`` times the transpose of ``source``, unpacked if its bytes are ready, else quantized again."""
        step, left = self.step("right"), self._cast(left, self.program.left)
        gradient = self.operand(Rotation(left, left), "left")
        if step.source is Source.READY:
            term = Term(source.unpack(), source.multiplier)
        else:
            assert step.kernel is not None
            job = Job(source, self._plain("right"), self.options.dtype)
            term = Term(step.kernel.run(job).values.to(self.options.dtype))
        terms = quantized or gradient.quantized(self.options.dtype), (term,)
        if self.options.observer is not None:
            x = source.unpack().mT
            self.show(self.operands(Rotation(left, x)), (left, x), terms)
        self.observe(gradient)
        return self.multiply(*terms)

    def show(
        self, operands: tuple[BoundOperand, BoundOperand], given: tuple[Tensor, Tensor], terms: tuple[Terms, Terms]
    ) -> None:
        """Show both operands to the observer."""
        if self.options.observer is not None:
            shown = zip(operands, given, terms, strict=True)
            left, right = (ObservedOperand(**vars(operand), given=x, terms=each) for operand, x, each in shown)
            self.options.observer(left, right)

    def observe(self, *operands: BoundOperand) -> None:
        """Write the state that the graph keeps, after everything else has read it."""
        for operand in operands:
            if operand.program.observes and self.options.training:
                values = operand.program.observe(operand.x, operand.draw, operand.state, operand.segments)
                for slot, entry in zip(self.options.program.state, self.state, strict=True):
                    if entry is not None and slot.written and slot.entry.operand is operand.operand:
                        # Checkpointed regions have the state as an input, and would refuse it after a write in the
                        # backward. autograd counts no write to ``data``; no region reads state that a backward writes.
                        target = entry if operand.operand.gemm is Gemm.FPROP else entry.data
                        target.copy_(values[slot.technique, slot.entry.name])

    def taken_back(self, x: Tensor) -> Tensor:
        """Return the rows ``x`` of the GEMM's layout in the original order of the tokens."""
        return x if self.layout is None or self.program.gemm is Gemm.WGRAD else self.layout.take_back(x)

    def _plain(self, side: Side) -> Direction:
        """Return the direction in which a kernel quantizes an operand by the spec alone."""
        spec = self.program.side(side).spec
        assert spec is not None
        return Direction(spec, self.operand_draw(side))

    def _cast(self, x: Tensor, program: OperandProgram) -> Tensor:
        return x if program.from_master else x.to(self.options.dtype)

    def _state_of(self, operand: Operand, rotation: Rotation) -> OperandState:
        """Return an operand's state; entries of the weight's shape are transposed and transformed like the operand."""
        result: dict[str, dict[str, Tensor]] = {}
        for slot, tensor in zip(self.options.program.state, self.state, strict=True):
            if slot.entry.operand is operand and tensor is not None:
                if slot.entry.weight_like:
                    tensor = tensor.mT if operand is Operand.DGRAD_WEIGHT else tensor
                    tensor = rotation.apply(tensor, "right")
                if slot.shared:
                    tensor = in_dtype(tensor, rotation.right.dtype)
                result.setdefault(slot.technique, {})[slot.entry.name] = tensor
        return result
