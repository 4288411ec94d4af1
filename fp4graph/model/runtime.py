"""Runs the calls of a model with a policy applied, forward by forward and phase by phase."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp4graph import torch_internals
from fp4graph.errors import Error
from fp4graph.graph.blocks import upwards
from fp4graph.graph.observe import Recording
from fp4graph.graph.site import Site
from fp4graph.model import distributed, hooks, state
from fp4graph.model.apply_options import ApplyOptions
from fp4graph.model.conversion import opaque, refuse_conversion, refuse_other_models
from fp4graph.model.current import CurrentForward
from fp4graph.model.forward import CALL, Forward, Kind
from fp4graph.model.optimizers import PreparedOptimizers
from fp4graph.model.prepare import PhasePlan, device_of, prepare, unprepare
from fp4graph.model.running import Runner
from fp4graph.model.steps import Steps
from fp4graph.model.subnormals import refuse_flushed
from fp4graph.model.tree import Tree
from fp4graph.model.weight import Weight
from fp4graph.numerics import noise
from fp4graph.policy import Policy

_ON_META = (
    "the applied model is on the meta device, where nothing is computed; call model.to_empty(device=...) and load its "
    "weights first, or call fp4graph.explain(model, policy, args), for which shapes suffice"
)
_COUNT_UNKNOWN = (
    "a state dict was loaded after fp4graph.apply(), and it does not say for how many forwards its weights were "
    "trained, so policy {policy} begins in its first phase. To resume a training, load the state of the prepared "
    "optimizer too, or use fp4graph.training.checkpoint; to begin one, load the weights before fp4graph.apply()"
)


class Runtime:
    """A model under one phase of a policy. ``nn.Module.__call__`` of an applied model runs this object.

    Each phase of a policy has its own Runtime.

    Args:
        policy: the policy, with all its phases.
        settings: the options of :func:`fp4graph.apply`.
        phase: the number of the policy's phases that have begun.
        explains: collect refusals in ``capture.problems`` instead of raising them.

    Attributes:
        plan: the plan of this phase. weights: every weight that a rule quantizes in it.
        capture: the model's compiled forward. sites: the sites of its graphs.
        optimizers: the optimizers that techniques act through.
        inspection: the observer of the forwards.
        intercept: called with the arguments instead of the model's call; None lets the call run.
        autocast: the dtype of the autocast in which the last forward with gradients was called; None without autocast.
    """

    def __init__(
        self, root: nn.Module, policy: Policy, settings: ApplyOptions, phase: int = 0, explains: bool = False
    ) -> None:
        self.root, self.policy, self.settings, self.phase = root, policy, settings, phase
        self.plan = self.plan_of(phase)
        self._current = CurrentForward(
            noise.make_step(settings.seed, 0, 0),
            part=None if settings.strict else self.run_part,
            method=self.run_method,
            copied=lambda memo: _apply_to_copy(self, memo),
        )
        self._steps = Steps(self.plan, settings.seed, self._current)
        self._runner = Runner(self.plan, settings, self._current, self._steps, explains=explains)
        self.capture, self.inspection = self._runner.capture, self._runner.inspection
        self.weights: list[Weight] = self.plan.weights
        self.sites: list[Site] = self.capture.sites
        self.optimizers = PreparedOptimizers()
        self._any_hook: hooks.MarkHook | None = None
        self._original: weakref.ref[nn.Module] | None = None  # the model that the root is a copy of
        self._previous: Any = None
        self._tree = Tree(root, self.plan.weights, quantizes=policy.quantizes)
        self.intercept: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None
        self.autocast: torch.dtype | None = None
        self.count_from, self.over_ranks = self._steps.count_from, self._steps.over_ranks
        self.check_coverage = self._runner.check_coverage

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return device_of(self.root)

    @property
    def step(self) -> Tensor:
        """The step tensor (seed, rank, count) of the last forward."""
        return self._current.step

    @property
    def root_state(self) -> state.RootState | None:
        """The state of the count of forwards; None where no phase quantizes anything, and until :meth:`attach`."""
        return self._steps.root_state

    @property
    def count(self) -> int | None:
        """The number of forwards with gradients that have begun; None where no phase quantizes anything."""
        return self._steps.count

    def plan_of(self, phase: int) -> PhasePlan:
        """Plan a phase without changing the model."""
        return PhasePlan(self.root, self.policy.in_phase(phase))

    def attach(self) -> None:
        """Add state, hooks and the compiled call to the root. After an error the model is unchanged, under its
        previous policy if it had one."""
        replaced = runtime_of(self.root)
        buffers = state.buffers_to_keep(self.root)
        count_unknown = replaced is not None and replaced.root_state is not None and replaced.root_state.count_unknown
        detach(self.root)
        try:
            self.install(buffers)
        except BaseException:
            detach(self.root)
            if replaced is not None:
                replaced.install(buffers)
            raise
        if count_unknown and self.root_state is not None:
            self.root_state.count_unknown = True

    def install(self, buffers: dict[str, Tensor]) -> None:
        """Attach to a root without a policy, and take over the ``buffers`` of an earlier application that fit."""
        self._previous = self.root._compiled_call_impl
        self.root._compiled_call_impl = self
        if type(self.root).compile is nn.Module.compile:
            # The argument has a deepcopy reach the current forward where no hook does, under a policy that keeps all.
            self.root.__dict__["compile"] = partial(hooks.compiled_already, self._current)
        with torch.inference_mode(False):  # training cannot use tensors made in inference mode
            self._steps.root_state = prepare(self.plan, self.policy, self._current, buffers)
        if self.root_state is not None and not self.settings.strict:
            self._runner.uncompiled.show(*_parts(self))
        for name in self.settings.methods:
            self.root.__dict__[name] = hooks.Method(self.root, name, self._current)
        self._any_hook = next((hook for _, _, hook in hooks.mark_hooks(self.root)), None)
        self._tree = Tree(self.root, self.weights, quantizes=self.policy.quantizes)

    def give_back(self, root: nn.Module) -> None:
        """Give ``root``, the model or a copy of it, the compiled call that the model had before."""
        if root is self.root:
            self._runner.uncompiled.parts.hide()
        del root._compiled_call_impl  # the class attribute is None
        if self._previous is not None:
            root._compiled_call_impl = self._previous

    # An outer torch.compile must not trace into the model's compiled graphs with its own backend.
    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward of the root."""
        return self.run_method(CALL, args, kwargs) if self.intercept is None else self.intercept(args, kwargs)

    @opaque
    def run_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the root's call, or a method that is compiled and counted like it."""
        return self._forward(Forward.of(self.root, name, args, kwargs, self._current.repeated()))

    @opaque
    def run_part(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module of the model that was called alone, or by a method of the model that is not compiled.

        Activation checkpointing calls modules again in the backward. Such a call is not a new forward: it repeats the
        noise of the first call.
        """
        call: Any = module.forward if module is self.root else module._call_impl
        kind = Kind.PART if torch_internals.backward_id() == -1 else Kind.RECOMPUTED
        return self._forward(Forward(kind, module, call, args, kwargs))

    def _forward(self, forward: Forward) -> Any:
        """Run a forward, with the duties of its kind."""
        if (bypass := _bypass(self, forward)) is not None:
            with bypass:
                return forward.run()
        if self._tree.adapted():
            return _replaced(self, self.phase)._forward(forward)
        refuse_conversion(quantizes=self._any_hook is not None)
        self._runner.open(forward)
        _follow(self, training=forward.training)
        if forward.duties.begins:
            self._steps.meet(training=forward.training)
            phase = self._current_phase(training=forward.training)
            if phase != self.phase:
                return _replaced(self, phase)._forward(forward)
            self._begin(forward)
        return self._runner.run(forward)

    def _begin(self, forward: Forward) -> None:
        """Check the preconditions of a forward, and make state and the step tensor ready for it."""
        if all(parameter.is_meta for parameter in self.root.parameters()) and self.plan.weights:
            raise Error(_ON_META)
        if self.device.type == "cpu":
            refuse_flushed(self.plan.policy)
        of_parts = forward.duties.counts == "again"
        first = forward.training and not (of_parts and self._current.ran)
        if first:
            device = self.device.type
            self.autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if first and self._steps.trained == 1:
            self.optimizers.check(self.plan)
        if first:
            self.plan.before_training()
        counted = self.root_state
        if counted is not None and first and counted.count_unknown and counted.count == 0 and self.policy.phases:
            self._runner.uncompiled.warn("count", _COUNT_UNKNOWN.format(policy=repr(self.policy.name)))
        self._runner.begin(forward, training=first)

    def up_to_date(self) -> Runtime:
        """Return the runtime of the model as it is now, a new one if adapters or parametrizations joined or left."""
        return _replaced(self, self.phase) if self._tree.adapted() else self

    def _current_phase(self, *, training: bool = True) -> int:
        """Return the phase that the count of forwards asks for. A model that is evaluated before its training is in the
        first phase, for which the length of the training need not be known."""
        total = self.settings.total_forwards
        if (counted := self.root_state) is None:
            return self.phase
        if not training and total is None and counted.count == 0 and not counted.count_unknown:
            return 0
        return self.policy.phase(counted.count, total)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run forwards in this context, and their backwards, node by node; raise NonFiniteError at NaN or Inf."""
        phase = self._current_phase()
        with (self if phase == self.phase else _replaced(self, phase)).inspection.watched():
            yield

    def observe(self, recording: Recording | None, *, training: bool = True) -> None:
        """Show ``recording`` the sites of the following forwards, with gradients if ``training`` else without, until
        :meth:`observe` is called with None.

        An observed forward and its backward run without a compiler, with the noise and effects of any other. The first
        forward, whose coverage is checked, is not observed.
        """
        self.inspection.recording, self.inspection.training = recording, training


def _bypass(runtime: Runtime, forward: Forward) -> AbstractContextManager[None] | None:
    """Return the context in which the forward runs as if no policy were applied; None if the policy applies."""
    bypassed = runtime._any_hook is not None and runtime._any_hook.bypassed > 0
    if forward.duties.compiled:
        if any(x.is_meta for x in forward.tensors):  # for shapes alone, as Keras does before its first step
            return hooks.bypassed(runtime.root)
        return nullcontext() if bypassed else None
    # Modules of fully_shard have graphs of their own.
    return runtime._current.parts_left_alone() if bypassed or hooks.has_sharded_forward(runtime.root) else None


def _follow(runtime: Runtime, *, training: bool) -> None:
    """Let a copy follow the count of its original until the copy's first training forward."""
    if runtime._original is None or runtime.root_state is None:
        return
    if training:
        runtime._original = runtime.root_state.followed = None
    elif (model := runtime._original()) is not None and (original := runtime_of(model)) is not None:
        runtime.root_state.followed = original.count
        runtime.settings = dataclasses.replace(runtime.settings, total_forwards=original.settings.total_forwards)


def _replaced(runtime: Runtime, phase: int) -> Runtime:
    """Apply the policy again, in ``phase``, to the model as it is now: adapters may have joined or left. State and
    optimizers stay."""
    if runtime.inspection.watching:
        raise Error(
            "a phase of the policy begins inside detect_nonfinite(); use a context for the steps of each phase"
            if phase != runtime.phase
            else "adapters joined or left the model inside detect_nonfinite(); call the model once before it"
        )
    following = Runtime(runtime.root, runtime.policy, runtime.settings, phase)
    following.plan.require_sources()
    following.attach()
    following._original = runtime._original
    following._steps.from_rank_zero = runtime._steps.from_rank_zero
    if following.root_state is not None and runtime.root_state is not None:
        following.root_state.followed = runtime.root_state.followed
    following.observe(runtime.inspection.recording, training=runtime.inspection.training)
    runtime.optimizers.prepare_again(following.plan)
    return following


def _parts(runtime: Runtime) -> tuple[dict[nn.Module, bool], set[nn.Module]]:
    """Return the modules below the root, mapped to whether the module or one below it has a mark hook, and the modules
    with products of their own: owners of planned weights, owners of matrices that only a graph shows to be weights, and
    innermost modules whose products of activations a rule may quantize. Behind a graph break inside of such a module a
    graph would not show whose product it is."""
    root, plan = runtime.root, runtime.plan
    holding = {name for _, _, hook in hooks.mark_hooks(root) for name in upwards(hook.name)}
    named = [(n, m) for n, m in root.named_modules(remove_duplicate=False) if n]
    holds = {module for name, module in named if name in holding}

    def may_own(name: str, module: nn.Module) -> bool:
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            return False  # no graph holds recurrent layers
        matrices = any(p is not None and min((1, *p.shape)[-2:]) > 1 for p in module._parameters.values())
        parts = any(part in holds for part in module.children())
        return matrices and not parts and runtime.policy.may_quantize(plan.names.view(name, "linear"))

    def may_attend(name: str) -> bool:
        return any(plan.policy.may_quantize(plan.names.view(name, op)) for op in ("matmul", "sdpa"))

    attending = {name for name in plan.hosts() if may_attend(name)}
    outer = {parent for name in attending for parent in upwards(name) if parent != name}
    owners = {weight.module for weight in plan.weights} | {m for n, m in named if may_own(n, m)}
    owners |= {m for n, m in named if n in attending - outer}
    return {module: module in holds for _, module in named}, owners


def _apply_to_copy(runtime: Runtime, memo: dict[Any, Any]) -> None:
    """Apply the policy to the copy of the root that ``copy.deepcopy`` is making, with a copy of the state."""
    twin: nn.Module | None = memo.get(id(runtime.root))
    if twin is None:
        return  # only a part is copied, or an object that copies itself

    def finish(attributes: dict[str, Any]) -> None:  # deepcopy's last step: it hands the attributes over
        del twin.__dict__["__setstate__"]
        twin.__setstate__(attributes)  # type: ignore[no-untyped-call]
        copied = Runtime(twin, runtime.policy, runtime.settings, runtime.phase)
        copied.attach()
        copied.count_from(runtime.count or 0)
        if copied.root_state is not None and runtime.root_state is not None:
            copied.root_state.count_unknown = runtime.root_state.count_unknown
        copied._original = weakref.ref(runtime.root)

    twin.__dict__["__setstate__"] = finish


def runtime_of(model: nn.Module) -> Runtime | None:
    """Return the runtime of an applied model, or None."""
    call = distributed.unwrapped(model).__dict__.get("_compiled_call_impl")
    return call if isinstance(call, Runtime) else None


def require_runtime(model: nn.Module, caller: str) -> Runtime:
    """Return the runtime of an applied model, or raise an Error that names ``caller``."""
    refuse_other_models(model, caller)
    if (runtime := runtime_of(model)) is not None:
        return runtime
    pickled = any(hook.current is None for _, _, hook in hooks.mark_hooks(model))
    why = f"this model was prepared, but {hooks.PICKLED}" if pickled else "call fp4graph.apply(model, policy) first"
    raise Error(f"{caller}() takes a model that fp4graph.apply has prepared; {why}")


def detach(root: nn.Module, *, shared: bool = False) -> None:
    """Take hooks, state and the compiled call off ``root``; with ``shared``, leave modules that another applied
    model has taken over."""
    runtime = runtime_of(root)
    unprepare(root, runtime._current if shared and runtime is not None else None)
    if runtime is not None:
        runtime.give_back(root)
