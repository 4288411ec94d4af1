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


def quantizer_bytes(m: int, k: int, n: int, itemsize: int, quantized: Collection[Operand]) -> int:
    """Return the least number of bytes that quantizing the operands ``quantized`` of one site moves."""
    numel = {"x": m * k, "w": n * k, "dy": m * n}
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
            m, k, n, products = extents(site)
            largest = itemsize * max(m * k, n * k, m * n)
            total += products * quantizer_bytes(m, k, n, itemsize, quantized) / bandwidth(largest, device)
    return total


def extents(site: Site) -> tuple[int, int, int, int]:
    """Return M, K and N of a site's matrix products, and the number of products.

    A site's shapes are those of X and of the stored W, or of two activations ``[..., M, K]`` and ``[..., K, N]``.
    """
    left, right = ([int(size) for size in shape] for shape in site.shapes)
    if site.op == "linear":
        return math.prod(left[:-1]), left[-1], math.prod(right) // left[-1], 1
    return left[-2], left[-1], math.prod(right) // math.prod(right[:-2]) // left[-1], math.prod(left[:-2])
