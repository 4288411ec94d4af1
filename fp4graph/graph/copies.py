"""Reads the copies of experts' matrices that indices pick, ``w[ids]``, and tells what is done with them.

A product with such copies, as they are, is a grouped product of tokens that are not sorted yet (:func:`gathered`). What
an operation changed, or what something was written into, is none: it would be quantized as what it no longer is.
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
from fp4graph.graph.products import Product, name_of, origin, value_of, view_source
from fp4graph.ops.gathered import Gathering

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
    if not own or not isinstance(result, torch.Tensor) or gathered_source(node) is not None:
        return False
    if others and name_of(node) in _JOINS:
        return False
    return all(statically_known_true(matrix(result) >= matrix(x)) for x in own) and all(
        statically_known_true(matrix(other) < matrix(x)) for other in others for x in own
    )


def gathered(product: Product, *, weight_first: bool) -> Product | None:
    """Read ``A @ W[ids]``, or ``W[ids] @ A`` where ``weight_first``, as a product with a ``gathering``, or return None.

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
    return Product(product.node, "grouped", other, pick.stack, ends=pick.ids, gathering=gathering)


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


# ------------------------------------------------------------------ captured graphs
# ``outside`` is the node of the captured graph that a node of a body inside of it stands for.


def is_of_parameter(node: Node, outside: Callable[[Node], Node], is_parameter: Callable[[Node], bool]) -> bool:
    """Return whether ``node`` is copies of matrices of a parameter; a body may be given such as were picked outside."""
    stacks = map(gathered_from, (node, outside(origin(node)[0])))
    return any(stack is not None and is_parameter(outside(stack)) for stack in stacks)


def is_changed(node: Node, outside: Callable[[Node], Node]) -> bool:
    """Return whether ``node`` is made of copies of experts' matrices that an operation changed."""
    value = value_of(node)
    return value is not None and value.dim() >= 3 and CHANGED in outside(origin(node)[0]).meta


def follow(node: Node, outside: Callable[[Node], Node], is_parameter: Callable[[Node], bool]) -> None:
    """Mark ``node``, which is no product, where it changes copies of experts' matrices."""
    if node.op not in ("call_function", "call_method") or view_source(node) is not None:
        return
    inputs = {n: value for n in node.all_input_nodes if (value := value_of(n)) is not None}
    large = [n for n, value in inputs.items() if value.dim() >= 3]
    copies = {n for n in large if is_changed(n, outside) or is_of_parameter(n, outside, is_parameter)}
    if changes_copies(node, value_of(node), inputs, copies):
        node.meta[CHANGED] = True


# ------------------------------------------------------------------ forwards without a graph

#: Key in a node's meta data: True for a parameter and for a view of one.
OF_PARAMETER = "fp4graph_of_parameter"
#: Key in a node's meta data: True for copies that indices picked of a parameter of three axes or more, changed or not.
PICKED = "fp4graph_picked"


def experts_picked(node: Node) -> tuple[Node, ...]:
    """Return the nodes that a product with what ``node`` picks reads in its place: experts' matrices, and the indices.

    Both may stay in memory: the matrices are a parameter or a view of one, and an index is one number. A cast of all
    experts may not, and what was picked from one is no site.
    """
    pick = picked_matrices(node)
    if pick is None or not pick.stack.meta[OF_PARAMETER]:
        return ()
    value, first = value_of(pick.stack), pick.stack
    while (source := view_source(first)) is not None:
        first = source
    parameter = value_of(first)
    if value is None or parameter is None or value.dim() != 3:
        return ()
    shared = value is parameter or torch_internals.is_alias(value, parameter)
    return (pick.stack, pick.ids) if shared else ()


def is_picked(node: Node) -> bool:
    """Return whether ``node`` is copies that indices pick from a parameter of three axes or more, or a view of such."""
    source = view_source(node)
    if source is not None and source.meta.get(PICKED, False):
        return True
    stack = gathered_source(node)
    value = value_of(stack)
    return stack is not None and stack.meta[OF_PARAMETER] and value is not None and value.dim() >= 3
