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
from fp4graph.model.distributed import unwrapped
from fp4graph.model.explain import rehearse
from fp4graph.model.hooks import Method, bypassed, mark_hooks
from fp4graph.model.listening import listener
from fp4graph.model.packed import unpacked
from fp4graph.model.runtime import Runtime, detach, require_runtime, runtime_of
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

    Type, parameters and their names stay; buffers ``*._fp4graph_*`` are added. The graph is captured at the
    first call, and an error of the first call is raised again at every later call until the policy is replaced or
    removed. Applying again replaces the policy, and keeps state where it fits. State that Hugging Face's
    ``save_pretrained`` wrote beside the weights is restored.

    Args:
        model: any module. With a DistributedDataParallel, or what torch.compile returned, the policy is applied to the
            module inside.
        policy: a path, a shipped policy's name, a dict or a :class:`Policy`.
        backend: ``inductor``, ``aot_eager`` or ``eager``.
        seed: of stochastic rounding and random transforms; None means 0.
        dynamic: as torch.compile's.
        total_forwards: number of calls of the model with gradients in the whole training, for policies with phases at
            a share of it. With gradient accumulation there are several calls for each step of the optimizer.
        example_inputs: arguments of one call: a tuple or a list, a mapping of keywords, or the only argument. With
            them, every error of the first forward and backward, in any phase of the policy, is raised now. They become
            fake tensors: only shapes and dtypes matter.
        strict: raise :class:`UncompiledError` or :class:`CaptureError` where a module with quantized sites would run
            uncompiled. Otherwise it runs operation by operation, with the same quantizers and noise but slower, and a
            PolicyWarning says why.
        recompile_limit: graphs that may be compiled for the model's forward, one for each combination of ranks, modes
            and what else is no size; beyond them it runs uncompiled. None is 64, or torch's own limit where that is
            higher.
        methods: names of methods that are compiled like the model's call, and counted as forwards like it. Another
            method runs uncompiled in its parts, and in high precision in its own body.
        mode, options: torch.compile's own, one of them, for ``inductor``: ``max-autotune``, ``reduce-overhead`` (CUDA
            graphs), ``{"triton.cudagraphs": True}``. The options that exactness needs are added.

    Returns:
        ``model`` itself.

    Raises:
        PolicyError: the policy cannot be loaded, or names modules that the model does not have. The model is as it was.
        Error: a submodule has a policy of its own, the model has no such method, an option of the compiler is
            unknown or would break exactness, or the backend is Inductor and there is neither a C++ compiler nor an
            accelerator. With ``example_inputs``, any error of the first call.
    """
    refuse_other_models(model, "apply")
    warn_once()
    inner_backend(backend)  # refuses an unknown name
    given = 0 if seed is None else seed, dynamic, total_forwards, strict, recompile_limit
    settings = ApplyOptions(backend, *given, compiler=compiler_options(backend, mode, options, dynamic))
    if backend == "inductor" and not torch.accelerator.is_available():
        require_compiler()
    root = unwrapped(model)
    loaded = load_policy(policy)
    check_modules(loaded, [name for name, _ in root.named_modules()])
    for name, module in root.named_modules():
        if name and runtime_of(module) is not None:
            raise Error(
                f"submodule {name!r} has a policy of its own; fp4graph.remove() it before applying to the whole"
            )
    with unpacked(root):
        _check_methods(root, methods)
        if total_forwards is not None:
            _check_total(total_forwards)
        if total_forwards is not None or example_inputs is not None:
            loaded.phase(0, total_forwards)  # phases in the wrong order are refused here
        if example_inputs is not None:
            rehearse(root, loaded, example_inputs, strict=strict)
        first = runtime_of(root) is None and not mark_hooks(root)
        Runtime(root, loaded, dataclasses.replace(settings, methods=tuple(dict.fromkeys(methods)))).attach()
    if first:
        saved.restore(root)
    listener().applied(model)
    return model


def set_total_forwards(model: nn.Module, total_forwards: int) -> None:
    """Set the number of training forwards in the whole training, for phases that begin at a share of it.

    Raises:
        PolicyError: the policy's phases would not be in order.
        Error: the model is not applied.
    """
    runtime = require_runtime(model, "set_total_forwards")
    _check_total(total_forwards)
    runtime.policy.phase(0, total_forwards)
    runtime.settings = dataclasses.replace(runtime.settings, total_forwards=total_forwards)


def detect_nonfinite(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which ``model`` reports the first product, operation or loss that makes NaN or Inf.

    Forward and backward run node by node without a compiler, much slower, with the same noise. Run the step that fails,
    its ``backward()`` included, inside::

        with fp4graph.detect_nonfinite(model):
            loss = criterion(model(x), y)
            loss.backward()  # raises NonFiniteError: blocks.3.mlp.fc1 (linear), backward: ...

    Infinities inside the graph are ignored, because attention masks use them; the model's outputs and every gradient
    must be finite.

    Raises:
        Error: the model is not applied. NonFiniteError: in the context, from the model's call or from ``backward()``.
    """
    return require_runtime(model, "detect_nonfinite").watched()


def _check_methods(root: nn.Module, methods: Sequence[str]) -> None:
    """Raise an Error where ``methods`` names what is no method of ``root``'s class."""
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
                f"methods= takes methods of the model itself; {name!r} is one of a submodule, which runs uncompiled"
            )
        if name in root.__dict__ and not isinstance(root.__dict__[name], Method):
            raise Error(f"{name!r} was replaced on this model itself, and methods= compiles the method of its class")
        if not inspect.isfunction(inspect.getattr_static(kind, name, None)):
            public = [n for n in dir(kind) if not n.startswith("_") and not hasattr(nn.Module, n)]
            own = [n for n in public if inspect.isfunction(inspect.getattr_static(kind, n))]
            raise Error(f"{kind.__name__} has no method {name!r}; {suggest(name, own)}")


def _check_total(total_forwards: int) -> None:
    if type(total_forwards) is not int or total_forwards < 1:
        raise ValueError(f"total_forwards is a number of training forwards, at least 1; got {total_forwards!r}")


def remove(model: M) -> M:
    """Undo :func:`apply`: the model runs as before, its weights as they are now. Returns ``model``."""
    if runtime_of(model) is None and not mark_hooks(model):
        raise Error("this model is not applied")
    detach(unwrapped(model))
    return model


def bypass(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which ``model``, its methods and its submodules run uncompiled and in high precision."""
    if runtime_of(model) is None and not mark_hooks(model):
        raise Error("this model is not applied, so there is nothing to bypass")
    return bypassed(model)
