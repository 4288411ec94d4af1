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

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4graph.numerics import noise
from fp4graph.operands import Operand
from fp4graph.ops.program import GemmProgram, OperandProgram, Rotation, StateSlot, Term, multiply, operand_key, total

Weights = Mapping[str, Mapping[str, Tensor]]


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


def quantized_matmul(
    program: MatmulProgram,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    key: Tensor | None = None,
    step: Tensor | None = None,
    state: tuple[Tensor, ...] = (),
) -> Tensor:
    """``A @ Bᵀ (+ bias)`` under ``program``, differentiable in A, B and bias.

    Args:
        a: ``[..., M, K]``; b: ``[..., N, K]``, the same leading axes; bias: ``[N]``.
        key: int32 ``[2]``, the site's; step: int32 ``[2]``, this forward's. Needed if ``program.draws``.
        state: weight-state tensors of the shape of ``b``, in the order of ``program.state``.

    Returns:
        ``[..., M, N]`` in the dtype autocast asks for, else in that of ``a``.
    """
    device = a.device.type
    dtype = a.dtype
    if torch.is_autocast_enabled(device) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(device)
    elif a.dtype != b.dtype:
        raise RuntimeError(f"expected both factors to have one dtype, got {a.dtype} and {b.dtype}")
    combined = noise.mix(key, step) if key is not None and step is not None else None
    with torch.autocast(device, enabled=False):
        result: Tensor = _QuantizedMatmul.apply(program, dtype, a, b, bias, combined, *state)
    return result


class _QuantizedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        program: MatmulProgram,
        dtype: torch.dtype,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        key: Tensor | None,
        *state: Tensor,
    ) -> Tensor:
        fprop = program.fprop
        weights = _by_technique(program.state, state)
        rotation, left_key, right_key = _rotated(fprop, dtype, a, b, key, Operand.FPROP_INPUT, Operand.FPROP_WEIGHT)
        weights = {t: {n: rotation.apply(e, "right") for n, e in group.items()} for t, group in weights.items()}
        left = _in(dtype, fprop.left(rotation.left, left_key))
        right = _in(dtype, fprop.right(rotation.right, right_key, weights))
        y = multiply(left, right, None if bias is None else bias.to(dtype))

        # Only what the backward reads is saved: the dequantized fprop operand where the policy requantizes that, the
        # original where an operand or a gradient factor starts from it.
        needs_a, needs_b = ctx.needs_input_grad[2], ctx.needs_input_grad[3]
        factors = fprop.left.has_gradient_factor or fprop.right.has_gradient_factor
        a_fprop = rotation.undo(total(left), "left").to(dtype) if needs_b and program.wgrad.right.from_fprop else None
        b_fprop = rotation.undo(total(right), "right").to(dtype) if needs_a and program.dgrad.right.from_fprop else None
        keep_a = (needs_b and a_fprop is None) or factors
        keep_b = (needs_a and b_fprop is None) or factors
        ctx.program, ctx.dtype, ctx.has_bias = program, dtype, bias is not None
        ctx.dtypes = (a.dtype, b.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(
            _saved(a, dtype, fprop.left, program.wgrad.right) if keep_a else None,
            _saved(b, dtype, fprop.right, program.dgrad.right) if keep_b else None,
            a_fprop,
            b_fprop,
            key,
            *(state if factors else ()),
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        program: MatmulProgram = ctx.program
        a, b, a_fprop, b_fprop, key, *state = ctx.saved_tensors
        with torch.autocast(dy.device.type, enabled=False):
            da = db = dbias = None
            dy = dy.to(ctx.dtype)
            if ctx.needs_input_grad[2]:
                source = b if b_fprop is None else b_fprop
                da = _gemm(
                    program.dgrad, ctx.dtype, dy, source.mT, key, Operand.DGRAD_GRAD_OUTPUT, Operand.DGRAD_WEIGHT
                )
            if ctx.needs_input_grad[3]:
                source = a if a_fprop is None else a_fprop
                db = _gemm(
                    program.wgrad, ctx.dtype, dy.mT, source.mT, key, Operand.WGRAD_GRAD_OUTPUT, Operand.WGRAD_INPUT
                )
            if program.fprop.left.has_gradient_factor or program.fprop.right.has_gradient_factor:
                da, db = _with_factors(program, ctx.dtype, a, b, da, db, key, _by_technique(program.state, state))
            if ctx.has_bias and ctx.needs_input_grad[4]:
                dbias = dy.sum_to_size(dy.shape[-1]).to(ctx.dtypes[2])
            da = None if da is None else da.to(ctx.dtypes[0])
            db = None if db is None else db.to(ctx.dtypes[1])
        return (None, None, da, db, dbias, None, *(None for _ in program.state))


def _gemm(
    gemm: GemmProgram,
    dtype: torch.dtype,
    left: Tensor,
    right: Tensor,
    key: Tensor | None,
    left_operand: Operand,
    right_operand: Operand,
) -> Tensor:
    """One backward GEMM, in ``dtype``."""
    rotation, left_key, right_key = _rotated(gemm, dtype, left, right, key, left_operand, right_operand)
    return multiply(_in(dtype, gemm.left(rotation.left, left_key)), _in(dtype, gemm.right(rotation.right, right_key)))


def _rotated(
    gemm: GemmProgram,
    dtype: torch.dtype,
    left: Tensor,
    right: Tensor,
    key: Tensor | None,
    left_operand: Operand,
    right_operand: Operand,
) -> tuple[Rotation, Tensor | None, Tensor | None]:
    """The operands in the dtype they are quantized from and in the GEMM's basis, with their keys."""
    left = left if gemm.left.from_master else left.to(dtype)
    right = right if gemm.right.from_master else right.to(dtype)
    left_key, right_key = operand_key(key, left_operand), operand_key(key, right_operand)
    # Random transforms share one draw per GEMM: that of its left operand.
    return gemm.rotate(left, right, left_key), left_key, right_key


def _with_factors(
    program: MatmulProgram,
    dtype: torch.dtype,
    a: Tensor,
    b: Tensor,
    da: Tensor | None,
    db: Tensor | None,
    key: Tensor | None,
    weights: Weights,
) -> tuple[Tensor | None, Tensor | None]:
    """``dA ← (dA·R ⊙ f'(A·R))·R⁻¹`` and the same for B, R being fprop's pair transforms."""
    fprop = program.fprop
    rotation, left_key, right_key = _rotated(fprop, dtype, a, b, key, Operand.FPROP_INPUT, Operand.FPROP_WEIGHT)
    if da is not None:
        factor = fprop.left.gradient_factor(rotation.left, left_key, {})
        da = da if factor is None else rotation.undo(rotation.apply(da, "left") * factor, "left")
    if db is not None:
        weights = {t: {n: rotation.apply(e, "right") for n, e in group.items()} for t, group in weights.items()}
        factor = fprop.right.gradient_factor(rotation.right, right_key, weights)
        db = db if factor is None else rotation.undo(rotation.apply(db, "right") * factor, "right")
    return da, db


def _saved(x: Tensor, dtype: torch.dtype, *readers: OperandProgram) -> Tensor:
    """``x`` as the backward needs it: already cast unless a reader starts from the master."""
    return x if any(reader.from_master for reader in readers) else x.to(dtype)


def _by_technique(slots: tuple[StateSlot, ...], state: tuple[Tensor, ...] | list[Tensor]) -> Weights:
    result: dict[str, dict[str, Tensor]] = {}
    for slot, tensor in zip(slots, state, strict=False):
        result.setdefault(slot.technique, {})[slot.entry.name] = tensor
    return result


def _in(dtype: torch.dtype, terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """The terms in the dtype of the GEMM."""
    return tuple(Term(term.values.to(dtype), term.multiplier) for term in terms)
