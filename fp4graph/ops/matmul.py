"""The six-operand matrix product with its own backward.

For ``Y = A @ Bᵀ`` with ``A [..., M, K]`` and ``B [..., N, K]`` (contraction axis last throughout):

    fprop   Y  = Q1(A)  @ Q2(B)ᵀ                 contraction over K
    dgrad   dA = Q3(dY) @ Q4(B' ᵀ)ᵀ              contraction over N
    wgrad   dB = Q5(dYᵀ) @ Q6(A' ᵀ)ᵀ             contraction over M

(TetraJet, Chen et al. 2025, Eq. 3-5, and Microscaling's Eq. 6-7.) ``B'`` and ``A'`` are the originals, or with
``source: fprop`` the dequantized fprop operands Q2(B) and Q1(A), rotated back where a pair transform was applied.
The quantizers themselves are straight-through unless a technique gives a gradient factor f'(A), applied in the
transformed basis: dA ← (dA·R ⊙ f')·R⁻¹. If some input channels are multiplied apart, there are two products
(:mod:`fp4graph.ops.parted`). A schedule says beforehand how each product is computed (:mod:`fp4graph.ops.lower`).
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp4graph.errors import CaptureError
from fp4graph.kernels.direction import PackedOperand
from fp4graph.numerics.draw import Draw
from fp4graph.ops import contract, observe
from fp4graph.ops.bound import BoundMatmul
from fp4graph.ops.bound_gemm import MatmulOptions
from fp4graph.ops.first_order import first_order, refuse_transforms
from fp4graph.ops.gemm import MatmulProgram
from fp4graph.ops.grouped import Experts
from fp4graph.ops.kept import as_read, is_ready, packing, restored, tensors, values
from fp4graph.ops.lower import lower
from fp4graph.ops.parted import channel_order, joined, parts
from fp4graph.technique.operands import Gemm


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
    autocast: bool = True,
) -> Tensor:
    """Return ``alpha · A @ Bᵀ (+ beta · addend)`` under ``program``, differentiable in A, B and addend.

    ``alpha`` multiplies dY before the backward quantizes it.

    Args:
        a: ``[..., M, K]``; b: ``[..., N, K]``, the same leading axes; addend: broadcastable to ``[..., M, N]``.
        key: the site's key, int32 ``[2]``; step: this forward's step, int32 ``[5]``. ``program.draws`` needs both.
        state: the state, in the order of ``program.state``; ``weight_like`` entries have the shape of ``b``. Entries
            that the graph writes are changed in place if gradients are enabled.
        site: the name of the site, for errors.
        ends: makes a grouped product (:mod:`fp4graph.ops.grouped`): whole numbers ``[E]``. Then a is ``[T, K]``, b
            ``[E, N, K]``, and ``addend`` is None.
        autocast: whether autocast decides the dtype.

    Returns:
        ``[..., M, N]`` (``[T, N]``) in the dtype of autocast, or without autocast in the dtype of ``a``.
    """
    refuse_transforms(site)
    device = a.device.type
    dtype = a.dtype
    if autocast and torch.is_autocast_enabled(device) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(device)
    elif a.dtype != b.dtype:
        remedy = f"convert the model's input (x.to({b.dtype}))"
        remedy += ", or call the model under torch.autocast" if autocast else ""
        raise CaptureError(f"it multiplies {a.dtype} with {b.dtype}; {remedy}", site=site)
    options = MatmulOptions(program, dtype, torch.is_grad_enabled(), site, alpha, beta, observe.current())
    with torch.autocast(device, enabled=False), contract.at(site):
        # Parts add it to their sum. With beta 0 it is not added, and its gradient is zeros.
        inside = addend if program.apart is None or beta == 0 else None
        result: Tensor = _QuantizedMatmul.apply(options, a, b, inside, key, step, ends, *state)
        if addend is None or inside is not None:
            return result
        return result + (addend if beta == 1 else addend * beta).to(result.dtype)


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
        needs = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        schedule = lower(program, options.setting(a, b, key, needs, experts=ends is not None))
        order = None if program.apart is None else channel_order(state[program.apart.score])
        experts = None if ends is None else Experts(ends, a.shape[0], b.shape[0])
        products = parts(options, schedule, _draw(key, step), state, experts, order)
        added = None if options.beta == 0 else addend  # like torch, do not read it: it may be uninitialized
        forwards = [product.forward(a, b, added) for product in products]
        y = reduce(add, [forward.y for forward in forwards])
        # Save only tensors that the backward reads: the dequantized fprop operand (as bytes if possible) if the policy
        # quantizes it again, the original if an operand or a gradient factor starts from it.
        pairs = list(zip(products, forwards, strict=True))
        keep_a = any(p.schedule.fprop.left.saves_original(ready=is_ready(f.left)) for p, f in pairs)
        keep_b = any(p.schedule.fprop.right.saves_original(ready=is_ready(f.right)) for p, f in pairs)
        readers_a = [each for p in products for each in (p.program.fprop.left, p.program.wgrad.right)]
        readers_b = [each for p in products for each in (p.program.fprop.right, p.program.dgrad.right)]
        # Of the addend's shape, keep only the axes along which it is repeated, because a size may be symbolic.
        single = () if addend is None else tuple(statically_known_true(size == 1) for size in addend.shape)
        ctx.options, ctx.schedule, ctx.single = options, schedule, single
        ctx.dtypes = (a.dtype, b.dtype, None if addend is None else addend.dtype)
        # A gradient factor needs the state of this forward, so state that the forward is about to change is copied.
        # The backward changes the live state, not a saved copy: two forwards may come before one backward.
        written = [slot.written for slot in program.state] if order is None else []  # parts have no state of their own
        slots = list(zip(state, written, strict=order is None))
        ctx.live = tuple(entry if now else None for entry, now in slots)
        before = [entry.clone() if now else entry for entry, now in slots] if _factors(program) else []
        kept = [operand for forward in forwards for operand in (forward.left, forward.right)]
        ctx.packings = [packing(operand) for operand in kept]
        ctx.save_for_backward(
            as_read(a, dtype, *readers_a) if keep_a else None,
            as_read(b, dtype, *readers_b) if keep_b else None,
            key,
            step,
            ends,
            order,
            *(tensor for operand in kept for tensor in tensors(operand)),
            *before,
        )
        for product, forward in pairs:
            product.gemm(Gemm.FPROP).observe(*forward.operands)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        options: MatmulOptions = ctx.options
        program, dtype = options.program, options.dtype
        a, b, key, step, ends, order, *saved = ctx.saved_tensors
        kept = [restored(saved[4 * i : 4 * i + 4], each) for i, each in enumerate(ctx.packings)]
        before, draw = saved[4 * len(ctx.packings) :], _draw(key, step)
        experts = None if ends is None else Experts(ends, dy.shape[0], ends.shape[0])
        products = parts(options, ctx.schedule, draw, ctx.live, experts, order)
        with torch.autocast(dy.device.type, enabled=False), contract.at(options.site):
            da = db = daddend = None
            dy = dy.to(dtype)
            needs_a, needs_b = ctx.needs_input_grad[1:3]
            # This comes before the sum over dY: Inductor writes an operator's input to memory, and the sum then reads
            # it there. After the sum, Inductor would write dY once more, in another layout.
            scaled = dy if options.alpha == 1 else dy * options.alpha
            dy_rows = dy_columns = summed = None
            if needs_a and needs_b:
                # If the addend is a bias, the kernel adds up the rows that it reads.
                sums = ctx.needs_input_grad[3] and ctx.single == (False,) and dy.dim() == 2 and options.alpha == 1
                dy_rows, dy_columns, summed = products[0].gradients(scaled, sums)
            if ctx.needs_input_grad[3]:
                axes = zip(ctx.single, dy.shape[dy.dim() - len(ctx.single) :], strict=True)
                sizes = [1 if single else size for single, size in axes]
                daddend = (dy.sum_to_size(sizes) if summed is None else summed.to(dtype)).to(ctx.dtypes[2])
                daddend = daddend if options.beta == 1 else daddend * options.beta
            if needs_a:
                da = products[0].product(Gemm.DGRAD, scaled, _whole(b, kept[1::2], order), dy_rows)
            if needs_b:
                each = [
                    product.product(
                        Gemm.WGRAD, scaled.mT, product.of(a) if x is None else x, dy_columns if index == 0 else None
                    )
                    for index, (product, x) in enumerate(zip(products, kept[::2], strict=True))
                ]
                db = each[0] if order is None else joined(each, order)
            if _factors(program):
                former = BoundMatmul(options, ctx.schedule, draw, tuple(before), experts)
                da, db = former.with_factors(a, b, da, db)
            da = None if da is None else da.to(ctx.dtypes[0])
            db = None if db is None else db.to(ctx.dtypes[1])
        return (None, da, db, daddend, None, None, None, *(None for _ in program.state))


def _factors(program: MatmulProgram) -> bool:
    return program.fprop.left.has_gradient_factor or program.fprop.right.has_gradient_factor


def _whole(b: Tensor | None, kept: list[Tensor | PackedOperand | None], order: Tensor | None) -> Tensor | PackedOperand:
    """Return B as dgrad reads it: quantized, as the forward kept it, or the original."""
    operands = [operand for operand in kept if operand is not None]
    if order is not None and b is None:
        return joined([values(operand) for operand in operands], order)
    if b is None or (operands and order is None):
        return operands[0]
    return b


def _draw(key: Tensor | None, step: Tensor | None) -> Draw | None:
    return None if key is None or step is None else Draw(key, step)
