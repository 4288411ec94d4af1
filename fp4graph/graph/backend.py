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
        options: of Inductor, as :func:`fp4graph.kernels.inductor.compiler_options` returns them.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend is one of {', '.join(BACKENDS)}; got {name!r}")
    if name == "eager":
        return torch_internals.backend_named(name)  # runs the backward of each product, which refuses by itself
    compiler = partial(_inductor, options or {}) if name == "inductor" else torch_internals.backend_named(name)
    return partial(_first_order, compiler)


def _first_order(compiler: Backend, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Compile with ``compiler``, which traces the backward, and have that backward refuse ``create_graph=True``.

    The refusal is a hook on the node of the backward, so that results stay the compiler's own. The node is behind the
    outputs and behind the inputs that the graph has written to, or behind the tensors that these are views of: a later
    write to a view gives the view another ``grad_fn``. Parameters are not written to where gradients are enabled. A
    graph without quantized products is left as it is.
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
    """Compile with Inductor, told for a GPU to compute what eager mode computes; its C++ does so by itself."""
    on_gpu = any(isinstance(x, Tensor) and x.device.type == "cuda" for x in example_inputs)
    if not on_gpu:
        require_compiler()
    with compiler_errors():
        return torch_internals.compile_with_inductor(gm, example_inputs, patches(options, on_gpu=on_gpu))


def with_own_code(function: Any, of: type) -> Callable[..., Any]:
    """Return ``function`` with a code object of its own, named after class ``of``.

    Dynamo's cache and recompile limit are per code object. What it remembers of the sizes of inputs, to make those
    dynamic that change, is per name of code: the number keeps the inputs of one capture out of the next.
    """
    code = function.__code__.replace(co_name=f"fp4graph_{of.__name__}_{next(_numbers)}")
    return types.FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)
