"""The products of many experts at once: each expert's weight with the tokens of that expert.

With ``A [T, K]``, the tokens sorted by expert, ``B [E, N, K]`` and ``ends [E]``, the cumulative numbers of tokens as
``torch.nn.functional.grouped_mm`` takes them, expert e has the tokens ``ends[e-1] <= t < ends[e]`` and

    fprop   Y_e  = A_e  @ B_eᵀ      contraction over K
    dgrad   dA_e = dY_e @ B_e       contraction over N
    wgrad   dB_e = dY_eᵀ @ A_e      contraction over the expert's tokens

Tokens from ``ends[-1]`` on belong to no expert: their results and gradients are 0. The host never waits for ``ends``.

No block, Hadamard block or statistic may reach into two experts. So the operands of a GEMM are laid out with the first
token of every expert at a multiple of the GEMM's granule G, the least common multiple of all lengths that its
quantizers treat together along the tokens, and with zeros between the experts. Such zeros change no block's amax, are
quantized to zeros, and add nothing to a product. Where G is 1 (fprop and dgrad, unless activations have 2-D blocks)
tokens stay where they are. The layout has room for ``⌊(T + E·(G − 1)) / G⌋·G`` tokens, a bound that depends on sizes
alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add, mul
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4graph.kernels.cpu_product import product_into
from fp4graph.kernels.experts import tokens_of_experts, zero_others
from fp4graph.numerics import target
from fp4graph.numerics.declare import operator
from fp4graph.numerics.segments import Segments
from fp4graph.ops.product import Terms
from fp4graph.technique.operands import Gemm


class Experts:
    """The tokens of each expert.

    Args:
        ends: the cumulative numbers of tokens, whole numbers ``[E]``.
        tokens: T, the number of tokens.
        count: E, the number of experts.
    """

    def __init__(self, ends: Tensor, tokens: int, count: int) -> None:
        self.tokens, self.count = tokens, count
        self._ends = ends.to(torch.int64)
        if target.kind(ends.device) != "cpu":  # the CPU's operator checks the offsets; a GPU's would wait for them
            self._ends = self._ends.cummax(0).values.clamp(0, tokens)
        self._sizes = torch.diff(self._ends, prepend=self._ends.new_zeros(1))

    def layout(self, granule: int) -> Layout:
        """Return the layout in which every expert begins at a multiple of ``granule``."""
        device = self._ends.device
        if granule == 1:
            ids = torch.searchsorted(self._ends, torch.arange(self.tokens, device=device), right=True)
            return Layout(self, self._ends - self._sizes, self._sizes, ids)
        room = (self._sizes + (granule - 1)) // granule * granule
        ends = room.cumsum(0)
        starts, positions = ends - room, (self.tokens + self.count * (granule - 1)) // granule * granule
        place = torch.arange(positions, device=device)
        ids = torch.searchsorted(ends, place, right=True)
        zero = ids.new_zeros(1)
        offset = place - torch.cat([starts, zero])[ids]
        used = offset < torch.cat([self._sizes, zero])[ids]
        # The row after the last token, T, is zero.
        source = torch.where(used, torch.cat([self._ends - self._sizes, zero])[ids] + offset, self.tokens)
        unpadded_ids = torch.where(used, ids, self.count)
        return Layout(self, starts, self._sizes, ids, source, unpadded_ids)

    def token_places(self, layout: Layout) -> Tensor:
        """Return the position of every token in ``layout``; for tokens of no expert, the position after the last."""
        tokens = torch.arange(self.tokens, device=self._ends.device)
        ids = torch.searchsorted(self._ends, tokens, right=True)
        shift = torch.cat([layout.starts - (self._ends - self._sizes), ids.new_zeros(1)])
        return torch.where(ids < self.count, tokens + shift[ids], layout.ids.shape[0])


@dataclass(frozen=True, eq=False)
class Layout:
    """The places of tokens in the operands of a GEMM.

    Attributes:
        starts, sizes: the first position and the number of tokens of each expert, int64 ``[E]``.
        ids: the expert of each position, E for no expert; the zeros after an expert's tokens count as the expert's.
        source: the token at each position, T for a zero; None if tokens stay where they are.
        unpadded_ids: like ``ids``, but E for the zeros too; None if tokens stay where they are.
    """

    experts: Experts
    starts: Tensor
    sizes: Tensor
    ids: Tensor
    source: Tensor | None = None
    unpadded_ids: Tensor | None = None

    @property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """The first position and the number of tokens of each expert as operators take them, int32 ``[E]``."""
        return self.starts.to(torch.int32), self.sizes.to(torch.int32)

    def lay_out(self, x: Tensor) -> Tensor:
        """Return rows ``x [T, ...]`` at their positions."""
        if self.source is None:
            return x
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, self.source)

    def take_back(self, x: Tensor) -> Tensor:
        """Return the rows of ``x [positions, ...]`` in the order of the tokens: the inverse of :meth:`lay_out`."""
        if self.source is None:
            return x
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, self.experts.token_places(self))

    def segments(self, gemm: Gemm, side: str) -> Segments:
        """Return the positions of each expert in one operand of ``gemm``."""
        if gemm is Gemm.WGRAD:
            return Segments(1, self.experts.count, self.ids, self.unpadded_ids)
        if side == "left":
            return Segments(0, self.experts.count, self.ids, self.unpadded_ids)
        return Segments(0, self.experts.count)

    def multiply(self, left: Terms, right: Terms, period: int = 1) -> Tensor:
        """Return ``left @ rightᵀ`` of every expert: ``[positions, N]`` of ``left [positions, K]`` and ``right [E, N,
        K]``, and ``[E, N, K]`` of ``left [N, positions]`` and ``right [K, positions]``.

        Args:
            period: the number of positions over which a pair transform spreads each token, if the GEMM sums over them.
        """
        sizes = self.sizes if period == 1 else (self.sizes + (period - 1)) // period * period
        tokens = self.starts.to(torch.int32), sizes.to(torch.int32)
        pairs = [(a.values, b.values, self.scale(a.multiplier, b.multiplier)) for a in left for b in right]
        if len(pairs) == 1 or all(scale is None for _, _, scale in pairs):
            return reduce(add, [grouped_product(a, b, *tokens, scale) for a, b, scale in pairs])
        # As in an ordinary product (:func:`fp4graph.ops.product.multiply`), the sum of accumulators is rounded once.
        wide = torch.promote_types(pairs[0][0].dtype, torch.float32)
        accumulators = (
            self._times(grouped_product(a.to(wide), b.to(wide), *tokens), scale, b) for a, b, scale in pairs
        )
        return reduce(add, accumulators).to(pairs[0][0].dtype)

    def _times(self, product: Tensor, scale: Tensor | None, right: Tensor) -> Tensor:
        """Return a ``product`` that had ``right`` as its right operand, times one number for each expert."""
        if scale is None:
            return product
        if right.dim() == 2:
            return product * scale[:, None, None]
        return product * torch.cat([scale, scale.new_zeros(1)])[self.ids][:, None]

    def scale(self, left: Tensor | None, right: Tensor | None) -> Tensor | None:
        """Return the product of two terms' multipliers, ``[E]``, a None counting as 1; None if both are None."""
        parts = [part[: self.experts.count] for part in (left, right) if part is not None]
        return reduce(mul, parts) if parts else None


def grouped_product(left: Tensor, right: Tensor, starts: Tensor, sizes: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return :meth:`Layout.multiply` of two tensors, times one number for each expert if ``scale`` is not None."""
    result: Tensor = torch.ops.fp4graph.grouped_product(left, right, starts, sizes, scale)
    return result


def _empty(left: Tensor, right: Tensor, experts: int) -> Tensor:
    if right.dim() == 3:
        return left.new_empty((left.shape[0], right.shape[1]))
    return left.new_empty((experts, left.shape[0], right.shape[0]))


def _fake(left: Tensor, right: Tensor, starts: Tensor, sizes: Tensor, scale: Tensor | None) -> Tensor:
    return _empty(left, right, starts.shape[0])


def _on_cpu(left: Tensor, right: Tensor, starts: Tensor, sizes: Tensor, scale: Tensor | None) -> Tensor:
    """Multiply expert by expert, as an ordinary product of the expert's tokens does."""
    by_rows = right.dim() == 3
    tokens = left.shape[0 if by_rows else 1]
    result, experts = _empty(left, right, starts.shape[0]), list(tokens_of_experts(starts, sizes, tokens))
    if by_rows:
        zero_others(result, experts)
    for expert, places in enumerate(experts):
        if places.start == places.stop:
            if not by_rows:
                result[expert] = 0
            continue
        a, b = (left[places], right[expert]) if by_rows else (left[:, places], right[:, places])
        out = result[places] if by_rows else result[expert]
        product_into(out, a, b, None if scale is None else scale[expert])
    return result


def _on_cuda(left: Tensor, right: Tensor, starts: Tensor, sizes: Tensor, scale: Tensor | None) -> Tensor:
    """Multiply by torch's grouped GEMM, which rounds to the operands' dtype before ``scale`` multiplies."""
    by_rows = right.dim() == 3
    ends = torch.cat([starts[1:], starts[-1:] + sizes[-1:]])
    y = F.grouped_mm(left, right.mT, offs=ends)
    if not by_rows:
        y = y if scale is None else (y * scale[:, None, None]).to(y.dtype)
        return torch.where((sizes > 0)[:, None, None], y, 0)
    ids = torch.searchsorted(ends, torch.arange(left.shape[0], device=left.device, dtype=ends.dtype), right=True)
    if scale is not None:
        y = (y * torch.cat([scale, scale.new_zeros(1)])[ids][:, None]).to(y.dtype)
    return torch.where((ids < starts.shape[0])[:, None], y, 0)  # torch leaves the other rows unwritten


def _flops(left: torch.Size, right: torch.Size, *rest: Any, out_shape: torch.Size, **options: Any) -> int:
    """Return 2·T·N·K, where T includes the zeros between experts."""
    return 2 * left.numel() * (right[1] if len(right) == 3 else right[0])


operator(
    "grouped_product(Tensor left, Tensor right, Tensor starts, Tensor sizes, Tensor? scale) -> Tensor",
    _fake,
    flops=_flops,
    CPU=_on_cpu,
    CUDA=_on_cuda,
)
