"""The forward pre-hook of modules with planned sites: marks them while Dynamo traces, refuses to run uncompiled."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp4graph.errors import UncompiledError
from fp4graph.graph.marker import ENTER, Tag
from fp4graph.sharding import whole

if TYPE_CHECKING:
    from fp4graph.runtime import Runtime


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
            ENTER(self.tag, module._fp4graph.key, self.runtime.step, weights, state, module.training)  # type: ignore[union-attr]
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


def entries(root: nn.Module) -> list[tuple[nn.Module, int, Entry]]:
    """(module, hook id, hook) for every hook of ours below ``root``."""
    return [
        (module, key, hook)
        for module in root.modules()
        for key, hook in module._forward_pre_hooks.items()
        if isinstance(hook, Entry)
    ]
