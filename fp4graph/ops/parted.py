"""The six-operand product of a linear layer, some of whose input channels are multiplied apart.

With C the chosen channels, R the rest, and Q and C the quantizers of the two
(:class:`~fp4graph.technique.Partition`):

    fprop   Y    = Q1(X_R) @ Q2(W_R)ᵀ + C1(X_C) @ C2(W_C)ᵀ
    dgrad   dX   = Q3(dY) @ Q4(W'ᵀ)ᵀ
    wgrad   dW_R = Q5(dYᵀ) @ Q6(X'_Rᵀ)ᵀ,   dW_C = C5(dYᵀ) @ C6(X'_Cᵀ)ᵀ

X' and W' are the originals, or the dequantized fprop operands. dgrad and all that leaves this module have the
channels in the layer's own order. The three GEMMs of the parts take as many FLOPs as those of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp4graph.numerics.draw import Draw
from fp4graph.ops import contract
from fp4graph.ops.bound import BoundMatmul, MatmulOptions
from fp4graph.ops.draw import apart_draw, operand_draw
from fp4graph.ops.first_order import first_order
from fp4graph.ops.gemm import MatmulProgram
from fp4graph.ops.kept import as_read, packing, restored, tensors, values
from fp4graph.ops.lower import lower
from fp4graph.ops.product import Terms, total
from fp4graph.ops.schedule import Schedule
from fp4graph.technique.operands import Operand


def parted_matmul(
    options: MatmulOptions,
    a: Tensor,
    b: Tensor,
    addend: Tensor | None,
    key: Tensor | None,
    step: Tensor | None,
    state: tuple[Tensor, ...],
) -> Tensor:
    """Return ``alpha · A @ Bᵀ (+ beta · addend)`` under a program with channels apart, differentiable in all three.

    Args:
        a: ``[..., M, K]``; b: ``[..., N, K]``; others as in :func:`fp4graph.ops.matmul.quantized_matmul`, which calls
            this with autocast off.
    """
    y: Tensor = _PartedMatmul.apply(options, a, b, key, step, *state)
    if addend is None:
        return y
    return y + (addend if options.beta == 1 else addend * options.beta).to(y.dtype)


@dataclass(frozen=True, eq=False)
class _Part:
    """Some channels of a site: their indices ``[k]``, their program, and the program at work."""

    channels: Tensor
    program: MatmulProgram
    bound: BoundMatmul

    def of(self, x: Tensor) -> Tensor:
        """Return the channels of ``x [..., K]``."""
        return x.index_select(-1, self.channels)


def channel_order(score: Tensor) -> Tensor:
    """Return the channels by falling ``score [K]``, int64 ``[K]``; of equal scores the first channel comes first."""
    return torch.argsort(score, descending=True, stable=True)


def _parts(options: MatmulOptions, schedule: Schedule, draw: Draw | None, order: Tensor) -> tuple[_Part, _Part]:
    """Return the rest of the channels and the chosen ones."""
    apart = options.program.apart
    assert apart is not None
    assert schedule.apart is not None
    own, chosen = options.program.of_rest, apart.program
    unseen = replace(options, program=chosen, observer=None)
    return (
        _Part(order[apart.count :], own, BoundMatmul(replace(options, program=own), schedule, draw, ())),
        _Part(order[: apart.count], chosen, BoundMatmul(unseen, schedule.apart, apart_draw(draw), ())),
    )


def _joined(of_parts: list[Tensor], order: Tensor) -> Tensor:
    """Return the parts' channels, along the last axis, in the layer's own order."""
    rest, chosen = of_parts
    gathered = torch.cat([chosen, rest], -1)
    return torch.empty_like(gathered).index_copy(-1, order, gathered)


class _PartedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: MatmulOptions,
        a: Tensor,
        b: Tensor,
        key: Tensor | None,
        step: Tensor | None,
        *state: Tensor,
    ) -> Tensor:
        program, dtype = options.program, options.dtype
        assert program.apart is not None
        order = channel_order(state[program.apart.score])
        needs_a, needs_b = needs = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        schedule = lower(program, options.setting(a, b, key, needs))
        parts = _parts(options, schedule, _draw(key, step), order)
        rereads_b = needs_a and program.dgrad.right.from_fprop
        rereads_a = [needs_b and part.program.wgrad.right.from_fprop for part in parts]
        products, saved, packings = [], [], []
        for part in parts:
            bound, fprop, x, w = part.bound, part.program.fprop, part.of(a), part.of(b)
            rotation = bound.rotated(fprop, x, w)
            operands = left, right = bound.operands(fprop, rotation)
            left_terms, a_fprop = bound.kept_terms(left, rotation, "left")
            right_terms, b_fprop = bound.kept_terms(right, rotation, "right")
            bound.show(operands, (x, b), (left_terms, right_terms))  # dgrad's weight is compared with the whole one
            products.append(bound.multiply(fprop, left_terms, right_terms))
            saved += [*tensors(a_fprop), *tensors(b_fprop)]
            packings.append((packing(a_fprop), packing(b_fprop)))
        readers = [part.program.wgrad.right for part in parts]
        ctx.save_for_backward(
            as_read(a, dtype, *readers) if needs_b and not all(rereads_a) else None,
            as_read(b, dtype, program.dgrad.right) if needs_a and not rereads_b else None,
            key,
            step,
            order,
            *saved,
        )
        ctx.options, ctx.schedule, ctx.packings, ctx.dtypes = options, schedule, packings, (a.dtype, b.dtype)
        rest, chosen = products
        return rest + chosen

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        options: MatmulOptions = ctx.options
        program = options.program
        a, b, key, step, order, *saved = ctx.saved_tensors
        parts = _parts(options, ctx.schedule, _draw(key, step), order)
        needs_a, needs_b = ctx.needs_input_grad[1:3]
        kept = [
            (restored(saved[start : start + 4], of_a), restored(saved[start + 4 : start + 8], of_b))
            for start, (of_a, of_b) in zip((0, 8), ctx.packings, strict=True)
        ]
        with torch.autocast(dy.device.type, enabled=False), contract.at(options.site):
            da = db = None
            dy = dy.to(options.dtype)
            dy = dy if options.alpha == 1 else dy * options.alpha
            quantized: list[Terms | None] = [None, None, None]  # for dgrad, for wgrad of the rest, of the chosen
            if needs_a and needs_b:
                quantized[:2] = parts[0].bound.gradients(dy, False)[:2]
            if needs_a:
                read = _joined([values(w) for _, w in kept if w is not None], order) if b is None else b
                da = parts[0].bound.product(program.dgrad, dy, read, quantized[0]).to(ctx.dtypes[0])
            if needs_b:
                gradients = [
                    part.bound.product(part.program.wgrad, dy.mT, part.of(a) if x is None else x, terms)
                    for part, (x, _), terms in zip(parts, kept, quantized[1:], strict=True)
                ]
                db = _joined(gradients, order).to(ctx.dtypes[1])
        return (None, da, db, None, None, *(None for _ in program.state))


def quantized_weight(program: MatmulProgram, w: Tensor, draw: Draw | None, score: Tensor) -> Tensor:
    """Return ``w [N, K]`` as fprop multiplies with it under a program with channels apart: dequantized.

    Args:
        score: of the channels, ``[K]``.
    """
    apart = program.apart
    assert apart is not None
    order, operand = channel_order(score), Operand.FPROP_WEIGHT
    rest, chosen = (w.index_select(-1, channels) for channels in (order[apart.count :], order[: apart.count]))
    own = total(program.fprop.right(rest, operand_draw(draw, operand)))
    other = total(apart.program.fprop.right(chosen, operand_draw(apart_draw(draw), operand)))
    return _joined([own, other], order)


def is_apart(program: MatmulProgram, score: Tensor) -> Tensor:
    """Return whether each channel is multiplied apart, bool ``[K]``, by the channels' ``score [K]``."""
    assert program.apart is not None
    order = channel_order(score)
    places = torch.arange(order.shape[0], device=order.device) < program.apart.count
    return torch.empty_like(places).index_copy(0, order, places)


def _draw(key: Tensor | None, step: Tensor | None) -> Draw | None:
    return None if key is None or step is None else Draw(key, step)
