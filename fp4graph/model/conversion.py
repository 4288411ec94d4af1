"""Refuses to convert an applied model, because the result would silently run in high precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fp4graph.errors import Error
from fp4graph.ops.first_order import is_transformed

_REMEDY = "call fp4graph.remove(model) first, and fp4graph.apply(model, policy) afterwards to go on training"
_F = TypeVar("_F", bound=Callable[..., Any])


def opaque(function: _F) -> _F:
    """Disable Dynamo for ``function``; under fullgraph=True or torch.export, Dynamo's error says what to do."""
    reason = (
        "a model with a policy applied compiles its own graph, which an outer torch.compile cannot include; leave out "
        f"fullgraph=True of the outer torch.compile; to export the model, {_REMEDY}"
    )
    return cast(_F, torch.compiler.disable(function, reason=reason))  # type: ignore[no-untyped-call]


def refuse(converter: str) -> None:
    """Raise an Error: ``converter`` cannot convert an applied model."""
    raise Error(
        f"{converter} cannot convert a model with a policy applied, because it does not see the quantizers; {_REMEDY}"
    )


def refuse_other_models(model: object, caller: str) -> None:
    """Raise an error if ``model`` is not a module, has weights without a shape, or contains a TorchScript module, whose
    operations are hidden."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller}() takes an nn.Module; got {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise Error(
                f"{name or 'the model'} is a TorchScript module ({module.original_name}), whose products fp4graph does "
                f"not see; call {caller}() with the Python module that it was scripted or traced from"
            )
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise Error(f"{lazy[0]} has no shape yet; call the model once, on a batch, before {caller}()")


def refuse_conversion(*, quantizes: bool) -> None:
    """Raise an Error if the running call is traced or transformed; ``quantizes`` says whether any module of the model
    has quantized sites."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        refuse("torch.jit.trace")
    if torch.compiler.is_exporting():
        refuse("torch.export")
    if quantizes and is_transformed():
        raise Error(
            "a transform of torch.func (grad, vmap, jvp) or forward-mode differentiation cannot run a model with a "
            "policy applied, because quantizers have gradients of their own; use loss.backward() or "
            "torch.autograd.grad, or wrap the call in fp4graph.bypass(model) if high precision is what you want"
        )


def refuse_nested(inputs: Iterable[torch.Tensor]) -> None:
    """Raise an Error for a nested tensor of strided layout, on which the guards of torch.compile crash the process."""
    if any(x.is_nested and x.layout is torch.strided for x in inputs):
        raise Error(
            "an input of the model is a nested tensor, whose products cannot be quantized; pad it "
            "(x.to_padded_tensor(0.0)), or make it with layout=torch.jagged and pass its values (x.values())"
        )


@opaque
def refuse_export() -> None:
    """Raise an Error under torch.export."""
    refuse("torch.export")
