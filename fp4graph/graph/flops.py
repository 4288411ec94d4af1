"""Counts the FLOPs of a node of a captured graph, with torch's own counter on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fp4graph import torch_internals
from fp4graph.graph.nested import nested
from fp4graph.graph.products import Product, operation
from fp4graph.torch_internals import pytree


def of_product(product: Product) -> int | None:
    """Return 2·M·N·K of ``A[..., M, K] @ B[..., K, N]``, summed over the batch; None where a size is unknown."""
    try:
        a, b = map(_known, product.shapes)
    except TypeError:
        return None
    columns = b[-1 if product.by_columns else -2]
    if product.form == "grouped":
        return 2 * prod(a) * columns
    batch: torch.Size = torch.broadcast_shapes(a[:-2], b[:-2])  # type: ignore[no-untyped-call]
    return 2 * prod(batch) * prod(a[-2:]) * columns


def of_grouped(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Return 2·T·N·K for T tokens ``a [T, K]``, each multiplied with one matrix of ``b [E, K, N]``.

    Groups may also divide the columns of ``b [K, T]`` or the contraction ``a [M, T] @ b [T, N]``.
    """
    columns = b.shape[-1] // a.shape[0] if a.dim() == 3 and b.dim() == 2 else b.shape[-1]
    return 2 * prod(a.shape) * columns


def of_call(call: Callable[[], Any]) -> dict[str, int] | None:
    """Return the FLOPs of the matrix operations that ``call`` runs, as torch counts them, by the module that runs them.

    The entry of the root, "", is the sum. Return None if the call fails: some models run on tensors without data only
    while a compiler traces them, and torch 2.14 has no grouped product of fp32 for such tensors.
    """
    grouped = {torch.ops.aten._grouped_mm: _raw_grouped}  # unknown to the counters of torch 2.14 and 2.15
    counter = FlopCounterMode(display=False, custom_mapping=grouped)
    try:
        # torch 2.14 does not count the fused attention of a CPU.
        with torch_internals.fake_tensors_silent(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
            call()
    except Exception:  # noqa: BLE001  # a model may raise anything
        return None
    counts = {name: sum(flops.values()) for name, flops in counter.get_flop_counts().items()}
    return {name.partition(".")[2]: flops for name, flops in counts.items() if "." in name} | {
        "": counts.get("Global", 0)
    }


def _raw_grouped(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return of_grouped(a, b)


_raw_grouped._get_raw = True  # type: ignore[attr-defined]  # torch's counter hands over tensors, not shapes


def of_recurrent(*args: Any, **kwargs: Any) -> int:
    """Return the FLOPs of multiplying every token with each matrix; the first tensor holds the tokens."""
    first, *others = nested((args, kwargs), Tensor)
    return 2 * prod(first.shape[:-1]) * sum(other.numel() for other in others if other.dim() == 2)


def of_bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> int:
    """Return the FLOPs of ``Σ_ij x_i W_nij y_j``: one product of x_i·y_j with each element of W, for each token."""
    return 2 * prod(x.shape[:-1]) * weight.numel()


def of_vector(a: Tensor, b: Tensor, **_: Any) -> int:
    """Return the FLOPs of a product of a matrix or a vector with a vector."""
    return 2 * max(a.numel(), b.numel())


def of_mm(a: Tensor, b: Tensor, **_: Any) -> int:
    """Return the FLOPs of ``a [M, K] @ b [K, N]``."""
    return 2 * a.numel() * b.shape[-1]


def of_distances(x: Tensor, y: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of the inner products of all rows of ``x [..., P, M]`` with all of ``y [..., R, M]``."""
    return 2 * x.numel() * y.shape[-2]


def of_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of ``Q [..., L, E] @ K [..., S, E]ᵀ`` and ``P [..., L, S] @ V [..., S, F]``, without a mask."""
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def of_node(node: Node, formula: Callable[..., int] | None = None) -> int | None:
    """Return the forward FLOPs of a node that is not read as a product: 0 for views, arithmetic and look-ups, None
    where unknown. A ``formula`` replaces torch's counter."""
    try:
        args, kwargs = pytree.tree_map_only(Node, _empty, (node.args, node.kwargs))
        if formula is not None:
            return formula(*args, **kwargs)
        counter = FlopCounterMode(display=False)
        with torch_internals.without_dispatch_modes(), torch.no_grad(), counter:
            operation(node)(*args, **kwargs)
    except Exception:  # noqa: BLE001  # an operation that needs data is not counted
        return None
    return counter.get_total_flops()


def _empty(node: Node) -> Any:
    """Return the value of ``node``, with tensors without data, and symbolic numbers as they were at the capture."""
    value = node.meta.get("example_value", node.meta.get("val"))
    value = pytree.tree_map_only((torch.SymInt, torch.SymFloat, torch.SymBool), lambda number: number.node.hint, value)
    with torch_internals.without_dispatch_modes():
        return pytree.tree_map_only(Tensor, lambda t: torch.empty(_sizes(t), dtype=t.dtype, device="meta"), value)


def _sizes(x: Tensor) -> list[int]:
    """Return the shape, with symbolic sizes as at the capture. Raise TypeError for a size that depends on data."""
    return _known(x.shape)


def _known(shape: Iterable[Any]) -> list[int]:
    return [int(size if isinstance(size, int) else size.node.hint) for size in shape]
