"""Reads single nodes: which are matrix products, and why other matrix work is not one.

A new product operation is added here, to ``_READERS``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """One node that computes ``beta·addend + alpha·A @ B``.

    ``form`` is ``linear`` (B stored ``[N, K]``), or ``matmul`` (B ``[..., K, N]``); ``addend`` the bias or accumulator.
    """

    node: Node
    form: str
    a: Node
    b: Node
    addend: Node | None = None
    alpha: float = 1
    beta: float = 1

    @property
    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The fake tensors that the factors stand for."""
        a, b = value_of(self.a), value_of(self.b)
        assert a is not None, "read_product checked it"
        assert b is not None, "read_product checked it"
        return a, b


@dataclass(frozen=True)
class NoProduct:
    """Matrix work that cannot be a site: the name of the operation, and why."""

    op: str
    reason: str


def _linear(node: Node, input: Node, weight: Node, bias: Node | None = None) -> Product:  # torch's name
    return Product(node, "linear", input, weight, bias)


def _matmul(node: Node, a: Node, b: Node | None = None, **names: Node) -> Product:
    other = b if b is not None else names.get("other", names.get("mat2", names.get("tensor2")))
    assert other is not None
    return Product(node, "matmul", names.get("input", a), other)


def _addmm(node: Node, addend: Node, a: Node, b: Node, *, beta: float = 1, alpha: float = 1) -> Product:
    return Product(node, "matmul", a, b, addend, alpha=alpha, beta=beta)


_READERS: Mapping[Any, Callable[..., Product]] = {
    torch._C._nn.linear: _linear,
    nn.functional.linear: _linear,
    aten.linear.default: _linear,
    **dict.fromkeys((torch.matmul, torch.linalg.matmul, torch.mm, torch.bmm, operator.matmul), _matmul),
    **dict.fromkeys((aten.matmul.default, aten.mm.default, aten.bmm.default), _matmul),
    **dict.fromkeys(("matmul", "__matmul__", "mm", "bmm"), _matmul),
    **dict.fromkeys((torch.addmm, torch.baddbmm, aten.addmm.default, aten.baddbmm.default, "addmm", "baddbmm"), _addmm),
}

_CONVOLUTIONS = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]
_RECURRENT = ["lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"]
_NOT_SITES: Mapping[Any, NoProduct] = {
    **{
        getattr(library, name): NoProduct("conv", "convolutions are kept in high precision")
        for library in (torch, nn.functional)
        for name in _CONVOLUTIONS
    },
    **{
        getattr(torch, name): NoProduct("recurrent", "recurrent layers are kept in high precision")
        for name in _RECURRENT
    },
    nn.functional.bilinear: NoProduct("bilinear", "three factors"),
    torch.addbmm: NoProduct("addbmm", "sums over the batch; write it as a matmul to quantize it"),
    torch.tensordot: NoProduct("tensordot", "write it as a matmul or einsum to quantize it"),
    torch.chain_matmul: NoProduct("chain_matmul", "write it as matmuls to quantize it"),
    torch.linalg.multi_dot: NoProduct("multi_dot", "write it as matmuls to quantize it"),
    torch.outer: NoProduct("outer", "no contraction axis"),
    torch.mv: NoProduct("mv", "a matrix-vector product"),
    torch.dot: NoProduct("dot", "a vector product"),
    **dict.fromkeys(
        (torch.einsum, torch.functional.einsum, aten.einsum.default),
        NoProduct("einsum", "not a product of two matrices"),
    ),
    nn.functional.multi_head_attention_forward: NoProduct("attention", "could not be expanded"),
}
_SDPA = (nn.functional.scaled_dot_product_attention, aten.scaled_dot_product_attention.default)


#: Products that torch's FLOP counter does not count: parts of their names, and whole names.
_UNCOUNTED, _UNCOUNTED_NAMES = ("grouped_mm", "scaled_mm"), ("_int_mm",)
#: Libraries in which a reader or the FLOP counter knows every operation that multiplies matrices.
_KNOWN_LIBRARIES = frozenset(
    {"aten", "prims", "prim", "inductor", "c10d", "_c10d_functional", "c10d_functional", "fsdp"}
)


def operation(node: Node) -> Callable[..., Any]:
    """Return the function that ``node`` calls; a method is a function of its object."""
    target: Any = node.target
    if not isinstance(target, str):
        return target  # type: ignore[no-any-return]
    return lambda owner, *args, **kwargs: getattr(owner, target)(*args, **kwargs)


def is_uncounted_product(node: Node) -> bool:
    """Return whether ``node`` is known by its name to multiply matrices, in a way for which there is no reader."""
    name = name_of(node)
    return name in _UNCOUNTED_NAMES or any(part in name for part in _UNCOUNTED)


def is_foreign(node: Node) -> bool:
    """Return whether ``node`` calls an operation of an unknown library (``torch.library.custom_op``)."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[0] not in _KNOWN_LIBRARIES
    return isinstance(target, torch._ops.OpOverloadPacket) and (
        target._qualified_op_name.partition("::")[0] not in _KNOWN_LIBRARIES
    )


def is_sdpa(node: Node) -> bool:
    """Return whether ``node`` is fused attention."""
    return node.op == "call_function" and node.target in _SDPA


def is_product(node: Node) -> bool:
    """Return whether :func:`read_product` has a reader for ``node``."""
    return node.op in ("call_function", "call_method") and node.target in _READERS


def read_product(node: Node) -> Product | NoProduct | None:
    """Read ``node``; None where it does no matrix work that is known here."""
    if node.op not in ("call_function", "call_method"):
        return None
    reader = _READERS.get(node.target)
    if reader is None:
        if is_sdpa(node):
            return NoProduct("sdpa", "fused attention is kept in high precision unless a rule targets op: sdpa")
        return _NOT_SITES.get(node.target)
    op = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    if "out" in node.kwargs:
        return NoProduct(op, "writes into out=")
    product = reader(node, *node.args, **node.kwargs)
    a, b = value_of(product.a), value_of(product.b)
    if a is None or b is None or not (a.is_floating_point() and b.is_floating_point()):
        return NoProduct(op, "not floating point")
    if a.dim() < (1 if product.form == "linear" else 2) or b.dim() < 2:
        return NoProduct(op, "a matrix-vector product")
    return product


def value_of(node: Any) -> torch.Tensor | None:
    """Return the fake tensor that ``node`` stands for, or None."""
    value = node.meta.get("example_value", node.meta.get("val")) if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


#: Operations that show the same numbers in another shape, layout or dtype: a weight is followed through them.
_VIEW_NAMES = frozenset({
    "t", "transpose", "permute", "view", "reshape", "contiguous", "to", "float", "half", "bfloat16", "type_as",
    "chunk", "split", "unbind", "narrow", "select", "unsqueeze", "squeeze", "expand", "detach", "clone", "flatten",
    "unflatten", "swapaxes", "adjoint", "getitem", "__getitem__", "getattr", "slice", "alias", "_to_copy",
    "_unsafe_view", "numpy_T", "mT", "T", "tensor_split", "movedim", "split_with_sizes",
})  # fmt: skip


def view_source(node: Node) -> Node | None:
    """Return the node that ``node`` is a view or cast of, or None."""
    if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], Node):
        return None
    return node.args[0] if name_of(node) in _VIEW_NAMES else None


#: Key in the meta data of an input: the operation that made the tensor, where it is known.
PRODUCER = "fp4graph_producer"
#: Views that may exchange the axes of a matrix.
_TRANSPOSITIONS = frozenset({"t", "transpose", "numpy_T", "mT", "T", "adjoint", "swapaxes", "swapdims", "permute"})


def transposes(views: tuple[Node, ...]) -> bool:
    """Return whether a chain of views shows a matrix transposed."""
    odd = False
    for view in views:
        name = str(view.args[1]) if name_of(view) == "getattr" else name_of(view)
        if name == "permute":
            order = [axis for axis in view.args[1:] if isinstance(axis, int)] or list(view.args[1])  # type: ignore[arg-type]
            odd ^= [axis % 2 for axis in order] == [1, 0] if len(order) == 2 else False
        else:
            odd ^= name in _TRANSPOSITIONS
    return odd


def producer_of(node: Node) -> str | None:
    """Return the operation that computed ``node``, past views, casts and dropout; "swiglu" for silu(x)·y."""
    while (source := view_source(node)) is not None or name_of(node) == "dropout":
        node = source if source is not None else node.args[0]  # type: ignore[assignment]
    if node.op == "placeholder":
        return node.meta.get(PRODUCER)
    if name_of(node) == "mul" and any(isinstance(arg, Node) and name_of(arg) == "silu" for arg in node.args):
        return "swiglu"
    return "sdpa" if is_sdpa(node) else name_of(node)


def name_of(node: Node) -> str:
    """Return the name of the operation, without its library and overload."""
    target: Any = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", target))
