"""The six-operand matrix product with its own backward.

For ``Y = A @ Bᵀ`` with ``A [..., M, K]`` and ``B [..., N, K]`` (contraction axis last throughout):

    fprop   Y  = Q1(A)  @ Q2(B)ᵀ                 contraction over K
    dgrad   dA = Q3(dY) @ Q4(B' ᵀ)ᵀ              contraction over N
    wgrad   dB = Q5(dYᵀ) @ Q6(A' ᵀ)ᵀ             contraction over M

(TetraJet, Chen et al. 2025, Eq. 3-5, and Microscaling's Eq. 6-7.) ``B'`` and ``A'`` are the originals, or with
``source: fprop`` the dequantized fprop operands Q2(B) and Q1(A), rotated back where a pair transform was applied.
The quantizers themselves are straight-through unless a technique gives a gradient factor f'(A), applied in the
transformed basis: dA ← (dA·R ⊙ f')·R⁻¹. A program that multiplies some input channels apart is in
:mod:`fp4graph.ops.parted`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp4graph.errors import CaptureError
from fp4graph.kernels.direction import PackedOperand
from fp4graph.numerics.draw import Draw
from fp4graph.ops import contract, observe
from fp4graph.ops.bound import BoundMatmul, MatmulOptions
from fp4graph.ops.first_order import first_order, refuse_transforms
from fp4graph.ops.gemm import MatmulProgram
from fp4graph.ops.grouped import Experts
from fp4graph.ops.kept import as_read, is_ready, packing, restored, tensors
from fp4graph.ops.lower import lower
from fp4graph.ops.parted import parted_matmul
from fp4graph.ops.schedule import Keeps, Way


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
    ends: Tensor | None = None,
) -> Tensor:
    """Return ``alpha · A @ Bᵀ (+ beta · addend)`` under ``program``, differentiable in A, B and addend.

    ``alpha`` multiplies dY before the backward quantizes it.

    Args:
        a: ``[..., M, K]``; b: ``[..., N, K]``, the same leading axes; addend: broadcastable to ``[..., M, N]``.
        key: int32 ``[2]``, the site's; step: int32 ``[5]``, this forward's. Needed if ``program.draws``.
        state: in the order of ``program.state``; ``weight_like`` ones of the shape of ``b``. Entries that the graph
            writes are changed in place where gradients are enabled.
        site: for the errors of plugins.
        ends: whole numbers ``[E]``, of a grouped product (:mod:`fp4graph.ops.grouped`): a is then ``[T, K]``, b
            ``[E, N, K]``, and there is no addend.

    Returns:
        ``[..., M, N]`` (``[T, N]``) in the dtype autocast asks for, else in that of ``a``.
    """
    refuse_transforms(site)
    device = a.device.type
    dtype = a.dtype
    if torch.is_autocast_enabled(device) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(device)
    elif a.dtype != b.dtype:
        raise CaptureError(
            f"it multiplies {a.dtype} with {b.dtype}; convert the model's input (x.to({b.dtype})), or call the model "
            "under torch.autocast",
            site=site,
        )
    options = MatmulOptions(program, dtype, torch.is_grad_enabled(), site, alpha, beta, observe.current())
    with torch.autocast(device, enabled=False), contract.at(site):
        if program.apart is not None:
            return parted_matmul(options, a, b, addend, key, step, state)
        result: Tensor = _QuantizedMatmul.apply(options, a, b, addend, key, step, ends, *state)
    return result


class _QuantizedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: MatmulOptions,
        a: Tensor,
        b: Tensor,
        addend: Tensor | None,
        key: Tensor | None,
        step: Tensor | None,
        ends: Tensor | None,
        *state: Tensor,
    ) -> Tensor:
        program, dtype = options.program, options.dtype
        fprop = program.fprop
        needs = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        schedule = lower(program, options.setting(a, b, key, needs, experts=ends is not None))
        bound = BoundMatmul(options, schedule, _draw(key, step), state, _experts(ends, a, b))
        rotation = bound.rotated(fprop, a, b, leaves=schedule.fprop.turns)
        operands = left, right = bound.operands(fprop, rotation)
        left_terms, a_fprop = bound.kept_terms(left, rotation, "left")
        b_fprop: Tensor | PackedOperand | None
        if schedule.fprop.right.way is Way.PRODUCT:
            packs = Keeps.BYTES in schedule.fprop.right.keeps
            y, b_fprop = bound.quantized_product(fprop, left_terms, right, packs=packs)
        else:
            right_terms, b_fprop = bound.kept_terms(right, rotation, "right")
            bound.show(operands, (a, b), (left_terms, right_terms))
            y = bound.multiply(fprop, left_terms, right_terms, addend)
        # Only what the backward reads is saved: the dequantized fprop operand where the policy requantizes that (as
        # bytes if it can be), the original where an operand or a gradient factor starts from it.
        keep_a = schedule.fprop.left.saves_original(ready=is_ready(a_fprop))
        keep_b = schedule.fprop.right.saves_original(ready=is_ready(b_fprop))
        factors = fprop.left.has_gradient_factor or fprop.right.has_gradient_factor
        # Only the axes along which the addend is repeated are kept of its shape, because a size may be symbolic.
        ctx.options, ctx.schedule, ctx.single = options, schedule, ()
        if addend is not None:
            ctx.single = tuple(statically_known_true(size == 1) for size in addend.shape)
        ctx.dtypes = (a.dtype, b.dtype, None if addend is None else addend.dtype)
        # A factor must differentiate what was computed, so state that this forward is about to change is copied. State
        # that the backward changes is not saved but referred to: two forwards may come before one backward.
        written = [slot.written for slot in program.state]
        ctx.live = tuple(entry if now else None for entry, now in zip(state, written, strict=True))
        before = tuple(
            (entry.clone() if now else entry) if factors else None for entry, now in zip(state, written, strict=True)
        )
        ctx.save_for_backward(
            as_read(a, dtype, fprop.left, program.wgrad.right) if keep_a else None,
            as_read(b, dtype, fprop.right, program.dgrad.right) if keep_b else None,
            key,
            step,
            ends,
            *tensors(a_fprop),
            *tensors(b_fprop),
            *before,
        )
        ctx.packings = packing(a_fprop), packing(b_fprop)
        bound.observe(*operands)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        options: MatmulOptions = ctx.options
        program, dtype = options.program, options.dtype
        a, b, key, step, ends, *rest = ctx.saved_tensors
        a_fprop, b_fprop, before = restored(rest[:4], ctx.packings[0]), restored(rest[4:8], ctx.packings[1]), rest[8:]
        draw = _draw(key, step)
        experts = None if ends is None else Experts(ends, dy.shape[0], ends.shape[0])
        bound = BoundMatmul(options, ctx.schedule, draw, ctx.live, experts)
        with torch.autocast(dy.device.type, enabled=False), contract.at(options.site):
            da = db = daddend = None
            dy = dy.to(dtype)
            needs_a, needs_b = ctx.needs_input_grad[1:3]
            # Before the sum over dY: what an operator reads, Inductor writes to memory, and the sum then reads it too,
            # where after the sum it would write dY once more, in another layout.
            scaled = dy if options.alpha == 1 else dy * options.alpha
            dy_rows = dy_columns = summed = None
            if needs_a and needs_b:
                # A bias: the kernel adds up what it reads.
                sums = ctx.needs_input_grad[3] and ctx.single == (False,) and dy.dim() == 2 and options.alpha == 1
                dy_rows, dy_columns, summed = bound.gradients(scaled, sums)
            if ctx.needs_input_grad[3]:
                axes = zip(ctx.single, dy.shape[dy.dim() - len(ctx.single) :], strict=True)
                sizes = [1 if single else size for single, size in axes]
                daddend = (dy.sum_to_size(sizes) if summed is None else summed.to(dtype)).to(ctx.dtypes[2])
                daddend = daddend if options.beta == 1 else daddend * options.beta
            if needs_a:
                da = bound.product(program.dgrad, scaled, b if b_fprop is None else b_fprop, dy_rows)
            if needs_b:
                db = bound.product(program.wgrad, scaled.mT, a if a_fprop is None else a_fprop, dy_columns)
            if program.fprop.left.has_gradient_factor or program.fprop.right.has_gradient_factor:
                former = BoundMatmul(options, ctx.schedule, draw, tuple(before), experts)
                da, db = former.with_factors(a, b, da, db)
            da = None if da is None else da.to(ctx.dtypes[0])
            db = None if db is None else db.to(ctx.dtypes[1])
        return (None, da, db, daddend, None, None, None, *(None for _ in program.state))


def _experts(ends: Tensor | None, a: Tensor, b: Tensor) -> Experts | None:
    return None if ends is None else Experts(ends, a.shape[0], b.shape[0])


def _draw(key: Tensor | None, step: Tensor | None) -> Draw | None:
    return None if key is None or step is None else Draw(key, step)
