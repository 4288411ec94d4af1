"""The six-operand product of a linear layer, some of whose input channels are multiplied apart.

Let C be the chosen channels, whose quantizers are C1 to C6, and R the other channels, whose quantizers are Q1 to Q6
(:class:`~fp4graph.technique.Partition`):

    fprop   Y    = Q1(X_R) @ Q2(W_R)ᵀ + C1(X_C) @ C2(W_C)ᵀ
    dgrad   dX   = Q3(dY) @ Q4(W'ᵀ)ᵀ
    wgrad   dW_R = Q5(dYᵀ) @ Q6(X'_Rᵀ)ᵀ,   dW_C = C5(dYᵀ) @ C6(X'_Cᵀ)ᵀ

X' and W' are the originals, or the dequantized fprop operands. dgrad and all results have the channels in the order of
the layer. The GEMMs of both parts together take as many FLOPs as the GEMMs of a whole product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fp4graph.numerics.draw import Draw
from fp4graph.ops.bound import BoundMatmul
from fp4graph.ops.bound_gemm import MatmulOptions
from fp4graph.ops.draw import apart_draw, operand_draw
from fp4graph.ops.gemm import MatmulProgram
from fp4graph.ops.grouped import Experts
from fp4graph.ops.product import total
from fp4graph.ops.schedule import Schedule
from fp4graph.technique.operands import Operand


def parts(
    options: MatmulOptions,
    schedule: Schedule,
    draw: Draw | None,
    state: tuple[Tensor | None, ...],
    experts: Experts | None,
    order: Tensor | None,
) -> tuple[BoundMatmul, ...]:
    """Return the products that a site consists of: one, or two, of the other channels and then of the chosen ones.

    Args:
        order: the channels, the chosen channels first; None if all channels are multiplied together.
    """
    apart = options.program.apart
    if apart is None or schedule.apart is None or order is None:
        return (BoundMatmul(options, schedule, draw, state, experts),)
    rest = replace(options, program=options.program.of_rest)
    chosen = replace(options, program=apart.program, observer=None)
    return (
        BoundMatmul(rest, schedule, draw, (), channels=order[apart.count :]),
        BoundMatmul(chosen, schedule.apart, apart_draw(draw), (), channels=order[: apart.count]),
    )


def channel_order(score: Tensor) -> Tensor:
    """Return the channels by falling ``score [K]``, int64 ``[K]``; of equal scores the first channel comes first."""
    return torch.argsort(score, descending=True, stable=True)


def joined(parts: Sequence[Tensor], order: Tensor) -> Tensor:
    """Return the channels of both parts, along the last axis, in the order of the layer."""
    rest, chosen = parts
    gathered = torch.cat([chosen, rest], -1)
    return torch.empty_like(gathered).index_copy(-1, order, gathered)


def quantized_weight(program: MatmulProgram, w: Tensor, draw: Draw | None, score: Tensor) -> Tensor:
    """Return the dequantized ``w [N, K]`` that fprop multiplies with, under a program with channels apart.

    Args:
        score: the scores of the channels, ``[K]``.
    """
    apart = program.apart
    assert apart is not None
    order, operand = channel_order(score), Operand.FPROP_WEIGHT
    rest, chosen = (w.index_select(-1, channels) for channels in (order[apart.count :], order[: apart.count]))
    rest = total(program.fprop.right(rest, operand_draw(draw, operand)))
    chosen = total(apart.program.fprop.right(chosen, operand_draw(apart_draw(draw), operand)))
    return joined([rest, chosen], order)


def is_apart(program: MatmulProgram, score: Tensor) -> Tensor:
    """Return whether each channel is multiplied apart, bool ``[K]``, by the channels' ``score [K]``."""
    assert program.apart is not None
    order = channel_order(score)
    places = torch.arange(order.shape[0], device=order.device) < program.apart.count
    return torch.empty_like(places).index_copy(0, order, places)
