"""Products of tokens with the matrices that indices pick for them, computed as grouped products.

``Y[s] = A[s] @ W[ids[s]]``, with ``A [S, P, K]`` and ``W [E, K, N]``, is written in models as a copy ``W[ids]`` of a
matrix for every s and a batched product. Sorted by expert, the same rows are those of a grouped product
(:mod:`fp4graph.ops.grouped`), which reads each matrix once and copies none:

    order      = argsort(ids)         stable
    ends[e]    = P · #{s : ids[s] <= e}
    Y[order]   = grouped(A[order], W, ends)

No host waits for an index, and all sizes follow from those of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gathering:
    """How a product with gathered matrices is written.

    Attributes:
        weight_first: whether the matrices are the first factor: ``W[ids] @ A``, with A ``[..., K, P]``.
        transposed: whether the copies are transposed before they are multiplied: ``A @ W[ids].mT``.
        wraps: whether negative indices count from the end, as in ``W[ids]``; ``index_select`` refuses them.
        dtype: of the copies where they are multiplied, before autocast.
    """

    weight_first: bool
    transposed: bool
    wraps: bool
    dtype: torch.dtype

    @property
    def by_columns(self) -> bool:
        """Whether W is stored ``[E, K, N]``, not ``[E, N, K]``."""
        return self.weight_first == self.transposed


def gathered_matmul(
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor], gathering: Gathering, a: Tensor, w: Tensor, ids: Tensor
) -> Tensor:
    """Return ``a[s] @ w[ids[s]]ᵀ`` for every s.

    Args:
        multiply: the grouped product of tokens ``[T, K]`` sorted by expert, ``w`` and ``ends [E]`` (int32), which
            returns ``[T, N]``.
        a: ``[..., P, K]``, or ``[..., K, P]`` where the weight comes first; the leading axes may be broadcast to those
            of ``ids``.
        w: ``[E, N, K]``.
        ids: whole numbers, of one axis or more.

    Returns:
        ``[*ids.shape, P, N]``, or ``[*ids.shape, N, P]`` where the weight comes first.

    Raises:
        IndexError: on a CPU, an index that torch's own indexing refuses. On other devices it fails as there.
    """
    tokens = a.mT if gathering.weight_first else a
    rows, picks = tokens.shape[-2], ids.numel()
    w = w.to(gathering.dtype)  # the copies were cast, under autocast too
    # The indices pick from the experts' numbers as they do from the matrices: an index that is out of range is the
    # same error, and one that counts from the end becomes the expert's number.
    numbers, flat = torch.arange(w.shape[0], device=a.device), ids.flatten().to(a.device)
    experts = numbers[flat] if gathering.wraps else numbers.index_select(0, flat)
    experts, order = torch.sort(experts, stable=True)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True) * rows
    x = tokens.expand(*ids.shape, *tokens.shape[-2:]).reshape(picks, rows, tokens.shape[-1])
    y = multiply(x.index_select(0, order).flatten(0, 1), w, ends)
    y = y.reshape(picks, rows, w.shape[1])
    y = torch.empty_like(y).index_copy(0, order, y).reshape(*ids.shape, rows, w.shape[1])
    return y.mT.contiguous() if gathering.weight_first else y
