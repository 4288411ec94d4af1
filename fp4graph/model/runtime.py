"""A policy applied to a model: what the model's call runs, forward by forward and phase by phase."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fp4graph import torch_internals
from fp4graph.errors import CaptureError, Error
from fp4graph.graph.backend import inner_backend
from fp4graph.graph.blocks import upwards
from fp4graph.graph.observe import Recording
from fp4graph.graph.replace import UnmarkedWeight
from fp4graph.graph.site import Site
from fp4graph.model import coverage, distributed, hooks, state
from fp4graph.model.apply_options import ApplyOptions
from fp4graph.model.capture import CALL, Capture
from fp4graph.model.conversion import opaque, refuse_conversion, refuse_nested, refuse_other_models
from fp4graph.model.current import CurrentForward
from fp4graph.model.inspection import Inspection
from fp4graph.model.optimizers import PreparedOptimizers
from fp4graph.model.packed import release_all, unpacked
from fp4graph.model.prepare import PhasePlan, device_of, prepare, unprepare
from fp4graph.model.repacking import Packing
from fp4graph.model.tree import Tree
from fp4graph.model.uncompiled import Uncompiled, cause
from fp4graph.model.weight import Weight
from fp4graph.numerics import noise
from fp4graph.numerics.sharding import fsdp_modules
from fp4graph.policy import Policy
from fp4graph.torch_internals import pytree
from fp4graph.versions import refused_grouped_product


class Runtime:
    """A model under one phase of a policy. ``nn.Module.__call__`` of an applied model runs this object.

    Another phase, like another policy, makes another Runtime.

    Args:
        policy: with its phases.
        settings: how the policy is applied.
        phase: the number of the policy's phases that have begun.
        explains: collect in ``capture.problems`` what a graph does not allow, and do not raise it.

    Attributes:
        plan: what this phase of the policy asks of the model.
        capture: the model's compiled forward, and what its graphs came to.
        optimizers: the optimizers that techniques act through.
        inspection: what observes the forwards.
        root_state: the count of forwards; None where no phase quantizes anything, and until :meth:`attach`.
        packing: packs the weights again that were packed, where some were.
        intercept: called with the arguments in the place of the model's call; None lets the call run.
    """

    def __init__(
        self,
        root: nn.Module,
        policy: Policy,
        settings: ApplyOptions,
        phase: int = 0,
        explains: bool = False,
    ) -> None:
        self.root, self.policy, self.settings, self.phase = root, policy, settings, phase
        self.plan = self.plan_of(phase)
        uncompiled = None if settings.strict else self._run_uncompiled
        self.capture = Capture(
            self.plan,
            inner_backend(settings.backend, settings.compiler),
            settings.dynamic,
            recompile_limit=settings.recompile_limit,
            explains=explains,
            uncompiled=uncompiled,
        )
        self._running = self.capture  # of the compiled call in progress
        self.optimizers = PreparedOptimizers()
        self.root_state: state.RootState | None = None
        self.inspection = Inspection(self.plan, settings.dynamic)
        part = None if settings.strict else self.run_part
        self._current = CurrentForward(noise.make_step(settings.seed, 0, 0), part=part, copied=self._apply_to_copy)
        self._current.method = self.run_method
        self._current.uncaptured = None if settings.strict else self._run_uncaptured
        self._uncompiled = Uncompiled(self.plan, self._current, self.inspection)
        self._any_hook: hooks.MarkHook | None = None
        self._checked, self._explains = explains, explains
        self._failure: Error | None = None  # of the first forward or of packing; every later forward raises it again
        self._refused: str | None = None  # why torch.compile refuses the forward, which runs uncompiled from then on
        self._trained = 0
        self._original: weakref.ref[nn.Module] | None = None  # what this model was copied from
        self._previous: Any = None
        self._synchronized: weakref.ref[DistributedDataParallel] | None = None
        self._tree = Tree(root, self.weights, quantizes=policy.quantizes)
        self.packing: Packing | None = None
        self.intercept: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None

    @property
    def weights(self) -> list[Weight]:
        """Every weight that a rule quantizes in this phase."""
        return self.plan.weights

    @property
    def sites(self) -> list[Site]:
        """The captured sites of this phase."""
        return self.capture.sites

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return device_of(self.root)

    @property
    def step(self) -> Tensor:
        """The step tensor (seed, rank, count) of the last forward."""
        return self._current.step

    def plan_of(self, phase: int) -> PhasePlan:
        """Plan a phase; the model is left as it is."""
        return PhasePlan(self.root, self.policy.in_phase(phase))

    def attach(self) -> None:
        """Add state, hooks and the compiled call to the root. After an error the model is as it was, under its former
        policy if it had one."""
        replaced = runtime_of(self.root)
        former = state.buffers_to_keep(self.root)
        count_unknown = replaced is not None and replaced.root_state is not None and replaced.root_state.count_unknown
        detach(self.root)
        try:
            self.install(former)
        except BaseException:
            detach(self.root)
            if replaced is not None:
                replaced.install(former)
            raise
        if count_unknown and self.root_state is not None:
            self.root_state.count_unknown = True

    def install(self, former: dict[str, Tensor]) -> None:
        """Attach to a root without a policy, and take over our buffers of ``former`` where they fit."""
        self._previous = self.root._compiled_call_impl
        self.root._compiled_call_impl = self
        if type(self.root).compile is nn.Module.compile:
            self.root.__dict__["compile"] = hooks.compiled_already
        self.root_state = prepare(self.plan, self.policy, self._current, former)
        if self.root_state is not None and not self.settings.strict:
            holding = {name for _, _, hook in hooks.mark_hooks(self.root) for name in upwards(hook.name)}
            named = [(n, m) for n, m in self.root.named_modules(remove_duplicate=False) if n]
            holds = {module for name, module in named if name in holding}
            owners = {weight.module for weight in self.weights}
            owners |= {m for n, m in named if self._may_own(n, m, holds)}
            self._uncompiled.show({module: module in holds for _, module in named}, owners)
        for name in self.settings.methods:
            self.root.__dict__[name] = hooks.Method(self.root, name, self._current)
        self._any_hook = next((hook for _, _, hook in hooks.mark_hooks(self.root)), None)
        self._tree = Tree(self.root, self.weights, quantizes=self.policy.quantizes)

    def _may_own(self, name: str, module: nn.Module, holds: Collection[nn.Module]) -> bool:
        """Return whether a module has matrices of its own that only a graph shows to be weights, and no parts that hold
        weights. Recurrent layers are none of a graph's."""
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            return False
        matrices = any(p is not None and min((1, *p.shape)[-2:]) > 1 for p in module._parameters.values())
        parts = any(part in holds for part in module.children())
        return matrices and not parts and self.policy.may_quantize(self.plan.names.view(name, "linear"))

    @property
    def count(self) -> int | None:
        """The number of forwards with gradients that have begun; None where no phase quantizes anything."""
        return None if self.root_state is None else self.root_state.count + bool(self._current.ran)

    def count_from(self, count: int) -> None:
        """Set the count of forwards, as a resumed training has it."""
        self._current.ran.clear()
        if self.root_state is not None:
            self.root_state.count_from(count)

    def give_back(self, root: nn.Module) -> None:
        """Give ``root``, the model or a copy of it, the compiled call that the model had before."""
        if root is self.root:
            self._uncompiled.parts.hide()
        del root._compiled_call_impl  # the class has None
        if self._previous is not None:
            root._compiled_call_impl = self._previous

    def _apply_to_copy(self, memo: dict[Any, Any]) -> None:
        """Apply the policy to the copy of the root that ``copy.deepcopy`` is making, with a copy of the state."""
        twin: nn.Module | None = memo.get(id(self.root))
        if twin is None:
            return  # a part of the model is copied, or something that makes its copy by itself

        def finish(attributes: dict[str, Any]) -> None:  # deepcopy's last step: it hands the attributes over
            del twin.__dict__["__setstate__"]
            twin.__setstate__(attributes)  # type: ignore[no-untyped-call]
            packed = release_all(twin)
            copied = Runtime(twin, self.policy, self.settings, self.phase)
            copied.attach()
            if packed and self.packing is not None:
                self.packing.again(copied.plan, packed)
                copied.packing = Packing(p for p in twin.parameters() if not p.requires_grad)
            copied.count_from(self.count or 0)
            if copied.root_state is not None and self.root_state is not None:
                copied.root_state.count_unknown = self.root_state.count_unknown
            copied._original = weakref.ref(self.root)

        twin.__dict__["__setstate__"] = finish

    def _follow(self, *, training: bool) -> None:
        """Evaluate in the phase and noise of the model that this one was copied from; go on alone in training."""
        if self._original is None or self.root_state is None:
            return
        if training:
            self._original = self.root_state.followed = None
        elif (model := self._original()) is not None and (runtime := runtime_of(model)) is not None:
            self.root_state.followed = runtime.count
            self.settings = dataclasses.replace(self.settings, total_forwards=runtime.settings.total_forwards)

    # An outer torch.compile must not trace through into our graphs with its own backend.
    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward of the root."""
        return self.run_method(CALL, args, kwargs)

    @opaque
    def run_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the root's call, or a method that is compiled and counted like it."""
        if self.intercept is not None and name == CALL:
            return self.intercept(args, kwargs)
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        symbolic = any(x.is_meta for x in given)  # for shapes alone, as Keras does before its first step
        if self._bypassed or symbolic:
            with hooks.bypassed(self.root) if symbolic else nullcontext():
                return self._call(name)(*args, **kwargs)
        if self._tree.adapted():
            return self._adapted().run_method(name, args, kwargs)
        refuse_conversion(quantizes=self._any_hook is not None)
        refuse_nested(given)
        if name != CALL and fsdp_modules(self.root):
            raise Error(
                "methods= compiles whole methods, but under fully_shard modules are compiled one by one; drop it"
            )
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        training = torch.is_grad_enabled()
        self._follow(training=training)
        if training and self._current.ran:
            self._advance()  # parts that ran by themselves: their forward is over
        if training and name != CALL and not self._checked and self.capture.captured(name):
            self._uncompiled.check(self.capture)
        due = self._due()
        if due != self.phase:
            return self._enter(due).run_method(name, args, kwargs)
        self._begin(training)
        self._current.whole |= training
        result = self._run(name, training, args, kwargs)
        if not self._checked and not self.inspection.watching:
            try:
                if name == CALL:
                    self.check_coverage()
                else:  # rules may be about what others call
                    coverage.check_captured(self.plan, self.capture)
            except Error as error:
                self._failure = error
                raise
            self._checked = name == CALL
        if training and (
            name == CALL or any(getattr(leaf, "requires_grad", False) for leaf in pytree.tree_leaves(result))
        ):
            self._trained += 1
            self._advance()
        return result

    def _call(self, name: str) -> Callable[..., Any]:
        """Return the root's own call, or its method ``name``."""
        call: Any = self.root._call_impl if name == CALL else getattr(type(self.root), name).__get__(self.root)
        return call  # type: ignore[no-any-return]

    @property
    def _bypassed(self) -> bool:
        return self._any_hook is not None and self._any_hook.bypassed > 0

    def _advance(self) -> None:
        """Count one more forward with gradients."""
        self._current.ran.clear()
        if self.root_state is not None:
            self.root_state.advance()

    def up_to_date(self) -> Runtime:
        """Return the runtime of the model as it is now: adapters or parametrizations may have joined or left."""
        return self._adapted() if self._tree.adapted() else self

    def _begin(self, training: bool) -> None:
        """Make state and the step tensor ready for a forward."""
        if all(parameter.is_meta for parameter in self.root.parameters()) and self.plan.weights:
            raise Error(
                "the applied model is on the meta device, where nothing is computed; call model.to_empty(device=...) "
                "and load its weights first, or fp4graph.explain(model, policy, args) if shapes are all you want"
            )
        if training and self._trained == 1:
            self.optimizers.check(self.plan)
        if training and self.packing is not None:
            self.packing.warn_unfrozen()
        if self.root_state is not None:
            if training and self.root_state.count_unknown and self.root_state.count == 0 and self.policy.phases:
                self._uncompiled.warn(
                    "count",
                    "a state dict was loaded after fp4graph.apply(), and it does not say for how many forwards its "
                    f"weights were trained, so policy {self.policy.name!r} begins in its first phase. To resume a "
                    "training, load the state of the prepared optimizer too, or use fp4graph.training.checkpoint; to "
                    "begin one, load the weights before fp4graph.apply()",
                )
            self._settle(self.root_state, training)
            rank, device = distributed.rank(), self.root_state.forwards.device
            self._current.step = noise.make_step(self.settings.seed, rank, self.root_state.count, device=device)

    @opaque
    def run_part(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module of the model that was called by itself: by another method than the model's call, or alone.

        The count of forwards advances when a module that has run with gradients since it last changed runs again.
        Activation checkpointing calls modules again in the backward; that is no forward of its own, and its noise is
        that of the first time.
        """
        call: Any = module.forward if module is self.root else module._call_impl
        if self._bypassed or hooks.has_sharded_forward(self.root):
            with self._current.parts_left_alone():  # modules of fully_shard have graphs of their own
                return call(*args, **kwargs)
        if self._tree.adapted():
            return self._adapted().run_part(module, args, kwargs)
        refuse_conversion(quantizes=True)
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        training, again = torch.is_grad_enabled(), torch_internals.backward_id() != -1
        self._follow(training=training)
        if not again and id(module) in self._current.ran:
            if not self._checked:
                self._uncompiled.check(self.capture)
            self._advance()
            self._trained = max(1, self._trained)
        due = self._due()
        if due != self.phase and not again:  # a backward ends in the phase of its forward
            return self._enter(due).run_part(module, args, kwargs)
        if not again:
            first = training and not self._current.ran
            self._begin(first)
            self._trained += first
            self._current.whole &= not training
        checked = self._checked or self._trained > 1
        if again and self._current.whole:  # recomputed for the backward of a forward that is counted already
            return self._uncompiled.run(module, call, args, kwargs, self.capture, checked=checked)
        place = self.plan.names.name(module)
        self._uncompiled.warn(
            f"module {place}",
            f"module {place or '(root)'!r} was called by itself, so it runs uncompiled: quantized as ever, and slower. "
            "Only calling the applied model runs the compiled graph",
        )
        return self._uncompiled.run(module, call, args, kwargs, self.capture, checked=checked)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_uncompiled(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call of the model that Dynamo does not compile."""
        what = "this forward" if name == CALL else f"{name}()"
        result = self._uncompiled.run(self.root, call, args, kwargs, self.capture, checked=self._is_listed)
        # Dynamo leaves a forward that raises an error to Python, so the error says more than this does.
        why = self._refused or cause(full=self.capture.is_full(name))
        self._uncompiled.warn(why, f"{what} runs uncompiled, quantized as ever, and slower: {why}")
        return result

    @property
    def _is_listed(self) -> bool:
        """Whether the sites of a forward that runs uncompiled are listed already."""
        return self._checked and not self._explains

    @opaque
    def _run_uncaptured(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, disabled: bool
    ) -> Any:
        """Run a module that the compiled call calls outside of its graphs. The compiled call counts the forward."""
        current, name = self._current, self.plan.names.name(module)
        current.require_thread()
        self._uncompiled.warn_uncaptured(module, name, disabled=disabled)
        ran, current.ran = current.ran, set()
        call, checked = module._call_impl, self._is_listed
        try:
            return self._uncompiled.run(
                module, call, args, kwargs, self.capture, checked=checked, running=self._running
            )
        finally:
            current.ran = ran

    def _run(self, name: str, training: bool, args: Any, kwargs: Any) -> Any:
        """Run the compiled call ``name``, or the observed one."""
        capture, sharded = self.capture, False
        checked = self._checked or (name != CALL and self._trained > 0)  # the first call of the model is checked
        if isinstance(self.root.__dict__.get("forward"), hooks.ShardedForward):
            if self.inspection.watching or self.inspection.recording is not None:
                raise Error("what fully_shard has taken over is compiled module by module, which cannot be watched")
            sharded = True
        elif (looked_at := self.inspection.capture(training=training, checked=checked)) is not None:
            capture = looked_at
        if training and self._current.compiled:
            self._current.require_thread()
        self._current.compiled, self._current.thread, self._running = True, threading.get_ident(), capture
        try:
            with capture.configured(), nullcontext() if name == CALL else hooks.uncalled(self.root):
                if sharded:
                    with capture.forward():
                        return self.root._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
                if self._refused is not None and all(p.dtype is not torch.float32 for p in self.root.parameters()):
                    self._refused = None  # the remedy that the warning names
                if self._refused is not None:
                    return self._run_uncompiled(name, self._call(name), args, kwargs)
                return capture.run(name, args, kwargs)
        except Exception as error:
            ours, capture.error = capture.error, None
            if (why := refused_grouped_product(error)) is not None:
                if capture.strict or sharded:
                    raise CaptureError(why) from error
                self._refused = why
                return self._run(name, training, args, kwargs)  # what ran before a graph break runs again, this once
            unmarked = ours.all if isinstance(ours, UnmarkedWeight) and not capture.has_run else []
            carried = [self._uncompiled.carry(each) for each in unmarked]
            if any(carried):
                return self._run(name, training, args, kwargs)  # nothing has run: the call's first graph was refused
            if ours is not None:
                self._failure = None if self._checked or self._trained else ours
                raise ours from ours.__cause__  # without the compiler's own errors around it
            if torch_internals.is_internal_error(error) and isinstance(error.__context__, Error):
                raise error.__context__ from None
            raise error
        finally:
            self._current.compiled = False

    def _settle(self, root_state: state.RootState, training: bool) -> None:
        """Start state before the first forwards at the weights as they are now (initialized after apply(), sharded, or
        received from another rank), and make it the same on all ranks of a DDP."""
        if not self._trained:
            distributed.compile_sharded(self.root, self.weights, self.capture.backend, self.settings.dynamic)
            if self._current.uncaptured is not None and hooks.has_sharded_forward(self.root):
                self._current.uncaptured = None  # modules of fully_shard have graphs of their own, between its hooks
                self._uncompiled.show_without_owners()
            with torch.inference_mode(False):  # tensors made in it could not be trained with
                for own in state.states(self.root):
                    if root_state.count == 0:
                        own.restart()
                    own.settle(device_of(own.module, self.device))
        wrapper = torch_internals.active_ddp()
        former = None if self._synchronized is None else self._synchronized()
        if training and wrapper is not None and wrapper is not former:
            distributed.synchronize(wrapper, root_state, self.weights)
            self._synchronized = weakref.ref(wrapper)

    def over_ranks(self, x: Tensor, parameter: Tensor) -> Tensor:
        """Return the sum of ``x`` over the ranks that train ``parameter``."""
        wrapper = None if self._synchronized is None else self._synchronized()
        return distributed.over_ranks(x, parameter, wrapper)

    def check_coverage(self) -> None:
        """Raise PolicyError or CaptureError where the captured graphs do not contain what the policy is about."""
        self.capture.learn(coverage.check(self.plan, self.capture))

    def _due(self) -> int:
        """Return the phase that the count of forwards asks for."""
        count = None if self.root_state is None else self.root_state.count
        return self.phase if count is None else self.policy.phase(count, self.settings.total_forwards)

    def _enter(self, phase: int) -> Runtime:
        """Enter another phase: apply its policy, with the present state and optimizers."""
        if self.inspection.watching:
            raise Error("a phase of the policy begins inside detect_nonfinite(); watch the steps of each by themselves")
        return self._replaced(phase)

    def _adapted(self) -> Runtime:
        """Apply the policy to the model with the adapters that have joined or left it."""
        if self.inspection.watching:
            raise Error("adapters joined or left the model inside detect_nonfinite(); call the model once before it")
        return self._replaced(self.phase)

    def _replaced(self, phase: int) -> Runtime:
        """Apply the policy in ``phase`` to the model as it is now, with the present state and optimizers."""
        with unpacked(self.root) as packed:  # plans are made of parameters
            following = Runtime(self.root, self.policy, self.settings, phase)
            following.attach()
        following.packing = self.packing
        if packed and self.packing is not None:
            try:
                self.packing.again(following.plan, packed)
            except Error as error:
                following._failure = error  # the values of bytes are no weights of this phase
                raise
        following._original = self._original
        if following.root_state is not None and self.root_state is not None:
            following.root_state.followed = self.root_state.followed
        following.observe(self.inspection.recording, training=self.inspection.training)
        self.optimizers.prepare_again(self.root)
        return following

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run forwards in this context, and their backwards, node by node; they raise NonFiniteError."""
        due = self._due()
        with (self if due == self.phase else self._enter(due)).inspection.watched():
            yield

    def observe(self, recording: Recording | None, *, training: bool = True) -> None:
        """Show ``recording`` the sites at work in all following forwards with gradients (``training``) or in all
        without, until it is None again.

        Such a forward and its backward run without a compiler, to the noise and with the effects of any other. The
        very first forward, which is checked, is not observed.
        """
        self.inspection.recording, self.inspection.training = recording, training


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
    why = f"this one was, but {hooks.PICKLED}" if pickled else "call fp4graph.apply(model, policy) first"
    raise Error(f"{caller}() takes a model that fp4graph.apply has prepared; {why}")


def detach(root: nn.Module) -> None:
    """Take hooks, state and the compiled call off ``root``; packed weights become parameters again."""
    release_all(root)
    unprepare(root)
    if (runtime := runtime_of(root)) is not None:
        runtime.give_back(root)
