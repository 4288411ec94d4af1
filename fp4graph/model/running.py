"""Runs the forwards of an applied model in its compiled graphs or, without a graph, operation by operation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fp4graph import torch_internals
from fp4graph.errors import CaptureError, Error
from fp4graph.graph.backend import inner_backend
from fp4graph.graph.direct import Direct
from fp4graph.graph.replace import UnmarkedWeight
from fp4graph.model import coverage, distributed, hooks
from fp4graph.model.apply_options import ApplyOptions
from fp4graph.model.capture import Capture
from fp4graph.model.conversion import opaque, refuse_nested
from fp4graph.model.current import CurrentForward
from fp4graph.model.forward import CALL, Forward, Kind
from fp4graph.model.inspection import Inspection
from fp4graph.model.prepare import PhasePlan
from fp4graph.model.rerun import Before
from fp4graph.model.steps import Steps
from fp4graph.model.uncompiled import Uncompiled, cause
from fp4graph.model.versions import refused_grouped_product
from fp4graph.numerics.sharding import fsdp_modules
from fp4graph.torch_internals import pytree


class Runner:
    """Runs the forwards of all kinds in one phase.

    Args:
        explains: whether to collect refusals in ``capture.problems`` instead of raising them.

    Attributes:
        capture: the model's compiled forward, and the sites of its graphs.
        inspection: the observer of the forwards.
        uncompiled: runs forwards that no compiler captured, and warns about them.
        checked: whether the coverage of the model's call was checked.
        failure: the error of the first forward or of packing; every later forward raises it again.
    """

    def __init__(
        self, plan: PhasePlan, settings: ApplyOptions, current: CurrentForward, steps: Steps, *, explains: bool
    ) -> None:
        self._plan, self._dynamic, self._current, self._steps = plan, settings.dynamic, current, steps
        uncompiled = None if settings.strict else self._run_refused
        self.capture = Capture(
            plan,
            inner_backend(settings.backend, settings.compiler),
            settings.dynamic,
            recompile_limit=settings.recompile_limit,
            explains=explains,
            uncompiled=uncompiled,
        )
        current.uncaptured = None if settings.strict else self._run_uncaptured
        self.inspection = Inspection(plan, settings.dynamic, uncompiled)
        self.uncompiled = Uncompiled(plan, current, self.inspection)
        self.checked, self._explains = explains, explains
        self.failure: Error | None = None
        self._running = self.capture  # the capture of the compiled call in progress
        self._refused: str | None = None  # why calls run uncompiled from now on although they begin compiled
        self._dtypes = frozenset[torch.dtype]()  # the parameters' dtypes when _refused was set

    @property
    def _listed(self) -> bool:
        """True once all sites of the model's call are listed."""
        return self.checked and not self._explains

    def open(self, forward: Forward) -> None:
        """Raise an Error if the forward cannot run or an earlier forward has failed. Count earlier calls of parts as
        one forward, unless this forward continues them."""
        if forward.duties.compiled:
            refuse_nested(forward.tensors if self.checked else forward.all_tensors)
        if forward.kind is Kind.METHOD and fsdp_modules(self._plan.root):
            raise Error(
                "methods= compiles whole methods, but fully_shard has modules compiled one by one; leave out methods="
            )
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        ran, steps, repeated = self._current.ran, self._steps, False
        if forward.duties.counts == "again":
            if repeated := id(forward.module) in ran:
                steps.advance()
                steps.trained = max(1, steps.trained)
        elif forward.duties.begins and forward.training:
            repeated = forward.kind is Kind.METHOD and self.capture.captured(forward.name)
            if ran:
                steps.advance()
        if repeated and not self.checked:
            self.uncompiled.check(self.capture)  # warns about rules that matched nothing in a whole step

    def begin(self, forward: Forward, *, training: bool) -> None:
        """Make modules, state and the step tensor ready; ``training`` says whether the forward trains and does not
        continue earlier calls of parts."""
        if self._steps.root_state is not None and not self._steps.trained:
            self._compile_sharded()
        self._steps.begin(training=training)
        for group in self._plan.groups:
            group.refresh()
        self._steps.trained += training and forward.duties.counts == "again"
        if forward.training:
            self._current.last = forward.kind

    def run(self, forward: Forward) -> Any:
        """Run a forward, check coverage if the forward is the first, and count the forward if it trains."""
        if forward.duties.compiled:
            self._current.begin_call(forward.step)
        # Another applied model may call this model in an uncompiled pass, which must not see this model's operations.
        with nullcontext() if self._current.direct else torch_internals.without_function_modes(Direct):
            result = self._run(forward)
        duties = forward.duties
        if duties.covers != "none" and not self.checked and not self.inspection.watching:
            try:
                if duties.covers == "all":
                    self.check_coverage()
                else:  # other calls may match the remaining rules
                    coverage.check_captured(self._plan, self.capture)
            except Error as error:
                self.failure = error
                raise
            self.checked = duties.covers == "all"
        if forward.training and _counts(forward, result):
            self._steps.trained += 1
            self._steps.advance()
        return result

    def check_coverage(self) -> None:
        """Raise PolicyError or CaptureError if the captured graphs lack sites that the policy is written for."""
        self.capture.learn(coverage.check(self._plan, self.capture))

    def _run(self, forward: Forward) -> Any:
        listed = self._listed or self._steps.trained >= forward.duties.listed
        if forward.duties.compiled:
            return self._run_compiled(forward, listed)
        if forward.duties.warns:
            place = self._plan.names.name(forward.module)
            self.uncompiled.warn(
                f"module {place}",
                f"module {place or '(root)'!r} was called by itself, so it runs uncompiled, with the same quantizers "
                "but slower. Only calling the applied model runs the compiled graph",
            )
        return self.uncompiled.run(forward, self.capture, checked=listed)

    def _compile_sharded(self) -> None:
        """Compile each module of ``fully_shard`` as a graph of its own, between the hooks of FSDP."""
        root, current = self._plan.root, self._current
        distributed.compile_sharded(self._plan, self.capture.backend, self._dynamic)
        if current.uncaptured is not None and hooks.has_sharded_forward(root):
            current.uncaptured = None
            self.uncompiled.show_without_owners()

    def _run_compiled(self, forward: Forward, listed: bool) -> Any:
        """Run the compiled call, or the observed call in its place."""
        current, root = self._current, self._plan.root
        sharded = hooks.sharded_forward(root) is not None
        if sharded and (self.inspection.watching or self.inspection.recording is not None):
            raise Error("a model under fully_shard is compiled module by module; observe it without fully_shard")
        observed = None if sharded else self.inspection.capture(training=forward.training, checked=listed)
        capture = observed or self.capture
        if forward.training and current.compiled:
            current.require_thread()
        step = current.step
        current.step = step if forward.step is None else forward.step
        current.compiled, current.thread, self._running = True, threading.get_ident(), capture
        current.threads.add(current.thread)
        strict = capture.strict or sharded
        early = not self.checked or (forward.training and not self._steps.trained)  # graphs may be refused yet
        before = Before(root) if early and (sharded or not strict) and not self._explains else None
        try:
            with capture.configured(), nullcontext() if forward.name == CALL else hooks.uncalled(root):
                if sharded:
                    with capture.forward():
                        return forward.run()
                if self._refused is not None and self._dtypes != _dtypes(root):
                    self._refused = None  # the user has changed dtypes, as the warning advises
                if self._refused is not None:
                    return self._run_refused(forward.name, forward.call, forward.args, forward.kwargs)
                return capture.run(forward.name, forward.args, forward.kwargs)
        except Exception as error:
            refusal, capture.error = capture.error, None
            if self._refuses_product(error, strict=strict) or self._provides_markers(refusal, capture, strict=strict):
                if before is not None:
                    before.restore()
                return self._run_compiled(forward, listed)  # from the beginning: graphs before a break run again
            if refusal is not None:
                self.failure = None if self.checked or self._steps.trained else refusal
                raise refusal from refusal.__cause__  # without the compiler's errors around it
            if torch_internals.is_internal_error(error) and isinstance(error.__context__, Error):
                raise error.__context__ from None
            raise error
        finally:
            current.threads.discard(threading.get_ident())
            current.compiled, current.step = bool(current.threads), step

    def _refuses_product(self, error: Exception, *, strict: bool) -> bool:
        """Return whether ``error`` is torch's refusal of a grouped product; if so, calls run uncompiled from now on."""
        why = refused_grouped_product(error)
        if why is not None and strict:
            raise CaptureError(why) from error
        if why is not None:
            self._refused, self._dtypes = why, _dtypes(self._plan.root)
        return why is not None

    def _provides_markers(self, error: Error | None, capture: Capture, *, strict: bool) -> bool:
        """Provide the markers that ``error`` finds missing, or let the modules that need them, or the whole call, run
        uncompiled from now on. Return whether the call can be repeated."""
        unmarked = error.all if isinstance(error, UnmarkedWeight) else []
        # A graph begins with the forward of each module of fully_shard, so other modules may have run before it.
        early = not capture.has_run or hooks.has_sharded_forward(self._plan.root)
        carried = [self.uncompiled.carry(each) for each in unmarked if early]
        if any(carried):
            return True
        if strict or not unmarked or self._refused is not None:
            return False
        # Behind a graph break the caller may be unknown; then it is looked for around the owner of the weight.
        owners = ("" if each.owner is None else each.owner.module for each in unmarked)
        if not self.uncompiled.add_owners(each.caller or owner for each, owner in zip(unmarked, owners, strict=True)):
            self._refused, self._dtypes = _BROKEN, _dtypes(self._plan.root)
        capture.start_over()
        return True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_refused(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of the model that Dynamo does not compile."""
        forward = replace(Forward.of(self._plan.root, name, args, kwargs), call=call)
        result = self.uncompiled.run(forward, self.capture, checked=self._listed)
        # Warn last: Dynamo also leaves to Python a forward that raises, and its error says more than a warning.
        why = self._refused or cause(full=self._running.is_full(name))
        call_name = "this forward" if name == CALL else f"{name}()"
        self.uncompiled.warn(why, f"{call_name} runs uncompiled, with the same quantizers but slower: {why}")
        return result

    @opaque
    def _run_uncaptured(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, disabled: bool
    ) -> Any:
        """Run a module that the compiled call calls outside of its graphs. The compiled call counts the forward."""
        current = self._current
        current.require_thread()
        self.uncompiled.warn_uncaptured(module, self._plan.names.name(module), disabled=disabled)
        forward = Forward(Kind.UNCAPTURED, module, module._call_impl, args, kwargs)
        ran, current.ran = current.ran, set()
        try:
            return self.uncompiled.run(forward, self.capture, checked=self._listed, running=self._running)
        finally:
            current.ran = ran


#: Why a call runs uncompiled if a graph break parts products of the model itself from the call.
_BROKEN = (
    "a graph break (a print, a disabled function, a loop that torch.compile does not trace) parts products of the "
    "model itself from its call; remove the break, or move the products into a module"
)


def _dtypes(model: nn.Module) -> frozenset[torch.dtype]:
    return frozenset(parameter.dtype for parameter in model.parameters())


def _counts(forward: Forward, result: Any) -> bool:
    """Return whether a training forward that returned ``result`` counts by itself."""
    if forward.duties.counts != "with gradients":
        return forward.duties.counts == "each"
    return _needs_gradient(result) or not torch.is_grad_enabled()  # unknown until a reentrant checkpoint repeats it


#: Types of objects in a result whose attributes do not count as parts of the result.
_NOT_SEARCHED = (Tensor, nn.Module, torch.optim.Optimizer, ModuleType, type)


def _needs_gradient(result: Any) -> bool:
    """Return whether ``result`` is or has a tensor that requires gradients, or an iterator that may yield one.

    Attributes of objects such as dataclasses and distributions count too.
    """
    pending, seen = [result], set[int]()
    while pending:
        for x in pytree.tree_leaves(pending.pop()):
            if isinstance(x, Iterator) or (isinstance(x, Tensor) and x.requires_grad):
                return True
            if hasattr(x, "__dict__") and not isinstance(x, _NOT_SEARCHED) and id(x) not in seen:
                seen.add(id(x))
                pending.append(vars(x))
    return False
