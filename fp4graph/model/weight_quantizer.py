"""Quantizes one weight as fprop does, outside of a graph: for the optimizer, exports and statistics."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp4graph.model.weight import Weight
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.segments import Segments
from fp4graph.numerics.sharding import like, whole
from fp4graph.ops.draw import operand_draw
from fp4graph.ops.parted import is_apart, quantized_weight
from fp4graph.ops.product import total
from fp4graph.technique import Quantization
from fp4graph.technique.operands import Operand


def quantize(weight: Weight, w: Tensor, step: Tensor, autocast: torch.dtype | None = None) -> Tensor:
    """Quantize ``w`` (in stored layout) as fprop does in the graph; return dequantized values of its shape and dtype.

    ``autocast`` is the dtype of the training's autocast, None without it.
    If products multiply with parts of ``w``, blocks and tensor scales are nevertheless those of the whole ``w``;
    :meth:`Weight.settle` refuses techniques that would act on such values.
    A sharded ``w`` is gathered first, because blocks and tensor scales reach across shards.
    """
    assert weight.plan.program is not None
    fprop = weight.plan.program.fprop
    canonical = cast(weight, matrix(weight, w), autocast)
    draw = Draw(weight.key, step.to(weight.key.device)) if weight.plan.program.draws else None
    if (score := _score(weight)) is not None:
        result = quantized_weight(weight.plan.program, canonical, draw, score).to(w.dtype)
        return like(result.mT if weight.stored_transposed else result, w)
    rotation = fprop.rotate(canonical, canonical, operand_draw(draw, Operand.FPROP_INPUT))
    entries = fprop_state(weight, lambda entry: rotation.apply(entry, "right"), canonical.dtype)
    segments = Segments(0, w.shape[0]) if weight.view.op == "grouped" else None
    terms = fprop.right(rotation.right, operand_draw(draw, Operand.FPROP_WEIGHT), entries, segments)
    result = rotation.undo(total(terms), "right").to(w.dtype)
    return like((result.mT if weight.stored_transposed else result).reshape(w.shape), w)


def matrix(weight: Weight, x: Tensor) -> Tensor:
    """Gather ``x``, laid out like the weight; return it as the quantizer takes it, ``[..., N, K]``.

    The kernels of a convolution are the rows of a matrix.
    """
    canonical = weight.canonical(x)
    return canonical.flatten(1) if weight.view.op == "conv" else canonical


def cast(weight: Weight, w: Tensor, autocast: torch.dtype | None) -> Tensor:
    """Return ``w`` in the dtype that the weight's quantizer takes under autocast to ``autocast``, None without it."""
    program = weight.plan.program
    from_master = program is not None and program.fprop.right.from_master
    if autocast is None or not weight.autocast or from_master or w.dtype is torch.float64:
        return w
    return w.to(autocast)


def quantization(weight: Weight, step: Tensor, autocast: torch.dtype | None) -> Quantization:
    """Return the elements, scales and statistics of a linear or grouped weight ``[..., N, K]`` in fprop.

    ``autocast`` is that of :func:`quantize`.
    """
    assert weight.plan.program is not None
    draw = Draw(weight.key, step.to(weight.key.device)) if weight.plan.program.draws else None
    segments = Segments(0, weight.parameter.shape[0]) if weight.view.op == "grouped" else None
    w = cast(weight, weight.canonical(weight.parameter), autocast)
    entries = fprop_state(weight, lambda entry: entry, w.dtype)
    return weight.plan.program.fprop.right.quantize(w, operand_draw(draw, Operand.FPROP_WEIGHT), entries, segments)


def _score(weight: Weight) -> Tensor | None:
    """Return the scores of the input channels ``[K]``; None if no channel is multiplied apart."""
    program = weight.plan.program
    return None if program is None or program.apart is None else weight.entry(program.state[program.apart.score])


def apart(weight: Weight) -> Tensor | None:
    """Return a mask of the weight's elements in input channels multiplied apart; None without such channels."""
    if (score := _score(weight)) is None:
        return None
    assert weight.plan.program is not None
    chosen = is_apart(weight.plan.program, score)
    chosen = chosen.unsqueeze(-1) if weight.stored_transposed else chosen
    return like(chosen.expand(weight.parameter.shape), weight.parameter)


def fprop_state(
    weight: Weight, lay_out: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32
) -> dict[str, dict[str, Tensor]]:
    """Return the technique state that fprop's quantizer receives for a weight in ``dtype`` (autocast's if enabled).

    An entry of the weight's shape is turned to ``[N, K]`` and passed as ``lay_out(entry)``. A maximum that siblings
    share is rounded to ``dtype``, as if the weights were of that dtype. Other entries are passed unchanged.
    """
    states: dict[str, dict[str, Tensor]] = {}
    for slot in weight.plan.program.state if weight.plan.program is not None else ():
        if slot.entry.operand is Operand.FPROP_WEIGHT:
            entry = whole(weight.entry(slot))
            if slot.entry.weight_like:
                entry = lay_out(entry.mT if weight.stored_transposed else entry)
            if slot.shared:
                entry = entry.to(dtype).to(torch.float32)
            states.setdefault(slot.technique, {})[slot.entry.name] = entry
    return states
