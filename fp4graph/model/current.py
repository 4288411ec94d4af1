"""The forward of an applied model that is running, and the calls of the model's parts."""

from __future__ import annotations

import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp4graph import torch_internals
from fp4graph.errors import Error
from fp4graph.graph.backend import with_own_code
from fp4graph.graph.direct import Direct
from fp4graph.model.forward import Kind
from fp4graph.torch_internals import frame_hook

#: Key of a deepcopy's memo: the copy is not to be applied.
PLAIN: Any = "fp4graph_plain"


@dataclass
class Calls:
    """The calls of a model in one checkpointed region: their steps, and how many of them each backward has repeated."""

    steps: list[Tensor] = field(default_factory=list)
    repeats: Counter[int] = field(default_factory=Counter)


@dataclass(eq=False)
class CurrentForward:
    """The forward of an applied model that is running, or was the last to run.

    Attributes:
        step: the tensor (seed, rank, count), which every mark hook of the model hands to the graph. Set anew for each
            forward, because a graph takes the tensor that is here when the forward begins.
        compiled: whether the compiled call is running. threads: those that run it, several at most without gradients.
        direct: the pass that is running uncompiled, or None. thread: the last to begin that, or the compiled call.
        ran: ids of the modules that ran uncompiled, with gradients, since the count of forwards last changed.
        last: the kind of the last forward with gradients that has begun, or None.
        regions: of each checkpointed region, the step of its forward and the sites of each module before it.
        calls: of each checkpointed region, the steps of the calls of the model in it, in their order.
        part: runs a module that was called by itself; None runs it as it is, which its hook refuses.
        uncaptured: runs a module that the compiled call calls outside of its graphs, and is told whether Dynamo is
            disabled there; None leaves the module to Dynamo.
        method: runs a method that is compiled like the model's call; None runs it as it is.
        copied: called with the memo of a deepcopy that meets this object.
    """

    step: Tensor
    compiled: bool = False
    threads: set[int] = field(default_factory=set)
    direct: Direct | None = None
    thread: int | None = None
    ran: set[int] = field(default_factory=set)
    last: Kind | None = None
    regions: weakref.WeakKeyDictionary[Any, tuple[Tensor, dict[str, int]]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    calls: weakref.WeakKeyDictionary[Any, Calls] = field(default_factory=weakref.WeakKeyDictionary)
    part: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any] | None = None
    uncaptured: Callable[..., Any] | None = None
    method: Callable[[str, tuple[Any, ...], dict[str, Any]], Any] | None = None
    copied: Callable[[dict[Any, Any]], None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return CurrentForward, (self.step,)  # no forward travels

    def __deepcopy__(self, memo: dict[Any, Any]) -> CurrentForward:
        memo[id(self)] = twin = CurrentForward(self.step)
        if self.copied is not None and PLAIN not in memo:
            self.copied(memo)
        return twin

    @contextmanager
    def parts_left_alone(self) -> Iterator[None]:
        """Let the model's parts run as they are in this context, which compiles what it runs itself, or bypasses it."""
        former = self.compiled, self.uncaptured
        self.compiled, self.uncaptured = True, None
        try:
            yield
        finally:
            self.compiled, self.uncaptured = former

    def require_thread(self) -> None:
        """Raise an Error in another thread than the one that runs the forward: what it multiplies would not be seen."""
        if self.thread != threading.get_ident():
            raise Error("two threads run one applied model at the same time; give each its own copy.deepcopy of it")

    def enter(self, module: nn.Module) -> None:
        """Note that ``module`` begins to run in the pass."""
        assert self.direct is not None
        region = torch_internals.checkpointed_region()
        again = torch_internals.backward_id() != -1  # a checkpoint runs its region again in the backward
        # A reentrant one, which has no region, runs it without gradients at first.
        noted = again and (region in self.regions or self.last in (Kind.CALL, Kind.METHOD))
        if torch.is_grad_enabled() and not noted:
            self.ran.add(id(module))
        if region is not None and region not in self.regions:
            self.regions[region] = self.step, self.direct.planner.occurrences

    def begin_call(self) -> None:
        """Note a call of the model that begins, if a checkpoint will repeat it."""
        if torch_internals.backward_id() == -1 and (region := torch_internals.checkpointed_region()) is not None:
            self.calls.setdefault(region, Calls()).steps.append(self.step)

    def repeated(self) -> Tensor | None:
        """Return the step of the call that a checkpoint repeats in this backward; None if the call is none of those."""
        backward, region = torch_internals.backward_id(), torch_internals.checkpointed_region()
        calls = None if backward == -1 or region is None else self.calls.get(region)
        if calls is None or calls.repeats[backward] == len(calls.steps):
            return None
        calls.repeats[backward] += 1
        return calls.steps[calls.repeats[backward] - 1]


class Parts:
    """The parts of an applied model: ``nn.Module.__call__`` of each runs :meth:`_run` in the place of the module's own.

    Dynamo traces that call where a module has hooks. Nothing is written for a forward, because Dynamo checks its guards
    faster while the modules' attributes stay as they are.

    While the compiled call is running, a part is usually inlined in a graph, or begins one. A part that does neither
    runs in ``current.uncaptured`` where its products would be in no graph: where Dynamo is disabled, and where the part
    owns quantized weights and its call does not fit into one graph.
    """

    def __init__(
        self, modules: Mapping[nn.Module, bool], owners: Collection[nn.Module], current: CurrentForward
    ) -> None:
        """``modules`` are all below the root, each with whether it or a module below it has quantized sites; ``owners``
        are those with quantized weights of their own."""
        self._current = current
        kinds = {False: self._call(holds=False), True: self._call(holds=True), None: self._call_in_one_graph()}
        kind_of = {module: None if module in owners else holds for module, holds in modules.items()}
        # Dynamo's cache and limit are per code object, and it skips one for good. The modules of a class share theirs:
        # guards ask for it, and alike blocks are to share their graphs.
        pairs = {(kind, type(m)) for m, kind in kind_of.items()}
        calls = {(kind, cls): with_own_code(kinds[kind], cls) for kind, cls in pairs}
        self._parts = [
            (m.__dict__, types.MethodType(calls[kind, type(m)], m), m._compiled_call_impl)
            for m, kind in kind_of.items()
        ]

    def show(self) -> None:
        """Put the parts in place."""
        for attributes, part, _ in self._parts:
            attributes["_compiled_call_impl"] = part

    def hide(self) -> None:
        """Give the modules the calls that they had before."""
        for attributes, part, former in self._parts:
            if attributes.get("_compiled_call_impl") is not part:
                continue  # another applied model has taken the module over
            if former is None:
                del attributes["_compiled_call_impl"]
            else:
                attributes["_compiled_call_impl"] = former

    def _call(self, *, holds: bool) -> Callable[..., Any]:
        current, run = self._current, self._run

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if current.compiled:
                if torch.compiler.is_compiling() or not holds or current.uncaptured is None or callable(frame_hook()):
                    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
                return current.uncaptured(module, args, kwargs, disabled=True)
            return run(holds, module, args, kwargs)

        return call

    def _call_in_one_graph(self) -> Callable[..., Any]:
        current, run = self._current, self._run

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if current.compiled:
                if current.uncaptured is not None and has_backward_hooks(module):
                    # Dynamo breaks there, and would skip this frame for good: not only while there is a hook.
                    return current.uncaptured(module, args, kwargs, disabled=False)
                if torch.compiler.is_compiling() or current.uncaptured is None:
                    # Dynamo resumes after a graph break, but not in the middle of a loop: it does not compile a frame
                    # that breaks there. This frame then runs as it is, before anything in it has run.
                    result = None
                    for _ in (None,):
                        result = module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
                    return result
                return current.uncaptured(module, args, kwargs, disabled=not callable(frame_hook()))
            return run(True, module, args, kwargs)

        return call

    def _run(self, holds: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module where the compiled forward is not running."""
        current = self._current
        if current.direct is None:
            if not holds:
                return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
            assert current.part is not None
            return current.part(module, args, kwargs)
        current.require_thread()
        current.enter(module)
        with current.direct.inside(module):
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether ``module`` has a hook on its backward, which Dynamo does not compile."""
    return len(module._backward_hooks) > 0 or len(module._backward_pre_hooks) > 0
