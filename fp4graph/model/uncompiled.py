"""Forwards that no compiler captured: parts of an applied model called by themselves, and calls that Dynamo refused.

They run operation by operation (:mod:`fp4graph.graph.direct`), slower than the compiled graph but with the same
quantizers, noise and state.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fp4graph import torch_internals
from fp4graph.errors import Error, PolicyError, PolicyWarning
from fp4graph.graph.blocks import pattern_of, upwards
from fp4graph.graph.direct import Direct
from fp4graph.graph.replace import UnmarkedWeight
from fp4graph.model import hooks
from fp4graph.model.capture import Capture
from fp4graph.model.coverage import check_sites, each_served, served_sites
from fp4graph.model.current import CurrentForward, Parts, has_backward_hooks
from fp4graph.model.forward import Forward
from fp4graph.model.inspection import Inspection
from fp4graph.model.prepare import PhasePlan, add_host


class Uncompiled:
    """Runs forwards of one model, or of a part of it, operation by operation.

    Attributes:
        parts: routes the calls of the modules below the root; :meth:`show` puts it in place, the runtime hides it.
    """

    def __init__(self, plan: PhasePlan, current: CurrentForward, inspection: Inspection) -> None:
        self.parts = Parts({}, (), current)
        self._plan, self._current, self._inspection = plan, current, inspection
        self._produced: MutableMapping[Tensor, str | None] = WeakTensorKeyDictionary()
        self._idle: set[Any] = set()
        self._warned: set[str] = set()
        self._modules: Mapping[nn.Module, bool] = {}
        self._owners: set[nn.Module] = set()

    def show(self, modules: Mapping[nn.Module, bool], owners: Collection[nn.Module]) -> None:
        """Route the calls of the modules below the root through :class:`Parts`, which takes the arguments."""
        self._modules, self._owners = modules, set(owners)
        self.parts = Parts(modules, owners, self._current)
        self.parts.show()

    def show_without_owners(self) -> None:
        """Let Dynamo compile modules that own weights as it compiles others: in pieces around graph breaks."""
        self.parts.hide()
        self.show(self._modules, ())

    def add_owners(self, names: Iterable[str]) -> bool:
        """Treat a module around each of ``names`` as an owner of products from now on: the innermost one below the root
        that is none yet. Return whether there is one."""
        modules, new = dict(self._plan.root.named_modules(remove_duplicate=False)), set[nn.Module]()
        for name in names:
            around = [modules[each] for each in upwards(name) if modules[each] in self._modules]
            if new.isdisjoint(around):
                new |= set([module for module in around if module not in self._owners][:1])
        if new:
            self.parts.hide()
            self.show(self._modules, self._owners | new)
        return bool(new)

    def run(self, forward: Forward, capture: Capture, *, checked: bool, running: Capture | None = None) -> Any:
        """Run ``forward``, and report its weights and sites to ``capture``.

        ``checked`` says whether the model's coverage was checked; only then is the forward recorded. ``running`` is the
        capture whose compiled call called this forward's module outside of its graphs, or None.
        """
        if self._inspection.watching:
            name = self._plan.names.name(forward.module)
            raise Error(
                "detect_nonfinite() watches compiled forwards only, and "
                + (f"module {name!r}" if name else "this forward")
                + " is not compiled; a warning says why. Remove what breaks the graph there, such as a print or a loop "
                "over the values of a tensor (for experts in transformers, set experts_implementation='grouped_mm')"
            )
        # A reentrant checkpoint's forward has no gradients, and its recomputation could not tell what ran before it.
        follows = running is not None and (forward.training or bool(torch_internals.checkpointed_regions()))
        before = running.ran.occurrences() if running is not None and follows else None
        # A call of the model has its own step tensor; a part uses the step tensor of its checkpointed region.
        step, occurrences = (
            (self._current.step, before) if forward.duties.compiled else self._current.begin_pass(before)
        )
        direct = Direct(
            self._plan.policy,
            self._plan.names,
            whole_model=forward.module is self._plan.root,
            produced=self._produced,
            idle=self._idle,
            carries=self._carries,
            recomputes=partial(self._recompute, step),
            lists=not checked,
            recording=self._inspection.shown(training=forward.training, checked=checked),
            first_occurrence=occurrences,
        )
        ran = set(self._current.ran)
        try:
            with self._running(direct, step, repeats=self._current.counted):
                self._current.enter(forward.module)
                with direct.inside(forward.module):
                    result = forward.run()
        except BaseException:
            self._current.ran = ran  # a failed forward does not count: the next try takes the same count and noise
            raise
        direct.finish(result)
        if running is not None:
            running.ran.note(direct.planner, self._plan.root)
        capture.take(direct.planner, direct.marked, forward, checked=checked)
        return result

    def _recompute(self, step: Tensor, region: Any, seen: Direct) -> None:
        """Have ``region``, which begins in a pass, recompute in a pass that continues from ``seen`` with the same
        ``step``: also products that belong to no call of a module in the region need it."""

        def by_a_pass(function: Callable[..., Any]) -> Callable[..., Any]:
            def recompute(*args: Any, **kwargs: Any) -> Any:
                with self._running(seen.begin_again(), step, repeats=True):
                    return function(*args, **kwargs)

            return recompute

        torch_internals.recompute_by(region, by_a_pass)

    @contextmanager
    def _running(self, direct: Direct, step: Tensor, *, repeats: bool) -> Iterator[None]:
        """Make ``direct`` the pass in progress, in this thread."""
        current = self._current
        saved = current.direct, current.compiled, current.step, current.repeats
        current.direct, current.compiled, current.step, current.repeats = direct, False, step, repeats
        current.thread = threading.get_ident()
        try:
            with direct:
                yield
        finally:
            current.direct, current.compiled, current.step, current.repeats = saved

    def check(self, capture: Capture) -> None:
        """Warn about rules that matched nothing in the first training step, if that step called only parts or methods
        of the model. A later call of the model may still match these rules."""
        parts, capture.of_parts = capture.of_parts, []
        if "coverage" in self._warned:
            return
        try:
            check_sites(self._plan.policy, each_served(served_sites(self._plan.root, capture), self._plan) or parts)
        except PolicyError as error:
            self.warn("coverage", f"a training step has called only parts or methods of the model, but {error}")
        self._warned.add("coverage")

    def warn_uncaptured(self, module: nn.Module, name: str | None, *, disabled: bool) -> None:
        """Warn, once for modules at similar places, that the compiled call runs ``module`` outside of its graphs."""
        if has_backward_hooks(module):
            why = "it has a hook on its backward, which torch.compile does not compile; remove the hook to compile it"
        elif any(torch_internals.is_full(owner.forward) for owner in (self._plan.root, module)):
            why = (
                "there is a graph break, and Dynamo has made as many graphs of the code around it, for this model and "
                "earlier ones, as its recompile limit allows; remove the break, or call torch._dynamo.reset() between "
                "models"
            )
        elif disabled:
            why = "it is called where Dynamo is disabled (a disabled function, or a checkpoint around a graph break)"
        else:
            why = "its call does not fit into one graph (because of a graph break, or a loop over values of a tensor)"
        inside = set(module.modules())
        if any(weight.module in inside and weight.stored.dim() == 3 for weight in self._plan.weights):
            why += ". The fast form of a mixture of experts is experts_implementation='grouped_mm' in transformers"
        effect = f"module {name!r} runs uncompiled, like others of its kind, with the same quantizers but slower"
        self.warn(f"uncaptured {pattern_of(name or '')}", f"{effect}. The reason: {why}")

    def warn(self, key: str, text: str) -> None:
        """Warn, once for each ``key``."""
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, PolicyWarning, stacklevel=2)

    def carry(self, error: UnmarkedWeight) -> hooks.CarryHook | hooks.MarkHook | None:
        """Let a module that multiplies with another module's weight, or with a tensor it computes, mark the product;
        return the new hook, or None where that is not possible."""
        modules = dict(self._plan.root.named_modules(remove_duplicate=False))
        owner, caller = (None if error.owner is None else modules[error.owner.module]), error.caller or ""
        if owner is None or not hooks.is_marked(owner):  # a ParameterList is not called
            return add_host(self._plan, modules[caller], caller, self._current)
        return hooks.CarryHook.add(modules[caller], owner)

    def _carries(self, error: UnmarkedWeight) -> bool:
        """Mark the product of ``error`` now, inside a forward; return whether that was possible."""
        caller = dict(self._plan.root.named_modules(remove_duplicate=False))[error.caller or ""]
        self.carry(error)
        marking = [h for h in caller._forward_pre_hooks.values() if isinstance(h, hooks.CarryHook | hooks.MarkHook)]
        for hook in marking:
            hook(caller, ())
        return bool(marking)


def cause(*, full: bool) -> str:
    """Return why Dynamo has not compiled the running call; ``full`` says whether the call has as many graphs as the
    recompile limit allows."""
    if (stance := torch_internals.stance()) != "default":
        return f"torch.compiler.set_stance({stance!r}) is in force"
    if torch_internals.dynamo_setting("disable"):
        return "torch._dynamo.config.disable (TORCHDYNAMO_DISABLE=1) switches torch.compile off"
    if torch_internals.is_functorch_active():
        return "a transform of torch.func is at work, which Dynamo does not compile"
    if torch_internals.has_dispatch_mode():
        return "a TorchDispatchMode such as FlopCounterMode is at work, which Dynamo does not compile"
    if full:
        return (
            "torch.compile gave up on it, because shapes, modes or frozen parameters change more often than its "
            "recompile limit allows: pad lengths, pass dynamic=True to fp4graph.apply, or pass a higher "
            "recompile_limit="
        )
    if torch_internals.dynamo_setting("suppress_errors"):
        return "torch.compile failed, and torch._dynamo.config.suppress_errors hides its error; set it to False"
    return "torch.compile skipped it without an error; the environment variable TORCH_LOGS=dynamo shows why"
