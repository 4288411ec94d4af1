"""Counts the FLOPs of a node of a captured graph, with torch's own counter on tensors without data."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

from fp4graph.graph.products import Product, operation

#: Fused recurrent layers, which the counter does not know.
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def of_product(product: Product) -> int | None:
    """Return 2·M·N·K of ``A[..., M, K] @ B[..., K, N]``, summed over the batch; None where a size is unknown."""
    try:
        a, b = map(_sizes, product.values)
    except TypeError:
        return None
    if product.form == "linear":
        return 2 * prod(a) * b[0]
    batch: torch.Size = torch.broadcast_shapes(a[:-2], b[:-2])  # type: ignore[no-untyped-call]
    return 2 * prod(batch) * prod(a[-2:]) * b[-1]


def of_node(node: Node) -> int | None:
    """Return the forward FLOPs of any other node: 0 for one that multiplies no matrices, None where unknown.

    Views, arithmetic and look-ups count nothing. A recurrent layer counts a product of each of its matrices with every
    token.
    """
    try:
        args, kwargs = pytree.tree_map_only(Node, _empty, (node.args, node.kwargs))
        if node.target in _RECURRENT:
            first, *others = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            return 2 * prod(first.shape[:-1]) * sum(other.numel() for other in others if other.dim() == 2)
        counter = FlopCounterMode(display=False)
        with _disable_current_modes(), torch.no_grad(), counter:
            operation(node)(*args, **kwargs)
    except Exception:  # noqa: BLE001  # an operation that needs data is not counted
        return None
    return counter.get_total_flops()


def _empty(node: Node) -> Any:
    """Return the value of ``node``: tensors without data, symbolic numbers as they were at the capture."""
    value = node.meta.get("example_value", node.meta.get("val"))
    value = pytree.tree_map_only((torch.SymInt, torch.SymFloat, torch.SymBool), lambda number: number.node.hint, value)
    with _disable_current_modes():
        return pytree.tree_map_only(Tensor, lambda t: torch.empty(_sizes(t), dtype=t.dtype, device="meta"), value)


def _sizes(x: Tensor) -> list[int]:
    """Return the shape, symbolic sizes as they were at the capture. A size that depends on data raises TypeError."""
    return [int(size if isinstance(size, int) else size.node.hint) for size in x.shape]
