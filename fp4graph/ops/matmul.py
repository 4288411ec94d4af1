"""The six-operand matrix product with its own backward.

For ``Y = A @ Bᵀ`` with ``A [..., M, K]`` and ``B [..., N, K]`` (contraction axis last throughout):

    fprop   Y  = Q1(A)  @ Q2(B)ᵀ                 contraction over K
    dgrad   dA = Q3(dY) @ Q4(B' ᵀ)ᵀ              contraction over N
    wgrad   dB = Q5(dYᵀ) @ Q6(A' ᵀ)ᵀ             contraction over M

(TetraJet, Chen et al. 2025, Eq. 3-5, and Microscaling's Eq. 6-7.) ``B'`` and ``A'`` are the originals, or with
``source: fprop`` the dequantized fprop operands Q2(B) and Q1(A), rotated back where a pair transform was applied.
The quantizers themselves are straight-through unless a technique gives a gradient factor f'(A), applied in the
transformed basis: dA ← (dA·R ⊙ f')·R⁻¹.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp4graph.kernels import operators
from fp4graph.kernels.operators import Packed
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops import contract
from fp4graph.ops.program import (
    Draw,
    GemmProgram,
    OperandProgram,
    OperandState,
    Rotation,
    StateSlot,
    Term,
    multiply,
    operand_draw,
    total,
)
from fp4graph.technique.operands import Operand

Side = Literal["left", "right"]


@dataclass(frozen=True)
class MatmulProgram:
    """The three GEMM programs of one kind of site. Equal programs share compiled code.

    ``fprop``: left A, right B. ``dgrad``: left dY, right Bᵀ. ``wgrad``: left dYᵀ, right Aᵀ.
    """

    fprop: GemmProgram
    dgrad: GemmProgram
    wgrad: GemmProgram
    state: tuple[StateSlot, ...] = field(default=())

    @property
    def draws(self) -> bool:
        """Whether any of its GEMMs needs a key."""
        return self.fprop.draws or self.dgrad.draws or self.wgrad.draws

    def operand(self, operand: Operand) -> OperandProgram:
        """The program of one of the six operands."""
        return {
            Operand.FPROP_INPUT: self.fprop.left,
            Operand.FPROP_WEIGHT: self.fprop.right,
            Operand.DGRAD_GRAD_OUTPUT: self.dgrad.left,
            Operand.DGRAD_WEIGHT: self.dgrad.right,
            Operand.WGRAD_GRAD_OUTPUT: self.wgrad.left,
            Operand.WGRAD_INPUT: self.wgrad.right,
        }[operand]


@dataclass(frozen=True, eq=False)
class Seen:
    """One operand of one GEMM, as :func:`observed` shows it.

    Attributes:
        operand: which. program: its quantizer.
        given: ``[..., K]``, before casts and pair transforms. x: what was quantized, in the GEMM's basis.
        terms: what was multiplied. draw, state: what the program was called with.
    """

    operand: Operand
    program: OperandProgram
    given: Tensor
    x: Tensor
    terms: tuple[Term, ...]
    draw: Draw | None
    state: OperandState


Observer = Callable[[Seen, Seen], None]  # the left and the right operand of a GEMM
_observer: ContextVar[Observer | None] = ContextVar("fp4graph_observer", default=None)


@contextmanager
def observed(observer: Observer | None) -> Iterator[None]:
    """Products of this context, and their backwards whenever they run, show ``observer`` what they multiply."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def quantized_matmul(
    program: MatmulProgram,
    a: Tensor,
    b: Tensor,
    addend: Tensor | None = None,
    key: Tensor | None = None,
    step: Tensor | None = None,
    state: tuple[Tensor, ...] = (),
    site: str | None = None,
    *,
    alpha: float = 1,
    beta: float = 1,
) -> Tensor:
    """``alpha · A @ Bᵀ (+ beta · addend)`` under ``program``, differentiable in A, B and addend.

    ``alpha`` multiplies dY before the backward quantizes it.

    Args:
        a: ``[..., M, K]``; b: ``[..., N, K]``, the same leading axes; addend: broadcastable to ``[..., M, N]``.
        key: int32 ``[2]``, the site's; step: int32 ``[5]``, this forward's. Needed if ``program.draws``.
        state: in the order of ``program.state``; ``weight_like`` ones of the shape of ``b``. Entries that the graph
            writes are changed in place where gradients are enabled.
        site: for the errors of plugins.

    Returns:
        ``[..., M, N]`` in the dtype autocast asks for, else in that of ``a``.
    """
    device = a.device.type
    dtype = a.dtype
    if torch.is_autocast_enabled(device) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(device)
    elif a.dtype != b.dtype:
        raise RuntimeError(f"expected both factors to have one dtype, got {a.dtype} and {b.dtype}")
    options = _Options(program, dtype, torch.is_grad_enabled(), site, alpha, beta, _observer.get())
    with torch.autocast(device, enabled=False), contract.at(site):
        result: Tensor = _QuantizedMatmul.apply(options, a, b, addend, key, step, *state)
    return result


@dataclass(frozen=True)
class _Options:
    """What is known without looking at a tensor; ``training``: whether state may be written."""

    program: MatmulProgram
    dtype: torch.dtype
    training: bool
    site: str | None
    alpha: float = 1
    beta: float = 1
    observer: Observer | None = None


class _QuantizedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: _Options,
        a: Tensor,
        b: Tensor,
        addend: Tensor | None,
        key: Tensor | None,
        step: Tensor | None,
        *state: Tensor,
    ) -> Tensor:
        program, dtype = options.program, options.dtype
        fprop = program.fprop
        call = _Call(options, _draw(key, step), state)
        operands = Operand.FPROP_INPUT, Operand.FPROP_WEIGHT
        rotation = call.rotated(fprop, a, b, operands[0])
        # Only what the backward reads is saved: the dequantized fprop operand where the policy requantizes that (as
        # bytes if it can be), the original where an operand or a gradient factor starts from it.
        needs_a, needs_b = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        factors = fprop.left.has_gradient_factor or fprop.right.has_gradient_factor
        rereads_a = needs_b and program.wgrad.right.from_fprop
        rereads_b = needs_a and program.dgrad.right.from_fprop
        left, a_fprop = call.quantized_and_kept(fprop.left, rotation, "left", operands[0], keep=rereads_a)
        right, b_fprop = call.quantized_and_kept(fprop.right, rotation, "right", operands[1], keep=rereads_b)
        if options.observer is not None:
            call.show(fprop, rotation, (a, b), (left, right), *operands)
        y = multiply(left, right, addend, options.alpha, options.beta)
        keep_a = (needs_b and not rereads_a) or factors
        keep_b = (needs_a and not rereads_b) or factors
        # Of the addend's shape only the axes along which it is repeated, for a size may be symbolic.
        ctx.options, ctx.single = options, () if addend is None else tuple(map(_is_single, addend.shape))
        ctx.dtypes = (a.dtype, b.dtype, None if addend is None else addend.dtype)
        # A factor must differentiate what was computed, so state that this forward is about to change is copied. What
        # the backward changes is not saved but referred to: two forwards may come before one backward.
        written = [slot.written for slot in program.state]
        ctx.live = tuple(entry if now else None for entry, now in zip(state, written, strict=True))
        before = tuple(
            (entry.clone() if now else entry) if factors else None for entry, now in zip(state, written, strict=True)
        )
        ctx.save_for_backward(
            _saved(a, dtype, fprop.left, program.wgrad.right) if keep_a else None,
            _saved(b, dtype, fprop.right, program.dgrad.right) if keep_b else None,
            *_tensors(a_fprop),
            *_tensors(b_fprop),
            key,
            step,
            *before,
        )
        ctx.packings = _packing(a_fprop), _packing(b_fprop)
        call.observe(fprop, rotation, *operands)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        options: _Options = ctx.options
        program, dtype = options.program, options.dtype
        a, b, a1, a2, b1, b2, key, step, *before = ctx.saved_tensors
        a_fprop, b_fprop = _kept(a1, a2, ctx.packings[0]), _kept(b1, b2, ctx.packings[1])
        draw = _draw(key, step)
        call = _Call(options, draw, ctx.live)
        with torch.autocast(dy.device.type, enabled=False), contract.at(options.site):
            da = db = daddend = None
            dy = dy.to(dtype)
            if ctx.needs_input_grad[3]:
                axes = zip(ctx.single, dy.shape[dy.dim() - len(ctx.single) :], strict=True)
                daddend = dy.sum_to_size([1 if single else size for single, size in axes]).to(ctx.dtypes[2])
                daddend = daddend if options.beta == 1 else daddend * options.beta
            dy = dy if options.alpha == 1 else dy * options.alpha
            if ctx.needs_input_grad[1]:
                operands = Operand.DGRAD_GRAD_OUTPUT, Operand.DGRAD_WEIGHT
                da = call.gemm(program.dgrad, dy, b if b_fprop is None else b_fprop, *operands)
            if ctx.needs_input_grad[2]:
                operands = Operand.WGRAD_GRAD_OUTPUT, Operand.WGRAD_INPUT
                db = call.gemm(program.wgrad, dy.mT, a if a_fprop is None else a_fprop, *operands)
            if program.fprop.left.has_gradient_factor or program.fprop.right.has_gradient_factor:
                da, db = _Call(options, draw, tuple(before)).with_factors(a, b, da, db)
            da = None if da is None else da.to(ctx.dtypes[0])
            db = None if db is None else db.to(ctx.dtypes[1])
        return (None, da, db, daddend, None, None, *(None for _ in program.state))


class _Call:
    """One forward or backward of one site: the program with its noise and state."""

    def __init__(self, options: _Options, draw: Draw | None, state: tuple[Tensor | None, ...]) -> None:
        self._options, self._draw = options, draw
        self._slots = tuple(zip(options.program.state, state, strict=True))

    def gemm(self, gemm: GemmProgram, left: Tensor, source: Tensor | Packed, *operands: Operand) -> Tensor:
        """One backward GEMM, in its dtype: ``left`` with the transpose of ``source``."""
        right = gemm.right
        if isinstance(source, Packed):
            direct = not gemm.transforms and not right.observes and right.by_kernel(left.device, self._draw)
            if direct and right.spec is not None:
                left = left if gemm.left.from_master else left.to(self._options.dtype)
                rotation = Rotation(left, left, (), (), ())  # of which only the left is read
                drawn = right.source(operand_draw(self._draw, operands[1]))
                terms = self._terms(gemm.left, rotation, "left", operands[0])
                requantized = (Term(source.requantized(right.spec, drawn).to(self._options.dtype)),)
                if self._options.observer is not None:
                    x = source.unpack().mT
                    self.show(gemm, Rotation(left, x, (), (), ()), (left, x), (terms, requantized), *operands)
                self._observe(gemm.left, left, operands[0], rotation)
                return multiply(terms, requantized)
            source = source.unpack()
        rotation = self.rotated(gemm, left, source.mT, operands[0])
        both = (
            self._terms(gemm.left, rotation, "left", operands[0]),
            self._terms(right, rotation, "right", operands[1]),
        )
        if self._options.observer is not None:
            self.show(gemm, rotation, (left, source.mT), both, *operands)
        y = multiply(*both)
        self.observe(gemm, rotation, *operands)
        return y

    def quantized_and_kept(
        self, program: OperandProgram, rotation: Rotation, side: Side, operand: Operand, *, keep: bool
    ) -> tuple[tuple[Term, ...], Tensor | Packed | None]:
        """An operand of fprop in the GEMM's basis and dtype, and if ``keep`` what the backward rereads of it: in the
        original basis, dequantized, or the bytes that say the same."""
        x, dtype = (rotation.left if side == "left" else rotation.right), self._options.dtype
        spec, draw = program.spec, operand_draw(self._draw, operand)
        packs = keep and not rotation.transforms and program.by_kernel(x.device, draw) and x.dtype in operators.DTYPES
        if packs and spec is not None and operators.packs(spec, dtype, x.device):
            values, packed = operators.quantize_and_pack(x, spec, program.source(draw), dtype)
            return (Term(values.to(dtype)),), packed
        terms = self._terms(program, rotation, side, operand)
        return terms, rotation.undo(total(terms), side).to(dtype) if keep else None

    def _terms(self, program: OperandProgram, rotation: Rotation, side: Side, operand: Operand) -> tuple[Term, ...]:
        """An operand in the GEMM's basis and dtype."""
        x = rotation.left if side == "left" else rotation.right
        state = self._state(program, operand, rotation)
        return _in(self._options.dtype, program(x, operand_draw(self._draw, operand), state))

    def show(
        self,
        gemm: GemmProgram,
        rotation: Rotation,
        given: tuple[Tensor, Tensor],
        terms: tuple[tuple[Term, ...], tuple[Term, ...]],
        *operands: Operand,
    ) -> None:
        """Let the observer see what one GEMM multiplies."""
        assert self._options.observer is not None
        seen = (
            Seen(
                operand,
                program,
                own,
                x,
                parts,
                operand_draw(self._draw, operand),
                self._state(program, operand, rotation),
            )
            for (program, x, operand), own, parts in zip(_sides(gemm, rotation, operands), given, terms, strict=True)
        )
        self._options.observer(*seen)

    def rotated(self, gemm: GemmProgram, left: Tensor, right: Tensor, first: Operand) -> Rotation:
        """The operands in the dtype they are quantized from and in the GEMM's basis."""
        left = left if gemm.left.from_master else left.to(self._options.dtype)
        right = right if gemm.right.from_master else right.to(self._options.dtype)
        # Transforms share one draw per GEMM: that of its left operand.
        return gemm.rotate(left, right, operand_draw(self._draw, first))

    def observe(self, gemm: GemmProgram, rotation: Rotation, *operands: Operand) -> None:
        """Write the state that the graph keeps, after everything else has read it."""
        for program, x, operand in _sides(gemm, rotation, operands):
            self._observe(program, x, operand, rotation)

    def _observe(self, program: OperandProgram, x: Tensor, operand: Operand, rotation: Rotation) -> None:
        if not (program.observes and self._options.training):
            return
        values = program.observe(x, operand_draw(self._draw, operand), self._state(program, operand, rotation))
        for slot, entry in self._slots:
            if entry is not None and slot.written and slot.entry.operand is operand:
                entry.copy_(values[slot.technique, slot.entry.name])

    def with_factors(
        self, a: Tensor, b: Tensor, da: Tensor | None, db: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """``dA ← (dA·R ⊙ f'(A·R))·R⁻¹`` and the same for B, R being fprop's pair transforms."""
        fprop = self._options.program.fprop
        operands = Operand.FPROP_INPUT, Operand.FPROP_WEIGHT
        rotation = self.rotated(fprop, a, b, operands[0])
        gradients: list[Tensor | None] = []
        for gradient, side, (program, x, operand) in zip(
            (da, db), ("left", "right"), _sides(fprop, rotation, operands), strict=True
        ):
            if gradient is not None:
                state = self._state(program, operand, rotation)
                factor = program.gradient_factor(x, operand_draw(self._draw, operand), state)
                if factor is not None:
                    # The gradient with respect to A·R is dA·R⁻ᵀ: a transform of the other side.
                    other: Side = "right" if side == "left" else "left"
                    gradient = rotation.undo(rotation.apply(gradient, other) * factor, other)
            gradients.append(gradient)
        return gradients[0], gradients[1]

    def _state(self, program: OperandProgram, operand: Operand, rotation: Rotation) -> OperandState:
        """An operand's entries, those of the weight's shape laid out as the operand is."""
        result: dict[str, dict[str, Tensor]] = {}
        for slot, tensor in self._slots:
            if slot.entry.operand is operand and tensor is not None:
                if slot.entry.weight_like:
                    tensor = tensor.mT if operand is Operand.DGRAD_WEIGHT else tensor
                    tensor = rotation.apply(tensor, "right")
                result.setdefault(slot.technique, {})[slot.entry.name] = tensor
        return result


def _sides(
    gemm: GemmProgram, rotation: Rotation, operands: tuple[Operand, ...]
) -> tuple[tuple[OperandProgram, Tensor, Operand], ...]:
    return (gemm.left, rotation.left, operands[0]), (gemm.right, rotation.right, operands[1])


def _draw(key: Tensor | None, step: Tensor | None) -> Draw | None:
    return None if key is None or step is None else Draw(key, step)


def _saved(x: Tensor, dtype: torch.dtype, *readers: OperandProgram) -> Tensor:
    """``x`` as the backward needs it: already cast unless a reader starts from the master."""
    return x if any(reader.from_master for reader in readers) else x.to(dtype)


def _in(dtype: torch.dtype, terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """The terms in the dtype of the GEMM."""
    return tuple(Term(term.values.to(dtype), term.multiplier) for term in terms)


def _is_single(size: int | torch.SymInt) -> bool:
    return statically_known_true(size == 1)


def _tensors(kept: Tensor | Packed | None) -> tuple[Tensor | None, Tensor | None]:
    """What is saved of a kept operand; :func:`_kept` puts it together again."""
    return (kept.codes, kept.scales) if isinstance(kept, Packed) else (kept, None)


def _packing(kept: Tensor | Packed | None) -> tuple[QuantSpec, int, torch.dtype] | None:
    return (kept.spec, kept.length, kept.dtype) if isinstance(kept, Packed) else None


def _kept(
    first: Tensor | None, second: Tensor | None, packing: tuple[QuantSpec, int, torch.dtype] | None
) -> Tensor | Packed | None:
    return first if packing is None or first is None or second is None else Packed(first, second, *packing)
