"""A pass over Inductor's graphs for a GPU: quantizers read their operands where they lie.

Inductor cannot fuse its code with a kernel of this project, so it writes the operand that the kernel reads. This pass
avoids two such writes and changes no value:

- **A cast of an input of the graph**, as autocast casts weights and the gradient of the output. The kernel reads the
  input and casts it.
- **A concatenation of tensors in memory**, as of the gradients of q, k and v where one linear makes all three. The
  kernel reads the parts.

The pass does not change an operand that Inductor's code computes: that code casts or concatenates the operand in the
same kernel. Nor does the pass change operands with symbolic sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from fp4graph.kernels import library

aten = torch.ops.aten
_RESHAPES = frozenset((aten.reshape.default, aten.view.default, aten._unsafe_view.default))
_VIEWS = _RESHAPES | {aten.permute.default, aten.transpose.int, aten.squeeze.dim, aten.unsqueeze.default}
_SPLITS = frozenset((aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int))
_MOST = 4  # the most parts: the kernel has a masked load for each part


def read_in_place(graph: Graph) -> None:
    """Let :data:`~fp4graph.kernels.library.READERS` read the tensors that were cast or concatenated."""
    for reader in [node for node in graph.nodes if node.target in library.READERS]:
        (x, *others), dtype, *_ = _arguments(reader)
        if others or not all(isinstance(size, int) for size in x.meta["val"].shape):
            continue
        with graph.inserting_before(reader):
            parts = _uncast(x, dtype) or _columns(x)
        if parts is not None:
            reader.update_arg(0, parts)
            reader.meta.pop("eager_input_vals", None)  # strides of the former source, which Inductor would use
            _erase_unused(x)


def _uncast(x: Node, dtype: torch.dtype) -> list[Node] | None:
    """Return the fp32 input whose cast to ``dtype`` is ``x`` if nothing else reads the cast, else None."""
    cast = _behind(x, _RESHAPES, alone=True)
    if cast.target is not torch.ops.prims.convert_element_type.default or len(cast.users) > 1:
        return None
    source = _behind(_arguments(cast)[0], _RESHAPES)
    read, result = source.meta["val"], cast.meta["val"].dtype
    if source.op != "placeholder" or not read.is_contiguous() or read.dtype is not torch.float32 or result is not dtype:
        return None
    return [_call(aten.reshape.default, source, x.meta["val"].shape)]


def _columns(x: Node) -> list[Node] | None:
    """Return the tensors in memory ``[..., C/n]`` that ``x [..., C]`` concatenates along its last axis, or None.

    ``x`` is either the concatenation of the tensors along that axis, or a permuted copy of their stack ``[n, ...]``.
    """
    permute = joined = _behind(x, _RESHAPES | {aten.clone.default})
    if permute.target is aten.permute.default:
        joined = _behind(_arguments(permute)[0], _RESHAPES)
    if joined.target is not aten.cat.default:
        return None
    parts, *rest = _arguments(joined)
    axis, values, whole = rest[0] if rest else 0, [part.meta["val"] for part in parts], x.meta["val"]
    shape, width = values[0].shape, whole.shape[-1] // len(parts)
    if width * len(parts) != whole.shape[-1]:
        return None
    if permute is joined:
        order = list(range(len(shape)))
        side_by_side = axis % len(shape) == len(shape) - 1 and shape[-1] == width
    else:
        stack, axes = _arguments(permute)
        axes = [each % len(axes) for each in axes]
        order = [each - 1 for each in axes if each > 0]
        features = order[axes.index(0) :] if 0 in axes else []
        stacked = axis == 0 and stack.meta["val"].shape == (len(parts), *shape)
        side_by_side = stacked and prod(shape[each] for each in features) == width
    alike = all(value.shape == shape and value.dtype is whole.dtype for value in values)
    if len(parts) > _MOST or not (side_by_side and alike and all(map(_in_memory, parts))):
        return None
    if not all(value.permute(order).is_contiguous() for value in values):
        return None
    laid_out = (_call(aten.permute.default, part, order) for part in parts)
    return [_call(aten.reshape.default, part, (*whole.shape[:-1], width)) for part in laid_out]


def _in_memory(x: Node) -> bool:
    """Return whether ``x`` or what it views is in memory anyway: an input, or one of several results of an operator."""
    root = _behind(x, _VIEWS)
    if root.target is operator.getitem:
        return _arguments(root)[0].target not in _SPLITS
    return root.op == "placeholder"


def _behind(x: Node, views: frozenset[Any], *, alone: bool = False) -> Node:
    """Return the node behind the ``views`` that end in ``x``; with ``alone`` stop at a view with several users."""
    while x.target in views and not (alone and len(x.users) > 1):
        x = _arguments(x)[0]
    return x


def _arguments(node: Node) -> Any:
    return node.args


def _call(target: Any, x: Node, sizes: Sequence[int]) -> Node:
    """Return a new node ``target(x, sizes)``."""
    node = x.graph.call_function(target, (x, list(sizes)))
    node.meta["val"] = target(x.meta["val"], list(sizes))
    return node


def _erase_unused(x: Node) -> None:
    """Erase ``x`` if nothing reads it, and then likewise the nodes that it read."""
    if x.users or x.op != "call_function":
        return
    inputs = x.all_input_nodes
    x.graph.erase_node(x)
    for each in inputs:
        _erase_unused(each)
