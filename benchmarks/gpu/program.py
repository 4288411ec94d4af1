"""The program that Inductor writes for an absent GPU: forward and backward of one module in training.

Dynamo captures the module on the CPU, with the policy's pass, and torch.compile's own path follows: AOTAutograd traces
forward and backward together, the partitioner decides what is saved between them, Inductor writes both. Two steps
differ from a run on the card. Autograd's engine needs a driver for tensors on a GPU, so forward and backward are traced
on fake tensors of the CPU, by code that is told to trace for CUDA, and then traced again on fake tensors of the card.
``scaled_dot_product_attention`` asks the driver for a kernel, so this module chooses it: flash attention for 16 bits,
memory-efficient attention for fp32.

For worker processes only (:func:`benchmarks.gpu.absent.worker`).
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch._inductor import compile_fx, scheduler
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node, traceback
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.gpu.absent import Gpu, Stop, install, stopping
from benchmarks.models import UNQUANTIZED, autocast, under
from fp4graph.kernels import product
from fp4graph.kernels.inductor import patches
from fp4graph.numerics.target import traced_for

aten = torch.ops.aten
#: The place of a product's left factor among its arguments.
_PRODUCTS: dict[Any, int] = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1, product.OPERATOR: 0}
_VIEWS = {aten.view, aten._unsafe_view, aten.reshape, aten.permute, aten.transpose, aten.t, aten.alias, aten.detach}
_VIEWS |= {aten.unsqueeze, aten.squeeze, aten.expand, aten.as_strided, aten.slice, aten.select}
_GEMM = re.compile(r"(bias_add|add|badd)?b?mm(_dtype)?(_out)?")
_LAUNCH = re.compile(r"^ +\w+\.run\((.*), stream=", re.MULTILINE)
_DEFINED = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)
_OPERATOR = re.compile(r"torch\.ops\.fp4graph\.\w+\.default\(")


@dataclass
class Program:
    """Forward and backward of one module."""

    bytes: int = 0  # by Inductor's count: each element of a buffer at most once in each direction of a kernel
    gemm_bytes: int = 0  # those of products, by a library or by this project
    gemms: int = 0
    launches: int = 0  # of Triton kernels, Inductor's and this project's
    keys: int = 0  # launches that compute the two numbers of a key
    sources: set[str] = field(default_factory=set)  # distinct kernels
    products: list[tuple[str, str, int]] = field(default_factory=list)  # dtypes of factors and of the result, FLOPs
    saved: int = 0  # bytes that the backward reads of inputs and intermediate results
    saved_parameters: int = 0  # and of parameters
    seconds: float = 0.0  # of tracing and writing


def program(module: nn.Module, args: Sequence[Tensor], policy: Any, gpu: Gpu, dtype: torch.dtype) -> Program:
    """Return the program of ``module(*args)`` and its backward on ``gpu``.

    Args:
        policy: a policy, or :data:`UNQUANTIZED`.
        dtype: float32, or the dtype of autocast.

    Raises:
        fp4graph.Error: the policy does not fit the module.
    """
    began = time.perf_counter()
    torch._dynamo.reset()
    graph, inputs = _captured(module, args, policy)
    install(gpu)
    written = _generated(graph, inputs, dtype, {} if policy == UNQUANTIZED else patches({}, on_gpu=True))
    written.seconds = time.perf_counter() - began
    return written


def _captured(module: nn.Module, args: Sequence[Tensor], policy: Any) -> tuple[GraphModule, list[Any]]:
    """Return the graph that torch.compile passes to Inductor, and its inputs."""
    captured: list[tuple[GraphModule, list[Any]]] = []

    def capture(graph: GraphModule, inputs: list[Any], **_: Any) -> None:
        captured.append((graph, inputs))
        raise Stop

    under(module, policy, "inductor", dynamic=False)
    with mock.patch.object(compile_fx, "compile_fx", capture):
        try:
            module(*args)
        except Stop:
            return captured[0]
    raise RuntimeError("torch.compile captured nothing")


def _generated(graph: GraphModule, inputs: Sequence[Any], dtype: torch.dtype, options: dict[str, Any]) -> Program:
    """Return the program that Inductor writes for ``graph``."""
    for node in graph.graph.nodes:
        if node.target is torch._C._nn.scaled_dot_product_attention:
            node.target = _attention
    graph.recompile()
    mode = FakeTensorMode()
    with mode:
        fakes = [_fake(x, "cpu") for x in inputs]
    parameters = {f"primals_{1 + i}" for i, x in enumerate(inputs) if isinstance(x, nn.Parameter)}
    written, forward, codes = Program(), list[GraphModule](), list[str]()

    def compile_one(traced: GraphModule, examples: Sequence[Any], **keywords: Any) -> Any:
        backward = bool(keywords.get("is_backward"))
        forward.append(traced)
        if backward:
            _count_saved(written, forward[0], traced, parameters)
        moved, on_card = _moved(traced, examples, mode)
        written.products += _products(moved)
        try:
            compile_fx.compile_fx_inner(moved, on_card, **keywords)
        except Stop:
            if backward:
                raise  # the program is complete
        return _never_called

    def stop(code: str) -> None:
        codes.append(code)
        _count_bytes(written)
        raise Stop

    with (
        autocast(dtype, torch.device("cpu")),
        traced_for("cuda"),
        stopping(stop),
        functorch.patch(force_non_lazy_backward_lowering=True),
    ):
        try:
            compile_fx.compile_fx(graph, fakes, inner_compile=compile_one, config_patches=options)
        except Stop:
            pass
        else:
            raise RuntimeError("there is no backward: no input needs a gradient")
    for code in codes:
        calls = _LAUNCH.findall(code)
        written.launches += len(calls) + len(_OPERATOR.findall(code))
        written.keys += sum(_two_numbers(call) for call in calls)
        written.sources |= {source.replace(name, "kernel") for name, source in _DEFINED.findall(code)}
        written.sources |= set(_variants(code))
    return written


def _variants(code: str) -> Iterator[str]:
    """Yield each call of an operator of this project in ``code``, reduced to what distinguishes compiled kernels.

    These are the specs, and which optional tensors are present. Dtypes of tensors are left out: the code lacks them.
    """
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and (called := ast.unparse(node.func)).startswith("torch.ops.fp4graph."):
            yield f"{called}({', '.join(map(_known, node.args))})"


def _known(argument: ast.expr) -> str:
    """Return an argument if a kernel is compiled for its value, else "…"."""
    if isinstance(argument, ast.Constant) and type(argument.value) is not int:
        return repr(argument.value)
    if isinstance(argument, ast.List | ast.Tuple):  # of salts, or of tensors that may be None
        return str([_known(item) for item in argument.elts])
    return ast.unparse(argument) if isinstance(argument, ast.Attribute) else "…"


def _never_called(*_: Any) -> Any:
    raise RuntimeError("this code was generated for an absent card and cannot run")


_never_called._boxed_call = True  # type: ignore[attr-defined]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention as ``scaled_dot_product_attention`` does on a card of compute capability 8.0 or more."""
    if enable_gqa:
        raise NotImplementedError("grouped queries: choose a block with as many key heads as query heads")
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
    if query.dtype is torch.float32 or attn_mask is not None:
        attend = aten._scaled_dot_product_efficient_attention
        return attend(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    attend = aten._scaled_dot_product_flash_attention
    return attend(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]


def _fake(x: Any, device: str) -> Any:
    if not isinstance(x, Tensor):
        return x
    fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return fake.requires_grad_() if x.requires_grad else fake


class _OnCard(Interpreter):
    """Runs a graph with its tensors made on the card; nodes keep the metadata of their origin."""

    def run_node(self, n: Node) -> Any:
        with traceback.set_current_meta(n):
            return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.lift_fresh_copy.default:  # copies numbers in the code, which tracing left on the CPU
            return torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype, device="cuda")
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cuda", 0)}
        return super().call_function(target, args, kwargs)


def _moved(traced: GraphModule, examples: Sequence[Any], mode: FakeTensorMode) -> tuple[GraphModule, list[Any]]:
    """Return the graph and its inputs on the card."""
    with mode, traceback.preserve_node_meta():
        on_card = [_fake(x.detach() if isinstance(x, Tensor) else x, "cuda") for x in examples]
        moved = make_fx(_OnCard(traced).run)(*on_card)
    output = moved.graph.output_node()
    output.meta.update({k: v for k, v in traced.graph.output_node().meta.items() if k not in output.meta})
    return moved, on_card


def _count_saved(program: Program, forward: GraphModule, backward: GraphModule, parameters: set[str]) -> None:
    """Count the bytes that the backward reads, each storage once."""
    nodes = {node.name: node for node in forward.graph.nodes}
    counted = set[str]()
    for placeholder in backward.graph.find_nodes(op="placeholder"):
        node = nodes.get(placeholder.name)
        if node is None or not isinstance(placeholder.meta.get("val"), Tensor):
            continue  # the gradient of an output
        while getattr(node.target, "overloadpacket", None) in _VIEWS:
            node = node.args[0]
        if node.name not in counted:
            counted.add(node.name)
            if node.name in parameters:
                program.saved_parameters += node.meta["val"].nbytes
            else:
                program.saved += node.meta["val"].nbytes


def _products(graph: GraphModule) -> Iterator[tuple[str, str, int]]:
    for node in graph.graph.nodes:
        place = _PRODUCTS.get(getattr(node.target, "overloadpacket", None))
        if place is not None:
            left, result = node.args[place].meta["val"], node.meta["val"]
            factors, written = (str(x.dtype).removeprefix("torch.") for x in (left, result))
            yield factors, written, 2 * result.numel() * left.shape[-1]


def _two_numbers(call: str) -> bool:
    """Return whether a launch computes the two words of a key: the sizes are the last arguments."""
    sizes = re.findall(r", (\d+)(?=,|$)", call)
    return sizes == ["2"]


def _count_bytes(program: Program) -> None:
    """Count the bytes of the schedule that Inductor has just written code for."""
    for node in V.graph.scheduler.nodes:
        nbytes = sum(node.get_read_write_buffer_accesses(include_reads=True, include_writes=True).values())
        program.bytes += nbytes
        if nbytes and _is_gemm(node):
            program.gemm_bytes += nbytes
            program.gemms += 1


def _is_gemm(node: scheduler.BaseSchedulerNode) -> bool:
    if not isinstance(node, scheduler.ExternKernelSchedulerNode):
        return False  # code of Inductor
    name = str(getattr(node.node, "op_overload", None) or getattr(node.node, "python_kernel_name", None))
    short = name.removesuffix(".default").removeprefix("extern_kernels.").removeprefix("aten.").replace(".", "_")
    return bool(_GEMM.fullmatch(short)) or short == "fp4graph_scaled_product"
