"""What users call on a model: apply, remove, bypass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from os import PathLike
from typing import Any, TypeVar

from torch import nn

from fp4graph import state
from fp4graph.errors import Error
from fp4graph.policy import Policy, check_modules, load_policy
from fp4graph.runtime import BACKENDS, Runtime, bypassed, detach, entries, runtime_of, unwrapped

M = TypeVar("M", bound=nn.Module)


def apply(
    model: M,
    policy: str | PathLike[str] | dict[str, Any] | Policy,
    *,
    backend: str = "inductor",
    seed: int | None = None,
    dynamic: bool | None = None,
) -> M:
    """Compile ``model`` in place so that it trains under ``policy``.

    Type, parameters and their names stay; buffers are added under ``*._fp4graph.*``. The graph is captured at the
    first call, whose errors are ours too. Applying again replaces the policy, and keeps state where it fits.

    Args:
        model: any module. Of a DistributedDataParallel, the module inside is what the policy is applied to.
        policy: a path, a shipped policy's name, a dict or a :class:`Policy`.
        backend: ``inductor``, ``aot_eager`` or ``eager``.
        seed: of stochastic rounding and random transforms; None is 0.
        dynamic: as torch.compile's.

    Returns:
        ``model`` itself.

    Raises:
        PolicyError: the policy cannot be loaded, or names modules that the model has not. The model is as it was.
        Error: a part of the model is applied already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply() takes an nn.Module; got {type(model).__name__}")
    if backend not in BACKENDS:
        raise ValueError(f"backend is one of {', '.join(BACKENDS)}; got {backend!r}")
    root = unwrapped(model)
    loaded = load_policy(policy)
    check_modules(loaded, [name for name, _ in root.named_modules() if not state.is_ours(name)])
    for name, module in root.named_modules():
        if name and runtime_of(module) is not None:
            raise Error(
                f"submodule {name!r} has a policy of its own; fp4graph.remove() it before applying to the whole"
            )
    Runtime(root, loaded, backend, seed, dynamic).attach()
    return model


def remove(model: M) -> M:
    """Undo :func:`apply`: the model runs as before, its weights as they are now. Returns ``model``."""
    if runtime_of(model) is None and not entries(model):
        raise Error("this model is not applied")
    detach(unwrapped(model))
    return model


def bypass(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which ``model``, its methods and its submodules run uncompiled and in high precision."""
    if runtime_of(model) is None and not entries(model):
        raise Error("this model is not applied, so there is nothing to bypass")
    return bypassed(model)
