"""The hooks of an applied model's modules: they mark the graph while Dynamo traces, and refuse to run uncompiled."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from fp4graph import torch_internals
from fp4graph.errors import PolicyWarning, UncompiledError
from fp4graph.graph.marker import MARK, Tag
from fp4graph.graph.names import Names
from fp4graph.model import state
from fp4graph.model.conversion import refuse_export
from fp4graph.model.current import CurrentForward
from fp4graph.numerics.sharding import whole

#: Why a model that was pickled, or a copied part of one, has no compiled call.
PICKLED = (
    "it was pickled (by torch.save, ddp_spawn or worker processes) or copied apart from its model, which drops the "
    "compiled call; call fp4graph.apply(model, policy) on it"
)


class MarkHook:
    """Forward pre-hook that marks one module for the graph pass while Dynamo traces, and refuses to run uncompiled.

    Attributes:
        current: the current forward of the applied model; None in a copy or a reloaded model, which has no policy.
        name: the module's fully qualified name. tag: the static part of the mark, as text.
        bypassed: depth of :func:`fp4graph.bypass` contexts.
    """

    def __init__(self, current: CurrentForward | None, name: str, tag: Tag, entries: tuple[str, ...]) -> None:
        self.current = current
        self.name = name
        self.bypassed = 0
        self.tag = tag.encode()
        self._decoded, self._carried = tag, replace(tag, carried=True).encode()
        self._weights = tuple(tuple(path.split(".")) for path in tag.weights)
        self._entries = tuple(tuple(path.split(".")) for path in entries)

    def __call__(self, module: nn.Module, args: Any, *, carried: bool = False) -> None:
        if torch.compiler.is_compiling():
            if torch_internals.is_exporting():
                refuse_export()
            if self.current is None:
                raise UncompiledError("this copy of an applied model has no policy; call fp4graph.apply on it")
            tag = self._carried if carried else self.tag
            weights = [_follow(module, path) for path in self._weights]
            MARK(tag, getattr(module, state.KEY), self.current.step, weights, self._state(module), module.training)
        elif self.current is not None and (direct := self.current.direct) is not None:
            weights = [_follow(module, path) for path in self._weights]
            self.current.require_thread()
            decoded = replace(self._decoded, carried=carried)
            key = getattr(module, state.KEY)
            direct.mark(module, self.name, decoded, key, self.current.step, weights, self._state(module))
        elif not self.bypassed:
            why = (
                PICKLED
                if self.current is None
                else "forward() or a submodule was called directly, the module was taken out of its model, or "
                "torch.compile gave up (recompile limit, force_eager); only calling the applied model itself runs the "
                "compiled graph"
            )
            raise UncompiledError(
                f"module {self.name or '(root)'!r} has quantized sites but is about to run uncompiled, in high "
                f"precision: {why}. Call fp4graph.apply(model, policy) on the model you call, or wrap the call in "
                "fp4graph.bypass(model) if high precision is what you want"
            )

    def _state(self, module: nn.Module) -> list[Tensor]:
        return [whole(_follow(module, path)) for path in self._entries]

    def __reduce__(self) -> tuple[Any, ...]:
        # A hook loaded from a file is detached, because no compiled graph comes with it.
        return _detached, (self.name,)

    def __deepcopy__(self, memo: dict[Any, Any]) -> MarkHook:
        copy.deepcopy(self.current, memo)  # applies the policy to the copy of the model
        return _detached(self.name)


@dataclass(eq=False)
class CarryHook:
    """Forward pre-hook that marks the weights of ``owner``, which the hooked module uses without a call."""

    hook: MarkHook
    owner: nn.Module

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.hook(self.owner, args, carried=True)

    @staticmethod
    def add(module: nn.Module, owner: nn.Module) -> CarryHook | None:
        """Let ``module`` mark the weights of ``owner`` before its own weights; return None if that is not possible."""
        hook = next((each for holder, _, each in mark_hooks(owner) if holder is owner), None)
        if (sharded := sharded_forward(module)) is not None:
            return sharded.carry(hook, owner)
        hooks = module._forward_pre_hooks
        if hook is None or any(isinstance(h, CarryHook) and h.hook is hook for h in hooks.values()):
            return None
        carrying = CarryHook(hook, owner)
        module.register_forward_pre_hook(carrying)
        for key in [key for key, h in hooks.items() if isinstance(h, MarkHook)]:
            hooks[key] = hooks.pop(key)
        return carrying


def _detached(name: str) -> MarkHook:
    return MarkHook(None, name, Tag((), (), ()), ())


def _follow(module: Any, path: tuple[str, ...]) -> Tensor:
    for attribute in path:
        module = getattr(module, attribute)
    return module  # type: ignore[no-any-return]


class _Instead:
    """An attribute of a model that hides function ``name`` of the model's class."""

    def __init__(self, module: nn.Module, name: str, current: CurrentForward) -> None:
        self.module, self.name, self._current = module, name, current
        functools.update_wrapper(self, getattr(type(module), name))  # type: ignore[arg-type]  # subclasses are called
        del self.__wrapped__  # type: ignore[attr-defined]  # a function of the class, not picklable by every pickler

    @property
    def __code__(self) -> CodeType:
        """The code of the hidden function, whose parameters torch.export reads before it calls the model."""
        code: CodeType = getattr(type(self.module), self.name).__code__
        return code


class GuardedForward(_Instead):
    """``forward`` of a root that owns quantized weights: a direct call runs the root's hooks too.

    Attributes:
        previous: the ``forward`` that other code had set on the root itself, or None.
    """

    def __init__(self, module: nn.Module, current: CurrentForward) -> None:
        super().__init__(module, "forward", current)
        self.previous: Callable[..., Any] | None = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = self._current
        if not torch.compiler.is_compiling():
            marks = [hook for hook in self.module._forward_pre_hooks.values() if isinstance(hook, MarkHook)]
            if marks and all(hook.current is current for hook in marks):  # else a wrapper kept it beyond its policy
                if current.direct is None and not current.compiled and current.part is not None:
                    return current.part(self.module, args, kwargs)
                for hook in marks:
                    hook(self.module, args)
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def remove(self) -> None:
        """Give the root its previous forward back."""
        del self.module.forward
        if self.previous is not None:
            self.module.forward = self.previous


class Method(_Instead):
    """A method of an applied model that is compiled like the model's call."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(getattr(type(self.module), self.name).__get__(self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current, held = self._current, self.module.__dict__.get(self.name)
        if isinstance(held, Method) and held is not self:
            return held(*args, **kwargs)  # the method of a later phase or policy
        runs = current.compiled or current.direct is not None  # this call is part of a forward
        if held is None or current.method is None or runs:
            return getattr(type(self.module), self.name)(self.module, *args, **kwargs)
        return current.method(self.name, args, kwargs)


def compiled_already(*args: Any, **kwargs: Any) -> None:
    """Replace ``nn.Module.compile``, whose compiled call would bypass the graph pass, by a warning."""
    text = "model.compile() has no effect after fp4graph.apply(), which compiles the model already"
    warnings.warn(text, PolicyWarning, stacklevel=2)


def marked_method(root: nn.Module, name: str) -> Callable[..., Any]:
    """Return the method ``name`` of ``root``'s class, bound, with the marks that precede the model's call."""
    method = getattr(type(root), name)

    def call(*args: Any, **kwargs: Any) -> Any:
        for hook in root._forward_pre_hooks.values():
            if isinstance(hook, MarkHook | CarryHook):
                hook(root, args)
        return method(root, *args, **kwargs)

    return call


@contextmanager
def uncalled(root: nn.Module) -> Iterator[None]:
    """Take the applied call off ``root`` in this context: a method and the forward that it calls share one graph."""
    call, root._compiled_call_impl = root._compiled_call_impl, None
    try:
        yield
    finally:
        root._compiled_call_impl = call


class ShardedForward:
    """``forward`` of a module that ``fully_shard`` was called on; it runs as a graph of its own.

    FSDP's hooks around the module run uncompiled, so a graph begins there in any case. This forward begins a graph in
    every module (Dynamo begins none in the forward of torch's own modules) and for every caller (activation
    checkpointing runs the module again in the backward, outside the root's call).

    Args:
        module: a sharded module with a :class:`MarkHook` on it or below.
        compiled: the compiled :func:`run_sharded`.
        names: the names of the model's modules, which learn in which module a graph begins.

    Attributes:
        hook: the module's own mark hook, or None. It marks a graph, so it runs inside the compiled function.
        carrying: the hooks that mark weights of modules that this one does not call. They run there too.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], names: Names) -> None:
        self.module, self._compiled, self._names = module, compiled, names
        self._any_hook = mark_hooks(module)[0][2]
        marks = [(key, hook) for key, hook in module._forward_pre_hooks.items() if isinstance(hook, MarkHook)]
        for key, _ in marks:
            del module._forward_pre_hooks[key]
        self.hook = marks[0][1] if marks else None
        self.carrying: tuple[CarryHook, ...] = ()

    def carry(self, hook: MarkHook | None, owner: nn.Module) -> CarryHook | None:
        """Let the module mark the weights of ``owner``; return None if that is not possible."""
        if hook is None or any(each.hook is hook for each in self.carrying):
            return None
        self.carrying += (CarryHook(hook, owner),)
        return self.carrying[-1]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._any_hook.bypassed:
            return type(self.module).forward(self.module, *args, **kwargs)
        outer, self._names.within = self._names.within, self._names.name(self.module)
        try:
            return self._compiled(self.module, self.carrying, self.hook, *args, **kwargs)
        finally:
            self._names.within = outer


def run_sharded(
    module: nn.Module, carrying: tuple[CarryHook, ...], hook: MarkHook | None, *args: Any, **kwargs: Any
) -> Any:
    """Run the forward of a :class:`ShardedForward`; the module is an argument, so that equal modules share a graph."""
    for each in carrying:
        each(module, args)
    if hook is not None:
        hook(module, args)
    return type(module).forward(module, *args, **kwargs)


def sharded_forward(module: nn.Module) -> ShardedForward | None:
    """Return the :class:`ShardedForward` of ``module``, or None; several modules may share its graph."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, ShardedForward) else None


def has_sharded_forward(root: nn.Module) -> bool:
    """Return whether ``root`` or a module in it has a :class:`ShardedForward`."""
    return any(sharded_forward(module) is not None for module in root.modules())


def is_marked(module: nn.Module) -> bool:
    """Return whether ``module`` itself has a mark hook."""
    return any(owner is module for owner, _, _ in mark_hooks(module))


def mark_hooks(root: nn.Module) -> list[tuple[nn.Module, int | None, MarkHook]]:
    """Return (module, hook id, hook) for every mark hook below ``root``; a hook inside a sharded forward has no id."""
    marks: list[tuple[nn.Module, int | None, MarkHook]] = []
    for module in root.modules():
        if (sharded := sharded_forward(module)) is not None and sharded.hook is not None:
            marks.append((module, None, sharded.hook))
        marks += [(module, key, hook) for key, hook in module._forward_pre_hooks.items() if isinstance(hook, MarkHook)]
    return marks


def remove_hooks(root: nn.Module, shared: Collection[nn.Module] = ()) -> None:
    """Remove mark hooks, guarded and sharded forwards, and their state from ``root``, except from the modules in
    ``shared``, which another applied model has taken over."""
    if getattr(compiles := root.__dict__.get("compile"), "func", compiles) is compiled_already:
        del root.__dict__["compile"]
    for module, key, _ in mark_hooks(root):
        if key is not None and module not in shared:
            module._forward_pre_hooks.pop(key)
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    for module in [module for module in root.modules() if module not in shared]:
        for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, CarryHook)]:
            del module._forward_pre_hooks[key]
        if (module_state := state.State.of(module)) is not None:
            module_state.remove()
        if isinstance(forward := module.__dict__.get("forward"), GuardedForward):
            forward.remove()
        elif isinstance(forward, ShardedForward):
            del module.forward
        for name in [name for name, value in module.__dict__.items() if isinstance(value, Method)]:
            del module.__dict__[name]


def drop_repeated_hooks(embeddings: Iterable[nn.Embedding]) -> None:
    """Keep one of the hooks through which transformers makes an embedding's output require gradients.

    transformers adds an equal hook each time gradient checkpointing is switched on, which TRL does around every
    generation, and Dynamo recompiles for each.
    """
    for embedding in embeddings:
        hooks = embedding._forward_hooks
        if len(hooks) > 1:
            same = [key for key, hook in hooks.items() if getattr(hook, "__name__", "") == "make_inputs_require_grads"]
            for key in same[1:]:
                del hooks[key]


@contextmanager
def bypassed(root: nn.Module) -> Iterator[None]:
    """Let all modules with hooks below ``root`` run uncompiled while the context lasts."""
    marks = [hook for _, _, hook in mark_hooks(root)]
    for hook in marks:
        hook.bypassed += 1
    try:
        yield
    finally:
        for hook in marks:
            hook.bypassed -= 1
