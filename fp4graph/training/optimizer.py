"""Hooks techniques act through around the user's own ``optimizer.step()``.

What a technique remembers of a parameter lies in ``optimizer.state[parameter]``, under keys that begin with
``fp4graph.``: it is saved, loaded and sharded with the optimizer's own state. What the graph reads as well lies in the
model (:mod:`fp4graph.state`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fp4graph.errors import Error
from fp4graph.ops import contract
from fp4graph.runtime import PlannedWeight, Runtime, Weight, runtime_of
from fp4graph.technique import Technique, overrides

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741  # the optimizer

_PREFIX = "fp4graph."
_BEFORE, _AFTER = ("before_step", "before_optimizer"), ("after_step", "after_optimizer")


@dataclass(frozen=True)
class OptimizerStep:
    """One step of the user's optimizer, as a technique that acts on all of it sees it.

    Attributes:
        optimizer: the user's.
        scratch: the technique's, kept from before the step until after it.
    """

    optimizer: torch.optim.Optimizer
    scratch: dict[Any, Any]
    _memory: _Memory
    _technique: str

    def parameters(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Every parameter with a gradient, and its group."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter, group

    def memory(self, parameter: Tensor) -> dict[str, Tensor]:
        """What the technique remembers of ``parameter``, by name: to be read, written and deleted from."""
        return self._memory.of(parameter, self._technique)


@dataclass(frozen=True)
class WeightUpdate:
    """One quantized weight at an optimizer step.

    Attributes:
        name: fully qualified name of the parameter. parameter: itself, as stored; it has a gradient.
        state: the technique's entries for it in the model, by entry name, as stored; written in place.
        memory: what the technique remembers of it in the optimizer's state, by name: a dict of tensors.
        optimizer, group: the user's optimizer, and the parameter group the weight is in.
        quantize: the operand program of ``fprop.weight`` outside the graph: dequantized values of a tensor of the
            weight's shape.
        scratch: kept from before the step until after it.
    """

    name: str
    parameter: Tensor
    state: Mapping[str, Tensor]
    memory: dict[str, Tensor]
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    quantize: Callable[[Tensor], Tensor]
    scratch: dict[Any, Any]


def prepare_optimizer(model: nn.Module, optimizer: O) -> O:
    """Attach the policy's optimizer-side techniques to ``optimizer`` and return it.

    Nothing is attached where the policy has none, so the line can stay in every training script. Preparing an
    optimizer again, after applying another policy, replaces the hooks. Where several optimizers share a model's
    parameters, each is prepared. Load an optimizer's checkpoint after preparing it.

    Raises:
        Error: the model is not applied, the optimizer holds none of the weights that a technique acts on, it runs no
            hooks, or it was given a checkpoint before this, in which torch rounded what techniques remember to the
            parameters' dtype.
    """
    runtime = runtime_of(model)
    if runtime is None:
        raise Error("prepare_optimizer() takes a model that fp4graph.apply has prepared")
    hooks = _Hooks(runtime, optimizer)
    # torch marks a step that runs hooks; wrappers that skip Optimizer.__init__, as timm's Lookahead, run none.
    if hooks.techniques and not getattr(type(optimizer).step, "hooked", False):
        raise Error(
            f"{type(optimizer).__name__} runs no hooks around its step(), through which technique "
            f"{', '.join(t.name for t in hooks.techniques)} would act; if it wraps an optimizer, prepare that one"
        )
    former: _Hooks | None = optimizer.__dict__.pop("_fp4graph", None)
    memory = former.remove() if former is not None else None
    if hooks.techniques:
        hooks.attach(memory or _Memory(optimizer))
        optimizer.__dict__["_fp4graph"] = hooks
    elif memory is not None:
        memory.keep(())
    runtime.prepared |= {id(weight.parameter) for weight in hooks.weights}
    runtime.optimizers = [*(ref for ref in runtime.optimizers if ref() is not optimizer), weakref.ref(optimizer)]
    return optimizer


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

    def mirror(self) -> None:
        """Show the optimizer's state what is remembered now."""
        for parameter in self._entries:
            flat = dict(self._flat(parameter))
            state = self._optimizer.state[parameter] if flat else self._optimizer.state.get(parameter, {})
            for name in [name for name in state if str(name).startswith(_PREFIX) and name not in flat]:
                del state[name]
            state.update(flat)

    def keep(self, techniques: Collection[str]) -> None:
        """Forget what others than these remembered."""
        for entries in self._entries.values():
            for name in entries.keys() - set(techniques):
                del entries[name]
        self.mirror()

    def reload(self, saved: dict[str, Any]) -> None:
        """After ``load_state_dict(saved)``: take the entries from there, for torch casts them to the parameter."""
        self._entries.clear()
        keys = chain.from_iterable(group["params"] for group in saved["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        for key, parameter in zip(keys, parameters, strict=True):
            state = saved["state"].get(key, {})
            ours = {n: _brought(v, parameter) for n, v in state.items() if str(n).startswith(_PREFIX)}
            self._adopt(parameter, ours)
        self.mirror()

    def _adopt(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            if str(name).startswith(_PREFIX):
                technique, entry = name.removeprefix(_PREFIX).split(".", 1)
                self.of(parameter, technique)[entry] = value

    def _flat(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        for technique, entries in self._entries.get(parameter, {}).items():
            for name, value in entries.items():
                yield f"{_PREFIX}{technique}.{name}", value


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


@dataclass
class _Hooks:
    """The hooks on one optimizer."""

    runtime: Runtime
    optimizer: torch.optim.Optimizer
    weights: list[Weight] = field(init=False)
    techniques: list[Technique] = field(init=False)

    def __post_init__(self) -> None:
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        self.weights = [weight for weight in self.runtime.weights if id(weight.parameter) in held]
        acting = [t for t in self.runtime.techniques() if any(overrides(t, stage) for stage in (*_BEFORE, *_AFTER))]
        for technique in acting:
            due = [w for w in self.runtime.weights if _concerns(technique, w) and w.parameter.requires_grad]
            if due and not any(id(weight.parameter) in held for weight in due):
                raise Error(
                    f"technique {technique.name} acts on {due[0].name}, which this optimizer does not hold; pass it "
                    "model.parameters() of the applied model"
                )
        self.techniques = acting

    def attach(self, memory: _Memory) -> None:
        self._memory = memory
        memory.keep({technique.name for technique in self.techniques})
        self._scratch: dict[Any, dict[Any, Any]] = {}
        self._handles = (
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
            self.optimizer.register_load_state_dict_pre_hook(self._loading),
            self.optimizer.register_load_state_dict_post_hook(self._loaded),
        )

    def remove(self) -> _Memory:
        for handle in self._handles:
            handle.remove()
        return self._memory

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._scratch = {}
        acting = [t.name for t in self.techniques if any(overrides(t, stage) for stage in _BEFORE)]
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

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not _skips(optimizer):
            self._run(_AFTER)
        self._memory.mirror()
        self._scratch = {}

    def _loading(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        self._saved = saved

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        self._memory.reload(self._saved)
        del self._saved

    @torch.no_grad()
    def _run(self, stages: tuple[str, str]) -> None:
        per_weight, whole = stages
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        for technique in self.techniques:
            if overrides(technique, per_weight):
                for weight in self.weights:
                    if _concerns(technique, weight) and weight.parameter.grad is not None:
                        weight.require_settled()
                        with contract.at(weight.name):
                            contract.run(technique, per_weight, self._update(technique, weight, groups))
            if overrides(technique, whole):
                step = OptimizerStep(self.optimizer, self._kept(technique, None), self._memory, technique.name)
                contract.run(technique, whole, step)

    def _update(self, technique: Technique, weight: Weight, groups: dict[int, dict[str, Any]]) -> WeightUpdate:
        parameter = weight.parameter
        return WeightUpdate(
            weight.name,
            parameter,
            weight.entries(technique),
            self._memory.of(parameter, technique.name),
            self.optimizer,
            groups[id(parameter)],
            lambda w: weight.quantize(w, self.runtime.step),
            self._kept(technique, parameter),
        )

    def _kept(self, technique: Technique, parameter: Tensor | None) -> dict[Any, Any]:
        return self._scratch.setdefault((technique.name, None if parameter is None else id(parameter)), {})
