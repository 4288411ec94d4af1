"""The functions that users call on a model: apply, remove, bypass and the like."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import nn

from fp4graph.errors import Error, suggest
from fp4graph.graph.backend import inner_backend
from fp4graph.kernels.inductor import compiler_options, require_compiler
from fp4graph.model import saved
from fp4graph.model.apply_options import ApplyOptions
from fp4graph.model.conversion import refuse_other_models
from fp4graph.model.distributed import leave_to_ranks, unwrapped
from fp4graph.model.explain import rehearse
from fp4graph.model.hooks import Method, bypassed, mark_hooks
from fp4graph.model.listening import listener
from fp4graph.model.runtime import Runtime, detach, require_runtime, runtime_of
from fp4graph.model.source import release_all, released
from fp4graph.model.subnormals import refuse_flushed
from fp4graph.model.versions import warn_once
from fp4graph.policy import Policy, check_modules, load_policy

M = TypeVar("M", bound=nn.Module)


def apply(
    model: M,
    policy: str | PathLike[str] | dict[str, Any] | Policy,
    *,
    backend: str = "inductor",
    seed: int | None = None,
    dynamic: bool | None = None,
    total_forwards: int | None = None,
    example_inputs: Any = None,
    strict: bool = False,
    recompile_limit: int | None = None,
    methods: Sequence[str] = (),
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> M:
    """Compile ``model`` in place so that it trains under ``policy``.

    The model keeps its type, parameters and names, and gains buffers ``*._fp4graph_*``. The first call captures the
    graph; if it fails, every later call raises the same error until the policy is replaced or removed. Applying again
    replaces the policy and keeps the state that fits. State that Hugging Face's ``save_pretrained`` wrote beside the
    weights is restored.

    Args:
        model: any module. Under DistributedDataParallel or torch.compile, the policy is applied to the module inside.
        policy: a path, a shipped policy's name, a dict or a :class:`Policy`.
        backend: ``inductor``, ``aot_eager`` or ``eager``.
        seed: seeds stochastic rounding and random transforms; None means 0.
        dynamic: passed to torch.compile.
        total_forwards: number of calls of the model with gradients in the whole training, needed by phases that begin
            at a share of it. With gradient accumulation there are several calls for each step of the optimizer.
        example_inputs: arguments of one call: a tuple or list, a mapping of keywords, or a single argument. If given,
            apply() raises every error of the first forward and backward, in any phase of the policy. The arguments
            become fake tensors: only shapes and dtypes matter.
        strict: raise :class:`UncompiledError` or :class:`CaptureError` if a module with quantized sites would run
            uncompiled. If False, such a module runs operation by operation, slower, with the same quantizers and noise,
            and a PolicyWarning says why.
        recompile_limit: number of graphs that may be compiled for the model's forward; after that the forward runs
            uncompiled. None means 64, or torch's limit if it is higher.
        methods: names of methods to compile and count as forwards, like the model's call. In any other method, modules
            run quantized but uncompiled, and operations of the method itself run in high precision.
        mode, options: the argument of torch.compile for backend ``inductor``, at most one of the two, such as
            ``max-autotune``, ``reduce-overhead`` (CUDA graphs) or ``{"triton.cudagraphs": True}``. fp4graph adds the
            options that exactness needs.

    Returns:
        ``model`` itself.

    Raises:
        PolicyError: the policy cannot be loaded, names modules that the model does not have, or has scales that are 0
            under ``torch.set_flush_denormal(True)``. The model is unchanged.
        Error: a submodule has a policy of its own, the model has no such method, an option is unknown or would break
            exactness, or Inductor finds neither a C++ compiler nor an accelerator; with ``example_inputs``, any error
            of the first call.
    """
    refuse_other_models(model, "apply")
    warn_once()
    inner_backend(backend)  # refuses an unknown name
    arguments = 0 if seed is None else seed, dynamic, total_forwards, strict, recompile_limit
    settings = ApplyOptions(backend, *arguments, compiler=compiler_options(backend, mode, options, dynamic))
    _apply(unwrapped(model), load_policy(policy), settings, methods, example_inputs)
    leave_to_ranks(model)
    listener().applied(model)
    return model


def _apply(
    root: nn.Module, policy: Policy, settings: ApplyOptions, methods: Sequence[str], example_inputs: Any
) -> None:
    """Check everything that can be checked before a call, and attach ``policy``."""
    if settings.backend == "inductor" and not torch.accelerator.is_available():
        require_compiler()
    if not torch.accelerator.is_available():
        for each in (policy, *(phase.policy for phase in policy.phases)):
            refuse_flushed(each)
    check_modules(policy, [name for name, _ in root.named_modules()])
    for name, module in root.named_modules():
        if name and runtime_of(module) is not None:
            raise Error(
                f"submodule {name!r} has a policy of its own; call fp4graph.remove() on it, then apply to the model"
            )
    with released(root):
        _check_methods(root, methods)
        if settings.total_forwards is not None or example_inputs is not None:
            policy.phase(0, settings.total_forwards)  # phases in the wrong order are refused here
        if example_inputs is not None:
            rehearse(root, policy, example_inputs, strict=settings.strict)
        is_new = runtime_of(root) is None and not mark_hooks(root)
        Runtime(root, policy, dataclasses.replace(settings, methods=tuple(dict.fromkeys(methods)))).attach()
    if is_new:
        saved.restore(root)


def set_total_forwards(model: nn.Module, total_forwards: int) -> None:
    """Set the number of training forwards in the whole training, for phases that begin at a share of it.

    Raises:
        PolicyError: the policy's phases would not be in order.
        Error: the model is not applied.
    """
    runtime = require_runtime(model, "set_total_forwards")
    settings = dataclasses.replace(runtime.settings, total_forwards=total_forwards)
    runtime.policy.phase(0, total_forwards)
    runtime.settings = settings


def detect_nonfinite(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which ``model`` reports the first product, operation or loss that makes NaN or Inf.

    Forward and backward run node by node without a compiler, much slower, with the same noise. Run the step that fails,
    its ``backward()`` included, inside::

        with fp4graph.detect_nonfinite(model):
            loss = criterion(model(x), y)
            loss.backward()  # raises NonFiniteError: blocks.3.mlp.fc1 (linear), backward: ...

    NaN and Inf count only if an output of the model or a gradient is not finite: attention masks use infinities. The
    error then names where that NaN or Inf began.

    Raises:
        Error: the model is not applied. NonFiniteError: in the context, from the model's call or from ``backward()``.
    """
    return require_runtime(model, "detect_nonfinite").watched()


def _check_methods(root: nn.Module, methods: Sequence[str]) -> None:
    """Raise an Error for a name in ``methods`` that is not a method of ``root``'s class."""
    if isinstance(methods, str):
        raise TypeError(f"methods= takes a list of names; got {methods!r}")
    kind = type(root)
    for name in methods:
        if name == "forward" or hasattr(nn.Module, name):
            raise Error(
                f"methods= takes methods that {kind.__name__} adds to nn.Module; the model's call is compiled anyway"
            )
        if "." in name:
            raise Error(
                f"methods= takes methods of the model itself; {name!r} is a submodule's method, which runs uncompiled"
            )
        if name in root.__dict__ and not isinstance(root.__dict__[name], Method):
            raise Error(
                f"method {name!r} was replaced on this model object; delete the attribute to compile the class's method"
            )
        if not inspect.isfunction(inspect.getattr_static(kind, name, None)):
            public = [n for n in dir(kind) if not n.startswith("_") and not hasattr(nn.Module, n)]
            functions = [n for n in public if inspect.isfunction(inspect.getattr_static(kind, n))]
            raise Error(f"{kind.__name__} has no method {name!r}; {suggest(name, functions)}")


def remove(model: M) -> M:
    """Undo :func:`apply`, keep the present weights, and return ``model``; if policies were applied to parts of it, undo
    these."""
    root = unwrapped(model)
    parts = [] if runtime_of(root) is not None else [part for part in root.modules() if runtime_of(part) is not None]
    if runtime_of(root) is None and not parts and not mark_hooks(root):
        raise Error("this model is not applied")
    release_all(root)
    for part in parts:
        detach(part, shared=True)
    detach(root, shared=True)
    return model


def bypass(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which ``model``, its methods and its submodules run uncompiled and in high precision."""
    if runtime_of(model) is None and not mark_hooks(model):
        raise Error("this model is not applied, so there is nothing to bypass")
    return bypassed(model)
