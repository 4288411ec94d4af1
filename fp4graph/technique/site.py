"""What policies and techniques may know of a site: plain data, seen while planning and never inside a graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockPosition:
    """Where a module stands in its repeated stack of blocks: ``index`` of ``total``, counted from 0."""

    stack: str
    index: int
    total: int


@dataclass(frozen=True)
class SiteView:
    """One matrix product ``Y = A[..., M, K] @ B[..., K, N]`` of a captured graph.

    Attributes:
        module: fully qualified name of the owner ("" is the root), or None where it cannot be known.
        op: "linear" when B is a parameter (F.linear, Conv1D, x @ W, ...), "matmul" when both are activations,
            "sdpa" for fused attention.
        in_features: K, or None where it is symbolic.
        out_features: N, or None where it is symbolic.
        numel: elements of B (of the weight for op "linear"), or None where symbolic.
        block: position in a repeated stack, or None outside one.
        producer: the operation that made A ("swiglu", "gelu", "layer_norm", "sdpa", ...), or None.
    """

    module: str | None
    op: str
    in_features: int | None
    out_features: int | None
    numel: int | None
    block: BlockPosition | None = None
    producer: str | None = None

    def __str__(self) -> str:
        return "(root)" if self.module == "" else self.module or f"({self.op} of no module)"
