"""The torch.compile backends that run a rewritten graph."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Parameter

from fp4graph import torch_internals
from fp4graph.kernels.inductor import compiler_errors, patches, require_compiler
from fp4graph.ops.first_order import refuse_create_graph

BACKENDS = ("inductor", "aot_eager", "eager")
_numbers = itertools.count(1)
Backend = Callable[[GraphModule, list[Any]], Callable[..., Any]]


def inner_backend(name: str, options: Mapping[str, Any] | None = None) -> Backend:
    """Return the torch.compile backend that runs the rewritten graph.

    Args:
        options: Inductor's options, as :func:`fp4graph.kernels.inductor.compiler_options` returns them.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend is one of {', '.join(BACKENDS)}; got {name!r}")
    if name == "eager":
        return torch_internals.backend_named(name)  # runs the backward of each product, which refuses by itself
    compiler = partial(_inductor, options or {}) if name == "inductor" else torch_internals.backend_named(name)
    return partial(_first_order, compiler)


def _first_order(compiler: Backend, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Compile with ``compiler``, which traces the backward, and have that backward refuse ``create_graph=True``.

    A hook on the autograd node of the backward refuses, so the compiler's results are returned as they are. The node is
    found through the graph's outputs and the inputs that it may write to; of a view, through its base, because a later
    write to the view replaces its ``grad_fn``. Parameters are left out, as nothing writes to them where gradients are
    enabled. A graph without quantized products gets no hook.
    """
    modules = [module for module in gm.modules() if isinstance(module, GraphModule)]
    sites = [str(n.kwargs["site"]) for m in modules for n in m.graph.nodes if "site" in n.kwargs]
    compiled = compiler(gm, example_inputs)
    if not sites:
        return compiled
    where = sites[0] if len(sites) == 1 else f"{sites[0]} and {len(sites) - 1} more in its graph"
    writable = [i for i, x in enumerate(example_inputs) if isinstance(x, Tensor) and not isinstance(x, Parameter)]

    def refuse(gradients: Any) -> None:
        refuse_create_graph(where)

    def run(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*inputs)
        first = torch_internals.next_sequence_number()
        results = compiled(*inputs)
        tensors = [*(x for x in results if isinstance(x, Tensor)), *(inputs[i] for i in writable)]
        for node in torch_internals.compiled_backwards(tensors, first):
            node.register_prehook(refuse)
        return results

    return run


def _inductor(options: Mapping[str, Any], gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Compile with Inductor. GPU code needs options to compute what eager mode computes; C++ code does so by itself."""
    on_gpu = any(isinstance(x, Tensor) and x.device.type == "cuda" for x in example_inputs)
    if not on_gpu:
        require_compiler()
    with compiler_errors():
        return torch_internals.compile_with_inductor(gm, example_inputs, patches(options, on_gpu=on_gpu))


def with_own_code(function: Any, cls: type) -> Callable[..., Any]:
    """Return ``function`` with a new code object, named after ``cls`` and numbered.

    Dynamo has a cache and a recompile limit for each code object. By the name of the code it remembers input sizes, to
    make sizes that change dynamic. A new object with a new name lets captures share neither.
    """
    code = function.__code__.replace(co_name=f"fp4graph_{cls.__name__}_{next(_numbers)}")
    return types.FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)
