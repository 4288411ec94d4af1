"""The hooks through which techniques act around the user's own ``optimizer.step()``, and the loss scaler.

A technique acts on a parameter once per step, however many sites, modules or models use the parameter. What the
technique keeps for the parameter is in ``optimizer.state[parameter]``, under keys that begin with ``fp4graph.``
(:mod:`fp4graph.training.memory`): these entries are saved, loaded and sharded with the optimizer's own state. State
that the graph reads as well is in the model (:mod:`fp4graph.model.state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fp4graph.errors import Error
from fp4graph.model import weight_quantizer
from fp4graph.model.listening import listener
from fp4graph.model.runtime import Runtime, require_runtime, runtime_of
from fp4graph.model.weight import Weight
from fp4graph.ops import contract
from fp4graph.technique import Technique, acts_at, hooks_of
from fp4graph.technique.updates import OptimizerStep, WeightUpdate
from fp4graph.training import acting
from fp4graph.training.acting import AFTER, BEFORE
from fp4graph.training.count import ForwardCounts
from fp4graph.training.memory import Memory, is_ours

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741  # the optimizer


def prepare_optimizer(model: nn.Module, optimizer: O) -> O:
    """Attach the policy's optimizer-side techniques to ``optimizer`` and return it.

    The optimizer's state dict then also carries the model's count of forwards, from which noise and phases continue
    after a resumption. So call this function in every training script that saves checkpoints. Preparing an optimizer
    again, after applying another policy, replaces the model's hooks. If one optimizer trains several applied models,
    prepare it with each of them; if several optimizers share a model's parameters, prepare each.
    Load a checkpoint into an optimizer after preparing it.

    Every phase of the policy is checked, so that no phase is refused in the middle of a training.

    Raises:
        Error: the model is not applied; or the optimizer holds none of the weights that a technique acts on, or runs no
            hooks; or it has already loaded a checkpoint, and torch rounded techniques' entries to 16 bits; or two uses
            of one parameter have different techniques or quantizers; or a technique that acts on the whole optimizer
            has several sets of options; or several models order their techniques differently.
    """
    takes = "prepare_optimizer(model, optimizer) takes"
    if isinstance(optimizer, nn.Module):
        raise Error(f"{takes} the model first; the arguments are swapped")
    runtime = require_runtime(model, "prepare_optimizer").up_to_date()
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise Error(f"{takes} an optimizer such as torch.optim.AdamW(model.parameters()); got {optimizer!r}")
    runtime.plan.before_training()
    previous: _Hooks | None = optimizer.__dict__.get("_fp4graph")
    others = [] if previous is None else [r for r in previous.runtimes if _is_live(r) and r.root is not runtime.root]
    coming = list[Technique]()
    for phase in range(runtime.phase, len(runtime.policy.phases) + 1):
        plan = runtime.plan if phase == runtime.phase else runtime.plan_of(phase)
        coming += acting.techniques(plan)
        plans = [*(other.plan for other in others), plan]
        acting.check_fit(plan, optimizer)
        acting.check_options(plans)
        acting.check_uses(plans)
        acting.in_order(plans)

    replaced: set[str] = set()
    if previous is None:
        hooks = _Hooks([runtime], optimizer, Memory(optimizer))
        if coming:
            hooks.attach()
            optimizer.__dict__["_fp4graph"] = hooks
    else:  # a phase may begin inside a step, in its closure, while torch goes through the optimizer's hooks
        hooks = previous
        replaced = {t.name for r in hooks.runtimes if r.root is runtime.root for t in acting.techniques(r.plan)}
        hooks.serve([*others, runtime])
    hooks.acts_before[runtime.root] = any(acts_at(technique, *BEFORE) for technique in coming)
    remaining = {technique.name for technique in hooks.techniques}
    ids = {id(parameter) for parameter in runtime.root.parameters()}
    hooks.memory.forget(lambda parameter, name: name not in remaining and (id(parameter) in ids or name in replaced))
    held = acting.groups_by_parameter(optimizer)
    parameters = {id(weight.parameter) for weight in runtime.weights if id(weight.parameter) in held}
    ForwardCounts.of(optimizer, runtime)
    runtime.optimizers.add(optimizer, parameters, prepare_optimizer)
    listener().prepared(model, optimizer)
    return optimizer


def grad_scaler(model: nn.Module) -> torch.amp.GradScaler:
    """Return torch's dynamic loss scaler for an applied model, disabled (a no-op) unless a technique scales the loss in
    any phase of the policy.

    Source: Micikevicius et al. 2018.
    """
    runtime = require_runtime(model, "grad_scaler")
    used = (t for phase in range(len(runtime.policy.phases) + 1) for t in runtime.plan_of(phase).techniques())
    scalers = [technique.loss_scaler for technique in used if technique.loss_scaler is not None]
    options = scalers[0] if scalers else {}
    return torch.amp.GradScaler(runtime.device.type, enabled=bool(scalers), **options)  # type: ignore[arg-type]


def _is_live(runtime: Runtime) -> bool:
    """Return whether ``runtime`` is still in force: neither removed from its model nor replaced (policy or phase)."""
    return runtime_of(runtime.root) is runtime


def _skips(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this step updates nothing.

    A fused optimizer skips the update if a ``GradScaler`` reports an overflow. torch's distributed checkpoint takes a
    step with zero gradients and learning rates to allocate the state that it loads.
    """
    overflow = getattr(optimizer, "found_inf", None)
    if overflow is not None and bool(overflow):
        return True
    if any(float(group.get("lr", 1)) != 0 for group in optimizer.param_groups):
        return False
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    values = (grad.coalesce().values() if grad.is_sparse else grad for grad in grads)
    return not any(bool((x != 0).any()) for x in values)


class _Closure:
    """The closure of a step, called before techniques act on the gradients that it computes."""

    def __init__(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = [*enumerate(args), *kwargs.items()]
        self._optimizer, self._args, self._kwargs = optimizer, args, kwargs
        self._places = [place for place, value in arguments if place and callable(value)]
        with torch.enable_grad():
            self._losses = [value() for place, value in arguments if place in self._places]
        self._point = list[tuple[int, bool]]()  # the weights for which the optimizer may ask the loss

    def instead(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of the step with a closure that only returns the loss; None without a closure."""
        if not self._places:
            return None
        self._point = self._present()
        changed = [self._loss if place in self._places else value for place, value in enumerate(self._args)]
        return tuple(changed), {k: self._loss if k in self._places else value for k, value in self._kwargs.items()}

    def _loss(self) -> Any:
        if not self._losses or self._present() != self._point:
            raise Error(
                "techniques act on gradients once for each step, and this optimizer calls the closure several times in "
                "a step, or for other weights (as LBFGS and SAM do); use an optimizer that calls it once, first of all"
            )
        return self._losses.pop()

    def _present(self) -> list[tuple[int, bool]]:
        """Return what shows whether the weights have changed, or gradients have gone."""
        return [(p._version, p.grad is None) for group in self._optimizer.param_groups for p in group["params"]]


class _Hooks:
    """The hooks on one optimizer, for the techniques of ``runtimes``, the applied models in the order of preparing.

    Attributes:
        acts_before: by model, whether a technique acts before the step in this phase or a later one.
    """

    def __init__(self, runtimes: Sequence[Runtime], optimizer: torch.optim.Optimizer, memory: Memory) -> None:
        self.optimizer, self.memory = optimizer, memory
        self.acts_before = WeakKeyDictionary[nn.Module, bool]()
        self.serve(runtimes)
        self._scratch: dict[Any, dict[Any, Any]] = {}
        self._loaded_state: dict[str, Any] = {}  # while load_state_dict runs

    def serve(self, runtimes: Sequence[Runtime]) -> None:
        """Act for the techniques of ``runtimes`` from now on."""
        self.runtimes = tuple(runtimes)
        self.techniques = acting.in_order([runtime.plan for runtime in runtimes])
        self._agree = False  # True once captured graphs have shown that all uses of every parameter agree

    def attach(self) -> None:
        """Register the hooks on the optimizer."""
        self.optimizer.register_step_pre_hook(self._before)
        self.optimizer.register_step_post_hook(self._after)
        # A step that raised has left entries out, see Memory.mirror.
        self.optimizer.register_state_dict_pre_hook(lambda optimizer: self.memory.mirror())
        self.optimizer.register_load_state_dict_pre_hook(self._loading)
        # Before ForwardCounts counts the entries, also if the optimizer was prepared for a model without techniques.
        self.optimizer.register_load_state_dict_post_hook(self._loaded, prepend=True)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._scratch = {}
        acts = any(self.acts_before.get(runtime.root) for runtime in self.runtimes if _is_live(runtime))
        closure = _Closure(optimizer, args, kwargs) if acts else None
        names = self._acting_before()  # a phase may have begun in the closure
        if names and getattr(optimizer, "grad_scale", None) is not None:
            raise Error(
                f"technique {names} acts on gradients before the step, and this fused optimizer unscales them inside "
                "it; call scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        if not _skips(optimizer):
            self._run(BEFORE)
        self.memory.mirror(stepping=True)
        return None if closure is None else closure.instead()

    def _acting_before(self) -> str:
        """Return the names of the techniques that act on gradients before the step."""
        return ", ".join(t.name for t in self._live() if acts_at(t, *BEFORE))

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not _skips(optimizer):
            self._run(AFTER)
        self.memory.mirror()
        self._scratch = {}

    def _loading(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Return ``saved`` without the entries of techniques."""
        self._loaded_state = saved
        plain = {key: {n: v for n, v in state.items() if not is_ours(n)} for key, state in saved["state"].items()}
        return {**saved, "state": {key: state for key, state in plain.items() if state}}

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        self.memory.reload(self._loaded_state)
        self._loaded_state = {}

    def _live(self) -> list[Technique]:
        """Return the techniques of models that still have the policy under which they were prepared."""
        if all(_is_live(runtime) for runtime in self.runtimes):
            return self.techniques
        return acting.in_order([runtime.plan for runtime in self.runtimes if _is_live(runtime)])

    @torch.no_grad()
    def _run(self, stages: tuple[str, str]) -> None:
        per_weight, on_all = stages
        live = [runtime for runtime in self.runtimes if _is_live(runtime)]
        if not self._agree:  # a graph captured since the last step may show which rule decides about a weight
            acting.check_uses([runtime.plan for runtime in live])
            self._agree = all(len(weight.choices) == 1 for runtime in live for weight in runtime.weights)
        groups = acting.groups_by_parameter(self.optimizer)
        uses: dict[int, list[tuple[Weight, Runtime]]] = {}
        for runtime in live:
            for weight in runtime.weights:
                if not weight.is_used:
                    continue
                if id(weight.parameter) in groups and weight.parameter.grad is not None:
                    uses.setdefault(id(weight.parameter), []).append((weight, runtime))
        for technique, hook in ((t, hook) for t in self._live() for hook in hooks_of(t)):
            if hook.acts_at(per_weight):
                for identity, of_parameter in uses.items():
                    concerned = [use for use in of_parameter if acting.concerns(technique, use[0])]
                    if concerned:
                        (weight, runtime), *followers = concerned
                        weight.require_settled()
                        update = self._update(technique, weight, runtime, groups[identity])
                        before = dict(update.state)
                        with contract.at(weight.name):
                            contract.run(hook, per_weight, update)
                            if lost := next((n for n, x in update.state.items() if x is not before.get(n)), None):
                                rule = "only entries that are written in place, as by copy_(), are kept; see memory"
                                raise contract.broken(hook, per_weight, f"assigned state[{lost!r}], and {rule}")
                        for follower, _ in followers:
                            _follow(technique, weight, follower)
            if hook.acts_at(on_all):
                memory = partial(self.memory.of, technique=technique.name)
                step = OptimizerStep(self.optimizer, self._kept(technique, None), memory)
                contract.run(hook, on_all, step)
            if stages is BEFORE:
                self.memory.mirror(stepping=True)  # for techniques that act on the optimizer's state

    def _update(self, technique: Technique, weight: Weight, runtime: Runtime, group: dict[str, Any]) -> WeightUpdate:
        parameter = weight.parameter
        return WeightUpdate(
            name=weight.name,
            parameter=parameter,
            state=weight.entries(technique),
            memory=self.memory.of(parameter, technique.name),
            optimizer=self.optimizer,
            group=group,
            quantize=lambda w: weight_quantizer.quantize(weight, w, runtime.step, runtime.autocast),
            quantization=lambda: weight_quantizer.quantization(weight, runtime.step, runtime.autocast),
            canonical=weight.canonical,
            stored=weight.as_stored,
            scratch=self._kept(technique, parameter),
            over_ranks=lambda x: runtime.over_ranks(x, parameter),
            apart=lambda: weight_quantizer.apart(weight),
        )

    def _kept(self, technique: Technique, parameter: Tensor | None) -> dict[Any, Any]:
        return self._scratch.setdefault((technique.name, id(parameter)), {})


def _follow(technique: Technique, weight: Weight, follower: Weight) -> None:
    """Copy the entries that the optimizer's step has written for ``weight`` to another use of the same parameter."""
    sources, targets = weight.entries(technique), follower.entries(technique)
    for slot in weight.slots:
        if slot.technique == technique.name and slot.entry.writer == "optimizer":
            source, target = sources[slot.label], targets[slot.label]
            if target is not source:
                target.copy_(source)
