"""Reports what a policy would quantize in a model, without changing the model."""

from __future__ import annotations

import copy
import dataclasses
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from fp4graph import torch_internals
from fp4graph.errors import CaptureError, Error, PolicyWarning
from fp4graph.graph import flops
from fp4graph.graph.nested import nested
from fp4graph.graph.site import Site
from fp4graph.model import coverage, hooks
from fp4graph.model.apply_options import ApplyOptions
from fp4graph.model.conversion import refuse_other_models
from fp4graph.model.current import PLAIN
from fp4graph.model.distributed import unwrapped
from fp4graph.model.explanation import Explanation
from fp4graph.model.runtime import Runtime, detach
from fp4graph.model.source import release_all
from fp4graph.policy import Policy, load_policy
from fp4graph.torch_internals import pytree


def explain(model: nn.Module, policy: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Explanation:
    """Capture ``model(*args, **kwargs)`` on fake tensors and report every site; model and RNG stay untouched.

    Args:
        model: any module, applied or not; its train or eval mode is used as it is.
        policy: as for :func:`fp4graph.apply`. The first phase of a policy with phases is shown; to see a later one,
            pass ``policy.phases[i].policy``.
        args: arguments of the forward call: a tuple or list, a mapping of keywords, or a single argument. Only shapes
            and dtypes matter.
        kwargs: keyword arguments of the call, beside positional ``args``.

    Raises:
        PolicyError: the policy cannot be loaded. CaptureError: a site cannot be planned under the policy.
    """
    refuse_other_models(model, "explain")
    loaded = dataclasses.replace(load_policy(policy), phases=())
    recurrent: dict[str, int] = {}
    counts: dict[str, int] = {}
    args, keywords = _arguments(args)
    keywords |= kwargs or {}
    runtime, problem = _captured(model, loaded, args, keywords, recurrent=recurrent, counts=counts)
    blocks = runtime.plan.names.blocks
    served = coverage.served_sites(runtime.plan.root, runtime.capture)
    sites = [dataclasses.replace(site, module=name) for site, names in served for name in names]
    sites = [
        dataclasses.replace(s, flops=recurrent.get(str(s.module))) if s.op == "recurrent" and s.flops is None else s
        for s in sites
    ]
    problem = problem or _missing(sites, counts)
    text = None if problem is None else str(problem)
    groups = tuple(tuple(dict.fromkeys(w.name for w in group.weights.values())) for group in runtime.plan.groups)
    return Explanation(loaded, tuple(sites), blocks, text, runtime.capture.graphs, tuple(g for g in groups if g[1:]))


def _missing(sites: Sequence[Site], counts: Mapping[str, int]) -> Error | None:
    """Return an error if ``sites`` lack FLOPs that torch has counted in the forward, else None.

    Sites may have more FLOPs than torch counts: torch ignores products with vectors, for example. Recurrent layers are
    left out, because torch's count of their FLOPs depends on the device.
    """
    recurrent = {site.module: site.flops or 0 for site in sites if site.op == "recurrent"}
    listed = sum(site.flops or 0 for site in sites) - sum(recurrent.values())
    counted = counts.get("", 0) - sum(counts.get(str(name), 0) for name in recurrent)
    if counted <= listed or any(site.flops is None for site in sites):
        return None
    modules = {site.module for site in sites}
    inner = {name.rpartition(".")[0] for name in counts}
    names = [name for name, flops in counts.items() if flops and name not in modules | inner]
    return CaptureError(
        f"torch counts {counted} FLOPs of matrix products in this forward, and the listed sites have {listed}; the "
        f"other products ({', '.join(names[:3]) or 'in the same modules'}) run outside of the captured graphs in high "
        "precision, as after a graph break in a loop or a try. Remove the graph break; TORCH_LOGS=graph_breaks shows "
        "its cause",
    )


def rehearse(model: nn.Module, policy: Policy, example_inputs: Any, *, strict: bool) -> None:
    """Run one forward and backward of every phase of ``policy`` on fake tensors; raise the first error of a training.

    The model stays untouched. ``example_inputs`` are a tuple or list, a mapping of keywords, or a single argument.
    """
    args, kwargs = _arguments(example_inputs)
    for in_phase in (dataclasses.replace(policy, phases=()), *(phase.policy for phase in policy.phases)):
        _, problem = _captured(model, in_phase, args, kwargs, backward=True, strict=strict)
        if problem is not None:
            raise problem


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments in a tuple or list, a mapping of keywords, or a single argument."""
    if isinstance(inputs, Mapping):
        if (key := next((key for key in inputs if not isinstance(key, str)), None)) is not None:
            raise Error(f"keys of a mapping of inputs must be names of forward's inputs; got {key!r}")
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _captured(
    model: nn.Module,
    policy: Policy,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    backward: bool = False,
    strict: bool = False,
    recurrent: dict[str, int] | None = None,
    counts: dict[str, int] | None = None,
) -> tuple[Runtime, Error | None]:
    """Return a runtime that has captured a fake copy of ``model``, and the error that training it would raise.

    Fill ``recurrent`` with the forward FLOPs of the recurrent layers, which no graph shows, by the layers' names. Fill
    ``counts`` with the FLOPs that torch counts in an uncompiled forward, by module (:func:`flops.of_call`).
    """
    twin, fake_mode, (fake_args, fake_kwargs) = _fake(model, (args, dict(kwargs)))
    counting = [] if recurrent is None else _count_recurrent(twin, recurrent)
    runtime = Runtime(twin, policy, ApplyOptions("eager", strict=strict), explains=True)
    try:
        with _generators_kept(), fake_mode, warnings.catch_warnings():
            warnings.simplefilter("ignore", PolicyWarning)  # training warns about uncompiled modules too
            runtime.attach()
            result = twin(*fake_args, **fake_kwargs)
            outputs = [leaf for leaf in nested(result, torch.Tensor) if backward and leaf.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    except TypeError as error:
        inputs = f"{len(args)} positional inputs and the keywords {list(kwargs)}"
        error.add_note(f"forward() was called with {inputs}; they come from args of explain() or example_inputs")
        raise
    except (torch_internals.DataDependentOutputException, torch_internals.DynamicOutputShapeException) as error:
        raise CaptureError(
            f"the forward depends on the values of tensors ({error.func}), which the fake tensors of explain() and "
            "example_inputs do not have; leave example_inputs out to see errors at the first call instead. A loop over "
            "experts trains quantized but uncompiled; model.set_experts_implementation('grouped_mm') makes the experts "
            "of Hugging Face's models independent of values, and faster"
        ) from error
    finally:
        runtime.capture.forget()
    problem = next(iter(runtime.capture.problems), None)
    try:
        runtime.check_coverage()
    except Error as error:
        problem = problem or error
    for handle in counting:
        handle.remove()
    if counts is not None:
        with _generators_kept(), fake_mode, hooks.bypassed(twin), warnings.catch_warnings():
            warnings.simplefilter("ignore", PolicyWarning)
            call: Any = twin._call_impl
            counts.update(flops.of_call(lambda: call(*fake_args, **fake_kwargs)) or {})
    return runtime, problem


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the random number generators of torch, Python and NumPy after this context."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _fake(model: nn.Module, inputs: Any) -> tuple[nn.Module, torch_internals.FakeTensorMode, Any]:
    """Return a plain copy of ``model``, the fake mode, and ``inputs``; the copy and the inputs have fake tensors."""
    fake_mode = torch_internals.FakeTensorMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng(), torch_internals.FakeCopyMode(fake_mode):
        twin = copy.deepcopy(unwrapped(model), {PLAIN: True})
    release_all(twin)
    detach(twin)
    twin._compiled_call_impl = None
    device = next((tensor.device for tensor in nested(inputs, torch.Tensor) if not tensor.is_meta), torch.device("cpu"))
    _leave_meta(twin, fake_mode, device)
    return twin, fake_mode, pytree.tree_map_only(torch.Tensor, lambda t: _placed(t, fake_mode, device), inputs)


def _leave_meta(model: nn.Module, fake_mode: torch_internals.FakeTensorMode, device: torch.device) -> None:
    """Put the fake tensors of ``model`` that are on the meta device on ``device``, where its inputs are."""
    placed: dict[int, torch.Tensor] = {}  # tied parameters stay tied
    for module in model.modules():
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for held in holders:
            for name, value in list(held.items()):
                if isinstance(value, torch.Tensor) and value.device.type == "meta":
                    held[name] = placed.setdefault(id(value), _placed(value, fake_mode, device))


def _count_recurrent(model: nn.Module, counts: dict[str, int]) -> list[RemovableHandle]:
    """Hook every recurrent layer of ``model`` to add the FLOPs of its forwards to ``counts`` under its name, and
    return the hooks."""

    def hook_of(name: str) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def count(layer: nn.RNNBase, args: tuple[Any, ...]) -> None:
            tokens = args[0].data if isinstance(args[0], PackedSequence) else args[0]
            counts[name] = counts.get(name, 0) + flops.of_recurrent(tokens, layer._flat_weights)

        return count

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.RNNBase)]
    return [layer.register_forward_pre_hook(hook_of(name)) for name, layer in layers]


def _placed(x: torch.Tensor, fake_mode: torch_internals.FakeTensorMode, device: torch.device) -> torch.Tensor:
    """Return ``x`` as a fake tensor; if ``x`` is on the meta device, return a fake tensor like it on ``device``."""
    x = x if isinstance(x, torch_internals.FakeTensor) else fake_mode.from_tensor(x)
    if x.device.type != "meta":
        return x
    with fake_mode:
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device, requires_grad=x.requires_grad)
    return nn.Parameter(like, x.requires_grad) if isinstance(x, nn.Parameter) else like
