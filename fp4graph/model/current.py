"""The forward of an applied model that is running, and the calls of the model's parts."""

from __future__ import annotations

import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from fp4graph import torch_internals
from fp4graph.errors import Error
from fp4graph.graph.backend import with_own_code
from fp4graph.graph.direct import Direct
from fp4graph.model.forward import Kind, reentrant_regions
from fp4graph.torch_internals import frame_hook

_Start = TypeVar("_Start")
#: The start of an uncompiled pass: the step tensor, and the number of sites that each module had run before, if known.
PassStart = tuple[Tensor, "dict[str, int] | None"]
#: A key that a caller puts into the memo of a deepcopy, so that the copy stays unapplied.
PLAIN: Any = "fp4graph_plain"


@dataclass
class Calls(Generic[_Start]):
    """The calls in one checkpointed region: how each began, and how many of them each backward has repeated.

    ``backward`` is the backward in which the region began, or -1: a reentrant checkpoint runs regions in one.
    """

    backward: int
    starts: list[_Start] = field(default_factory=list)
    repeats: Counter[int] = field(default_factory=Counter)

    def repeat(self) -> _Start | None:
        """Return the start of the call that the running backward repeats next, or None if it repeats no further one."""
        place = self.repeats[torch_internals.backward_id()]
        self.repeats[torch_internals.backward_id()] += 1
        return self.starts[place] if place < len(self.starts) else None


@dataclass(eq=False)
class CurrentForward:
    """The forward of an applied model that is running, or was the last to run.

    Attributes:
        step: the tensor (seed, rank, count) that every mark hook of the model hands to the graph. Each forward sets a
            new tensor when it begins.
        compiled: whether the compiled call is running. threads: the ids of the threads that run it, at most one with
            gradients.
        direct: the uncompiled pass in progress, or None. thread: the id of the thread that last began such a pass or
            the compiled call.
        ran: ids of the modules that ran uncompiled, with gradients, since the count of forwards last changed.
        last: the kind of the last forward with gradients that has begun, or None.
        repeats: whether a checkpoint runs modules again, which does not count.
        passes: maps a checkpointed region to the uncompiled passes in it: their step tensors, and the numbers of sites
            that each module had run before, or None.
        calls: maps a checkpointed region to the step tensors of the model's calls in it.
        part: runs a module that was called by itself. None runs the module unchanged, and its mark hook raises.
        uncaptured: runs a module that the compiled call calls outside of its graphs; ``disabled`` says whether Dynamo
            is disabled there. None leaves the module to Dynamo.
        method: runs a method that is compiled like the model's call; None runs the method unchanged.
        copied: is called with the memo of a deepcopy that reaches this object.
    """

    step: Tensor
    compiled: bool = False
    threads: set[int] = field(default_factory=set)
    direct: Direct | None = None
    thread: int | None = None
    ran: set[int] = field(default_factory=set)
    last: Kind | None = None
    repeats: bool = False
    passes: weakref.WeakKeyDictionary[Any, Calls[PassStart]] = field(default_factory=weakref.WeakKeyDictionary)
    calls: weakref.WeakKeyDictionary[Any, Calls[Tensor]] = field(default_factory=weakref.WeakKeyDictionary)
    part: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any] | None = None
    uncaptured: Callable[..., Any] | None = None
    method: Callable[[str, tuple[Any, ...], dict[str, Any]], Any] | None = None
    copied: Callable[[dict[Any, Any]], None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return CurrentForward, (self.step,)  # a pickle holds no forward

    def __deepcopy__(self, memo: dict[Any, Any]) -> CurrentForward:
        memo[id(self)] = twin = CurrentForward(self.step)
        if self.copied is not None and PLAIN not in memo:
            self.copied(memo)
        return twin

    @contextmanager
    def parts_left_alone(self) -> Iterator[None]:
        """Leave the model's parts alone in this context: they have graphs of their own, or are bypassed."""
        saved = self.compiled, self.uncaptured
        self.compiled, self.uncaptured = True, None
        try:
            yield
        finally:
            self.compiled, self.uncaptured = saved

    def require_thread(self) -> None:
        """Raise an Error unless this thread runs the forward; products of another thread would not be seen."""
        if self.thread != threading.get_ident():
            raise Error("two threads run one applied model at the same time; give each its own copy.deepcopy of it")

    def enter(self, module: nn.Module) -> None:
        """Record that ``module`` begins to run in the uncompiled pass."""
        assert self.direct is not None
        self.direct.look_for_region()
        if torch.is_grad_enabled() and not self.repeats:
            self.ran.add(id(module))

    @property
    def counted(self) -> bool:
        """Whether a backward runs modules again that have counted in the forward. A reentrant checkpoint's forward has
        no gradients, so its modules count when they run again, unless a call of the model counts."""
        known = _repeated(self.passes) is not None or self.last in (Kind.CALL, Kind.METHOD)
        return known and torch_internals.backward_id() != -1

    def begin_pass(self, before: dict[str, int] | None) -> PassStart:
        """Return the start of an uncompiled pass that begins now, inside or outside of a checkpointed region.

        ``before`` has the number of sites that each module has run. A pass that a checkpoint repeats starts as in the
        forward.
        """
        calls = _repeated(self.passes)
        start = (calls and calls.repeat()) or (self.step, before)
        _record(self.passes, start)
        return start

    def begin_call(self, step: Tensor | None) -> None:
        """Record the step tensor of a call of the model that a checkpoint will repeat; ``step`` is given for a call
        that is itself a repetition."""
        _record(self.calls, self.step if step is None else step, reentrant_regions())

    def repeated(self) -> Tensor | None:
        """Return the step tensor of the call that a checkpoint repeats in this backward; None for any other call."""
        calls = _repeated(self.calls, reentrant_regions)
        return None if calls is None else calls.repeat()


def _repeated(calls: Mapping[Any, Calls[_Start]], reentrant: Callable[[], list[Any]] = list) -> Calls[_Start] | None:
    """Return the calls of the innermost region that runs again now, or None: regions in it begin anew. In the backward
    of a reentrant region only its own regions run again, so other regions are inside of it."""
    if (backward := torch_internals.backward_id()) == -1:
        return None
    known = (calls.get(region) for region in (*torch_internals.checkpointed_regions(), *reentrant()))
    return next((each for each in known if each is not None and each.backward != backward), None)


def _record(calls: MutableMapping[Any, Calls[_Start]], start: _Start, reentrant: Sequence[Any] = ()) -> None:
    """Record a call that begins, in each region that runs for the first time."""
    backward = torch_internals.backward_id()
    for region in (*torch_internals.checkpointed_regions(), *reentrant):
        of_region = calls.setdefault(region, Calls(backward))
        if of_region.backward == backward:
            of_region.starts.append(start)


class Parts:
    """Routes the calls of an applied model's parts, which are the modules below the root.

    ``nn.Module.__call__`` of each part calls a function of this object instead of the module. Dynamo traces that call
    if the module has hooks. A forward sets no attribute of a module, because Dynamo checks guards faster while
    attributes are unchanged.

    While the compiled call is running, a part is usually inlined in a graph or starts one. ``current.uncaptured`` runs
    a part that does neither if its products would be in no graph, or in one that does not show whose they are: Dynamo
    is disabled, or the part has products of its own and its call does not fit into one graph.
    """

    def __init__(
        self, modules: Mapping[nn.Module, bool], owners: Collection[nn.Module], current: CurrentForward
    ) -> None:
        """``modules`` maps every module below the root to whether it or a module in it has quantized sites; ``owners``
        have products of their own, with weights or of activations."""
        self._current = current
        kinds = {False: self._call(holds=False), True: self._call(holds=True), None: self._call_in_one_graph()}
        kind_of = {module: None if module in owners else holds for module, holds in modules.items()}
        # Dynamo caches, limits and skips by code object. Modules of one class share a code object, because guards check
        # it, and similar blocks should share their graphs.
        pairs = {(kind, type(m)) for m, kind in kind_of.items()}
        calls = {(kind, cls): with_own_code(kinds[kind], cls) for kind, cls in pairs}
        self._parts = [
            (m.__dict__, types.MethodType(calls[kind, type(m)], m), m._compiled_call_impl)
            for m, kind in kind_of.items()
        ]

    def show(self) -> None:
        """Route the calls of all parts through this object."""
        for attributes, part, _ in self._parts:
            attributes["_compiled_call_impl"] = part

    def hide(self) -> None:
        """Give the parts back the calls that they had before."""
        for attributes, part, original in self._parts:
            if attributes.get("_compiled_call_impl") is not part:
                continue  # another applied model has taken the module over
            if original is None:
                del attributes["_compiled_call_impl"]
            else:
                attributes["_compiled_call_impl"] = original

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
                    # Dynamo breaks at the hook, and would skip this frame for good, even after the hook is removed.
                    return current.uncaptured(module, args, kwargs, disabled=False)
                if torch.compiler.is_compiling() or current.uncaptured is None:
                    # Dynamo cannot resume inside a loop, so it does not compile a frame with a graph break there.
                    # This frame then runs uncompiled from its beginning.
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
