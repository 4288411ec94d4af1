"""Decides how a site's product is computed: with :mod:`fp4graph.ops.code` the one place that chooses kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fp4graph.kernels import experts, operators
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.code import Code, Quantizing
from fp4graph.ops.gemm import GemmProgram, MatmulProgram, Side
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.schedule import GemmSchedule, Keeps, Multiply, Schedule, Setting, Step, Way
from fp4graph.technique.operands import Gemm

_WAYS = {Code.KERNEL: Way.KERNEL, Code.WITHIN: Way.WITHIN, Code.GIVEN: Way.GIVEN, Code.TENSOR: Way.TENSOR}


def lower(program: MatmulProgram, setting: Setting) -> Schedule:
    """Return how ``program`` is computed in ``setting``; the same schedule every time."""
    known = program.schedules
    if setting not in known:
        known[setting] = _lowered(program, setting)
    return known[setting]


def _lowered(program: MatmulProgram, setting: Setting) -> Schedule:
    if program.apart is None:
        return _Lowering(program, setting).schedule()
    rest = lower(program.of_rest, replace(setting, part="rest"))
    # Observers see a site's operands once: those of the rest, with the site's techniques.
    return replace(rest, apart=lower(program.apart.program, replace(setting, part="chosen", observed=False)))


def reads_bytes(spec: QuantSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether an operator makes an operand of ``dtype`` from bytes; tensor code reads any others."""
    return operators.packs(spec, dtype, dtype, device)


@dataclass(frozen=True)
class _Lowering:
    program: MatmulProgram
    setting: Setting

    def schedule(self) -> Schedule:
        needs_a, needs_b = self.setting.needs
        fprop = self._fprop()
        kept = fprop.right.keeps
        return Schedule(
            fprop,
            self._backward(self.program.dgrad, kept) if needs_a and self.setting.part != "chosen" else None,
            self._backward(self.program.wgrad, fprop.left.keeps) if needs_b else None,
        )

    # ------------------------------------------------------------------ fprop

    def _fprop(self) -> GemmSchedule:
        fprop, (needs_a, needs_b) = self.program.fprop, self.setting.needs
        left = self._kept(fprop.left, "left", self.program.wgrad, needs_b)
        rereads = needs_a and self.program.dgrad.right.from_fprop
        right, dtype = self._kept(fprop.right, "right", self.program.dgrad, needs_a), self._given(fprop, "right")
        if self.setting.experts and self._outside_product(fprop, dtype, packs=rereads) is None:
            keeps = right.keeps - {Keeps.VALUES, Keeps.BYTES} | ({Keeps.BYTES} if rereads else set())
            right = Step(Way.PRODUCT, "", keeps)
        return GemmSchedule(left, right, self._multiply(fprop), not rereads and self._turns(fprop, dtype))

    def _kept(self, program: OperandProgram, side: Side, reader: GemmProgram, needed: bool) -> Step:
        """Return how an operand of fprop is quantized that ``reader`` reads again where the gradient is ``needed``."""
        fprop = self.program.fprop
        factors = fprop.left.has_gradient_factor or fprop.right.has_gradient_factor
        rereads = needed and reader.right.from_fprop
        original = (needed and not rereads) or factors
        keeps = {Keeps.ORIGINAL} if original else set()
        if rereads:
            refused = self._unpacked(program, side)
            if refused is None:
                return Step(Way.PACKS, "", frozenset(keeps | {Keeps.BYTES}))
            return self._by_program(program, frozenset(keeps | {Keeps.VALUES}), f"no bytes: {refused}")
        if original and not factors and self._unready(program, side, reader) is None:
            return Step(Way.BOTH, "", frozenset({Keeps.READY}))
        return self._by_program(program, frozenset(keeps))

    def _unpacked(self, program: OperandProgram, side: Side) -> str | None:
        """Return why a kernel does not return an operand of fprop as bytes too; None where it does."""
        fprop = self.program.fprop
        if fprop.transforms:
            return f"{fprop.transforms[0].name} transforms the operands"
        if side == "left" and self._moves(fprop):
            return "tokens are laid out anew"
        choice = self._code(program)
        if choice is None or choice[0] is not Code.KERNEL or program.spec is None:
            return "high precision" if choice is None else choice[1]
        return operators.unpacked(program.spec, self._given(fprop, side), self.setting.dtype, self.setting.machine.kind)

    def _unready(self, own: OperandProgram, side: Side, reader: GemmProgram) -> str | None:
        """Return why one read of an operand of fprop does not also make what ``reader`` multiplies of it."""
        other = reader.right
        if self.setting.experts or self.setting.part or self.setting.observed:
            return "others see the operand"
        if self.program.fprop.transforms or reader.transforms:
            return "a technique transforms the operands"
        if own.from_master != other.from_master:
            return "one of the two starts from the master weight"
        if other.spec is None or not isinstance(other.spec.block, int):
            return "no bytes hold it"
        chosen = [*other.at("block_statistic"), *other.at("scale")]
        chosen += [t for t in other.at("group_scale") if t.group_granularity not in ("tensor", "all")]
        if chosen:
            return f"no bytes hold the scales of {chosen[0].name}"
        return self._unread_both(own, other, self._given(self.program.fprop, side))

    def _unread_both(self, rows: OperandProgram, columns: OperandProgram, dtype: torch.dtype) -> str | None:
        """Return why no kernel quantizes a tensor of ``dtype`` both ways in one read; None where one does."""
        if rows.spec is None or columns.spec is None:
            return "high precision"
        if rows.observes or columns.observes:
            return "a technique observes the operand"
        kind = self.setting.machine.kind
        specs = operators.by_runs(rows.spec), operators.by_runs(columns.spec)
        refused = self.setting.machine.lacks(None) or operators.unread_both(*specs, dtype, kind)
        return refused or self._not_in_one_read(rows) or self._not_in_one_read(columns)

    # ------------------------------------------------------------------ backward

    def _backward(self, gemm: GemmProgram, kept: frozenset[Keeps]) -> GemmSchedule:
        """Return how a GEMM of the backward is computed whose right operand was ``kept``."""
        left, multiply = self._gradient(gemm), self._multiply(gemm)
        packed = Keeps.BYTES in kept and not (self.setting.part and gemm.gemm is Gemm.DGRAD)
        if self.setting.experts:
            if gemm.gemm is Gemm.WGRAD and self._unplaced(gemm, packed=packed) is None:
                right = Step(Way.PLACES, "from bytes" if packed else "")
                return GemmSchedule(Step(Way.PLACES), right, multiply, bool(gemm.transforms))
            dtype = self.setting.dtype if packed else self._given(gemm, "right")
            if gemm.gemm is Gemm.DGRAD and self._outside_product(gemm, dtype, packed=packed) is None:
                turns = not packed and self._turns(gemm, dtype)
                return GemmSchedule(left, Step(Way.PRODUCT, "from bytes" if packed else ""), multiply, turns)
        if Keeps.READY in kept:
            return GemmSchedule(left, Step(Way.READY), multiply)
        if not packed:
            return GemmSchedule(left, self._by_program(gemm.right), multiply)
        refused = self._unread_bytes(gemm)
        right = Step(Way.BYTES) if refused is None else self._by_program(gemm.right, why=refused)
        return GemmSchedule(left, right, multiply)

    def _gradient(self, gemm: GemmProgram) -> Step:
        """Return how dY is quantized for a GEMM of the backward."""
        dgrad, wgrad = self.program.dgrad, self.program.wgrad
        both = all(self.setting.needs) and not self.setting.experts and self.setting.part != "chosen"
        plain = not (dgrad.transforms or wgrad.transforms)
        if both and plain and self._unread_both(dgrad.left, wgrad.left, self.setting.dtype) is None:
            return Step(Way.BOTH)
        return self._by_program(gemm.left)

    def _unread_bytes(self, gemm: GemmProgram) -> str | None:
        """Return why no kernel quantizes the right operand of ``gemm`` from bytes without unpacking them."""
        if gemm.transforms:
            return f"bytes are unpacked: {gemm.transforms[0].name} transforms the operands"
        if gemm.right.observes:
            return "bytes are unpacked: a technique observes the operand"
        if self._moves(gemm):
            return "bytes are unpacked: tokens are laid out anew"
        choice = self._code(gemm.right)
        if choice is None:
            return "bytes are unpacked"
        return None if choice[0] is Code.KERNEL else f"bytes are unpacked: {choice[1]}"

    # ------------------------------------------------------------------ experts

    def _outside_product(
        self, gemm: GemmProgram, dtype: torch.dtype, *, packs: bool = False, packed: bool = False
    ) -> str | None:
        """Return why the product of experts does not quantize their weights itself, one expert's at a time.

        Args:
            dtype: of the weights.
            packs: whether it is to return the bytes of the weights too.
            packed: whether the weights are bytes.
        """
        program, setting = gemm.right, self.setting
        if program.spec is None:
            return "high precision"
        if setting.observed or program.observes:
            return "others see the operand"
        if gemm.left.at("split"):
            return f"{gemm.left.at('split')[0].name} splits off a residual, a product of its own"
        kind = setting.machine.kind
        if not (experts.serves(dtype, kind) and experts.serves(setting.dtype, kind)):
            return f"no product of experts quantizes {dtype} on this {kind}"
        if packed or packs:
            if gemm.transforms:
                return f"{gemm.transforms[0].name} transforms the operands"
            if (refused := self._unread(program, dtype)) is not None:
                return refused
            if packed:
                return None
            if dtype is not setting.dtype:
                return "the weights are cast"
            return operators.unpacked(program.spec, dtype, setting.dtype, kind) or self._not_in_one_read(program)
        return self._not_in_one_read(program)

    def _turns(self, gemm: GemmProgram, dtype: torch.dtype) -> bool:
        """Return whether the product of experts rotates the weights itself."""
        if not self.setting.experts or self._outside_product(gemm, dtype) is not None:
            return False
        choice = self._code(gemm.right)
        return choice is not None and choice[0] is Code.KERNEL and self._rotates_within(gemm.rotates, gemm.right)

    @staticmethod
    def _rotates_within(block: int | None, *programs: OperandProgram) -> bool:
        """Return whether a kernel rotates operands by ``block`` before it quantizes their blocks."""
        lengths = [0 if program.spec is None else program.spec.block for program in programs]
        return block is not None and all(isinstance(n, int) and n > 0 and n % block == 0 for n in lengths)

    def _unplaced(self, gemm: GemmProgram, *, packed: bool) -> str | None:
        """Return why no kernel reads the operands of wgrad where the tokens lie; None where one does."""
        if gemm.granule == 1:
            return "tokens stay where they are"
        right = self.setting.dtype if packed else self._given(gemm, "right")
        refused = self._unread(gemm.left, self._given(gemm, "left")) or self._unread(gemm.right, right)
        if refused is not None or not gemm.transforms:
            return refused
        if packed or not self._rotates_within(gemm.rotates, gemm.left, gemm.right):
            return f"{gemm.transforms[0].name} transforms the operands"
        return None

    def _unread(self, program: OperandProgram, dtype: torch.dtype) -> str | None:
        """Return why no kernel of experts quantizes an operand of ``dtype``; None where one does."""
        if self.setting.observed or program.observes:
            return "others see the operand"
        if not experts.serves(dtype, self.setting.machine.kind):
            return f"no kernel of experts reads {dtype} on this {self.setting.machine.kind}"
        choice = self._code(program)
        if choice is None:
            return "high precision"
        return None if choice[0] is Code.KERNEL else choice[1]

    # ------------------------------------------------------------------ operands

    def _multiply(self, gemm: GemmProgram) -> Multiply:
        """Return how the quantized operands are multiplied, where group scales wait for the accumulator."""
        if self.setting.experts:
            return Multiply.EXPERTS
        narrows = self.setting.machine.narrows and self.setting.dtype is torch.float32
        return Multiply.NARROW if narrows and gemm.is_exact() else Multiply.DTYPE

    def _by_program(self, program: OperandProgram, keeps: frozenset[Keeps] = frozenset(), why: str = "") -> Step:
        choice = self._code(program)
        if choice is None:
            return Step(Way.HIGH, "", keeps)
        code, reason = choice
        return Step(_WAYS[code], reason or why, keeps)

    def _code(self, program: OperandProgram) -> tuple[Code, str] | None:
        if program.spec is None:
            return None
        choice = self._quantizing(program).of_whole(self.setting.machine)
        return choice.code, choice.why

    def _not_in_one_read(self, program: OperandProgram) -> str | None:
        return self._quantizing(program).refused_in_one_read(self.setting.machine, stateful=bool(program.state))

    def _quantizing(self, program: OperandProgram) -> Quantizing:
        assert program.spec is not None
        return Quantizing(program.spec, program.techniques, self.setting.drawn, program.shares)

    def _given(self, gemm: GemmProgram, side: Side) -> torch.dtype:
        """Return the dtype from which an operand is quantized that was given or kept as it is.

        Of a factor of the product that is its own where the operand starts from the master weight.
        """
        program = gemm.left if side == "left" else gemm.right
        if not program.from_master or (gemm.gemm is not Gemm.FPROP and side == "left"):
            return self.setting.dtype
        a, b = self.setting.dtypes
        return a if side == "left" or gemm.gemm is Gemm.WGRAD else b

    def _moves(self, gemm: GemmProgram) -> bool:
        """Return whether the operands of ``gemm`` are laid out in another way than they are given."""
        return self.setting.experts and gemm.granule > 1
