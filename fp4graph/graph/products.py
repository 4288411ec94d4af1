"""Reads single nodes: the two factors of a product, and the views and producers of a tensor.

:data:`fp4graph.graph.operations.TABLE` says which reader belongs to which operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fp4graph import torch_internals
from fp4graph.numerics.sharding import is_sharded
from fp4graph.policy.match import PRODUCERS


@dataclass(frozen=True)
class Product:
    """One node that computes ``beta·addend + alpha·A @ B``.

    ``form`` is ``linear`` (B stored ``[N, K]``), ``matmul`` (B ``[..., K, N]``), ``turned`` (``B @ A + addend`` of a
    node that multiplies a weight B ``[..., N, K]`` with A ``[..., K, T]``; see :meth:`turned`) or ``grouped`` (A
    ``[T, K]`` with the tokens sorted by expert, B ``[E, K, N]``, ``ends`` the cumulative numbers of tokens). ``addend``
    is the bias or accumulator, ``out_dtype`` the dtype that a call asks for, and ``autocast`` whether torch.autocast
    casts the factors, which torch's grouped product leaves as they are.

    A new form needs: a reader that returns it, :func:`objection` to say which factors it takes, its :attr:`shapes` and
    :attr:`by_columns`, the kind of site in ``Describer._product``, its FLOPs in
    :func:`fp4graph.graph.flops.of_product`, and its computation in :func:`fp4graph.graph.functions.site_function`.
    """

    node: Node
    form: str
    a: Node
    b: Node
    addend: Node | None = None
    alpha: float = 1
    beta: float = 1
    ends: Node | None = None
    out_dtype: torch.dtype | None = None
    autocast: bool = True

    @property
    def by_columns(self) -> bool:
        """True if the second factor is stored ``[..., K, N]``, not ``[..., N, K]``."""
        return self.form not in ("linear", "turned")

    @property
    def shapes(self) -> tuple[tuple[int | torch.SymInt, ...], tuple[int | torch.SymInt, ...]]:
        """The shapes of the factors; of A, ``[..., M, K]`` in every form."""
        a, b = self.values
        return tuple(a.mT.shape if self.form == "turned" else a.shape), tuple(b.shape)

    @property
    def outputs(self) -> int | torch.SymInt:
        """N, the number of the second factor's output features."""
        return self.shapes[1][-1 if self.by_columns else -2]

    def turned(self) -> Product:
        """Return ``A @ B``, whose first factor is the weight, as the transposed product ``Bᵀ @ Aᵀ``."""
        return replace(self, form="turned", a=self.b, b=self.a)

    @property
    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The fake tensors that the factors stand for."""
        a, b = value_of(self.a), value_of(self.b)
        assert a is not None, "objection() checked it"
        assert b is not None, "objection() checked it"
        return a, b


def linear(node: Node, input: Node, weight: Node, bias: Node | None = None) -> Product:  # torch's name
    """Read ``A @ Bᵀ + bias``."""
    return Product(node, "linear", input, weight, bias)


def matmul(node: Node, a: Node, b: Node) -> Product:
    """Read ``A @ B``."""
    return Product(node, "matmul", a, b)


def reversed_matmul(node: Node, b: Node, a: Node) -> Product:
    """Read ``b.__rmatmul__(a)``, which is ``A @ B``."""
    return Product(node, "matmul", a, b)


def addmm(node: Node, addend: Node, a: Node, b: Node, *, beta: float = 1, alpha: float = 1) -> Product:
    """Read ``beta·addend + alpha·A @ B``."""
    return Product(node, "matmul", a, b, addend, alpha=alpha, beta=beta)


def grouped(
    node: Node, a: Node, b: Node, offs: Node | None = None, bias: Node | None = None, out_dtype: Any = None
) -> Product:
    """Read ``A_e @ B_e`` of every expert e."""
    return Product(node, "grouped", a, b, bias, ends=offs, out_dtype=out_dtype, autocast=False)


def objection(product: Product) -> str | None:
    """Return why ``product`` cannot be a site, or None."""
    a, b = value_of(product.a), value_of(product.b)
    for value in (a, b):
        if value is not None and value.is_nested:
            return "a factor is a nested tensor; pass its values (x.values()), or pad it (x.to_padded_tensor(0.0))"
        if value is not None and value.layout is not torch.strided:
            return f"a factor is sparse ({value.layout}); make it dense (to_dense())"
        if is_quantized_elsewhere(value):
            return f"a factor is a {type(value).__name__}, which another library quantizes"
    if a is None or b is None or not (a.is_floating_point() and b.is_floating_point()):
        complex_numbers = any(value is not None and value.is_complex() for value in (a, b))
        return "complex numbers, which no format here rounds" if complex_numbers else "not floating point"
    if product.form == "grouped":
        return _grouped_objection(product, a, b)
    if a.dim() < (1 if product.form == "linear" else 2) or b.dim() < 2:
        return "a matrix-vector product"
    return None


def _grouped_objection(product: Product, a: torch.Tensor, b: torch.Tensor) -> str | None:
    if a.dim() != 2 or b.dim() != 3 or product.ends is None:
        return "it does not multiply tokens [T, K], sorted by expert and with offsets, with weights [E, K, N]"
    if product.addend is not None:
        return "it adds a bias; add the bias afterwards to quantize it"
    return None if product.out_dtype in (None, a.dtype) else "it asks for an out_dtype; cast the result instead"


def is_quantized_elsewhere(x: object) -> bool:
    """Return whether ``x`` is a tensor of another library that is made of several tensors, as torchao's weights are."""
    return isinstance(x, torch.Tensor) and not is_sharded(x) and torch_internals.is_traceable_wrapper_subclass(x)


def operation(node: Node) -> Callable[..., Any]:
    """Return the function that ``node`` calls; of a method, a function whose first argument is the object."""
    target: Any = node.target
    if not isinstance(target, str):
        return target  # type: ignore[no-any-return]
    return lambda owner, *args, **kwargs: getattr(owner, target)(*args, **kwargs)


def value_of(node: Any) -> torch.Tensor | None:
    """Return the fake tensor that ``node`` stands for, or None."""
    value = node.meta.get("example_value", node.meta.get("val")) if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


#: Operations that show the same numbers in another shape, layout or dtype. The pass follows a weight through them.
_VIEW_NAMES = frozenset({
    "t", "transpose", "permute", "view", "reshape", "contiguous", "to", "float", "half", "bfloat16", "double", "type",
    "type_as", "cpu", "cuda", "chunk", "split", "unbind", "narrow", "select", "unsqueeze", "squeeze", "expand",
    "detach", "clone", "flatten", "ravel", "unflatten", "swapaxes", "swapdims", "adjoint", "getitem", "__getitem__",
    "getattr", "slice", "alias", "_to_copy", "_unsafe_view", "numpy_T", "mT", "T", "matrix_H", "mH", "tensor_split",
    "hsplit", "vsplit", "unsafe_chunk", "unsafe_split", "movedim", "moveaxis", "split_with_sizes", "view_as",
    "reshape_as", "expand_as", "broadcast_to", "_get_data_attr", "requires_grad_", "pos", "positive", "conj",
    "resolve_conj", "to_dense", "to_sparse", "to_sparse_coo", "to_sparse_csr", "to_sparse_csc", "to_sparse_bsr",
    "to_sparse_bsc", "_to_sparse",
})  # fmt: skip


def view_source(node: Node) -> Node | None:
    """Return the node that ``node`` is a view or cast of, or None."""
    return _first(node) if name_of(node) in _VIEW_NAMES else None


def rows_of(node: Node) -> Node | None:
    """Return the node that ``node`` is a view or cast of, or picks rows from, as ``x[ids]``; None for any other."""
    return _first(node) if name_of(node) == "index_select" else view_source(node)


def _first(node: Node) -> Node | None:
    """Return the first argument of a call if it is a node, else None."""
    called = node.op in ("call_function", "call_method") and node.args
    return node.args[0] if called and isinstance(node.args[0], Node) else None


def origin(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """Return the node at the start of the chain of views that ends at ``node``, and the chain, the first view first."""
    chain: list[Node] = []
    while (source := view_source(node)) is not None:
        chain.append(node)
        node = source
    return node, tuple(reversed(chain))


#: Key in the meta data of an input: the operation that made the tensor, where it is known.
PRODUCER = "fp4graph_producer"
#: Key in the meta data of a node that keeps no value: the shape of its tensor.
SHAPE = "fp4graph_shape"
#: Views that may exchange the axes of a matrix.
_TRANSPOSITIONS = frozenset({
    "t", "transpose", "numpy_T", "mT", "T", "adjoint", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "H",
    "matrix_H", "mH",
})  # fmt: skip


def transposes(views: tuple[Node, ...]) -> bool:
    """Return whether a chain of views shows a matrix ``[N, K]``, or each of a stack ``[E, N, K]``, transposed."""
    sizes = _shape(views[0].args[0]) if views else ()
    shown = _shown(views, sizes) if len(sizes) > 1 else None
    if shown is not None and sizes[-1] != 1:
        strides, plain = shown.stride()[-2:], (sizes[-1], 1)
        if strides in (plain, plain[::-1]):
            return bool(strides != plain)
    transposed = False  # strides do not tell: a view took an argument from the graph, or shows other places
    for view in views:
        name = str(view.args[1]) if name_of(view) == "getattr" else name_of(view)
        if name in _TRANSPOSITIONS:
            # All sizes differ, so that the shape shows where each axis went.
            sizes = tuple(range(2, 2 + len(_shape(view.args[0]))))
            shown = operation(view)(torch.empty(sizes, device="meta"), *view.args[1:], **view.kwargs).shape
            transposed ^= len(sizes) > 1 and tuple(shown[-2:]) == (sizes[-1], sizes[-2])
    return transposed


#: Views that keep the places of the numbers.
_IN_PLACE = frozenset({
    "contiguous", "to", "float", "half", "bfloat16", "double", "type", "type_as", "cpu", "cuda", "detach", "clone",
    "alias", "_to_copy", "_get_data_attr", "requires_grad_", "pos", "positive", "conj", "resolve_conj", "to_dense",
})  # fmt: skip


def shown_part(views: tuple[Node, ...], factor: Node, by_columns: bool, transposed: bool) -> tuple[range, range] | None:
    """Return the rows and columns of a matrix ``[N, K]`` that a chain of views shows: the ``factor`` of a product.

    Args:
        by_columns: whether the factor is ``[..., K, N]``. transposed: whether the matrix is stored ``[K, N]``.

    Returns:
        None if the chain shows the numbers in another shape, or what only the running graph knows.
    """
    sizes = _shape(views[0].args[0] if views else factor)
    if len(sizes) != 2:
        return None
    shown = _shown(views, sizes)
    if shown is None:
        return None
    stored = torch.empty(sizes, device="meta")
    whole, shown = stored.mT if transposed else stored, shown.mT if by_columns else shown
    repeated = all(size == 1 or stride == 0 for size, stride in zip(shown.shape[:-2], shown.stride(), strict=False))
    if not repeated or shown.stride()[-2:] != whole.stride():
        return None
    row, column = divmod(int(shown.storage_offset()), max(whole.stride()))
    row, column = (column, row) if transposed else (row, column)
    return range(row, row + shown.shape[-2]), range(column, column + shown.shape[-1])


def _shown(views: tuple[Node, ...], sizes: tuple[Any, ...]) -> torch.Tensor | None:
    """Return what a chain of views shows of a tensor of ``sizes``, without data; None if an argument is a node, or if
    the chain copies, as ``w[[3, 1]]`` does."""
    if any(len(view.all_input_nodes) > 1 for view in views):
        return None
    shown: Any = (stored := torch.empty(sizes, device="meta"))
    try:
        for view in views:
            if name_of(view) not in _IN_PLACE:
                shown = operation(view)(shown, *view.args[1:], **view.kwargs)
    except (TypeError, RuntimeError):
        return None
    if not isinstance(shown, torch.Tensor) or not torch_internals.is_alias(shown, stored):
        return None
    return shown if shown.dim() > 1 else None


def _shape(node: Any) -> tuple[Any, ...]:
    """Return the shape of the tensor that ``node`` stands for."""
    value = value_of(node)
    return node.meta[SHAPE] if value is None else tuple(value.shape)


#: The names of x·y: torch's, Python's, and those that write into x.
_TIMES = frozenset({"mul", "multiply", "imul", "mul_"})


def producer_of(node: Node) -> str | None:
    """Return the name of the operation that computed ``node``, before views, casts, picks of rows and dropout;
    "swiglu" for silu(x)·y."""
    while (source := _first(node) if name_of(node) == "dropout" else rows_of(node)) is not None:
        node = source
    if node.op == "placeholder":
        return node.meta.get(PRODUCER)
    factors = (origin(arg)[0] for arg in node.args if isinstance(arg, Node))
    if name_of(node) in _TIMES and any(name_of(factor) == "silu" for factor in factors):
        return "swiglu"
    name = name_of(node)
    return "sdpa" if name == "scaled_dot_product_attention" else PRODUCERS.get(name, name)


def name_of(node: Node) -> str:
    """Return the name of the operation, without its library and overload."""
    target = torch_internals.packet_of(node.target)
    return str(getattr(target, "__name__", target))
