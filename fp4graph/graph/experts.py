"""Writes a product with copies of experts' matrices, ``w[ids]``, as a grouped product of sorted tokens.

Models compute ``Y[s] = A[s] @ W[ids[s]]``, with ``A [S, P, K]`` and ``W [E, K, N]``, by copying a matrix for every s
and a batched product. A grouped product of rows sorted by expert computes the same and copies nothing:

    order      = argsort(ids)         stable
    ends[e]    = P · #{s : ids[s] <= e}
    Y[order]   = grouped(A[order], W, ends)

:func:`follow` marks the nodes whose results are copies; :func:`written_out` groups a product with them. A product
with copies that were changed or written into is an error: the grouped product would use the unchanged matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp4graph import torch_internals
from fp4graph.graph.operations import operation_of
from fp4graph.graph.products import Product, name_of, origin, value_of, view_source
from fp4graph.numerics.declare import operator

#: Key in a node's meta data: the number of axes of the parameter that the node is a view of.
AXES = "fp4graph_axes"
#: Key in a node's meta data: a :class:`Copies`, or the reason for its absence: CHANGED or OTHERWISE.
COPIES = "fp4graph_copies"
#: An operation computed the node's result from copies, as ``2·w[ids]``.
CHANGED = "changed"
#: The node's result holds copies that were picked or viewed in a way that :class:`Copies` cannot describe.
OTHERWISE = "otherwise"
#: Operations that pick parts of a tensor by a tensor of indices, and the position of the argument that they pick from.
_PICKS = {"index_select": 0, "gather": 0, "take_along_dim": 0, "index": 0, "embedding": 1}
_CASTS = frozenset({"to", "float", "half", "bfloat16", "type_as", "_to_copy"})
_JOINS = frozenset({"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"})


@dataclass(frozen=True)
class Copies:
    """The result of a node, ``stack[ids]``, perhaps transposed and cast.

    Attributes:
        nodes: the stack of matrices and the indices, as nodes.
        tensors: the same as tensors.
        writes: the number of writes before the pick.
        versions: the versions of ``tensors`` at the pick, and of the result when it was made.
        wraps: whether negative indices count from the end, as in ``w[ids]``; ``index_select`` refuses them.
        dtype: the dtype that the copies were cast to, or None.
    """

    nodes: tuple[Node, Node]
    tensors: tuple[Tensor, Tensor]
    writes: int
    versions: tuple[int, ...]
    wraps: bool
    transposed: bool = False
    dtype: torch.dtype | None = None

    def viewed(self, node: Node, result: object) -> Copies | str:
        """Return the copies as ``node`` views or casts them; OTHERWISE if no :class:`Copies` describes the result."""
        if not isinstance(result, Tensor):
            return OTHERWISE
        view = replace(self, versions=(*self.versions[:2], _version(result)))
        if _swaps_matrix(node, result.dim()):
            return replace(view, transposed=not self.transposed)
        if name_of(node) in _CASTS and self.dtype is None:
            return replace(view, dtype=result.dtype)
        return view if name_of(node) in ("contiguous", "clone", "detach") else OTHERWISE

    def is_written(self, writes: int, copies: Tensor) -> bool:
        """Return whether anything was written since the pick, given the number of ``writes`` so far.

        A write into any tensor counts, because a graph does not show which tensors share memory. Versions show writes
        that are not operations of the forward, such as those of a backward inside of it.
        """
        return (self.writes, *self.versions) != (writes, *map(_version, (*self.tensors, copies)))

    def multiply(
        self, tokens: Tensor, w: Tensor, ids: Tensor, *, weight_first: bool, detached: bool, dtype: torch.dtype
    ) -> Tensor:
        """Return ``tokens[s] @ w[ids[s]]`` for every s, by a grouped product, without a host synchronization.

        Args:
            tokens: ``[..., P, K]``, or ``[..., K, P]`` where the weight comes first; the leading axes may be broadcast
                to those of ``ids``.
            w: ``[E, K, N]`` if the copies are first and transposed, or second and not transposed; else ``[E, N, K]``.
            detached: whether ``w`` gets no gradient.
            dtype: the dtype of the product under the caller's autocast.

        Returns:
            ``[*ids.shape, P, N]``, or ``[*ids.shape, N, P]`` where the weight comes first.

        Raises:
            IndexError: on a CPU, an index that torch's own indexing refuses; other devices fail as in torch's indexing.
        """
        x = tokens.mT if weight_first else tokens
        w = w.detach() if detached else w
        w = w if self.dtype is None else w.to(self.dtype)
        w = w if weight_first == self.transposed else w.mT
        rows, picks = x.shape[-2], ids.numel()
        # Indexing the experts' numbers raises the same errors as indexing the matrices, and turns a negative index into
        # the expert's number.
        numbers, flat = torch.arange(w.shape[0], device=x.device), ids.flatten().to(x.device)
        experts = numbers[flat] if self.wraps else numbers.index_select(0, flat)
        experts, order = torch.sort(experts, stable=True)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True) * rows
        x = x.expand(*ids.shape, *x.shape[-2:]).reshape(picks, rows, x.shape[-1])
        y: Tensor = EXPERTS_MM(x.index_select(0, order).flatten(0, 1), w, ends, dtype)
        y = y.reshape(picks, rows, w.shape[2])
        y = torch.empty_like(y).index_copy(0, order, y).reshape(*ids.shape, rows, w.shape[2])
        return y.mT.contiguous() if weight_first else y


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def follow(node: Node, result: object, inputs: Mapping[Node, Tensor], writes: int) -> None:
    """Mark ``node`` if its ``result`` is a view of a parameter, or holds copies of a parameter's matrices.

    Args:
        inputs: the node's input tensors.
        writes: the number of operations so far that wrote into a tensor.
    """
    if node.op not in ("call_function", "call_method"):
        return
    source, picked = view_source(node), _picked_from(node)
    before = source or picked
    if before is None:
        if operation_of(node) is None and _changes_copies(node, result, inputs):
            node.meta[COPIES] = CHANGED
        return
    copies, axes = before.meta.get(COPIES), before.meta.get(AXES, 0)
    if source is not None and axes:
        node.meta[AXES] = axes
    if copies is not None:
        node.meta[COPIES] = copies.viewed(node, result) if isinstance(copies, Copies) else copies
    elif picked is not None and axes >= 3:
        node.meta[COPIES] = _copies(node, result, inputs, writes) or OTHERWISE


def _picked_from(node: Node) -> Node | None:
    """Return the node that ``node`` picks parts of by a tensor of indices, or None."""
    name = name_of(node)
    if (position := _PICKS.get(name)) is not None and len(node.args) > position:
        source = node.args[position]
        return source if isinstance(source, Node) else None
    if name not in ("getitem", "__getitem__") or (source := view_source(node)) is None:
        return None
    return source if any(isinstance(index, Node) for index in _listed(node.args[1])) else None


def _copies(node: Node, result: object, inputs: Mapping[Node, Tensor], writes: int) -> Copies | None:
    """Read ``w[ids]``, ``w[ids, :]`` or ``w.index_select(0, ids)`` of a stack of matrices; None for other picks."""
    name, args = name_of(node), node.args
    stack, wraps = args[0], name in ("getitem", "__getitem__")
    if wraps:
        index, *trailing = _listed(args[1])
        by_matrix = all(axis is Ellipsis or axis == slice(None) for axis in trailing)
    else:
        index = args[-1]
        by_matrix = name == "index_select" and len(args) == 3 and args[1] in (0, -3)
    if not by_matrix or not isinstance(stack, Node) or not isinstance(index, Node) or not isinstance(result, Tensor):
        return None
    w, ids = tensors = inputs[stack], inputs[index]
    if w.dim() != 3 or ids.dtype not in (torch.int32, torch.int64) or ids.dim() + 2 != result.dim():
        return None
    # Without a graph, the stack stays in memory until the product: free for a parameter or its view, not for a cast.
    parameter = value_of(origin(stack)[0])
    if not isinstance(w, torch_internals.FakeTensor) and not (
        w is parameter or (parameter is not None and torch_internals.is_alias(w, parameter))
    ):
        return None
    return Copies((stack, index), tensors, writes, tuple(map(_version, (*tensors, result))), wraps)


def _changes_copies(node: Node, result: object, inputs: Mapping[Node, Tensor]) -> bool:
    """Return whether ``node`` computes new matrices from experts' copies, as ``2·w[ids]`` or ``relu(w[ids])``.

    It does if the result's matrices are as large as the copies, and those of other inputs (a scale, a mask, a gate) are
    smaller. Scores plus a picked bias remain scores, and copies joined with another tensor are activations.
    """

    def matrix(x: Tensor) -> int | torch.SymInt:
        return prod(x.shape[-2:])

    copied = [x for n, x in inputs.items() if COPIES in n.meta and x.dim() >= 3]
    operands = [x for n, x in inputs.items() if not (COPIES in n.meta and x.dim() >= 3) and x.is_floating_point()]
    if not copied or not isinstance(result, Tensor) or (operands and name_of(node) in _JOINS):
        return False
    return all(statically_known_true(matrix(result) >= matrix(x)) for x in copied) and all(
        statically_known_true(matrix(operand) < matrix(x)) for operand in operands for x in copied
    )


def _swaps_matrix(node: Node, axes: int) -> bool:
    """Return whether ``node`` exchanges the last two axes of a tensor with ``axes`` axes, and does nothing else."""
    name, last = name_of(node), {axes - 2, axes - 1}
    if name in ("mT", "adjoint"):
        return True
    if name == "getattr":
        return str(node.args[1]) == "mT"
    flat = [axis for argument in (*node.args[1:], *node.kwargs.values()) for axis in _listed(argument)]
    order = [axis % axes for axis in flat if isinstance(axis, int)]
    if name in ("transpose", "swapaxes"):
        return set(order) == last
    return name == "permute" and order == [*range(axes - 2), axes - 1, axes - 2]


def _listed(argument: Any) -> list[Any]:
    return list(argument) if isinstance(argument, tuple | list) and argument else [argument]


@dataclass(frozen=True)
class WrittenOut:
    """A function that computes a product with copies by other operations, and its arguments, as nodes and tensors."""

    function: Callable[..., Tensor]
    nodes: tuple[Node, Node, Node]
    tensors: tuple[Tensor, Tensor, Tensor]


def written_out(product: Product, writes: int, *, weight_first: bool) -> WrittenOut | None:
    """Write ``A @ W[ids]``, or ``W[ids] @ A`` where ``weight_first``, as a grouped product.

    Return None where the grouped product cannot be shown to be equal. It reads W and the indices at the product, not
    where the copies were made, so nothing may be written in between.
    """
    factor, activations = (product.a, product.b) if weight_first else (product.b, product.a)
    copies, matrices, tokens = factor.meta[COPIES], value_of(factor), value_of(activations)
    if not isinstance(copies, Copies) or matrices is None or tokens is None:
        return None
    if product.form != "matmul" or product.addend is not None or product.alpha != 1:
        return None
    stack, ids = copies.tensors
    batch = tokens.shape[:-2]
    if len(batch) > ids.dim() or not all(
        statically_known_true(size == 1) or statically_known_true(size == picks)
        for size, picks in zip(reversed(batch), reversed(ids.shape), strict=False)
    ):
        return None
    if copies.is_written(writes, matrices):
        return None
    out = value_of(product.node)
    function = partial(
        copies.multiply,
        weight_first=weight_first,
        # Copies that were picked under no_grad give their matrices no gradient.
        detached=stack.requires_grad and not matrices.requires_grad,
        dtype=tokens.dtype if out is None else out.dtype,
    )
    return WrittenOut(function, (activations, *copies.nodes), (tokens, *copies.tensors))


def _exact(tokens: Tensor, matrices: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply in high precision with one copy of a matrix for each token, as the model would."""
    ids = torch.searchsorted(ends, torch.arange(tokens.shape[0], device=ends.device), right=True)
    return torch.bmm(tokens.unsqueeze(1), matrices[ids]).squeeze(1)


#: The grouped product of tokens ``[T, K]``, matrices ``[E, K, N]`` and cumulative numbers of tokens ``[E]``. Unlike
#: torch's grouped product, it takes any floating-point dtype and any sizes.
EXPERTS_MM = operator(
    "experts_mm(Tensor tokens, Tensor matrices, Tensor ends, ScalarType dtype) -> Tensor",
    lambda tokens, matrices, ends, dtype: tokens.new_empty((tokens.shape[0], matrices.shape[2]), dtype=dtype),
    CompositeImplicitAutograd=_exact,
)
