"""Lower bounds of the time on this machine, from the bytes that quantizers move: "Floor" in docs/performance.md."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from functools import lru_cache

import torch

from benchmarks.timing import seconds_of
from fp4graph.graph.site import Site
from fp4graph.technique.operands import Operand

_TENSOR = {
    Operand.FPROP_INPUT: "x",
    Operand.WGRAD_INPUT: "x",
    Operand.FPROP_WEIGHT: "w",
    Operand.DGRAD_WEIGHT: "w",
    Operand.DGRAD_GRAD_OUTPUT: "dy",
    Operand.WGRAD_GRAD_OUTPUT: "dy",
}


def quantizer_bytes(x: int, w: int, dy: int, itemsize: int, quantized: Collection[Operand]) -> int:
    """Return the least number of bytes that quantizing the operands ``quantized`` of one site moves.

    Args:
        x, w, dy: numbers of elements.
    """
    numel = {"x": x, "w": w, "dy": dy}
    read = sum(numel[tensor] for tensor in {_TENSOR[operand] for operand in quantized})
    written = sum(numel[_TENSOR[operand]] for operand in quantized)
    return itemsize * (read + written)


@lru_cache(maxsize=64)
def bandwidth(nbytes: int, device: torch.device) -> float:
    """Return bytes per second of a copy of ``nbytes``, counting read and written bytes."""
    source = torch.zeros(max(nbytes, 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / seconds_of(lambda: target.copy_(source), device)


@lru_cache(maxsize=64)
def gemm_rate(dtype: torch.dtype, device: torch.device, size: int = 2048) -> float:
    """Return operations per second of a square matrix product; a multiplication and an addition count as two."""
    a = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    return 2 * size**3 / seconds_of(lambda: torch.mm(a, a, out=out), device)


def of_sites(sites: Iterable[Site], itemsize: int, device: torch.device) -> float:
    """Return the seconds of a copy of the least number of bytes that quantizing ``sites`` moves."""
    total = 0.0
    for site in sites:
        quantized = [operand for operand, spec in site.operands.items() if spec is not None]
        if quantized:
            elements = numel(site)
            nbytes = quantizer_bytes(*elements, itemsize, quantized)
            total += nbytes / bandwidth(itemsize * max(elements), device)
    return total


def numel(site: Site) -> tuple[int, int, int]:
    """Return the elements of both factors of a site, X and W or two activations, and of their product."""
    x, w = (math.prod(map(int, shape)) for shape in site.shapes)
    assert site.sizes is not None
    rows, _, outputs = site.sizes
    return x, w, rows * outputs
