"""Hooks techniques act through around the user's own ``optimizer.step()``.

A parameter is acted on once per step, however many sites, modules or models use it. What a technique remembers of a
parameter lies in ``optimizer.state[parameter]``, under keys that begin with ``fp4graph.``: it is saved, loaded and
sharded with the optimizer's own state. What the graph reads as well lies in the model (:mod:`fp4graph.model.state`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fp4graph.errors import Error
from fp4graph.model.runtime import PlannedWeight, Runtime, Weight, runtime_of
from fp4graph.ops import contract
from fp4graph.technique import Technique, overrides
from fp4graph.technique.operands import Operand
from fp4graph.technique.updates import OptimizerStep, WeightUpdate

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741  # the optimizer

_PREFIX = "fp4graph."
_BEFORE, _AFTER = ("before_step", "before_optimizer"), ("after_step", "after_optimizer")


def prepare_optimizer(model: nn.Module, optimizer: O) -> O:
    """Attach the policy's optimizer-side techniques to ``optimizer`` and return it.

    Nothing is attached where the policy has none, so the line can stay in every training script. Preparing an
    optimizer again, after applying another policy, replaces the model's hooks. Where one optimizer trains several
    applied models, prepare it with each of them; where several optimizers share a model's parameters, prepare each.
    Load an optimizer's checkpoint after preparing it.

    Every phase of the policy is looked at, so that none is refused in the middle of a training.

    Raises:
        Error: the model is not applied, the optimizer holds none of the weights that a technique acts on, it runs no
            hooks, or it was given a checkpoint before this, in which torch rounded what techniques remember to the
            parameters' dtype. Two uses of one parameter have different techniques or quantizers. A technique that acts
            on the whole optimizer has several sets of options, or several models order their techniques differently.
    """
    runtime = runtime_of(model)
    if runtime is None:
        raise Error("prepare_optimizer() takes a model that fp4graph.apply has prepared")
    former: _Hooks | None = optimizer.__dict__.get("_fp4graph")
    others = [] if former is None else [r for r in former.runtimes if _is_live(r) and r.root is not runtime.root]
    for phase in range(runtime.phase, len(runtime.whole.phases) + 1):
        following = runtime if phase == runtime.phase else runtime.in_phase(phase)
        _check_fit(following, optimizer)
        _check_whole([*others, following])
        _check_uses([*others, following])
        _in_order([_acting(each) for each in (*others, following)])

    replaced: set[str] = set()
    if former is not None:
        former.remove()
        replaced = {t.name for r in former.runtimes if r.root is runtime.root for t in _acting(r)}
        del optimizer.__dict__["_fp4graph"]
    memory = _Memory(optimizer) if former is None else former.memory
    hooks = _Hooks([*others, runtime], optimizer, memory)
    remaining = {technique.name for technique in hooks.techniques}
    own = {id(parameter) for parameter in runtime.root.parameters()}
    memory.forget(lambda parameter, name: name not in remaining and (id(parameter) in own or name in replaced))
    if hooks.techniques:
        hooks.attach()
        optimizer.__dict__["_fp4graph"] = hooks
    held = _groups(optimizer)
    runtime.prepared |= {id(weight.parameter) for weight in runtime.weights if id(weight.parameter) in held}
    runtime.optimizers = [*(ref for ref in runtime.optimizers if ref() is not optimizer), weakref.ref(optimizer)]
    return optimizer


def _is_live(runtime: Runtime) -> bool:
    """Whether ``runtime`` is still that of its model: neither removed nor replaced by another policy or phase."""
    return runtime_of(runtime.root) is runtime


def _groups(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """The group of each parameter, by the parameter's id."""
    return {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}


def _acts_at(technique: Technique, stages: Iterable[str]) -> bool:
    return any(overrides(technique, stage) for stage in stages)


def _acting(runtime: Runtime) -> list[Technique]:
    """The techniques of a model that act around the step, in the policy's order."""
    return [technique for technique in runtime.techniques() if _acts_at(technique, (*_BEFORE, *_AFTER))]


# ---------------------------------------------------------------------- what is refused


def _check_fit(runtime: Runtime, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that a technique of one model could not act through."""
    techniques, held = _acting(runtime), _groups(optimizer)
    for technique in techniques:
        due = [w for w in runtime.weights if _concerns(technique, w) and w.parameter.requires_grad]
        if due and not any(id(weight.parameter) in held for weight in due):
            raise Error(
                f"technique {technique.name} acts on {due[0].name}, which this optimizer does not hold; pass it "
                "model.parameters() of the applied model"
            )
    # torch marks a step that runs hooks; wrappers that skip Optimizer.__init__, as timm's Lookahead, run none.
    if techniques and not getattr(type(optimizer).step, "hooked", False):
        raise Error(
            f"{type(optimizer).__name__} runs no hooks around its step(), through which technique "
            f"{', '.join(t.name for t in techniques)} would act; if it wraps an optimizer, prepare that one"
        )


def _check_whole(runtimes: Sequence[Runtime]) -> None:
    """Refuse a technique that acts on the whole optimizer with several sets of options: each would act on all of it."""
    found: dict[str, Technique] = {}
    for runtime in runtimes:
        for technique in _acting(runtime):
            former = found.setdefault(technique.name, technique)
            if former != technique and _acts_at(technique, (_BEFORE[1], _AFTER[1])):
                raise Error(
                    f"technique {technique.name} acts on the whole optimizer, and rules or models give it different "
                    f"options: {former!r} and {technique!r}; give it the same options everywhere"
                )


def _check_uses(runtimes: Sequence[Runtime]) -> None:
    """Refuse a parameter whose uses have different techniques or weight quantizers: it is acted on once.

    A use in high precision has no say; neither has one that may turn out to be so when its product is captured.
    """
    firsts: dict[int, Weight] = {}
    for weight in (weight for runtime in runtimes for weight in runtime.weights):
        if any(dict(planned.plan.specs)[Operand.FPROP_WEIGHT] is None for planned in weight.choices):
            continue
        first = firsts.setdefault(id(weight.parameter), weight)
        differences = [_difference(first, a, weight, b) for a in first.choices for b in weight.choices]
        if None not in differences:
            raise Error(f"{differences[0]}; put both under one rule, or keep one of them in high precision")


def _difference(first: Weight, a: PlannedWeight, second: Weight, b: PlannedWeight) -> str | None:
    """Why two uses of one parameter, decided as ``a`` and ``b``, cannot be acted on together, or None."""
    former, own = _per_weight(a), _per_weight(b)
    if name := next((name for name in {**former, **own} if (name in former) != (name in own)), None):
        what = f"only {first.name if name in former else second.name} has technique {name}"
    elif name := next((name for name in own if own[name] != former[name]), None):
        what = f"{second.name} has technique {name} with other options"
    elif own and _quantizer(first, a) != _quantizer(second, b):
        what = f"{second.name} has another quantizer, and technique {', '.join(own)} acts on the parameter once"
    else:
        return None
    return f"{first.name}{_declared(a)} and {second.name}{_declared(b)} are one parameter, but {what}"


def _per_weight(planned: PlannedWeight) -> dict[str, Technique]:
    """The techniques that act on a weight at a step, by name."""
    stages = (_BEFORE[0], _AFTER[0])
    return {t.name: t for t in planned.rule.techniques if _acts_at(t, stages) and _acts(t, planned)}


def _quantizer(weight: Weight, planned: PlannedWeight) -> object:
    """What :meth:`Weight.quantize` depends on besides noise and state; compares equal for equal quantizers."""
    program = planned.plan.program
    return program and (program.fprop.right, program.fprop.transforms, weight.stored_transposed)


def _declared(planned: PlannedWeight) -> str:
    """The rule of a weight, in brackets."""
    place = f", {planned.rule.file}:{planned.rule.line}" if planned.rule.file else ""
    return f" (rule {planned.rule.name!r}{place})"


def _in_order(orders: Sequence[Sequence[Technique]]) -> list[Technique]:
    """Merge the models' techniques into one order that keeps each model's; equal techniques are one."""
    pending, merged = [list(order) for order in orders], list[Technique]()
    while any(pending):
        heads = [order[0] for order in pending if order]
        free = next((t for t in heads if not any(t in order[1:] for order in pending)), None)
        if free is None:
            raise Error(
                "models on one optimizer declare techniques in opposite orders: "
                f"{' and '.join(sorted({t.name for t in heads}))}; declare them in the same order in each policy"
            )
        merged.append(free)
        pending = [order[1:] if order and order[0] == free else order for order in pending]
    return merged


# ---------------------------------------------------------------------- what is remembered


class _Memory:
    """What techniques remember of parameters, kept beside the optimizer's state and mirrored into it.

    Not in it alone: Adam takes a parameter with any state for one whose moments exist, so nothing can be put there
    before its first step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._entries: dict[Tensor, dict[str, dict[str, Tensor]]] = {}
        for parameter, state in optimizer.state.items():
            self._adopt(parameter, state)
            for name, value in self._flat(parameter):
                if value.dtype in (torch.bfloat16, torch.float16):
                    raise Error(
                        f"the optimizer's state was loaded before prepare_optimizer(), and torch rounded {name!r} to "
                        f"{value.dtype}; prepare the optimizer first, then load its state"
                    )

    def of(self, parameter: Tensor, technique: str) -> dict[str, Tensor]:
        return self._entries.setdefault(parameter, {}).setdefault(technique, {})

    def mirror(self, *, stepping: bool = False) -> None:
        """Show the optimizer's state what is remembered now.

        Args:
            stepping: inside a step. A parameter of which the optimizer keeps nothing itself is shown nothing then:
                the optimizer would take it for one whose moments exist.
        """
        for parameter in self._entries:
            flat = dict(self._flat(parameter))
            state = self._optimizer.state[parameter] if flat else self._optimizer.state.get(parameter, {})
            if stepping and all(_is_ours(name) for name in state):
                flat = {}
            for name in [name for name in state if _is_ours(name) and name not in flat]:
                del state[name]
            state.update(flat)

    def forget(self, which: Callable[[Tensor, str], bool]) -> None:
        """Drop what a technique remembers of a parameter where ``which(parameter, technique's name)``."""
        for parameter, entries in self._entries.items():
            for name in [name for name in entries if which(parameter, name)]:
                del entries[name]
        self.mirror()

    def reload(self, saved: dict[str, Any]) -> None:
        """After ``load_state_dict(saved)``: take the entries from ``saved``; torch would cast them to the parameter."""
        self._entries.clear()
        keys = chain.from_iterable(group["params"] for group in saved["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        for key, parameter in zip(keys, parameters, strict=True):
            state = saved["state"].get(key, {})
            ours = {n: _brought(v, parameter) for n, v in state.items() if _is_ours(n)}
            self._adopt(parameter, ours)
        self.mirror()

    def _adopt(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            if _is_ours(name):
                technique, entry = name.removeprefix(_PREFIX).split(".", 1)
                self.of(parameter, technique)[entry] = value

    def _flat(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        for technique, entries in self._entries.get(parameter, {}).items():
            for name, value in entries.items():
                yield f"{_PREFIX}{technique}.{name}", value


def _is_ours(name: object) -> bool:
    """Whether an entry of an optimizer's state is what a technique remembers."""
    return str(name).startswith(_PREFIX)


def _concerns(technique: Technique, weight: Weight) -> bool:
    """Whether ``technique`` acts on ``weight`` at a step, or may as long as no graph has shown its product.

    It does not where the operands that it names are not quantized.
    """
    return any(technique in planned.rule.techniques and _acts(technique, planned) for planned in weight.choices)


def _acts(technique: Technique, planned: PlannedWeight) -> bool:
    operands, specs = technique.acts_on(planned.view), dict(planned.plan.specs)
    return not operands or any(specs[operand] is not None for operand in operands)


def _skips(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this step is none: a fused optimizer, which a ``GradScaler`` tells of an overflow, skips the update;
    and torch's distributed checkpoint takes one with zero gradients and rates, to make the state that it loads."""
    found = getattr(optimizer, "found_inf", None)
    if found is not None and bool(found):
        return True
    if any(float(group.get("lr", 1)) != 0 for group in optimizer.param_groups):
        return False
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return not any(bool((grad != 0).any()) for grad in grads)


def _brought(value: Tensor, parameter: Tensor) -> Tensor:
    """A copy where the parameter is; of a counter on the CPU, where reading it waits for nothing."""
    counter = value.dim() == 0 and not value.is_floating_point()
    return value.to("cpu" if counter else parameter.device, copy=True)


class _Hooks:
    """The hooks on one optimizer.

    Attributes:
        runtimes: of the models whose techniques act, in the order in which they were prepared.
        techniques: of all of them, in one order.
    """

    def __init__(self, runtimes: Sequence[Runtime], optimizer: torch.optim.Optimizer, memory: _Memory) -> None:
        self.runtimes, self.optimizer, self.memory = tuple(runtimes), optimizer, memory
        self.techniques = _in_order([_acting(runtime) for runtime in runtimes])
        self._scratch: dict[Any, dict[Any, Any]] = {}
        self._agree = False

    def attach(self) -> None:
        self._handles = (
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
            # A step that raised has left entries out, see _Memory.mirror.
            self.optimizer.register_state_dict_pre_hook(lambda optimizer: self.memory.mirror()),
            self.optimizer.register_load_state_dict_pre_hook(self._loading),
            self.optimizer.register_load_state_dict_post_hook(self._loaded),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._scratch = {}
        acting = [t.name for t in self._live() if _acts_at(t, _BEFORE)]
        closures = (*args[1:], kwargs.get("closure"))  # after the optimizer itself
        if acting and any(closure is not None for closure in closures):
            raise Error(
                f"technique {', '.join(acting)} acts on gradients before the step, and a closure computes them inside "
                "it; call the closure yourself, then optimizer.step()"
            )
        if acting and getattr(optimizer, "grad_scale", None) is not None:
            raise Error(
                f"technique {', '.join(acting)} acts on gradients before the step, and this fused optimizer unscales "
                "them inside it; call scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        if not _skips(optimizer):
            self._run(_BEFORE)
        self.memory.mirror(stepping=True)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not _skips(optimizer):
            self._run(_AFTER)
        self.memory.mirror()
        self._scratch = {}

    def _loading(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Leave to the optimizer what it saved itself."""
        self._saved = saved
        own = {key: {n: v for n, v in state.items() if not _is_ours(n)} for key, state in saved["state"].items()}
        return {**saved, "state": {key: state for key, state in own.items() if state}}

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        self.memory.reload(self._saved)
        del self._saved

    def _live(self) -> list[Technique]:
        """The techniques of models that still have the policy under which they were prepared."""
        if all(_is_live(runtime) for runtime in self.runtimes):
            return self.techniques
        return _in_order([_acting(runtime) for runtime in self.runtimes if _is_live(runtime)])

    @torch.no_grad()
    def _run(self, stages: tuple[str, str]) -> None:
        per_weight, whole = stages
        live = [runtime for runtime in self.runtimes if _is_live(runtime)]
        if not self._agree:  # since capture, which rule decides a weight may be known better
            _check_uses(live)
            self._agree = all(len(weight.choices) == 1 for runtime in live for weight in runtime.weights)
        groups = _groups(self.optimizer)
        uses: dict[int, list[tuple[Weight, Runtime]]] = {}
        for runtime in live:
            for weight in runtime.weights:
                if id(weight.parameter) in groups and weight.parameter.grad is not None:
                    uses.setdefault(id(weight.parameter), []).append((weight, runtime))
        for technique in self._live():
            if overrides(technique, per_weight):
                for identity, of_parameter in uses.items():
                    concerned = [use for use in of_parameter if _concerns(technique, use[0])]
                    if concerned:
                        (weight, runtime), *others = concerned
                        weight.require_settled()
                        update = self._update(technique, weight, runtime, groups[identity])
                        with contract.at(weight.name):
                            contract.run(technique, per_weight, update)
                        for other, _ in others:
                            _follow(technique, weight, other)
            if overrides(technique, whole):
                step = OptimizerStep(
                    self.optimizer, self._kept(technique, None), partial(self.memory.of, technique=technique.name)
                )
                contract.run(technique, whole, step)
            if stages is _BEFORE:
                self.memory.mirror(stepping=True)  # for techniques that act on the optimizer's state

    def _update(self, technique: Technique, weight: Weight, runtime: Runtime, group: dict[str, Any]) -> WeightUpdate:
        parameter = weight.parameter
        return WeightUpdate(
            weight.name,
            parameter,
            weight.entries(technique),
            self.memory.of(parameter, technique.name),
            self.optimizer,
            group,
            lambda w: weight.quantize(w, runtime.step),
            self._kept(technique, parameter),
        )

    def _kept(self, technique: Technique, parameter: Tensor | None) -> dict[Any, Any]:
        return self._scratch.setdefault((technique.name, None if parameter is None else id(parameter)), {})


def _follow(technique: Technique, weight: Weight, other: Weight) -> None:
    """Give ``other``, another use of the parameter, the values that the optimizer's side keeps for ``weight``."""
    values, followers = weight.entries(technique), other.entries(technique)
    for slot in weight.slots:
        if slot.technique == technique.name and slot.entry.writer == "optimizer":
            value, follower = values[slot.label], followers[slot.label]
            if follower is not value:
                follower.copy_(value)
