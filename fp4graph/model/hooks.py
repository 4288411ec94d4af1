"""The forward pre-hook of modules with planned sites: marks them while Dynamo traces, refuses to run uncompiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp4graph.errors import UncompiledError
from fp4graph.graph.marker import MARK, Tag
from fp4graph.numerics.sharding import whole

if TYPE_CHECKING:
    from fp4graph.model.runtime import Runtime


class Entry:
    """Forward pre-hook of one module.

    Attributes:
        runtime: of the applied model; None in a copy or a reloaded model, which runs nothing until applied again.
        name: the module's FQN.
        bypassed: depth of :func:`fp4graph.bypass` contexts.
    """

    def __init__(self, runtime: Runtime | None, name: str, tag: Tag, state: tuple[str, ...]) -> None:
        self.runtime = runtime
        self.name = name
        self.bypassed = 0
        self.tag = tag.encode()
        self._weights = tuple(tuple(path.split(".")) for path in tag.weights)
        self._state = tuple(tuple(path.split(".")) for path in state)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            if self.runtime is None:
                raise UncompiledError("this copy of an applied model was not applied; call fp4graph.apply on it")
            weights = [_follow(module, path) for path in self._weights]
            state = [whole(_follow(module, path)) for path in self._state]
            MARK(self.tag, module._fp4graph.key, self.runtime.step, weights, state, module.training)  # type: ignore[union-attr]
        elif not self.bypassed:
            why = (
                "it is a copy or a reloaded checkpoint of an applied model"
                if self.runtime is None
                else "forward() or a submodule was called directly, or torch.compile gave up (recompile limit, "
                "force_eager); only calling the applied model itself runs the compiled graph"
            )
            raise UncompiledError(
                f"module {self.name or '(root)'!r} has quantized sites but is about to run uncompiled, in high "
                f"precision: {why}. Call fp4graph.apply(model, policy) on the model you call, or wrap the call in "
                "fp4graph.bypass(model) if high precision is what you want"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is detached: it has no compiled graph behind it.
        return _detached, (self.name,)


def _detached(name: str) -> Entry:
    return Entry(None, name, Tag((), (), ()), ())


def _follow(module: Any, path: tuple[str, ...]) -> Tensor:
    for step in path:
        module = getattr(module, step)
    return module  # type: ignore[no-any-return]


class GuardedForward:
    """``forward`` of a root that owns quantized weights itself, where a direct call would meet no hook at all."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        functools.update_wrapper(self, type(module).forward)
        del self.__wrapped__  # type: ignore[attr-defined]  # a function of the class, not picklable by every pickler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for _, _, hook in entries(self.module):
                hook(self.module, args)
        return type(self.module).forward(self.module, *args, **kwargs)


class Unit:
    """``forward`` of a module that ``fully_shard`` was called on: a graph of its own.

    FSDP's hooks around it run uncompiled, so it begins a graph in any case. Here it does so whatever module it is
    (Dynamo starts none in the forward of torch's own) and whoever calls it (activation checkpointing runs it again in
    the backward, outside the root's call).

    Args:
        module: sharded, with an :class:`Entry` on it or below. compiled: what runs :func:`run_unit`.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any]) -> None:
        self.module, self._compiled = module, compiled
        self._below = entries(module)[0][2]
        own = [(key, hook) for key, hook in module._forward_pre_hooks.items() if isinstance(hook, Entry)]
        for key, _ in own:
            del module._forward_pre_hooks[key]
        #: The module's own hook: it marks a graph, so it runs inside.
        self.entry = own[0][1] if own else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._below.bypassed:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self._compiled(self.module, self.entry, *args, **kwargs)


def is_sharded_unit(root: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on ``root`` or something below, whose graphs serve several modules."""
    return any(isinstance(module.__dict__.get("forward"), Unit) for module in root.modules())


def run_unit(module: nn.Module, entry: Entry | None, *args: Any, **kwargs: Any) -> Any:
    """The forward of a :class:`Unit`; modules are an argument, so that those alike share one graph."""
    if entry is not None:
        entry(module, args)
    return type(module).forward(module, *args, **kwargs)


def entries(root: nn.Module) -> list[tuple[nn.Module, int | None, Entry]]:
    """(module, hook id or None, hook) for every hook of ours below ``root``; that of a unit has no id."""
    found: list[tuple[nn.Module, int | None, Entry]] = []
    for module in root.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, Unit) and forward.entry is not None:
            found.append((module, None, forward.entry))
        found += [(module, key, hook) for key, hook in module._forward_pre_hooks.items() if isinstance(hook, Entry)]
    return found
