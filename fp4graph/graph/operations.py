"""The table of the operations that multiply matrices, and what the graph pass does with each.

A node of a graph is looked up among the operators that plugins read, then in :data:`TABLE`, then by its library. An
entry reads the node as one product, which makes it a site, or opens it into other operations, or says why the
operation is not quantized. Operations without an entry are taken for views, arithmetic and look-ups. Such an operation
is an error if torch's FLOP counter knows it, or if it belongs to an unknown library and reads a matrix parameter
(:meth:`fp4graph.graph.describe.Describer.describe`).

A new operation is a row here:

- It multiplies two matrices: a reader in :mod:`fp4graph.graph.products`, which returns a ``Product``. A layout of the
  factors that no form describes is a new form; ``Product.form`` says what a form needs.
- It can be written with operations of the table: a function in :mod:`fp4graph.graph.contractions` or
  :mod:`fp4graph.graph.attention`.
- It multiplies parts of a parameter that another operation picked: the two are written out together, as
  :mod:`fp4graph.graph.experts` does.
- It does none of these: the reason, and ``Verdict.KEEP`` if every policy keeps it. Otherwise an operation with a
  parameter is an error where the policy would quantize a linear layer. ``flops`` counts what torch's counter does not.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from fp4graph import torch_internals
from fp4graph.errors import PluginError
from fp4graph.graph import attention, contractions, flops, products
from fp4graph.graph.products import Product, name_of
from fp4graph.technique.product import Factors, ProductOperation
from fp4graph.technique.registry import default_registry

aten = torch.ops.aten
Sizes = tuple[int | None, int | None, int | None]


class Verdict(Enum):
    """How the planner treats matrix work that cannot be a site. The values are the kinds of site that could replace it.

    The work is an error where the policy would quantize one of these kinds, and is kept elsewhere. ``UNKNOWN`` work is
    an error under every policy that quantizes anything, until a rule keeps it.
    """

    KEEP = ()
    LIKE_LINEAR = ("linear",)
    LIKE_EXPERTS = ("linear", "grouped")
    UNKNOWN = ("unknown",)


@dataclass(frozen=True)
class NoProduct:
    """Matrix work that cannot be a site: the name, reason and verdict of its operation, as in :class:`Operation`."""

    op: str
    reason: str
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Operation:
    """One row of the table.

    Attributes:
        op: name of the operation in reports; None uses the name of the node's target.
        read: called with a node and its arguments, returns the product that the node computes.
        opened: called with a node, returns a function that computes the same by other operations, or None where that is
            impossible.
        asks: called with a node, returns the kind of site that a rule must want before the operation is opened: "sdpa",
            "conv", or "product" for a linear or a matmul, whichever the operation would be; "" always opens it.
        sizes: called with a node, returns K, N and the number of elements of the second factor of the site asked for.
        reason: why the operation is not a site, if it is neither read nor opened.
        verdict: the treatment of an operation that is not a site. None means ``like`` if a factor is a parameter, else
            ``KEEP``; state ``LIKE_LINEAR`` if a factor is a weight but not a parameter.
        flops: called with the arguments of a call, tensors without data, returns its forward FLOPs; None uses torch's
            counter.
    """

    op: str | None = None
    read: Callable[..., Product] | None = None
    opened: Callable[[Node], Callable[..., Any] | None] | None = None
    asks: Callable[[Node], str] = lambda _: ""
    sizes: Callable[[Node], Sizes] = lambda _: (None, None, None)
    reason: str = ""
    verdict: Verdict | None = None
    like: Verdict = Verdict.LIKE_LINEAR
    flops: Callable[..., int] | None = None


def operation_of(node: Node) -> Operation | None:
    """Return the entry of the operation that ``node`` calls, or None."""
    if node.op not in ("call_function", "call_method"):
        return None
    name = torch_internals.qualified_name(node.target)
    if name is None:
        return TABLE.get(node.target)
    offer = default_registry().products.get(name)
    if offer is not None:
        return _of_plugin(offer)
    packet = torch_internals.packet_of(node.target)
    return TABLE.get(packet) or TABLE.get(name) or LIBRARIES.get(name.partition("::")[0])


@functools.cache
def _of_plugin(offer: ProductOperation) -> Operation:
    """Return the row of an operator that a plugin reads."""

    def read(node: Node, *args: Any, **kwargs: Any) -> Product:
        try:
            factors = offer.read(*args, **kwargs)
            if not isinstance(factors, Factors):
                raise TypeError(f"read() must return Factors; got {factors!r}")
            nodes = (factors.a, factors.b, *([] if factors.addend is None else [factors.addend]))
            if not all(isinstance(factor, Node) for factor in nodes):
                raise TypeError(
                    "a, b and addend of the Factors must be tensor arguments of the call, as they were given"
                )
            if not all(isinstance(factor, int | float) for factor in (factors.alpha, factors.beta)):
                raise TypeError(
                    "alpha and beta must be numbers; multiply by a tensor, or by a size, outside of the call"
                )
            if factors.form not in ("linear", "matmul"):
                raise ValueError(f"form is 'linear' or 'matmul'; got {factors.form!r}")
        except Exception as error:  # a bug of the plugin
            raise PluginError(
                f"product operation {offer.operator!r}: {type(error).__name__}: {error}", plugin=offer.plugin
            ) from error
        return Product(node, factors.form, factors.a, factors.b, factors.addend, factors.alpha, factors.beta)

    return Operation(read=read)


def library_of(node: Node) -> str | None:
    """Return the library whose operator ``node`` calls, or None."""
    name = torch_internals.qualified_name(node.target)
    return None if name is None else name.partition("::")[0]


def read_product(node: Node) -> Product | NoProduct | None:
    """Read ``node`` as a product; None where its operation has no entry."""
    operation = operation_of(node)
    if operation is None:
        return None
    name = operation.op or name_of(node)
    if operation.read is None:
        return NoProduct(name, operation.reason, operation.verdict)
    if node.kwargs.get("out") is not None:
        return NoProduct(name, "writes into out=")
    try:
        _signature(operation.read).bind(node, *node.args, **node.kwargs)
    except TypeError:
        return NoProduct(name, "it is called with an out_dtype, or in an order of arguments that torch deprecates")
    product = operation.read(node, *node.args, **node.kwargs)
    reason = products.objection(product)
    quantized = any(map(products.is_quantized_elsewhere, (products.value_of(product.a), products.value_of(product.b))))
    return product if reason is None else NoProduct(name, reason, Verdict.LIKE_LINEAR if quantized else None)


_signature = functools.cache(inspect.signature)  # a forward that runs uncompiled reads every product of it


def tag_of(node: Node) -> str | None:
    """Return the kind of the sites that ``node`` contains once it is opened; None for linear and matmul."""
    operation = operation_of(node)
    return operation.op if operation is not None and operation.op == operation.asks(node) else None


def _spelled(*names: str) -> Iterator[Any]:
    """Yield the targets that call torch's operation of each name: functions, operators, methods."""
    for name in names:
        for library in (torch, torch_internals.BUILTIN_NN, F, torch.linalg, aten):
            if hasattr(library, name):
                yield getattr(library, name)
        if hasattr(Tensor, name):
            yield name


def _kept(reason: str, op: str | None = None, flops: Callable[..., int] | None = None) -> Operation:
    """Return the row of an operation that every policy keeps."""
    return Operation(op, reason=reason, verdict=Verdict.KEEP, flops=flops)


def _expanded(function: Callable[..., Any]) -> Operation:
    """Return the row of an attention layer that is always opened."""
    return Operation("attention", opened=lambda _: function, reason="could not be expanded")


def _written_out(
    opened: Callable[[Node], Callable[..., Any] | None],
    reason: str = "no rule wants its products",
    flops: Callable[..., int] | None = None,
) -> Operation:
    """Return the row of an operation that is opened where a rule wants its products."""
    return Operation(opened=opened, asks=lambda _: "product", reason=reason, flops=flops)


def _asks_of_einsum(node: Node) -> str:
    equation, operands = contractions.einsum_operands(node)
    plain = isinstance(equation, str) and "->" in equation and "." not in equation
    return "" if plain and len(operands) == 2 else "product"


RECURRENT = "recurrent layers are kept in high precision"
_ATTENTION = "this fused attention is kept in high precision; scaled_dot_product_attention can be quantized"
_CONVOLUTION = "convolutions are kept in high precision"
_QUANTIZED = Operation(reason="its factors are quantized already", verdict=Verdict.LIKE_LINEAR)

#: The entry of each operation, by function, by operator or its qualified name, and by name of a method.
TABLE: Mapping[Any, Operation] = {
    key: operation
    for keys, operation in [
        # two factors
        (_spelled("linear"), Operation(read=products.linear)),
        ((*_spelled("matmul", "mm", "bmm"), operator.matmul, "__matmul__", operator.imatmul),  # x @= w makes a new x
         Operation(read=products.matmul)),
        (("__rmatmul__",), Operation(read=products.reversed_matmul)),
        (_spelled("addmm", "baddbmm"),
         Operation(read=products.addmm, opened=contractions.scaled_at_run_time, asks=lambda _: "product")),
        ((*_spelled("_grouped_mm", "grouped_mm"), "transformers::grouped_mm_fallback"),
         Operation(read=products.grouped, like=Verdict.LIKE_EXPERTS, flops=flops.of_grouped)),
        (("fp4graph::experts_mm",),
         Operation(read=lambda node, a, b, ends, _: Product(node, "grouped", a, b, ends=ends))),
        # several products, written out
        ((torch.einsum, torch.functional.einsum, aten.einsum),
         Operation("einsum", opened=contractions.einsum_as_matmul, asks=_asks_of_einsum,
                   reason="not a chain of matmuls")),
        ((torch.tensordot, torch.functional.tensordot, aten.tensordot),
         _written_out(contractions.tensordot_as_matmul, "not one matmul")),
        (_spelled("inner"), _written_out(contractions.inner_as_matmul, "a product with a vector")),
        ((torch.chain_matmul, torch.functional.chain_matmul, *_spelled("multi_dot", "linalg_multi_dot")),
         _written_out(contractions.chain_as_matmul, "a product with a vector")),
        (_spelled("addbmm"),
         _written_out(lambda _: contractions.addbmm, flops=lambda _, a, b, **__: flops.of_mm(a, b))),
        (_spelled("bilinear"), _written_out(lambda _: contractions.bilinear, flops=flops.of_bilinear)),
        ((F.multi_head_attention_forward,), _expanded(F.multi_head_attention_forward)),
        (_spelled("_transformer_encoder_layer_fwd"), _expanded(attention.encoder_layer)),
        (_spelled("_native_multi_head_attention"), _expanded(attention.native_attention)),
        (_spelled("scaled_dot_product_attention"),
         Operation("sdpa", opened=lambda _: attention.attention, asks=lambda _: "sdpa", verdict=Verdict.KEEP,
                   reason="fused attention is kept in high precision unless a rule targets op: sdpa")),
        (_spelled("conv1d", "conv2d"),
         Operation("conv", opened=lambda _: contractions.convolution, asks=lambda _: "conv",
                   sizes=contractions.convolution_sizes, verdict=Verdict.KEEP,
                   reason=f"{_CONVOLUTION} unless a rule targets op: conv")),
        # kept by every policy
        (_spelled("conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc", "convolution",
                  "_convolution", "mkldnn_convolution", "cudnn_convolution", "cudnn_convolution_transpose",
                  "miopen_convolution", "miopen_depthwise_convolution", "_slow_conv2d_forward",
                  "convolution_overrideable"), _kept(_CONVOLUTION, "conv")),
        (_spelled("lstm", "gru", "rnn_tanh", "rnn_relu"), _kept(RECURRENT, "recurrent", flops.of_recurrent)),
        (_spelled("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "mkldnn_rnn_layer"),
         _kept(RECURRENT, "recurrent")),
        (_spelled("_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
                  "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention",
                  "_scaled_dot_product_attention_math", "_flash_attention_forward", "_efficient_attention_forward"),
         _kept(_ATTENTION, "attention")),
        ((torch.ops.higher_order.flex_attention,), _kept(_ATTENTION, "attention", flops.of_attention)),
        ((torch.cdist, torch.functional.cdist, *_spelled("_cdist_forward", "_euclidean_dist")),
         _kept("distances are kept in high precision", flops=flops.of_distances)),
        (_spelled("cov", "corrcoef", "matrix_exp", "matrix_power", "linalg_matrix_power", "pinv", "pinverse",
                  "linalg_pinv", "lstsq", "linalg_lstsq", "householder_product", "linalg_householder_product", "orgqr",
                  "ormqr", "lobpcg", "svd_lowrank", "pca_lowrank"), _kept("linear algebra is kept in high precision")),
        # no matrix, or no contraction
        (_spelled("outer", "ger", "addr"), Operation(reason="no contraction axis", flops=lambda *_, **__: 0)),
        (_spelled("mv"), Operation(reason="a matrix-vector product", flops=flops.of_vector)),
        (_spelled("addmv"),
         Operation(reason="a matrix-vector product", flops=lambda _, a, b, **__: flops.of_vector(a, b))),
        (_spelled("dot", "vdot", "vecdot"), Operation(reason="a vector product", flops=flops.of_vector)),
        # refused where a linear layer would be quantized
        (_spelled("addmm_", "baddbmm_", "addbmm_", "addmv_"),
         Operation(reason="writes in place; write it without the underscore to quantize it")),
        (_spelled("_scaled_grouped_mm", "_scaled_grouped_mm_v2", "scaled_grouped_mm"),
         dataclasses.replace(_QUANTIZED, verdict=Verdict.LIKE_EXPERTS, flops=flops.of_grouped)),
        (_spelled("_int_mm"), dataclasses.replace(_QUANTIZED, flops=flops.of_mm)),
        (_spelled("_scaled_mm", "_scaled_mm_v2", "scaled_mm", "_weight_int4pack_mm", "_weight_int8pack_mm",
                  "_weight_int4pack_mm_for_cpu", "_dyn_quant_matmul_4bit", "_mixed_dtypes_linear"), _QUANTIZED),
        ((torch.sparse.mm, torch.sparse.addmm, torch.sparse.sampled_addmm,
          *_spelled("_sparse_mm", "_sparse_addmm", "_sparse_mm_reduce_impl", "sparse_sampled_addmm", "_cslt_sparse_mm",
                    "_sparse_semi_structured_mm", "_sparse_semi_structured_addmm", "_sparse_semi_structured_linear",
                    "hspmm", "smm", "sspaddmm")),
         Operation(reason="a sparse product; make its factors dense (to_dense())")),
    ]
    for key in keys
}  # fmt: skip

#: The libraries that move tensors between processes.
COLLECTIVE = ("c10d", "_c10d_functional", "c10d_functional", "fsdp")
#: The entry of all operations of a library; None if :data:`TABLE` and torch's counter know all of its products.
LIBRARIES: Mapping[str, Operation | None] = {
    **dict.fromkeys(("aten", "prims", "prim", "inductor", *COLLECTIVE)),
    **dict.fromkeys(("quantized", "torchao", "bitsandbytes", "fbgemm", "mslk", "marlin"), _QUANTIZED),
    **dict.fromkeys(
        ("flash_attn", "flash_attn_2", "flash_attn_3", "xformers", "xformers_flash"), _kept(_ATTENTION, "attention")
    ),
}
