"""Compiles a model's call and methods behind the graph pass, and records the sites of every captured graph."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fp4graph import torch_internals
from fp4graph.errors import Error
from fp4graph.graph.backend import Backend, with_own_code
from fp4graph.graph.functions import cacheable
from fp4graph.graph.plan import Planner
from fp4graph.graph.rewrite import rewrite
from fp4graph.graph.site import Site, WeightUse
from fp4graph.model import hooks, state
from fp4graph.model.forward import CALL, Forward, Kind
from fp4graph.model.prepare import PhasePlan
from fp4graph.model.ran import Drawing, Frame, Ran
from fp4graph.model.recompilations import Recompilations

#: How many graphs Dynamo may make of a model's forward, for shapes, training and evaluation, frozen parameters, caches.
RECOMPILE_LIMIT = 64
#: How many consecutive failing calls Dynamo traces anew, unless Dynamo's limit is lower.
_FAILURES = 8


class Capture:
    """Compiles the root's call and methods: rewrites each captured graph for ``plan`` and hands it to ``inner``.

    Args:
        plan: the plan of the phase in force.
        inner: the torch.compile backend that runs the rewritten graphs.
        recompile_limit: the number of graphs of one frame after which Dynamo gives up; None means
            :data:`RECOMPILE_LIMIT`, or torch's limit if it is higher.
        explains: collect refusals in ``problems`` instead of raising them.
        uncompiled: runs a named call that Dynamo does not compile; with None the hooks refuse it.

    Attributes:
        backend: the torch.compile backend.
        sites: the sites of all graphs, in the order of capture. A recaptured graph adds its sites again; a site that
            the model's call and its methods share is listed once.
        of_parts: sites of parts that ran by themselves before any graph was captured.
        uses: how the graphs use parameters, by the parameter's owner and name.
        read: parameters that the graphs take, as (module, name). marked: names of modules whose call was seen.
        error: the error of the last graph that failed. The compiler wraps it in errors of its own.
        has_run: whether the failed call had run other graphs before.
        ran: the record of the forward in progress.
    """

    def __init__(
        self,
        plan: PhasePlan,
        inner: Backend,
        dynamic: bool | None,
        *,
        recompile_limit: int | None = None,
        explains: bool = False,
        uncompiled: Callable[..., Any] | None = None,
    ) -> None:
        self._plan, self._inner, self._explains, self._limit = plan, inner, explains, recompile_limit
        self._dynamic, self._uncompiled = dynamic, uncompiled
        self.backend = _backend(self)
        self._entries: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._compiled: list[Callable[..., Any]] = []
        self._running = CALL
        self._failures = 0  # calls that have failed since one succeeded
        self._recompilations = Recompilations()
        self._embeddings = [module for module in plan.root.modules() if isinstance(module, torch.nn.Embedding)]
        self.sites: list[Site] = []
        self.of_parts: list[Site] = []
        self.uses: dict[tuple[str, str], WeightUse] = {}
        self.read: set[tuple[str, str]] = set()
        self.marked: set[str | None] = set()
        self.problems: list[Error] = []
        self.error: Error | None = None
        self.has_run = False
        #: By call and Dynamo frame: the number of sites of each module in earlier frames, and the frame's sites.
        self._frames: dict[Frame, tuple[dict[str, int], list[Site]]] = {}
        self.ran = Ran()
        self._bucket_bytes: int | None = None  # the size of buckets of the DDP that a forward runs in

    @property
    def graphs(self) -> int:
        """The largest number of graphs that any call was captured in."""
        return max(Counter(name for name, _ in self._frames).values(), default=0)

    @property
    def strict(self) -> bool:
        """True if calls that Dynamo does not compile are refused."""
        return self._uncompiled is None

    def captured(self, name: str) -> bool:
        """Return whether a graph of the call ``name`` was captured."""
        return any(call == name for call, _ in self._frames)

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the compiled call ``name``: :data:`CALL`, or a method."""
        if name not in self._entries:
            entry = _entry(self._plan.root, name, self._uncompiled)
            self._entries[name] = entry, torch.compile(entry, backend=self.backend, dynamic=self._dynamic)
            forgetting: Any = weakref.finalize(self, torch_internals.forget_code, entry.__code__)
            forgetting.atexit = False
            torch_internals.retry_skipped_code()
        elif 0 < self._failures <= _FAILURES:
            torch_internals.retry_skipped_code()
        self._running = name
        hooks.drop_repeated_hooks(self._embeddings)
        self._failures += 1
        with torch_internals.saved_tensor_hooks_kept(), self.forward(apart=True):
            result = self._entries[name][1](*args, **kwargs)
        self._failures = 0
        return result

    def is_full(self, name: str) -> bool:
        """Return whether Dynamo has made as many graphs of the call ``name`` as the recompile limit allows."""
        return torch_internals.is_full(self._entries[name][0])

    @contextmanager
    def forward(self, *, apart: bool = False) -> Iterator[None]:
        """Count the graphs that run in this context as one forward; if ``apart``, no two draw the same noise."""
        outer, self.ran = self.ran, Ran(apart=apart)
        try:
            yield
        finally:
            self.ran = outer

    def forget(self) -> None:
        """Have Dynamo forget the compiled calls."""
        for entry, _ in self._entries.values():
            torch_internals.forget_code(entry.__code__)

    def start_over(self) -> None:
        """Forget the graphs and sites of the running call, which failed and will run from its beginning."""
        self.forget()
        self._frames = {frame: held for frame, held in self._frames.items() if frame[0] != self._running}
        self.sites[:] = [site for _, sites in self._frames.values() for site in sites]

    def compile(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Rewrite a graph, record its sites, compile it, and return the function that runs it."""
        frame = self._running, torch_internals.compiled_frame()
        self._recompilations.look(frame[1])
        first = self._frames.get(frame, (self.ran.occurrences(), []))[0]
        try:
            keys = {id(each.key): each.fqn for each in state.states(self._plan.root) if each.has_sites}
            rewritten = rewrite(gm, self._plan.policy, self._plan.names, first_occurrence=first, keys=keys)
            if rewritten.refused is not None:
                if not self._explains:
                    raise rewritten.refused
                self.problems.append(rewritten.refused)
            self.learn(rewritten.uses)
            self.read |= rewritten.read
            bucket = self._bucket_bytes
            inner = self._inner if bucket is None else torch_internals.split_by_buckets(self._inner, bucket)
            with cacheable(gm):
                compiled = inner(gm, example_inputs)  # traces stages, which may fail
        except Error as error:
            self.error, self.has_run = error, bool(self.ran.sites)
            raise
        self._frames[frame] = (first, rewritten.sites)
        of_other_calls = [sites for (name, _), (_, sites) in self._frames.items() if name != self._running]
        listed = {_identity(site) for sites in of_other_calls for site in sites}
        self.sites.extend(site for site in rewritten.sites if _identity(site) not in listed)
        self.marked |= rewritten.marked

        drawing, place, capture = Drawing.of(rewritten), len(self._compiled), weakref.ref(self)
        sites = rewritten.sites
        self._compiled.append(compiled)

        def run(*inputs: Any) -> Any:  # Dynamo keeps this function in globals, so it must not keep the capture alive
            alive = _alive(capture)
            alive.ran.sites[frame] = sites
            return alive._compiled[place](*alive.ran.drawing(drawing, inputs))

        return run

    def learn(self, uses: Iterable[WeightUse]) -> None:
        """Tell the planned weights what a captured graph decided about them."""
        weights = {(weight.fqn, weight.parameter_name): weight for weight in self._plan.weights}
        for use in uses:
            owner = (use.module, use.parameter)
            if owner in weights:
                weights[owner].settle(use)
            self.uses[owner] = use

    def take(self, planner: Planner, marked: Iterable[str | None], forward: Forward, *, checked: bool) -> None:
        """Record the weights and sites of an uncompiled forward. Sites are listed until coverage is ``checked``."""
        self.learn(use for use in planner.uses if (use.module, use.parameter) not in self.uses)
        if forward.kind is Kind.UNCAPTURED:
            listed = set(map(_identity, self.sites))
            self.sites.extend(site for site in planner.sites if not checked and _identity(site) not in listed)
        elif forward.module is self._plan.root and not checked and not self._frames:
            self.sites.extend(planner.sites)
            self.marked |= set(marked)
        elif not self.sites and torch.is_grad_enabled():
            self.of_parts.extend(planner.sites)

    @contextmanager
    def configured(self) -> Iterator[None]:
        """Set Dynamo's options for this model in this context.

        DDP's buckets split the rewritten graph; a split of the captured one would separate markers from their products.
        Guards must check hooks. Otherwise a graph of an unmarked module, captured behind a graph break, would also run
        a similar module that has a mark hook, in high precision.
        """
        setting, wrapper = torch_internals.dynamo_setting, torch_internals.active_ddp()
        limit = self._limit or max(RECOMPILE_LIMIT, setting("recompile_limit"))
        total = max(limit, setting("accumulated_recompile_limit"))
        changes: dict[str, Any] = {"recompile_limit": limit, "accumulated_recompile_limit": total}
        changes["skip_nnmodule_hook_guards"] = False
        if wrapper is not None and setting("optimize_ddp") in (True, "ddp_optimizer"):
            self._bucket_bytes = wrapper.bucket_bytes_cap
            changes["optimize_ddp"] = False
        if self._plan.sources:  # hooks of sources set a weight and remove it again: no lasting side effect
            changes["skip_fwd_side_effects_in_bwd_under_checkpoint"] = True
        try:
            with torch_internals.dynamo_settings(**changes):
                yield
        finally:
            self._bucket_bytes = None
        self._recompilations.warn()


def _entry(root: torch.nn.Module, name: str, uncompiled: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the function that is compiled for the call ``name`` of ``root``."""

    def model_call(*args: Any, **kwargs: Any) -> Any:
        return root._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    # Behind a graph break Dynamo compiles this function by itself, so each model needs its own code object.
    call = with_own_code(model_call, type(root)) if name == CALL else hooks.marked_method(root, name)

    def entry(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or uncompiled is None:
            return call(*args, **kwargs)
        return uncompiled(name, call, args, kwargs)

    # Module._call_impl has one code object for all models of the process, and one recompile limit.
    return with_own_code(entry, type(root))


def _backend(capture: Capture) -> Backend:
    """Return the torch.compile backend of ``capture``. Dynamo never frees a backend, so this one holds the capture, and
    with it the model, by a weak reference."""
    reference = weakref.ref(capture)
    return lambda gm, example_inputs: _alive(reference).compile(gm, example_inputs)


def _alive(reference: weakref.ref[Capture]) -> Capture:
    """Return the capture whose graph Dynamo compiles or runs; the running call keeps it alive."""
    capture = reference()
    assert capture is not None
    return capture


def _identity(site: Site) -> tuple[object, ...]:
    return site.module, site.op, site.occurrence
