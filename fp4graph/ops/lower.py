"""Lowers programs to schedules: asks the list of kernels for each operand, and decides what the forward keeps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fp4graph.kernels.request import Asked, Kernel, Layout, Request
from fp4graph.kernels.rows import TENSOR_CODE, chosen
from fp4graph.ops.gemm import GemmProgram, MatmulProgram, Side
from fp4graph.ops.schedule import GemmSchedule, Keeps, Multiply, Schedule, Setting, Source, Step
from fp4graph.technique.operands import Gemm

_FROM_BYTES = "from bytes"
_REUSES = "it is the dequantized operand of fprop"


def lower(program: MatmulProgram, setting: Setting) -> Schedule:
    """Return the schedule of ``program`` in ``setting``; equal arguments give the same object."""
    known = program.schedules
    if setting not in known:
        known[setting] = _lowered(program, setting)
    return known[setting]


def _lowered(program: MatmulProgram, setting: Setting) -> Schedule:
    if program.apart is None:
        return _Lowering(program, setting).schedule()
    rest = lower(program.of_rest, replace(setting, part="rest"))
    # An observer sees each operand of a site once: in the product of the other channels, with the site's techniques.
    return replace(rest, apart=lower(program.apart.program, replace(setting, part="chosen", observed=False)))


@dataclass(frozen=True)
class _Lowering:
    program: MatmulProgram
    setting: Setting

    def schedule(self) -> Schedule:
        needs_a, needs_b = self.setting.needs
        fprop = self._fprop()
        dgrad = needs_a and self.setting.part != "chosen"
        return Schedule(
            fprop,
            self._backward(self.program.dgrad, fprop.right.keeps) if dgrad else None,
            self._backward(self.program.wgrad, fprop.left.keeps) if needs_b else None,
        )

    # ------------------------------------------------------------------ fprop

    def _fprop(self) -> GemmSchedule:
        fprop, (needs_a, needs_b) = self.program.fprop, self.setting.needs
        left = self._fprop_step("left", self.program.wgrad, needed=needs_b)
        right = self._fprop_step("right", self.program.dgrad, needed=needs_a)
        if self.setting.experts:
            rereads = needs_a and self.program.dgrad.right.from_fprop
            asked = Asked.BYTES if rereads else Asked.VALUES
            if (kernel := self._product(fprop, asked)) is not None:
                keeps = right.keeps - {Keeps.VALUES, Keeps.BYTES} | ({Keeps.BYTES} if rereads else set())
                right = Step(kernel, asked, keeps=keeps)
        return GemmSchedule(left, right, self._multiply(fprop))

    def _fprop_step(self, side: Side, reader: GemmProgram, *, needed: bool) -> Step:
        """Return the step of an operand of fprop that ``reader``, a GEMM of the backward, reads again if ``needed``."""
        fprop = self.program.fprop
        program = fprop.side(side)
        factors = fprop.left.has_gradient_factor or fprop.right.has_gradient_factor
        rereads = needed and reader.right.from_fprop
        original = (needed and not rereads) or factors
        keeps = {Keeps.ORIGINAL} if original else set()
        if rereads:
            moved = Layout.MOVED if side == "left" and self._moves(fprop) else Layout.DENSE
            kernel, refused = self._kernel(Asked.BYTES, fprop, side, layout=moved)
            if kernel is not None:
                return self._values(fprop, side, frozenset(keeps | {Keeps.BYTES})).by_kernel(kernel, Asked.BYTES)
            return self._values(fprop, side, frozenset(keeps | {Keeps.VALUES}), why=f"no bytes: {refused}")
        if original and not factors and program.from_master == reader.right.from_master:
            seen = self.setting.experts or self.setting.observed or self.setting.part is not None
            kernel = self._both_directions(fprop, side, reader, "right", seen=seen, keeps=True)
            if kernel is not None:
                return self._values(fprop, side, frozenset({Keeps.READY})).by_kernel(kernel, Asked.BOTH)
        return self._values(fprop, side, frozenset(keeps))

    # ------------------------------------------------------------------ backward

    def _backward(self, gemm: GemmProgram, kept: frozenset[Keeps]) -> GemmSchedule:
        """Return the schedule of a GEMM of the backward, whose right operand the forward keeps as ``kept``."""
        left, multiply = self._gradient(gemm), self._multiply(gemm)
        packed = Keeps.BYTES in kept and not (self.setting.part and gemm.gemm is Gemm.DGRAD)
        source, why = (Source.BYTES, _FROM_BYTES) if packed else (Source.TENSOR, "")
        if self.setting.experts and gemm.gemm is Gemm.WGRAD:
            if (kernels := self._places(gemm, packed=packed)) is not None:
                left_step, right_step = (Step(kernel, Asked.PLACES) for kernel in kernels)
                return GemmSchedule(left_step, replace(right_step, source=source, why=why), multiply)
        elif self.setting.experts:
            asked = Asked.FROM_BYTES if packed else Asked.VALUES
            if (kernel := self._product(gemm, asked)) is not None:
                return GemmSchedule(left, Step(kernel, asked, source=source, why=why), multiply)
        if Keeps.READY in kept:
            return GemmSchedule(left, self._values(gemm, "right", source=Source.READY), multiply)
        if not packed:
            return GemmSchedule(left, self._values(gemm, "right"), multiply)
        layout = Layout.MOVED if self._moves(gemm) else Layout.DENSE
        observed = gemm.right.observes
        kernel, refused = self._kernel(Asked.FROM_BYTES, gemm, "right", layout=layout, source=None, observed=observed)
        right = self._values(gemm, "right", source=source, why=f"bytes are unpacked: {refused}")
        return GemmSchedule(left, right if kernel is None else right.by_kernel(kernel, Asked.FROM_BYTES), multiply)

    def _gradient(self, gemm: GemmProgram) -> Step:
        """Return the step of dY in a GEMM of the backward."""
        step = self._values(gemm, "left")
        if all(self.setting.needs) and not self.setting.experts and self.setting.part != "chosen":
            kernel = self._both_directions(self.program.dgrad, "left", self.program.wgrad, "left")
            return step if kernel is None else step.by_kernel(kernel, Asked.BOTH)
        return step

    # ------------------------------------------------------------------ requests

    def _kernel(
        self, asked: Asked, gemm: GemmProgram, side: Side, *, observed: bool = False, **facts: Any
    ) -> tuple[Kernel | None, str]:
        """Return the kernel for a request for more than values, None for tensor code, and why earlier kernels refuse.

        Args:
            facts: attributes of the :class:`~fp4graph.kernels.request.Request`.
        """
        program = gemm.side(side)
        if program.spec is None:
            return None, "high precision"
        transform = gemm.transforms[0].name if gemm.transforms else None
        facts = {"source": self._source(gemm, side), "transform": transform, "rotation": gemm.rotates, **facts}
        quantizing = program.quantizing(drawn=self.setting.drawn)
        kernel, why = chosen(
            Request(asked, self.setting.machine, quantizing, dtype=self.setting.dtype, observed=observed, **facts)
        )
        return (None if kernel == TENSOR_CODE else kernel), why

    def _both_directions(
        self,
        rows: GemmProgram,
        side: Side,
        columns: GemmProgram,
        other: Side,
        *,
        seen: bool = False,
        keeps: bool = False,
    ) -> Kernel | None:
        """Return the kernel that quantizes an operand of ``rows`` and one of ``columns`` in one read."""
        along_rows, along_columns = rows.side(side), columns.side(other)
        if along_columns.spec is None:
            return None
        observed = seen or along_rows.observes or along_columns.observes
        transform = next((t.name for t in (*rows.transforms, *columns.transforms)), None)
        quantizing = along_columns.quantizing(drawn=self.setting.drawn)
        facts = {"columns": quantizing, "keeps": keeps, "transform": transform}
        return self._kernel(Asked.BOTH, rows, side, observed=observed, **facts)[0]

    def _product(self, gemm: GemmProgram, asked: Asked) -> Kernel | None:
        """Return the kernel that quantizes the weights of experts within their product."""
        residual = next((f"{t.name} splits off a residual, which needs a product" for t in gemm.left.at("split")), None)
        source = None if asked is Asked.FROM_BYTES else self._source(gemm, "right")
        facts = {"layout": Layout.WEIGHTS, "source": source, "residual": residual}
        observed = self.setting.observed or gemm.right.observes
        return self._kernel(asked, gemm, "right", observed=observed, **facts)[0]

    def _places(self, gemm: GemmProgram, *, packed: bool) -> tuple[Kernel, Kernel] | None:
        """Return the kernels that read wgrad's operands from where the tokens lie; None if no token has to be moved."""
        if gemm.granule == 1:
            return None
        sources: dict[Side, torch.dtype | None] = {
            "left": self._source(gemm, "left"),
            "right": None if packed else self._source(gemm, "right"),
        }
        kernels = [
            self._kernel(
                Asked.PLACES, gemm, side, source=source, observed=self.setting.observed or gemm.side(side).observes
            )[0]
            for side, source in sources.items()
        ]
        left, right = kernels
        return None if left is None or right is None else (left, right)

    # ------------------------------------------------------------------ operands

    def _values(
        self,
        gemm: GemmProgram,
        side: Side,
        keeps: frozenset[Keeps] = frozenset(),
        *,
        source: Source = Source.TENSOR,
        why: str = "",
    ) -> Step:
        program = gemm.side(side)
        if program.spec is None:
            return Step(None, source=source, keeps=keeps, why=_REUSES if program.reuses else "")
        setting = self.setting
        code, refused = program.chosen(setting.machine, self._source(gemm, side), setting.dtype, drawn=setting.drawn)
        return Step(code.first, Asked.VALUES, code, source, keeps, refused or why)

    def _multiply(self, gemm: GemmProgram) -> Multiply:
        """Return the way to multiply the quantized operands, if all group scales wait for the accumulator."""
        if self.setting.experts:
            return Multiply.EXPERTS
        narrows = self.setting.machine.narrows and self.setting.dtype is torch.float32
        return Multiply.NARROW if narrows and gemm.is_exact() else Multiply.DTYPE

    def _source(self, gemm: GemmProgram, side: Side) -> torch.dtype:
        """Return the dtype from which an operand is quantized, unless it is quantized from bytes.

        It is the dtype of the GEMMs, or the dtype of the factor if the operand starts from the master weight.
        """
        if not gemm.side(side).from_master or (gemm.gemm is not Gemm.FPROP and side == "left"):
            return self.setting.dtype
        a, b = self.setting.dtypes
        return a if side == "left" or gemm.gemm is Gemm.WGRAD else b

    def _moves(self, gemm: GemmProgram) -> bool:
        """Return whether the operands of ``gemm`` are copied to another layout."""
        return self.setting.experts and gemm.granule > 1
