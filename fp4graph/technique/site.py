"""The data by which policies and techniques see a site, while planning and never inside a graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockPosition:
    """The place of a module in its repeated stack of blocks: ``index`` of ``total``, counted from 0."""

    stack: str
    index: int
    total: int


@dataclass(frozen=True)
class SiteView:
    """One matrix product ``Y = A[..., M, K] @ B[..., K, N]`` of a captured graph.

    Attributes:
        module: the fully qualified name of the module that owns the product ("" is the root), or None if unknown.
        op: "linear" if B is a parameter (F.linear, Conv1D, x @ W, ...), "matmul" if A and B are activations, "grouped"
            for experts with their own tokens (grouped_mm; B is the weights of all experts ``[E, K, N]``), "sdpa" for a
            product of fused attention, "conv" for a convolution, as patches ``[B·L, K]`` times kernels.
        in_features: K, or None if it is symbolic.
        out_features: N, or None if it is symbolic.
        numel: the number of elements of B (the weight, for op "linear" and "grouped"), or None if it is symbolic.
        block: the place of the module in a repeated stack, or None outside one.
        producer: the operation that made A ("swiglu", "gelu", "layer_norm", "sdpa", ...), or None. For P·V of
            attention it is "softmax", or "masked_fill" under a mask.
        role: what the product is if not an ordinary layer: "adapter" (LoRA and the like), "router" (its output chooses
            by top-k) or "head" (it makes the model's output); else None.
        also: the other names of the module, if the model holds it in several places.
    """

    module: str | None
    op: str
    in_features: int | None
    out_features: int | None
    numel: int | None
    block: BlockPosition | None = None
    producer: str | None = None
    role: str | None = None
    also: tuple[str, ...] = ()

    @property
    def multiplies_weight(self) -> bool:
        """True if B is a weight, beside which techniques may keep state."""
        return self.op in ("linear", "grouped", "conv")

    @property
    def name(self) -> str:
        """The name of the module, for records."""
        return "(root)" if self.module == "" else self.module or f"({self.op} of no module)"

    @property
    def aliases(self) -> str:
        """The other names of the module, as errors add them to a name."""
        more = f" and {len(self.also) - 2} more" if len(self.also) > 2 else ""
        return f" (also {', '.join(self.also[:2])}{more})" if self.also else ""

    def __str__(self) -> str:
        return f"{self.name}{self.aliases}"
