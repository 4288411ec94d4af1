"""Bits per weight of a model under a policy, and the share of its FLOPs whose operands both have four bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fp4graph.graph.site import Site
from fp4graph.numerics.spec import QuantSpec
from fp4graph.technique.operands import Gemm, Operand

#: Bits of a weight that is kept in high precision, as models are served.
KEPT_BITS = 16.0


def bits_per_element(spec: QuantSpec | None, row: int) -> float:
    """Return the stored bits of one element and its share of the block's scale; 16 in high precision.

    A scale is stored in whole bytes. ``row`` is the length of a line, for blocks that are lines; the scale of a tensor
    counts nothing.
    """
    if spec is None:
        return KEPT_BITS
    sizes = {"row": (row,), "tensor": (math.inf,)}
    block = spec.block if isinstance(spec.block, tuple) else sizes.get(str(spec.block), (spec.block,))
    return spec.element.code_bits + 8 * math.ceil(spec.scale.format.code_bits / 8) / math.prod(map(float, block))


def in_fp4(specs: Mapping[Operand, QuantSpec | None], gemm: Gemm) -> bool:
    """Return whether both operands of a GEMM have elements of four bits (E2M1, E3M0, INT4)."""
    own = [specs.get(operand) for operand in Operand if operand.gemm is gemm]
    return all(spec is not None and spec.element.code_bits <= 4 for spec in own)


def fp4_flops(sites: Sequence[Site]) -> float | None:
    """Return the share of a training step's matrix FLOPs that multiply two operands of 4 bits; None if unknown.

    Σ_s F_s · g_s / Σ_s 3 F_s, where site s has F_s FLOPs in each of fprop, dgrad and wgrad, and g_s of these three have
    4-bit elements in both operands.
    """
    total = 3 * sum(site.flops or 0 for site in sites)
    short = sum((site.flops or 0) * sum(in_fp4(site.operands, gemm) for gemm in Gemm) for site in sites)
    return short / total if total else None


def bits_per_weight(sites: Sequence[Site]) -> float | None:
    """Return the mean bits of a weight that enters a matrix product, scales included; None without such weights.

    A weight that is kept has 16, and one that products share counts once.
    """
    weights: dict[tuple[Any, ...], tuple[int, float]] = {}
    for site in sites:
        if site.op in ("linear", "grouped") and all(isinstance(size, int) for size in site.shapes[1]):
            shape = [int(size) for size in site.shapes[1]]
            row = shape[-1 if site.op == "linear" else -2]
            bits = bits_per_element(site.operands.get(Operand.FPROP_WEIGHT), row)
            weights[site.module, site.shapes[1]] = math.prod(shape), bits
    total = sum(size for size, _ in weights.values())
    return sum(size * bits for size, bits in weights.values()) / total if total else None
