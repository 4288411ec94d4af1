"""Refuses derivatives that a quantized product does not have: of its backward, in forward mode, and by torch.func.

The backward of a quantized product rounds its operands, so autograd finds no derivative of it.
``torch.autograd.function.once_differentiable`` cannot refuse it: its error comes from a node that, under ``eager``,
``torch.autograd.grad(inputs=...)`` prunes, and that a backward compiled by AOTAutograd does not have. The gradient
would then miss its second-order term. But a backward can refuse before it computes anything: autograd enables grad mode
in a backward under ``create_graph=True``, and only then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp4graph import torch_internals
from fp4graph.errors import CaptureError, Error

_Backward = Callable[..., tuple[Tensor | None, ...]]


def refuse_create_graph(where: str) -> None:
    """Raise an Error in a backward with ``create_graph=True``; ``where`` names the sites that it runs through."""
    if torch.is_grad_enabled():
        raise Error(
            f"{where}: a backward with create_graph=True (hvp, hessian, gradient penalties, MAML) cannot run through "
            "quantized products, because quantizers have no second derivative. Compute the second-order term, with the "
            "forward that it differentiates, inside fp4graph.bypass(model); with torch.compile(backend='fp4graph'), on "
            "the model that was passed to torch.compile"
        )


def first_order(backward: _Backward) -> _Backward:
    """Make the backward of an ``autograd.Function`` refuse ``create_graph=True``; ``ctx.options`` names the site."""

    @functools.wraps(backward)
    def refusing(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph(ctx.options.site or "a product")
        return backward(ctx, *gradients)

    return refusing


def is_transformed() -> bool:
    """Return whether a transform of torch.func, or forward-mode differentiation, is active."""
    return torch_internals.is_functorch_active() or torch_internals.is_forward_mode_active()


def refuse_transforms(site: str | None) -> None:
    """Raise a CaptureError where a transform of torch.func, or forward mode, runs a quantized product."""
    if is_transformed():
        raise CaptureError(
            "torch.func (grad, vmap, jvp) and torch.autograd.forward_ad cannot transform a quantized product, which "
            "has a backward of its own. Keep this site in high precision by a rule, or use torch.autograd.grad "
            "without create_graph=True",
            site=site,
        )
