"""The programs of a site's three GEMMs, each with its pair transforms and its two quantizers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import Literal

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp4graph.numerics.blocking import Blocking, block_length
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.hadamard import BlockRotation
from fp4graph.numerics.segments import Segments
from fp4graph.ops import contract
from fp4graph.ops.draw import part_draw
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import Terms
from fp4graph.ops.schedule import Schedule, Setting
from fp4graph.ops.state import StateSlot
from fp4graph.technique import PairTransform
from fp4graph.technique.operands import Gemm, Operand

Side = Literal["left", "right"]


@dataclass(frozen=True)
class GemmProgram:
    """One GEMM ``left [..., I, K] @ right [..., J, K]ᵀ``: pair transforms, then each operand's quantizer.

    The transforms act on both operands in order, and cancel in the product.
    """

    gemm: Gemm
    left: OperandProgram
    right: OperandProgram
    transforms: tuple[PairTransform, ...] = ()

    def __post_init__(self) -> None:
        _ = self.rotates  # raises an error of the technique here, before anything runs

    def side(self, side: Side) -> OperandProgram:
        """Return the program of an operand."""
        return self.left if side == "left" else self.right

    @property
    def draws(self) -> bool:
        """True if calling the program needs a source of random bits."""
        return self.left.draws or self.right.draws or any(t.draws for t in self.transforms)

    @property
    def operands(self) -> tuple[Operand, Operand]:
        """The left and the right operand."""
        return self.gemm.operands

    @property
    def granule(self) -> int:
        """The number of tokens that are quantized together: the tokens of each expert begin at a multiple of it."""
        if self.gemm is not Gemm.WGRAD:
            block = None if self.left.spec is None else self.left.spec.block
            return block[0] if isinstance(block, tuple) else 1
        lengths = [transform.period for transform in self.transforms]
        for program in (self.left, self.right):
            if program.spec is not None:
                lengths += [block_length(program.spec.block), *(part.period for part in program.parts)]
        return lcm(*lengths)

    def is_exact(self, left: Terms | None = None, right: Terms | None = None) -> bool:
        """Return whether the quantized operands are bf16 numbers by construction, and so their products exact in fp32.

        Args:
            left, right: the operands; None assumes that group scales wait for the accumulator.
        """
        sides = ((self.left, left), (self.right, right))
        return all(
            program.is_exact_in_bfloat16(None if terms is None else terms[0].multiplier is not None)
            for program, terms in sides
        )

    @cached_property
    def rotates(self) -> int | None:
        """The block length if the transforms are one block rotation, which kernels can do; else None."""
        if len(self.transforms) != 1:
            return None
        block: object = self.transforms[0].block_rotation
        if block is None or (isinstance(block, int) and block > 1 and not block & (block - 1)):
            return block
        raise contract.broken(self.transforms[0], "block_rotation", f"is {block!r}, not a power of two above 1")

    def rotate(
        self,
        left: Tensor,
        right: Tensor,
        draw: Draw | None,
        segments: Segments | None = None,
        *,
        leaves: bool = False,
    ) -> Rotation:
        """Return both operands in the transforms' basis.

        Args:
            draw: the left operand's source of random bits, which the transforms share.
            segments: the left operand's segments, in a grouped product.
            leaves: whether to leave the right operand to a kernel, which then applies the ``turn`` of the result.
        """
        steps: list[PairStep] = []
        for transform in self.transforms:
            step = self._step(transform, left, right, draw, segments)
            steps.append(step)
            turn = step.turn() if leaves else None
            left = step.apply(left, "left")
            if turn is not None:
                return Rotation(left, right, (step,), turn)
            right = step.apply(right, "right")
            if statically_known_true(left.shape[-1] != right.shape[-1]):
                lengths = f"{left.shape[-1]} and {right.shape[-1]}"
                raise contract.broken(transform, "transform", f"gave the operands contraction axes of {lengths}")
        return Rotation(left, right, tuple(steps))

    def turn(self, left: Tensor, right: Tensor, draw: Draw | None, segments: Segments | None) -> BlockRotation:
        """Return the block rotation that :meth:`rotate` applies to both operands; :attr:`rotates` must not be None."""
        return self._step(self.transforms[0], left, right, draw, segments).turn()

    def _step(
        self,
        transform: PairTransform,
        left: Tensor,
        right: Tensor,
        draw: Draw | None,
        segments: Segments | None,
    ) -> PairStep:
        blocking = Blocking(tuple(left.shape), "tensor", segments=segments)
        context = contract.context(transform, part_draw(draw, transform.key), blocking, left.device, gemm=self.gemm)
        shared = contract.run(transform, "pair_context", left, right, context)
        shared = () if shared is None else shared
        if not (isinstance(shared, tuple) and all(isinstance(tensor, Tensor) for tensor in shared)):
            raise contract.broken(transform, "pair_context", "must return a tuple of tensors, or None")
        return PairStep(transform, shared, left.shape[-1])


@dataclass(frozen=True, eq=False)
class PairStep:
    """One pair transform with its shared tensors, and the length of the contraction axis before the transform."""

    transform: PairTransform
    shared: tuple[Tensor, ...]
    length: int | torch.SymInt

    def turn(self) -> BlockRotation:
        """Return the step as the block rotation that the transform declares."""
        block = self.transform.block_rotation
        assert block is not None
        if [tuple(tensor.shape) for tensor in self.shared] not in ([], [(block,)]):
            rule = f"must return signs [{block}] alone, or nothing, beside block_rotation {block}"
            raise contract.broken(self.transform, "pair_context", rule)
        return BlockRotation(block, self.shared[0].to(torch.float32) if self.shared else None)

    def apply(self, x: Tensor, side: Side) -> Tensor:
        """Return ``x`` in the transform's basis."""
        transformed = contract.run(self.transform, "transform", x, side, self.shared)
        return contract.along_last(self.transform, "transform", transformed, x)

    def undo(self, x: Tensor, side: Side) -> Tensor:
        """Return ``x`` in the basis and length before the transform."""
        back = contract.run(self.transform, "inverse", x, side, self.shared)
        x = contract.along_last(self.transform, "inverse", back, x)
        if statically_known_true(x.shape[-1] < self.length):
            message = f"returned a last axis of {x.shape[-1]} where {self.length} is due"
            raise contract.broken(self.transform, "inverse", message)
        return x[..., : self.length]


@dataclass(frozen=True, eq=False)
class Rotation:
    """The operands of one GEMM after its pair transforms: contraction axis last, perhaps zero-padded by them.

    Attributes:
        turn: the rotation of ``right`` that is left to a kernel; None if ``right`` is transformed already.
    """

    left: Tensor
    right: Tensor
    steps: tuple[PairStep, ...] = ()
    turn: BlockRotation | None = None

    def apply(self, x: Tensor, side: Side) -> Tensor:
        """Return ``x``, another tensor of the shape of that side, in the transforms' basis."""
        for step in self.steps:
            x = step.apply(x, side)
        return x

    def undo(self, x: Tensor, side: Side) -> Tensor:
        """Return ``x`` in the original basis and length."""
        for step in reversed(self.steps):
            x = step.undo(x, side)
        return x


@dataclass(frozen=True)
class Apart:
    """The program of input channels that are multiplied apart (:class:`~fp4graph.technique.Partition`).

    Attributes:
        score: the index, in a program's state, of the channels' scores, fp32 ``[K]``.
        count: the number of chosen channels, which have the largest scores.
        program: the program of the chosen channels. Its dgrad never runs, because the site's dgrad serves all channels.
    """

    score: int
    count: int
    program: MatmulProgram


@dataclass(frozen=True)
class MatmulProgram:
    """The three GEMM programs of one kind of site. Equal programs share compiled code.

    Attributes:
        fprop: left A, right B.
        dgrad: left dY, right Bᵀ.
        wgrad: left dYᵀ, right Aᵀ.
        state: the slots of all operands, in the order in which a call takes the state.
        apart: the program of the input channels that are multiplied apart, or None. With it, fprop and wgrad are the
            programs of the other channels.
    """

    fprop: GemmProgram
    dgrad: GemmProgram
    wgrad: GemmProgram
    state: tuple[StateSlot, ...] = ()
    apart: Apart | None = None

    @cached_property
    def of_rest(self) -> MatmulProgram:
        """The program of the channels that are not :attr:`apart`."""
        return replace(self, apart=None, state=())

    @cached_property
    def schedules(self) -> dict[Setting, Schedule]:
        """The schedules that :func:`fp4graph.ops.lower.lower` has made, by setting."""
        return {}

    @property
    def draws(self) -> bool:
        """True if any of the GEMMs needs a source of random bits."""
        any_draws = any(gemm.draws for gemm in (self.fprop, self.dgrad, self.wgrad))
        return any_draws or (self.apart is not None and self.apart.program.draws)

    def operand(self, operand: Operand) -> OperandProgram:
        """Return the program of one of the six operands."""
        gemm: GemmProgram = getattr(self, operand.gemm)
        return gemm.left if operand is gemm.operands[0] else gemm.right
