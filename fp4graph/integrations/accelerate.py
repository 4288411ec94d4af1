"""Applies a policy in a loop on ``accelerate.Accelerator``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from fp4graph.errors import Error
from fp4graph.model.api import apply
from fp4graph.model.runtime import runtime_of
from fp4graph.policy import Policy
from fp4graph.training import grad_scaler, prepare_optimizer
from fp4graph.training.origin import check_origin, write_origin

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

M = TypeVar("M", bound=nn.Module)


def apply_with_accelerate(
    accelerator: Accelerator,
    model: M,
    optimizer: torch.optim.Optimizer,
    policy: str | PathLike[str] | dict[str, Any] | Policy,
    *,
    backend: str = "inductor",
    seed: int | None = None,
    dynamic: bool | None = None,
    total_forwards: int | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    same_policy: bool = True,
) -> M:
    """Apply ``policy`` in a loop on Accelerate. This call, before ``accelerator.prepare``, is the only line to add.

    >>> apply_with_accelerate(accelerator, model, optimizer, "tetrajet")
    >>> model, optimizer, data = accelerator.prepare(model, optimizer, data)

    Prepare model and optimizer in place, let the accelerator scale the loss if the policy requires it, and return
    ``model``. ``accelerator.save_state`` and ``load_state`` work unchanged: the model's file holds the techniques'
    state, and ``fp4graph.json`` beside it the policy (``fp4graph_1.json`` for a second applied model).

    ``same_policy=False`` lets ``load_state`` read a state that was saved under another policy. The other keyword
    arguments go to :func:`fp4graph.apply`.

    Raises:
        Error: the accelerator has already prepared the model or the optimizer; also the errors of
            :func:`fp4graph.apply` and :func:`fp4graph.prepare_optimizer`. A later ``load_state`` raises
            :class:`fp4graph.training.checkpoint.Mismatch` if the state was saved under another policy or seed.
    """
    if getattr(model, "_is_accelerate_prepared", False) or getattr(optimizer, "optimizer", None) is not None:
        raise Error("apply_with_accelerate() got a prepared model or optimizer; call it before accelerator.prepare()")
    compiled: dict[str, Any] = {"backend": backend, "dynamic": dynamic, "mode": mode, "options": options}
    apply(model, policy, **compiled, seed=seed, total_forwards=total_forwards)
    prepare_optimizer(model, optimizer)
    scaler = grad_scaler(model)
    if scaler.is_enabled() and accelerator.scaler is None:
        accelerator.scaler = scaler  # accelerator.backward() and the prepared optimizer use it
        accelerator.unscale_gradients = partial(_unscale, accelerator)  # clip_grad_norm_() calls it

    def number_in(models: list[nn.Module]) -> int | None:
        """Return the place of ``model`` among the applied models of ``models``, or None if it is not among them."""
        plain = map(accelerator.unwrap_model, models)
        applied = [each for each in plain if each is model or runtime_of(each) is not None]
        return next((number for number, each in enumerate(applied) if each is model), None)

    def before_saving(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        if (number := number_in(models)) is not None and accelerator.is_main_process:
            write_origin(folder, model, number)

    def before_loading(models: list[nn.Module], folder: str) -> None:
        if (number := number_in(models)) is not None and same_policy:
            check_origin(folder, model, number)

    accelerator.register_save_state_pre_hook(before_saving)
    accelerator.register_load_state_pre_hook(before_loading)
    return model


def _unscale(accelerator: Accelerator, optimizer: Any = None) -> None:
    """Replace ``Accelerator.unscale_gradients``, which does nothing unless the precision is fp16."""
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]

    listed = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    for each in accelerator._optimizers if optimizer is None else listed:
        plain = each.optimizer if isinstance(each, AcceleratedOptimizer) else each
        try:
            accelerator.scaler.unscale_(plain)
        except RuntimeError as error:  # a loop may clip several times in a step
            if "already been called" not in str(error):
                raise
