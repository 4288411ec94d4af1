"""Reads single nodes: the two factors of a product, and the views and producers of a tensor.

Which reader belongs to which operation is written in :data:`fp4graph.graph.operations.TABLE`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp4graph import torch_internals
from fp4graph.numerics.sharding import is_sharded
from fp4graph.ops.gathered import Gathering


@dataclass(frozen=True)
class Product:
    """One node that computes ``beta·addend + alpha·A @ B``.

    ``form`` is ``linear`` (B stored ``[N, K]``), ``matmul`` (B ``[..., K, N]``), ``grouped`` (A ``[T, K]`` with the
    tokens sorted by expert, B ``[E, K, N]``, ``ends`` the cumulative numbers of tokens), or ``gathered`` (A
    ``[..., P, K]``, of which P rows are multiplied with one matrix of B ``[E, K, N]``, ``ends`` the index of each
    matrix; the node's own second factor is ``B[ends]``, and ``gathering`` says how it is written). ``addend`` is the
    bias or accumulator.

    A new form needs: a reader that returns it, :func:`objection` to say which factors it takes, its :attr:`shapes` and
    :attr:`by_columns`, the kind of site in ``Finder._product``, its FLOPs in
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
    gathering: Gathering | None = None

    @property
    def by_columns(self) -> bool:
        """Whether the second factor is stored ``[..., K, N]``, not ``[..., N, K]``."""
        return self.form != "linear" and (self.gathering is None or self.gathering.by_columns)

    @property
    def shapes(self) -> tuple[tuple[int | torch.SymInt, ...], tuple[int | torch.SymInt, ...]]:
        """The shapes of the factors as the site has them; of gathered matrices ``[T, K]`` and ``[E, K, N]``."""
        a, b = (tuple(value.shape) for value in self.values)
        if self.gathering is None:
            return a, b
        rows, columns = reversed(a[-2:]) if self.gathering.weight_first else a[-2:]
        ids = value_of(self.ends)
        assert ids is not None, "gathered() checked it"
        return (prod(ids.shape) * rows, columns), b if self.by_columns else (b[0], b[2], b[1])

    @property
    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The fake tensors that the factors stand for."""
        a, b = value_of(self.a), value_of(self.b)
        assert a is not None, "objection() checked it"
        assert b is not None, "objection() checked it"
        return a, b


@dataclass(frozen=True)
class NoProduct:
    """Matrix work that cannot be a site: the name of the operation, and why.

    ``weighs`` says that one factor is a weight, also where it is no parameter.
    """

    op: str
    reason: str
    weighs: bool = False


def linear(node: Node, input: Node, weight: Node, bias: Node | None = None) -> Product:  # torch's name
    """Read ``A @ Bᵀ + bias``."""
    return Product(node, "linear", input, weight, bias)


def matmul(node: Node, a: Node, b: Node | None = None, **names: Node) -> Product:
    """Read ``A @ B``."""
    other = b if b is not None else names.get("other", names.get("mat2", names.get("tensor2")))
    assert other is not None
    return Product(node, "matmul", names.get("input", a), other)


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
    return Product(node, "grouped", a, b, bias, ends=offs)


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
        return "only tokens [T, K] sorted by expert, with offsets, are multiplied with weights [E, K, N]"
    if product.addend is not None:
        return "it adds a bias; add the bias afterwards to quantize it"
    out = value_of(product.node)
    return None if out is None or out.dtype is a.dtype else "it asks for an out_dtype"


def is_quantized_elsewhere(x: object) -> bool:
    """Return whether ``x`` is a tensor of another library that is made of several tensors, as torchao's weights are."""
    return isinstance(x, torch.Tensor) and not is_sharded(x) and torch_internals.is_traceable_wrapper_subclass(x)


#: Operations that pick parts of a tensor by a tensor of indices, and the position of what they pick from.
_PICKS = {"index_select": 0, "gather": 0, "take_along_dim": 0, "index": 0, "embedding": 1}


def gathered_from(node: Node) -> Node | None:
    """Return the node of three axes or more that indices picked the matrices at ``node`` from, or None."""
    value, picked = value_of(node), False
    if value is None or value.dim() < 3:
        return None
    while True:
        source = gathered_source(node)
        picked = picked or source is not None
        if source is None and (source := view_source(node)) is None:
            break
        node = source
    stack = value_of(node)
    return node if picked and stack is not None and stack.dim() >= 3 else None


def gathered_source(node: Node) -> Node | None:
    """Return the node that ``node`` picks parts of by a tensor of indices, or None."""
    name = name_of(node)
    if (position := _PICKS.get(name)) is not None and len(node.args) > position:
        source = node.args[position]
        return source if isinstance(source, Node) else None
    if name not in ("getitem", "__getitem__") or (source := view_source(node)) is None:
        return None
    index = node.args[1] if isinstance(node.args[1], tuple | list) else (node.args[1],)
    return source if any(isinstance(i, Node) for i in index) else None


#: Key in a node's meta data: True for what an operation made of copies of experts' matrices, as ``2·w[ids]``.
CHANGED = "fp4graph_changed"
_JOINS = frozenset({"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack"})


def changes_copies(node: Node, result: object, inputs: Mapping[Node, torch.Tensor], copies: Container[Node]) -> bool:
    """Return whether ``node`` makes changed copies of experts' ``copies``, as ``2·w[ids]`` or ``relu(w[ids])``.

    They have as large matrices, and those of all inputs that are no copies are smaller: a scale, a mask or a gate.
    Scores to which a picked bias is added are scores, and copies that are joined with something else are activations.
    """

    def matrix(x: torch.Tensor) -> int | torch.SymInt:
        return prod(x.shape[-2:])

    own = [x for n, x in inputs.items() if n in copies and x.dim() >= 3]
    others = [x for n, x in inputs.items() if n not in copies and x.is_floating_point()]
    if not own or not isinstance(result, torch.Tensor) or (others and name_of(node) in _JOINS):
        return False
    return all(statically_known_true(matrix(result) >= matrix(x)) for x in own) and all(
        statically_known_true(matrix(other) < matrix(x)) for other in others for x in own
    )


def gathered(product: Product, *, weight_first: bool) -> Product | None:
    """Read ``A @ W[ids]``, or ``W[ids] @ A`` where ``weight_first``, as a product of form ``gathered``, or return None.

    Between the copies ``W[ids]`` and the product there may be a transposition of the matrices and a cast. Nothing may
    be written there, into whatever tensor: the site reads W and the indices where the product is, not where the copies
    were made, and which tensors share their memory cannot be known from a graph.
    """
    node, other = (product.a, product.b) if weight_first else (product.b, product.a)
    copies, tokens, transposed, casts = value_of(node), value_of(other), False, 0
    if product.form != "matmul" or product.addend is not None or copies is None or tokens is None:
        return None
    while (pick := picked_matrices(node)) is None:
        source, name = view_source(node), name_of(node)
        if source is None:
            return None
        if _swaps_matrix(node, copies.dim()):
            transposed = not transposed
        elif name in _CASTS:
            casts += 1
        elif name not in ("contiguous", "clone"):
            return None
        node = source
    stack, ids = value_of(pick.stack), value_of(pick.ids)
    if stack is None or stack.dim() != 3 or gathered_from(pick.stack) is not None or casts > 1:
        return None
    if ids is None or ids.dtype not in (torch.int32, torch.int64) or ids.dim() + 2 != copies.dim():
        return None
    batch = tokens.shape[:-2]
    if len(batch) > ids.dim() or not all(
        statically_known_true(size == 1) or statically_known_true(size == picks)
        for size, picks in zip(reversed(batch), reversed(ids.shape), strict=False)
    ):
        return None
    # Where the copies have no gradient though their matrices have one, torch gives the matrices none. It is no matter
    # in a product that runs without gradients itself, as in an evaluation.
    out = value_of(product.node)
    trains = torch.is_grad_enabled() if out is None else out.requires_grad or _changes_gradients(node, product.node)
    if trains and stack.requires_grad and not copies.requires_grad:
        return None
    if _is_written_between(node, product.node, copies):
        return None
    gathering = Gathering(weight_first, transposed, pick.wraps, copies.dtype)
    return Product(product.node, "gathered", other, pick.stack, ends=pick.ids, gathering=gathering)


@dataclass(frozen=True)
class Pick:
    """Whole parts of a tensor that a tensor of indices picks along the first axis: ``stack[ids]``.

    Attributes:
        wraps: whether negative indices count from the end; elsewhere torch refuses them.
    """

    stack: Node
    ids: Node
    wraps: bool


def picked_matrices(node: Node) -> Pick | None:
    """Read ``w[ids]``, ``w[ids, :]`` or ``w.index_select(0, ids)``; None for anything else."""
    name, args = name_of(node), (*node.args, *(node.kwargs[key] for key in ("dim", "index") if key in node.kwargs))
    if node.op not in ("call_function", "call_method") or not args or not isinstance(args[0], Node):
        return None
    if name in ("getitem", "__getitem__") and len(args) == 2:
        index, *others = args[1] if isinstance(args[1], tuple | list) and args[1] else (args[1],)
        whole = all(other is Ellipsis or other == slice(None) for other in others)
        return Pick(args[0], index, wraps=True) if isinstance(index, Node) and whole else None
    if name == "index_select" and len(args) == 3 and args[1] in (0, -3) and isinstance(args[2], Node):
        return Pick(args[0], args[2], wraps=False)
    return None


_CASTS = frozenset({"to", "float", "half", "bfloat16", "type_as", "_to_copy"})


def _swaps_matrix(node: Node, axes: int) -> bool:
    """Return whether ``node`` shows a tensor of so many ``axes`` with its last two exchanged, and nothing else."""
    name, last = name_of(node), {axes - 2, axes - 1}
    if name in ("mT", "adjoint"):
        return True
    if name == "getattr":
        return str(node.args[1]) == "mT"
    flat = [axis for given in (*node.args[1:], *node.kwargs.values()) for axis in _listed(given)]
    order = [axis % axes for axis in flat if isinstance(axis, int)]
    if name in ("transpose", "swapaxes"):
        return set(order) == last
    return name == "permute" and order == [*range(axes - 2), axes - 1, axes - 2]


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, tuple | list) else [given]


#: Key in the meta data of a node that picks, in a forward without a graph: a :class:`WritesSince`.
WRITES = "fp4graph_writes"


@dataclass
class Writes:
    """The number of operations so far that wrote into a tensor, of a forward without a graph."""

    count: int = 0


class WritesSince:
    """Whether anything was written since now, into the tensors given or by an operation that ``writes`` counts.

    Versions show what no operation of the forward wrote, say that of a backward inside of it.
    """

    def __init__(self, writes: Writes, *tensors: tuple[Node, torch.Tensor]) -> None:
        self._writes, self._count = writes, writes.count
        self._versions = [(node, _version(x)) for node, x in tensors]

    def any(self, copies: torch.Tensor) -> bool:
        """Return whether there was a write; ``copies`` are new tensors, made since then."""
        now = [None if (x := value_of(node)) is None else _version(x) for node, _ in self._versions]
        return self._writes.count != self._count or now != [v for _, v in self._versions] or bool(_version(copies))


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _is_written_between(pick: Node, product: Node, copies: torch.Tensor) -> bool:
    """Return whether an operation behind ``pick`` and before ``product`` writes into any tensor."""
    if (since := pick.meta.get(WRITES)) is not None:
        return bool(since.any(copies))
    return pick.next is pick or any(map(writes, _between(pick, product)))  # the former: in no graph


def _changes_gradients(pick: Node, product: Node) -> bool:
    """Return whether recording of gradients is switched on or off behind ``pick`` and before ``product``."""
    names = {"_set_grad_enabled", "set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode"}
    return any(name_of(node) in names for node in _between(pick, product))


def _between(first: Node, last: Node) -> Iterator[Node]:
    node = first.next
    while node is not last and node.op != "output":
        yield node
        node = node.next


#: Python packages whose functions write into no tensor but by the names and arguments that :func:`writes` knows.
_KNOWN = frozenset({"torch", "fp4graph", "einops"})


def writes(node: Node) -> bool:
    """Return whether ``node`` writes into a tensor, or may do so."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    target: Any = node.target
    if node.kwargs.get("out") is not None or _WRITES.fullmatch(name_of(node)) is not None:
        return True
    if (known := torch_internals.operator_writes(target)) is not None:
        return known
    if not inspect.isfunction(target):
        return False
    if target.__module__.partition(".")[0] not in _KNOWN:
        return True
    signature, switches = _switches(target)
    if not switches:
        return False
    try:
        given = signature.bind(*node.args, **node.kwargs).arguments
    except TypeError:
        return True
    return any(given.get(name, harmless) is not harmless for name, harmless in switches.items())


@cache
def _switches(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, object]]:
    """Return the parameters that make ``function`` write into its arguments, with the values that do not."""
    known = {"inplace": False, "max_norm": None}  # an embedding with max_norm scales its weight
    signature = inspect.signature(function)
    return signature, {name: harmless for name, harmless in known.items() if name in signature.parameters}


_WRITES = re.compile(
    r".*[^_]_"  # add_, _foreach_add_
    r"|(__)?(setitem|delitem)(__)?"  # x[i] = y
    r"|(__)?i(add|sub|mul|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift|concat)(__)?"  # x += y
)


def operation(node: Node) -> Callable[..., Any]:
    """Return the function that ``node`` calls; a method is a function of its object."""
    target: Any = node.target
    if not isinstance(target, str):
        return target  # type: ignore[no-any-return]
    return lambda owner, *args, **kwargs: getattr(owner, target)(*args, **kwargs)


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
    name = name_of(node)
    return "sdpa" if name == "scaled_dot_product_attention" else name


def name_of(node: Node) -> str:
    """Return the name of the operation, without its library and overload."""
    target = torch_internals.packet_of(node.target)
    return str(getattr(target, "__name__", target))
