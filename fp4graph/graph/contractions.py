"""Contractions and convolutions, written out as matrix products."""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp4graph.graph.products import value_of


def einsum_as_matmul(node: Node) -> Callable[..., Tensor] | None:
    """Return a function that computes the einsum at ``node`` as matmuls of permuted operands; None if impossible.

    More than two operands are multiplied in pairs, in the order that torch's own einsum takes. The result is contiguous
    where torch's is, so that a view of it works.
    """
    function = _as_matmuls(node)
    if function is None:
        return None
    is_contiguous = _is_contiguous(node)

    def einsum(*args: Any, **kwargs: Any) -> Tensor:
        written, operands = _read(args)
        result = function(written, *operands, **kwargs)
        return result.contiguous() if is_contiguous else result

    return einsum


def _is_contiguous(node: Node) -> bool:
    """Return whether torch's result of the einsum at ``node``, whose operands have values, is contiguous."""
    result = value_of(node)
    if result is None:  # a node without a graph, before it runs
        written, operands = einsum_operands(node)
        values = [value for operand in operands if (value := value_of(operand)) is not None]
        # In one dtype: under autocast operands may differ in theirs.
        result = torch.einsum(written, *(torch.empty_like(x, dtype=torch.float32, device="meta") for x in values))
    return result.is_contiguous()


def _as_matmuls(node: Node) -> Callable[..., Tensor] | None:
    """Return :func:`einsum_as_matmul`, whose result may have another layout."""
    written, operands = einsum_operands(node)
    values = [value_of(operand) for operand in operands]
    if not isinstance(written, str) or len(operands) < 2 or any(value is None for value in values):
        return None
    if node.kwargs.get("path") is not None:
        return None
    inputs, result = _labels(written, [value.dim() for value in values if value is not None])
    if len(operands) == 2:
        left, right = inputs.split(",")
        matmul = _pair(left, right, result)
        return None if matmul is None else lambda _, *factors, **__: matmul(*_listed(factors))
    if any(len(set(labels)) != len(labels) for labels in inputs.split(",")):
        return None

    def function(_: str, *factors: Any, **__: Any) -> Tensor:
        waiting: list[tuple[str, Tensor]] = list(zip(inputs.split(","), _listed(factors), strict=True))
        results: list[Tensor] = []
        for first, second in _path(f"{inputs}->{result}", [x for _, x in waiting]):
            (a, x), (b, y) = waiting[first], waiting[second]
            if any(y is earlier for earlier in results):  # a result goes first: the other factor may be a weight
                (a, x), (b, y) = (b, y), (a, x)
            waiting = [pair for place, pair in enumerate(waiting) if place not in (first, second)]
            later = set(result).union(*(labels for labels, _ in waiting))
            out = "".join(i for i in dict.fromkeys(a + b) if i in later) if waiting else result
            matmul = _pair(a, b, out)
            results.append(torch.einsum(f"{a},{b}->{out}", x, y) if matmul is None else matmul(x, y))
            waiting.append((out, results[-1]))
        return waiting[0][1]

    return function


def einsum_operands(node: Node) -> tuple[Any, list[Any]]:
    """Return the equation and the operands of the einsum at ``node``."""
    return _read(node.args)


def _read(args: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the equation and the operands of einsum's arguments: the equation first, or a list of axes after each
    operand and perhaps one for the result."""
    if len(args) < 2 or not isinstance(args[1], list | tuple) or isinstance(args[0], str):
        return args[0], _listed(args[1:])
    letters = string.ascii_uppercase + string.ascii_lowercase
    terms = ["".join("..." if axis is Ellipsis else letters[axis] for axis in axes) for axes in args[1::2]]
    result = "".join("..." if axis is Ellipsis else letters[axis] for axis in args[-1]) if len(args) % 2 else None
    return ",".join(terms) + ("" if result is None else f"->{result}"), list(args[: len(args) // 2 * 2 : 2])


def _labels(equation: str, dims: Sequence[int]) -> tuple[str, str]:
    """Return the labels of the operands and of the result, with a letter for each axis that an ellipsis stands for.

    Without ``->`` the result has the axes of the ellipsis, then the labels that occur once, in order.
    """
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms, free = inputs.split(","), [i for i in string.ascii_letters if i not in equation]
    counts = [dim - len(term) + 3 if "..." in term else 0 for term, dim in zip(terms, dims, strict=True)]
    axes = "".join(free[: max(counts)])
    if not arrow:
        result = "..." + "".join(i for i in sorted(set(inputs) - set(".,")) if inputs.count(i) == 1)
    shown = [term.replace("...", axes[len(axes) - count :]) for term, count in zip(terms, counts, strict=True)]
    return ",".join(shown), result.replace("...", axes)


def _listed(operands: Sequence[Any]) -> list[Any]:
    return list(operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands)


def _path(equation: str, operands: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the pairs of operands that einsum multiplies, in order; each result joins the operands as the last."""
    settings = torch.backends.opt_einsum
    if settings.is_available() and settings.enabled:
        path = settings.get_opt_einsum().contract_path(equation, *operands, optimize=settings.strategy or "auto")[0]
        return [(min(pair), max(pair)) for pair in path]
    return [(0, 1), *((0, count) for count in range(len(operands) - 2, 0, -1))]


def _pair(left: str, right: str, result: str) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return a function that contracts two tensors with these labels by one matmul; None if one is not enough."""
    batch = [i for i in left if i in right and i in result]
    summed = [i for i in left if i in right and i not in result]
    rows = [i for i in left if i not in right]
    columns = [i for i in right if i not in left]
    repeated = any(len(set(labels)) != len(labels) for labels in (left, right, result))
    if repeated or not summed or not (rows and columns) or any(i not in result for i in rows + columns):
        return None

    def function(a: Tensor, b: Tensor) -> Tensor:
        a, b = _summed_alike(a, b, [(left.index(i), right.index(i)) for i in summed])
        sizes = dict(zip(left, a.shape, strict=True))
        sizes |= {i: n for i, n in zip(right, b.shape, strict=True) if i not in sizes or not _is_one(n)}

        def matrix(x: Tensor, labels: str, first: list[str], second: list[str]) -> Tensor:
            x = x.permute([labels.index(i) for i in (*batch, *first, *second)])
            shape = (*x.shape[: len(batch)], *(math.prod(sizes[i] for i in axis) for axis in (first, second)))
            return x.reshape(shape)

        product = torch.matmul(matrix(a, left, rows, summed), matrix(b, right, summed, columns))
        order = [*batch, *rows, *columns]
        return product.reshape([sizes[i] for i in order]).permute([order.index(i) for i in result])

    return function


def _summed_alike(a: Tensor, b: Tensor, pairs: Iterable[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return the factors, each summed along its axes of ``pairs`` whose partner has size 1, as torch does."""
    for i, j in pairs:
        if _is_one(a.shape[i]) and not _is_one(b.shape[j]):
            b = b.sum(j, keepdim=True)
        elif _is_one(b.shape[j]) and not _is_one(a.shape[i]):
            a = a.sum(i, keepdim=True)
    return a, b


def _is_one(size: int | torch.SymInt) -> bool:
    return statically_known_true(size == 1)


def tensordot_as_matmul(node: Node) -> Callable[..., Tensor] | None:
    """Return a function that computes the tensordot at ``node`` as one matmul; None if it sums all axes, or no axis."""
    a, b = (value_of(argument) for argument in node.args[:2])
    if a is None or b is None or node.kwargs.get("out") is not None:
        return None
    dims: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dims", 2)
    if isinstance(dims, int):
        dims = list(range(a.dim() - dims, a.dim())), list(range(dims))
    if not isinstance(dims, tuple | list) or isinstance(dims[0], int) or not dims[0]:
        return None
    first, second = ([axis % x.dim() for axis in axes] for x, axes in zip((a, b), dims, strict=True))
    rows, columns = ([i for i in range(x.dim()) if i not in summed] for x, summed in ((a, first), (b, second)))
    if not (rows and columns):
        return None

    def function(a: Tensor, b: Tensor, *_: Any, **__: Any) -> Tensor:
        a, b = _summed_alike(a, b, zip(first, second, strict=True))
        left = a.permute(*rows, *first).flatten(len(rows)).flatten(0, len(rows) - 1)
        right = b.permute(*second, *columns).flatten(len(first)).flatten(0, len(first) - 1)
        return torch.matmul(left, right).reshape(*(a.shape[i] for i in rows), *(b.shape[i] for i in columns))

    return function


def inner_as_matmul(node: Node) -> Callable[..., Tensor] | None:
    """Return a function that computes ``torch.inner`` as one matmul; None for vectors."""
    values = [value_of(argument) for argument in node.all_input_nodes]
    if node.kwargs.get("out") is not None or any(value is None or value.dim() < 2 for value in values):
        return None
    return lambda a, other: torch.matmul(a, other.flatten(0, -2).mT).reshape(*a.shape[:-1], *other.shape[:-1])


def chain_as_matmul(node: Node) -> Callable[..., Tensor] | None:
    """Return a function that multiplies a chain of matrices in the cheapest order; None where one is a vector."""
    values = [value_of(argument) for argument in node.all_input_nodes]
    if node.kwargs.get("out") is not None or any(value is None or value.dim() != 2 for value in values):
        return None

    def function(*factors: Any) -> Tensor:
        matrices = _listed(factors)
        sizes = [int(matrix.shape[0]) for matrix in matrices] + [int(matrices[-1].shape[1])]

        @functools.cache
        def cheapest(first: int, last: int) -> tuple[int, int]:
            """Return the cost of the product of matrices ``first`` to ``last``, and where to split them."""

            def cost(at: int) -> int:
                return (
                    cheapest(first, at)[0] + cheapest(at + 1, last)[0] + sizes[first] * sizes[at + 1] * sizes[last + 1]
                )

            return min(((cost(at), at) for at in range(first, last)), default=(0, first))

        def product(first: int, last: int) -> Tensor:
            at = cheapest(first, last)[1]
            return matrices[first] if first == last else torch.matmul(product(first, at), product(at + 1, last))

        return product(0, len(matrices) - 1)

    return function


def addbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Compute ``beta·input + alpha·Σ_b batch1[b] @ batch2[b]`` as one product, whose contraction axis is b and K."""
    left, right = batch1.permute(1, 0, 2).flatten(1), batch2.flatten(0, 1)
    return torch.addmm(input, left, right, beta=beta, alpha=alpha)


def scaled_at_run_time(node: Node) -> Callable[..., Tensor] | None:
    """Return a function that computes the addmm at ``node`` as a product, a multiplication and a sum if the graph
    computes alpha or beta, of a size that changes; else None, because a site takes numbers."""
    factors = (node.kwargs.get(name) for name in ("alpha", "beta"))
    return _addmm_in_steps if any(isinstance(factor, Node) for factor in factors) else None


def _addmm_in_steps(input: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    y: Tensor = torch.matmul(a, b) * alpha
    return y if isinstance(beta, int | float) and beta == 0 else y + (input * beta).to(y.dtype)


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``y_n = Σ_ij x1_i W_nij x2_j + bias_n`` as a linear layer of the products x1_i x2_j.

    Like torch's, the result has the dtype of the inputs under autocast too, which does not cast bilinear layers.
    """
    products = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)
    return F.linear(products, weight.flatten(1), bias).to(products.dtype)


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Compute a convolution along one or two axes as the product that implicit GEMM kernels compute.

    ``Y[l, o] = Σ_k A[l, k] · W[o, k] + bias[o]``: l counts images and places of the output; k counts the input channels
    of o's group and the places under the kernel, its last axis fastest. Shapes: input ``[B, C, *S]`` or ``[C, *S]``,
    weight ``[O, C/groups, *kernel]``, and A ``[B·L, C/groups·|kernel|]``, which is written to memory. The result has
    the dtype of torch's convolution, and its layout where the input and the weight are contiguous.
    """
    axes = weight.dim() - 2
    if input.dim() == axes + 1:
        return convolution(input[None], weight, bias, stride, padding, dilation, groups)[0]
    kernel, (steps, spread) = list(weight.shape[2:]), (_each(stride, axes), _each(dilation, axes))
    reach = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
    if isinstance(padding, str):
        margins = [(r // 2, r - r // 2) if padding == "same" else (0, 0) for r in reach]
    else:
        margins = [(p, p) for p in _each(padding, axes)]
    x = F.pad(input, [width for pair in reversed(margins) for width in pair])
    places = [(size - r - 1) // s + 1 for size, r, s in zip(x.shape[2:], reach, steps, strict=True)]
    if axes == 1:
        x, kernel, steps, spread = x.unsqueeze(2), [1, *kernel], [1, *steps], [1, *spread]
    patches = F.unfold(x, tuple(kernel), tuple(spread), 0, tuple(steps))  # [B, C·|kernel|, L]
    batch, outputs = patches.shape[0], weight.shape[0]
    if groups == 1:
        y = F.linear(patches.mT, weight.flatten(1), bias).mT
    else:
        length, count = math.prod(weight.shape[1:]), math.prod(places)
        a = patches.reshape(batch, groups, length, count).permute(1, 0, 3, 2).reshape(groups, batch * count, length)
        product = torch.matmul(a, weight.reshape(groups, outputs // groups, length).mT)  # [groups, B·L, O/groups]
        y = product.reshape(groups, batch, count, outputs // groups).permute(1, 0, 3, 2).reshape(batch, outputs, count)
        y = y if bias is None else y + bias[:, None].to(y.dtype)  # under autocast y has another dtype than the bias
    y = y.reshape(batch, outputs, *places)
    return y if any(map(_is_channels_last, (input, weight))) else y.contiguous()


def _is_channels_last(x: Tensor) -> bool:
    """Return whether the channels of ``x [B, C, H, W]`` lie side by side in memory, as torch then writes the output."""
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def convolution_sizes(node: Node) -> tuple[int | None, int | None, int | None]:
    """Return K, N and the number of weight elements of a convolution's product."""
    weight = value_of(node.args[1])
    if weight is None or any(not isinstance(size, int) for size in weight.shape):
        return None, None, None
    return math.prod(weight.shape[1:]), weight.shape[0], weight.numel()


def _each(value: int | Sequence[int], axes: int) -> list[int]:
    return [value] * axes if isinstance(value, int) else list(value) * (axes if len(value) == 1 else 1)
