"""An applied model at run time: prepares modules, compiles the root, counts forwards, checks coverage."""

from __future__ import annotations

import dataclasses
import os
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import CompileContext
from torch.nn.parallel import DistributedDataParallel

from fp4graph.errors import CaptureError, Error, PolicyError
from fp4graph.graph.blocks import pattern_of
from fp4graph.graph.functions import cacheable
from fp4graph.graph.marker import Tag
from fp4graph.graph.names import Names
from fp4graph.graph.observe import Observation, Observer
from fp4graph.graph.plan import NOTHING, Plan, plan_weight
from fp4graph.graph.rewrite import Rewriter, Site, WeightUse
from fp4graph.graph.watch import Watch
from fp4graph.kernels.inductor import EXACT
from fp4graph.model import hooks, state
from fp4graph.numerics import noise
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.sharding import fsdp_units, is_sharded, like, whole
from fp4graph.ops import contract
from fp4graph.ops.draw import operand_draw
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import total
from fp4graph.ops.state import StateSlot
from fp4graph.policy import Policy, Rule
from fp4graph.technique import OPTIMIZER_STAGES, Technique, overrides
from fp4graph.technique.operands import Operand
from fp4graph.technique.site import SiteView

entries = hooks.entries
#: Modules that call, count or iterate over their children: a child of ours would change what they do.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
BACKENDS = ("inductor", "aot_eager", "eager")
Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]
#: Per frame of Dynamo: how many sites of each module earlier frames held, and its own.
_Frames = dict[Any, tuple[dict[str, int], list[Site]]]


@dataclasses.dataclass(frozen=True)
class PlannedWeight:
    """One weight's site, the rule that decides it, and the plan that comes of both."""

    view: SiteView
    rule: Rule
    plan: Plan

    @property
    def on_weight(self) -> tuple[tuple[Technique, ...], OperandProgram | None]:
        """What acts on the weight itself, outside of any product: techniques at the optimizer's step or with state,
        and where there are any the quantizer that they are handed."""
        program = self.plan.program
        keeping = {slot.technique for slot in program.state} if program is not None else set()
        stages = ("before_step", "after_step")
        acting = tuple(
            t for t in self.rule.techniques if t.name in keeping or any(overrides(t, stage) for stage in stages)
        )
        return acting, program.fprop.right if acting and program is not None else None


class Weight:
    """One weight that the policy quantizes at every use, as the optimizer sees it.

    Attributes:
        name: of the parameter; module, parameter_name: its owner.
        possible: what the policy may decide of it. Where rules tell producers apart these are several, until a graph
            shows the product (:meth:`settle`).
        stored_transposed: whether the parameter is stored ``[K, N]`` (Hugging Face Conv1D) rather than ``[N, K]``.
    """

    def __init__(
        self, module: nn.Module, fqn: str, parameter_name: str, possible: tuple[PlannedWeight, ...], transposed: bool
    ) -> None:
        self.module, self.fqn, self.parameter_name = module, fqn, parameter_name
        self.possible, self.stored_transposed = possible, transposed
        self._settled: PlannedWeight | None = possible[0] if len(possible) == 1 else None
        self._captured = False
        self._sharded: Tensor | None = None
        self.slots = self._all_slots()

    def _all_slots(self) -> tuple[StateSlot, ...]:
        """What techniques keep for it, under whichever rule."""
        slots: dict[tuple[str, str], tuple[StateSlot, Rule]] = {}
        for planned in self.possible:
            for slot in () if planned.plan.program is None else planned.plan.program.state:
                known, rule = slots.setdefault((slot.technique, slot.label), (slot, planned.rule))
                if dataclasses.replace(known.entry, init=slot.entry.init) != slot.entry:
                    raise CaptureError(
                        f"rules {rule.name!r} and {planned.rule.name!r} may both decide it, and keep different state "
                        f"under the name {slot.technique}.{slot.label}; tell them apart by module",
                        site=self.name,
                    )
        return tuple(slot for slot, _ in slots.values())

    def settle(self, use: WeightUse) -> None:
        """Take what a captured graph decided of the weight.

        Raises:
            CaptureError: another product with this weight was decided otherwise, and something acts on the weight
                itself, of which there is one.
        """
        rule = use.decision.rule
        planned = PlannedWeight(use.site, rule, plan_weight(use.site, rule) if rule.quantizes else NOTHING)
        former = self._settled if self._captured else None
        if former is not None and former.on_weight != planned.on_weight:
            raise CaptureError(
                f"two products use it, of which rule {former.rule.name!r} decides one and {rule.name!r} the other, and "
                "techniques act on the weight itself, of which there is one; let one rule decide both",
                site=self.name,
            )
        self._captured, self._settled, self.stored_transposed = True, planned, use.transposed

    def require_settled(self) -> None:
        """Raise CaptureError where it is not known which rule decides it."""
        if self._settled is None:
            names = " or ".join(repr(planned.rule.name) for planned in self.possible)
            raise CaptureError(
                f"whether rule {names} decides it depends on what computes the input of its product, and no such "
                "product was captured; tell the rules apart by module instead of producer",
                site=self.name,
            )

    @property
    def choices(self) -> tuple[PlannedWeight, ...]:
        """What is decided of it; what may be, before a graph has shown that."""
        return self.possible if self._settled is None else (self._settled,)

    @property
    def view(self) -> SiteView:
        """Its site: as captured, once it was."""
        return self.choices[0].view

    @property
    def rule(self) -> Rule:
        """The rule that decides it."""
        return self.choices[0].rule

    @property
    def plan(self) -> Plan:
        """The plan of its site."""
        return self.choices[0].plan

    @property
    def name(self) -> str:
        return f"{self.fqn}.{self.parameter_name}" if self.fqn else self.parameter_name

    @property
    def parameter(self) -> Tensor:
        """What the optimizer holds: under FSDP the shards, also while the module has the whole weight instead."""
        current = _parameter(self.module, self.parameter_name)
        if is_sharded(current):
            self._sharded = current
        return current if self._sharded is None else self._sharded

    def buffer(self, slot: StateSlot) -> str:
        """Name of the buffer that holds a technique's entry for this weight."""
        prefix = "" if self.parameter_name == "weight" else f"{self.parameter_name}_"
        return f"{prefix}{slot.technique}_{slot.label}"

    def entries(self, technique: Technique) -> dict[str, Tensor]:
        """A technique's state tensors for this weight, by their labels."""
        holder = getattr(self.module, state.NAME)
        return {
            slot.label: getattr(holder, self.buffer(slot)) for slot in self.slots if slot.technique == technique.name
        }

    def quantize(self, w: Tensor, step: Tensor) -> Tensor:
        """What the graph's fprop makes of a weight ``w`` (stored layout): dequantized, same shape and dtype.

        A sharded ``w`` is gathered for it: blocks and tensor scales reach across shards.
        """
        assert self.plan.program is not None
        fprop = self.plan.program.fprop
        canonical = whole(w).mT if self.stored_transposed else whole(w)
        holder = getattr(self.module, state.NAME)
        draw = Draw(holder.key, step.to(holder.key.device)) if self.plan.program.draws else None
        rotation = fprop.rotate(canonical, canonical, operand_draw(draw, Operand.FPROP_INPUT))
        entries = self.fprop_state(lambda entry: rotation.apply(entry, "right"))
        terms = fprop.right(rotation.right, operand_draw(draw, Operand.FPROP_WEIGHT), entries)
        result = rotation.undo(total(terms), "right").to(w.dtype)
        return like(result.mT if self.stored_transposed else result, w)

    def fprop_state(self, of_weight_like: Callable[[Tensor], Tensor]) -> dict[str, dict[str, Tensor]]:
        """What fprop's quantizer is given of its techniques' state: entries like the weight as ``of_weight_like`` of
        them, which are ``[N, K]``; the others as they are."""
        holder = getattr(self.module, state.NAME)
        given: dict[str, dict[str, Tensor]] = {}
        for slot in self.plan.program.state if self.plan.program is not None else ():
            if slot.entry.operand is Operand.FPROP_WEIGHT:
                entry = whole(getattr(holder, self.buffer(slot)))
                if slot.entry.weight_like:
                    entry = of_weight_like(entry.mT if self.stored_transposed else entry)
                given.setdefault(slot.technique, {})[slot.entry.name] = entry
        return given


class Runtime:
    """Everything that ties one policy to one model.

    Args:
        root: the model. policy: resolved. backend: one of BACKENDS. seed: of the noise; None is 0.
        total_forwards: training forwards of the whole training, for phases that begin at a share of it.
        phase: how many of the policy's phases have begun.
        explains: whether what a graph does not allow is collected in ``problems`` and not raised.

    Attributes:
        whole: the policy with its phases. policy: the one in force in this phase.
    """

    def __init__(
        self,
        root: nn.Module,
        policy: Policy,
        backend: str,
        seed: int | None,
        dynamic: bool | None,
        total_forwards: int | None = None,
        phase: int = 0,
        explains: bool = False,
    ) -> None:
        self.root, self.backend, self.seed = root, backend, 0 if seed is None else seed
        self.whole, self.policy, self.phase, self.total_forwards = policy, policy.in_phase(phase), phase, total_forwards
        self.dynamic, self.explains = dynamic, explains
        self.problems: list[Error] = []
        self.entry = _entry_point(root)
        self.names = Names(root)
        self.device = next((p.device for p in root.parameters()), torch.device("cpu"))
        self.step: Tensor = noise.make_step(self.seed, 0, 0)
        self.sites: list[Site] = []
        # Planned before anything is touched, so that a refusal leaves the model as it was.
        self.weights = self._weights_under(self.policy)
        self._marked: set[str | None] = set()
        self._plans: dict[tuple[Plan, ...], int] = {}
        self.prepared: set[int] = set()  # ids of the quantized weights that prepared optimizers hold
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []  # the prepared ones
        self._frames: _Frames = {}
        self._checked = explains
        self._failure: Error | None = None  # of the first forward; every later one raises it again
        self._uses: dict[tuple[str, str], WeightUse] = {}
        self._read: set[tuple[str, str]] = set()  # parameters that graphs take
        self._previous: Any = None
        self._compiled: Callable[..., Any] | None = None
        self._pending_error: Error | None = None
        self._trained = 0
        self._watch: Watch | None = None
        self._observer: Observer | None = None
        self._observes_training = True
        self._observation: Observation | None = None
        self._site_states: tuple[state.SiteState, ...] = ()
        self._bucket_bytes: int | None = None  # of the DDP that a forward runs in
        self._synchronized: Callable[[], DistributedDataParallel | None] = lambda: None

    # ------------------------------------------------------------------ preparing the model

    def attach(self) -> None:
        """Add state, hooks and the compiled call to the root. On an error the model is left as it was, under the policy
        that it had if it had one."""
        replaced = runtime_of(self.root)
        former = {
            key: value
            for key, value in self.root.state_dict().items()
            if state.is_ours(key) and isinstance(value, Tensor)
        }
        detach(self.root)
        self._previous = self.root._compiled_call_impl
        try:
            if self.policy.quantizes or self.whole.phases:
                self._attach_state(former)
            self._compiled = torch.compile(self.entry, backend=self._capture, dynamic=self.dynamic)
            self.root._compiled_call_impl = _Call(self)
        except BaseException:
            detach(self.root)
            if replaced is not None:
                replaced._attach_state(former)
                self.root._compiled_call_impl = _Call(replaced)
            raise

    def _attach_state(self, former: dict[str, Tensor]) -> None:
        root_state = state.RootState(self.whole.to_yaml(), self.device)
        planned: dict[str, list[Weight]] = {}
        for weight in self.weights:
            planned.setdefault(weight.fqn, []).append(weight)
        # Where any phase keeps state, so that a checkpoint's keys are the same in all of them.
        policies = [self.whole.in_phase(index) for index in range(len(self.whole.phases) + 1)]
        hosts = {host for policy in policies for host in self._hosts(policy)}
        if self.whole.phases:
            hosts |= {weight.fqn for policy in policies for weight in self._weights_under(policy)}
        site_states: dict[int, state.SiteState] = {}
        for fqn, module in list(self.root.named_modules(remove_duplicate=False)):
            if (fqn in planned or fqn in hosts) and not state.is_ours(fqn) and id(module) not in site_states:
                if isinstance(module, CONTAINERS):
                    continue
                device = next((p.device for p in module.parameters()), self.device)
                site_states[id(module)] = own = state.SiteState(fqn, device)
                for weight in planned.get(fqn, ()):
                    self._add_entries(own, weight)
        for fqn, module in list(self.root.named_modules(remove_duplicate=False)):
            if id(module) in site_states and not state.is_ours(fqn):
                self._prepare(fqn, module, site_states[id(module)], planned)
        if "" in planned:
            self.root.forward = hooks.GuardedForward(self.root)
        self.root_state = root_state
        self._site_states = tuple(site_states.values())
        self._place(root_state, site_states)
        self._restore(former)
        ours = [name for name, _ in self.root.named_buffers() if state.is_ours(name)]
        # DDP would overwrite every rank's counters and EMAs with rank 0's at each forward.
        ignored = list(getattr(self.root, "_ddp_params_and_buffers_to_ignore", []))
        self.root._ddp_params_and_buffers_to_ignore = [*ignored, *ours]  # type: ignore[assignment]

    def _place(self, root_state: state.RootState, site_states: dict[int, state.SiteState]) -> None:
        """Put the root's state on the root; where that is a container, which calls or counts its children, on the
        first module that has state of its own."""
        holder = site_states.get(id(self.root))
        if holder is None and isinstance(self.root, CONTAINERS):
            holder = next(iter(site_states.values()), None)
        if holder is not None:
            holder.add_module("root", root_state)
        elif not isinstance(self.root, CONTAINERS):
            self.root.add_module(state.NAME, root_state)

    def _weights_under(self, policy: Policy) -> list[Weight]:
        """Every weight that a rule of ``policy`` quantizes."""
        return [
            weight
            for fqn, module in self.root.named_modules(remove_duplicate=False)
            if not state.is_ours(fqn)
            for name, parameter in module._parameters.items()
            if (weight := self._weight(policy, fqn, module, name, parameter)) is not None
        ]

    def _weight(
        self, policy: Policy, fqn: str, module: nn.Module, name: str, parameter: Tensor | None
    ) -> Weight | None:
        """``parameter`` as a weight that a rule quantizes, or may, or None."""
        if parameter is None or parameter.dim() != 2 or isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return None
        if not (name == "weight" or name.endswith("_weight")):
            return None
        transposed = type(module).__name__ == "Conv1D"
        out_features, in_features = reversed(parameter.shape) if transposed else parameter.shape
        view = SiteView(fqn, "linear", in_features, out_features, parameter.numel(), self.names.block(fqn))
        possible: dict[tuple[Rule, Plan], PlannedWeight] = {}
        for site, decision in policy.decide_weight(view):
            rule = decision.rule
            plan = plan_weight(site, rule) if rule.quantizes else NOTHING
            possible.setdefault((rule, plan), PlannedWeight(site, rule, plan))
        if all(planned.plan.program is None for planned in possible.values()):
            return None
        return Weight(module, fqn, name, tuple(possible.values()), transposed)

    def _hosts(self, policy: Policy) -> set[str]:
        """Modules that may multiply activations with each other or use parameters directly, under a rule for it."""
        hosts = set()
        for fqn, module in self.root.named_modules(remove_duplicate=False):
            inside_torch = type(module).__module__.startswith("torch.nn.modules")
            attends = isinstance(module, nn.MultiheadAttention)
            if (inside_torch and not attends) or state.is_ours(fqn):
                continue
            owns = any(p is not None and p.dim() >= 2 for p in module._parameters.values())
            ops = ("matmul", "sdpa", *(("linear",) if owns or attends else ()))
            if any(policy.may_quantize(op, fqn, self.names.block(fqn)) for op in ops):
                hosts.add(fqn)
        return hosts

    def _add_entries(self, own: state.SiteState, weight: Weight) -> None:
        by_name = {t.name: t for planned in weight.possible for t in planned.rule.techniques}
        for slot in weight.slots:
            own.add(
                weight.buffer(slot),
                contract.initial(by_name[slot.technique], slot.entry, weight.name),
                partial(_parameter, weight.module, weight.parameter_name),
            )

    def _prepare(self, fqn: str, module: nn.Module, own: state.SiteState, planned: dict[str, list[Weight]]) -> None:
        """Give one module its state and its hook. The hook carries the weights of children it uses without a call."""
        if state.NAME not in module._modules:
            module.add_module(state.NAME, own)
        carried = [(weight.parameter_name, weight) for weight in planned.get(fqn, ())]
        if isinstance(module, nn.MultiheadAttention):
            child = f"{fqn}.out_proj" if fqn else "out_proj"
            carried += [(f"out_proj.{weight.parameter_name}", weight) for weight in planned.get(child, ())]
        entries, paths = [], []
        for index, (path, weight) in enumerate(carried):
            holder = path.rpartition(".")[0]
            for slot in weight.slots:
                entries.append((index, slot.technique, slot.label))
                buffer = weight.buffer(slot)
                paths.append(".".join(part for part in (holder, state.NAME, buffer) if part))
        rules = self.policy.places(fqn, self.names.block(fqn))
        choices = [tuple(planned.plan for planned in weight.possible) for _, weight in carried]
        plans = tuple(self._plans.setdefault(choice, len(self._plans)) for choice in choices)
        tag = Tag(rules, tuple(path for path, _ in carried), tuple(entries), plans)
        # After hooks that set the weights up: FSDP gathers them, weight normalization computes them.
        module.register_forward_pre_hook(hooks.Entry(self, fqn, tag, tuple(paths)))

    def _restore(self, former: dict[str, Tensor]) -> None:
        """Take over the values of an earlier application of the same policy (a deepcopy applied again)."""
        buffers = dict(self.root.named_buffers(remove_duplicate=False))
        for key, value in former.items():
            if key in buffers and buffers[key].shape == value.shape:
                buffers[key].copy_(value)
        if any(key.endswith(".forwards") for key in former):
            self.root_state.recount()

    # ------------------------------------------------------------------ compiling and running

    def _capture(
        self, gm: torch.fx.GraphModule, example_inputs: list[Any], *, watch: Watch | Observation | None = None
    ) -> Callable[..., Any]:
        """The torch.compile backend: rewrite, record, hand on to the inner backend, or to one that looks on."""
        context = CompileContext.current_compile_id()
        frame = getattr(context, "frame_id", None)
        frames: _Frames = self._frames if watch is None else watch.frames
        first = frames.get(frame, (_occurrences(frames), []))[0]
        try:
            keys = {id(own.key): own.fqn for own in self._site_states}
            rewriter = Rewriter(self.policy, self.names, first_occurrence=first, keys=keys)
            rewriter.run(gm)
            if rewriter.refused is not None:
                if not self.explains:
                    raise rewriter.refused
                self.problems.append(rewriter.refused)
            self._learn(rewriter.uses)
            self._read |= rewriter.read
            backend = inner_backend(self.backend)
            if self._bucket_bytes is not None:
                backend = _split_for_ddp(backend, self._bucket_bytes)
            if watch is not None:
                backend = watch.backend
            with cacheable(gm):
                compiled = backend(gm, example_inputs)  # traces stages, which may fail
        except Error as error:
            self._pending_error = error
            raise
        frames[frame] = (first, rewriter.sites)
        if watch is not None:
            return compiled
        self.sites.extend(rewriter.sites)
        self._marked |= rewriter.marked
        return compiled

    @property
    def graphs(self) -> int:
        """In how many graphs the forward was captured."""
        return len(self._frames)

    def _learn(self, uses: list[WeightUse]) -> None:
        """Tell the weights what a captured graph decided of them."""
        weights = {(weight.fqn, weight.parameter_name): weight for weight in self.weights}
        for use in uses:
            owner = (use.module, use.parameter)
            self._uses[owner] = use
            if owner in weights:
                weights[owner].settle(use)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Forwards in this context, and their backwards, run node by node and raise NonFiniteError."""
        due = self._due()
        if due != self.phase:
            with self._enter(due).watched():
                yield
            return
        watch = Watch(self.names)
        watch.compiled = torch.compile(
            _entry_point(self.root), backend=partial(self._capture, watch=watch), dynamic=self.dynamic
        )
        self._watch, former = watch, self._watch
        try:
            yield
        finally:
            self._watch = former
            watch.close()

    def observe(self, observer: Observer | None, *, training: bool = True) -> None:
        """Show ``observer`` the sites at work in all following forwards with gradients (``training``) or in all
        without, until it is None again.

        Such a forward and its backward run without a compiler, to the noise and with the effects of any other. The
        very first forward, which is checked, is not observed.
        """
        self._observer, self._observes_training = observer, training

    def _observed(self, training: bool) -> Callable[..., Any] | None:
        """What an observed forward runs; captured at the first."""
        if self._observer is None or training != self._observes_training or not self._checked:
            return None
        if self._observation is None:
            self._observation = Observation(self._observer)
            self._observation.compiled = torch.compile(
                _entry_point(self.root), backend=partial(self._capture, watch=self._observation), dynamic=self.dynamic
            )
        self._observation.observer = self._observer
        return self._observation.compiled  # type: ignore[no-any-return]

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """One root forward."""
        if any(hook.bypassed for _, _, hook in hooks.entries(self.root)[:1]):
            return self.root._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        training = torch.is_grad_enabled()
        root_state = getattr(self, "root_state", None)
        due = self._due()
        if due != self.phase:
            return self._enter(due).call(*args, **kwargs)
        self._check_optimizer(training)
        if root_state is not None:
            self._settle(root_state, training)
            device = root_state.forwards.device
            self.step = noise.make_step(self.seed, _rank(), root_state.count, device=device)
        run: Any = self._compiled
        if isinstance(self.root.__dict__.get("forward"), hooks.Unit):
            if self._watch is not None or self._observer is not None:
                raise Error("what fully_shard has taken over is compiled module by module, which cannot be watched")
            run = self.root._call_impl
        elif self._watch is not None:
            run = self._watch.compiled
        elif (observed := self._observed(training)) is not None:
            run = observed
        try:
            with self._captured_whole():
                result = run(*args, **kwargs)
        except Exception as error:
            pending, self._pending_error = self._pending_error, None
            if pending is not None:
                self._failure = None if self._checked else pending
                raise pending from pending.__cause__  # without the compiler's own errors around it
            raise error
        if not self._checked and self._watch is None:
            try:
                self.check_coverage()
            except Error as error:
                self._failure = error
                raise
            self._checked = True
        if training:
            self._trained += 1
            if root_state is not None:
                root_state.advance()
        return result

    def _due(self) -> int:
        """The phase that the count of forwards asks for."""
        root_state = getattr(self, "root_state", None)
        return self.phase if root_state is None else self.whole.phase(root_state.count, self.total_forwards)

    def in_phase(self, phase: int) -> Runtime:
        """The runtime of the same model in another phase; the model is left as it is."""
        return Runtime(self.root, self.whole, self.backend, self.seed, self.dynamic, self.total_forwards, phase)

    def _enter(self, phase: int) -> Runtime:
        """Go over to another phase: the policy is applied anew, with the state and the optimizers that there are."""
        from fp4graph.training.optimizer import prepare_optimizer

        if self._watch is not None:
            raise Error("a phase of the policy begins inside detect_nonfinite(); watch the steps of each by themselves")
        following = self.in_phase(phase)
        following.attach()
        following.observe(self._observer, training=self._observes_training)
        for reference in self.optimizers:
            if (optimizer := reference()) is not None:
                prepare_optimizer(self.root, optimizer)
        return following

    @contextmanager
    def _captured_whole(self) -> Iterator[None]:
        """Under DDP Dynamo cuts a graph along DDP's buckets before a backend sees it, which parts markers from what
        they mark. In this context it does not; :func:`_split_for_ddp` cuts what the pass has made of the graph."""
        wrapper = _active_ddp()
        if wrapper is None or torch._dynamo.config.optimize_ddp not in (True, "ddp_optimizer"):
            yield
            return
        self._bucket_bytes = wrapper.bucket_bytes_cap
        try:
            with torch._dynamo.config.patch(optimize_ddp=False):
                yield
        finally:
            self._bucket_bytes = None

    def _settle(self, root_state: state.RootState, training: bool) -> None:
        """Before the first forwards: state starts at the weights as they are now (initialized after apply(), sharded,
        received from another rank), and is the same on all ranks of a DDP."""
        if not self._trained:
            self._make_units()
            with torch.inference_mode(False):  # tensors made in it could not be trained with
                for own in self._site_states:
                    if root_state.count == 0:
                        own.restart()
                    own.follow_weights()
        wrapper = _active_ddp()
        if training and wrapper is not None and wrapper is not self._synchronized():
            self._synchronize(wrapper, root_state)
            self._synchronized = weakref.ref(wrapper)

    def _make_units(self) -> None:
        """Give every module that ``fully_shard`` was called on a graph of its own."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        # FSDP1 puts views in the place of parameters, or marks the flattened ones.
        parameters = [p for module in self.root.modules() for p in module._parameters.values() if p is not None]
        if any(not isinstance(p, nn.Parameter) or hasattr(p, "_fsdp_flattened") for p in parameters):
            raise Error(
                "FullyShardedDataParallel (FSDP1) makes flat vectors of weights, which have no blocks; use fully_shard"
            )
        units = fsdp_units(self.root)
        for unit in units:
            unit.reshard()  # an evaluation may have left the weights whole
        gathered = {id(module) for unit in units for module in unit.modules()}
        for weight in self.weights:
            if is_sharded(weight.parameter) and id(weight.module) not in gathered:
                raise CaptureError(
                    "its weight is a DTensor that nothing gathers for the forward (tensor parallelism), and quantizers "
                    "do not reach across shards; use fully_shard or DistributedDataParallel",
                    site=weight.name,
                )
        compiled: dict[type, Callable[..., Any]] = {}
        for unit in units:
            forward = unit.__dict__.get("forward")
            if (forward is None or isinstance(forward, hooks.GuardedForward)) and hooks.entries(unit):
                cls = type(unit)
                if cls not in compiled:
                    entry = _with_own_code(hooks.run_unit, cls)
                    compiled[cls] = torch.compile(entry, backend=self._capture, dynamic=self.dynamic)
                unit.forward = hooks.Unit(unit, compiled[cls])

    @torch.no_grad()
    def _synchronize(self, wrapper: DistributedDataParallel, root_state: state.RootState) -> None:
        """Once per DDP, do for state what its constructor did for weights: take rank 0's, which may be the only rank
        that loaded a checkpoint. What a rank's own backward wrote stays, where the rank is as far as rank 0."""
        group = wrapper.process_group
        source = torch.distributed.get_global_rank(group, 0)
        count = root_state.count
        torch.distributed.broadcast(root_state.get_buffer("forwards"), source, group=group)
        root_state.recount()
        behind = count != root_state.count
        for weight in self.weights:
            for slot in weight.slots:
                entry = getattr(getattr(weight.module, state.NAME), weight.buffer(slot))
                received = entry.clone()
                torch.distributed.broadcast(received, source, group=group)
                if behind or slot.entry.writer == "optimizer":
                    entry.copy_(received)

    def techniques(self) -> tuple[Technique, ...]:
        """Every technique that some rule of the policy uses, and those that act whatever is quantized."""
        rules = (*self.policy.rules, self.policy.default)
        of_rules = [t for rule in rules if rule.quantizes for t in rule.techniques]
        return tuple(dict.fromkeys((*of_rules, *(t for t in self.policy.techniques if t.per_model))))

    def _check_optimizer(self, training: bool) -> None:
        if not training or self._trained != 1:
            return
        stages = ("before_step", "after_step")
        whole = sorted(t.name for t in self.techniques() if any(overrides(t, s) for s in OPTIMIZER_STAGES - {*stages}))
        if whole and not self.optimizers:
            raise CaptureError(
                f"technique {', '.join(whole)} acts at the optimizer's step, but no optimizer was prepared: call "
                "fp4graph.prepare_optimizer(model, optimizer) before training"
            )
        for weight in self.weights:
            needs = sorted(t.name for t in weight.rule.techniques if any(overrides(t, stage) for stage in stages))
            if needs and weight.parameter.requires_grad and id(weight.parameter) not in self.prepared:
                raise CaptureError(
                    f"technique {', '.join(needs)} acts on {weight.name} at the optimizer's step, but no optimizer "
                    "that holds it was prepared: call fp4graph.prepare_optimizer(model, optimizer) before training"
                )

    def check_coverage(self) -> None:
        """Every required rule matched something, and something is quantized, over all graphs of the first forward."""
        served = self._served()
        sites = [dataclasses.replace(site, module=name) for site, names in served for name in names]
        check_coverage(self.policy, sites)
        self._check_share()
        captured = {site.module for site in self.sites}
        for module in sorted(name for name in self._marked - captured if name is not None):
            if self._ran_uncaptured(module):
                raise CaptureError(
                    "the module was called, but the product with its weight was not captured and ran in high precision "
                    "(a graph break between its hooks and its forward, or a loop or a disabled function around the "
                    "product?); remove the break, or keep the module by a rule",
                    site=module or "(root)",
                )
        served_by = {name: names[0] for _, names in served for name in names[1:] if name is not None}
        self._learn(
            [
                dataclasses.replace(use, module=name)
                for name, first in served_by.items()
                for (owner, _), use in list(self._uses.items())
                if owner == first
            ]
        )

    def _ran_uncaptured(self, name: str) -> bool:
        """Whether module ``name``, which was called and has no site, has matrices that no graph has read although a
        linear layer in its place would be quantized."""
        module = self.root.get_submodule(name)
        if isinstance(module, nn.Linear):
            return any(weight.fqn == name for weight in self.weights)
        if len(self._frames) < 2 or hooks.is_sharded_unit(self.root):
            return False  # without a graph break a parameter that no graph reads was not used
        matrices = {key for key, p in module._parameters.items() if p is not None and min((1, *p.shape)[-2:]) > 1}
        reads = any((name, key) in self._read for key in matrices)
        return bool(matrices) and not reads and self.policy.may_quantize("linear", name, self.names.block(name))

    def _check_share(self) -> None:
        """Raise PolicyError for a policy written for blocks, a model without any, and most of its work unquantized."""
        if not any(rule.quantizes and rule.match.needs_blocks for rule in self.policy.rules):
            return
        if set(self.names.blocks) != {""}:
            return
        if (share := self._share()) < 0.5:
            names = sorted({site.module or "(root)" for site in self.sites if site.quantized})
            raise PolicyError(
                f"policy {self.policy.name!r} is written for a repeated stack of blocks (block: true), and this model "
                f"has none that fp4graph recognises: only {', '.join(names[:8])} would be quantized, {share:.0%} of "
                "the matrix work of its layers. Write a policy that extends it, with rules that name what to quantize, "
                "such as match: {op: linear} for every linear layer or match: {module: 'head'} for one; convolutions "
                "and recurrent layers cannot be quantized",
                file=self.policy.file,
            )

    def _share(self) -> float:
        """The part of the matrix work of layers that is quantized: of the captured FLOPs, without attention and what a
        rule keeps by name. Recurrent layers, which no graph shows, count with the elements of their matrices."""
        layers = [site for site in self.sites if site.op not in ("matmul", "sdpa", "attention")]
        layers = [site for site in layers if site.quantized or site.rule_index in (None, -1)]
        work = sum(site.flops or 0 for site in layers)
        share = sum(site.flops or 0 for site in layers if site.quantized) / work if work else 1.0
        recurrent = sum(
            parameter.numel()
            for module in self.root.modules()
            if isinstance(module, nn.RNNBase | nn.RNNCellBase)
            for parameter in module.parameters(recurse=False)
            if parameter.dim() == 2
        )
        if not recurrent:
            return share
        ours = [use for use in self._uses.values() if use.decision.rule.quantizes]
        quantized = sum(use.site.numel or 0 for use in ours)
        return min(share, quantized / (quantized + recurrent))

    def _served(self) -> list[tuple[Site, list[str | None]]]:
        """Each captured site with the modules that it serves, its own first: blocks that FSDP or a graph break
        compiles one by one share a graph where their tags are equal."""
        if len(self._frames) < 2:
            return [(site, [site.module]) for site in self.sites]
        captured = {site.module for site in self.sites}
        tags = {hook.name: hook.tag for _, _, hook in hooks.entries(self.root)}
        alike: dict[Any, list[str]] = {}
        for name, module in self.root.named_modules():
            alike.setdefault((pattern_of(name), type(module), tags.get(name)), []).append(name)
        others: dict[str | None, list[str]] = {}
        for names in alike.values():
            if (first := next((name for name in names if name in captured), None)) is not None:
                others[first] = [name for name in names if name not in captured]
        return [(site, [site.module, *others.get(site.module, ())]) for site in self.sites]


def check_coverage(policy: Policy, sites: list[Site]) -> None:
    """Raise PolicyError for a required rule without a site, for nothing quantized, or for a failed ``expect``."""
    matched = {site.rule_index for site in sites}
    products = sorted({f"{s.module or '(root)'} ({s.op})" for s in sites if s.rule_index is not None})
    for index, rule in enumerate(policy.rules):
        if rule.required and index not in matched:
            seen = ", ".join(products[:8]) + (" ..." if len(products) > 8 else "")
            raise PolicyError(
                f"rule {rule.name!r} matches no site of this model; give it 'required: false' if that is meant. "
                f"Sites: {seen or 'none, the model has no matrix product'}",
                file=rule.file,
                line=rule.line,
            )
    quantized = sum(site.quantized for site in sites)
    if not quantized and policy.quantizes:
        raise PolicyError(
            f"policy {policy.name!r} quantizes no site of this model "
            f"({len(products)} products found); fp4graph.explain(model, policy, args) lists them with the reasons",
            file=policy.file,
        )
    policy.expect.check(quantized, len(products))


def _occurrences(frames: _Frames) -> dict[str, int]:
    counts: dict[str, int] = {}
    for _, sites in frames.values():
        for site in sites:
            counts[str(site.module)] = max(counts.get(str(site.module), 0), site.occurrence + 1)
    return counts


class _Call:
    """What ``nn.Module.__call__`` runs instead of the plain forward."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    # An outer torch.compile must not trace through into our graphs with its own backend.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.runtime.call(*args, **kwargs)


def _entry_point(root: nn.Module) -> Callable[..., Any]:
    """``root._call_impl`` behind a code object of its own: Dynamo's cache and recompile limit are per code object,
    and ``Module._call_impl`` is one for all models of the process."""

    def entry(*args: Any, **kwargs: Any) -> Any:
        return root._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    return _with_own_code(entry, type(root))


def _with_own_code(function: Any, of: type) -> Callable[..., Any]:
    code = function.__code__.replace(co_name=f"fp4graph_{of.__name__}")
    return types.FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)


def inner_backend(name: str) -> Backend:
    """The torch.compile backend that runs the rewritten graph."""
    if name not in BACKENDS:
        raise ValueError(f"backend is one of {', '.join(BACKENDS)}; got {name!r}")
    return _inductor if name == "inductor" else torch._dynamo.lookup_backend(name)


def _inductor(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Inductor, told for a GPU to compute what eager mode computes; its C++ does so as it is."""
    from torch._inductor.compile_fx import compile_fx

    on_gpu = any(isinstance(x, Tensor) and x.device.type == "cuda" for x in example_inputs)
    compiled: Any = compile_fx(gm, example_inputs, config_patches=dict(EXACT) if on_gpu else None)
    return compiled  # type: ignore[no-any-return]


def _active_ddp() -> DistributedDataParallel | None:
    """The DDP in whose forward this runs."""
    active: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    return active


def _split_for_ddp(backend: Backend, bucket_bytes: int) -> Backend:
    """``backend`` behind torch's own cut along DDP's buckets, which lets gradients be reduced during the backward."""
    from torch._dynamo.backends.distributed import DDPOptimizer

    first = min(bucket_bytes, torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)  # type: ignore[attr-defined]
    return DDPOptimizer(bucket_bytes, backend, first).compile_fn


def _parameter(module: nn.Module, name: str) -> Tensor:
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", 0))


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that a policy is applied to: of a DistributedDataParallel, which the graph has no part of, the one
    inside, so that names and noise are the same with it and without."""
    return unwrapped(model.module) if isinstance(model, DistributedDataParallel) else model


def runtime_of(model: nn.Module) -> Runtime | None:
    """The runtime of an applied model, or None."""
    call = unwrapped(model).__dict__.get("_compiled_call_impl")
    return call.runtime if isinstance(call, _Call) else None


def detach(root: nn.Module) -> None:
    """Take hooks, state and the compiled call off ``root``."""
    runtime = runtime_of(root)
    for module, key, _ in hooks.entries(root):
        if key is not None:
            module._forward_pre_hooks.pop(key)
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    for module in list(root.modules()):
        module._modules.pop(state.NAME, None)
        if isinstance(module.__dict__.get("forward"), hooks.GuardedForward | hooks.Unit):
            del module.forward
    ignored = [n for n in getattr(root, "_ddp_params_and_buffers_to_ignore", []) if not state.is_ours(n)]
    if ignored:
        root._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
    else:
        root.__dict__.pop("_ddp_params_and_buffers_to_ignore", None)
    if runtime is not None:
        del root._compiled_call_impl  # the class has None
        if runtime._previous is not None:
            root._compiled_call_impl = runtime._previous


@contextmanager
def bypassed(root: nn.Module) -> Iterator[None]:
    """All hooks below ``root`` let their modules run uncompiled while the context lasts."""
    found = [hook for _, _, hook in hooks.entries(root)]
    for hook in found:
        hook.bypassed += 1
    try:
        yield
    finally:
        for hook in found:
            hook.bypassed -= 1
