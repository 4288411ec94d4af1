"""One weight that a policy quantizes or may quantize: its plan, its state, and its values outside of graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor, nn

from fp4graph.errors import CaptureError
from fp4graph.graph.plan import NOTHING, Plan, plan_once
from fp4graph.graph.refusals import COMPUTED_INSIDE
from fp4graph.graph.site import WeightUse
from fp4graph.model import state
from fp4graph.model.source import Source, sources_of
from fp4graph.numerics.sharding import is_sharded, like, whole
from fp4graph.ops import contract
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.state import StateSlot, in_each_dtype
from fp4graph.policy import Rule
from fp4graph.technique import Technique, acts_at, hooks_of
from fp4graph.technique.site import SiteView


@dataclasses.dataclass(frozen=True)
class PlannedWeight:
    """A weight's site, the rule that decides the site, and the plan that follows from both."""

    view: SiteView
    rule: Rule
    plan: Plan

    @staticmethod
    def of(view: SiteView, rule: Rule) -> PlannedWeight:
        """Plan the weight of ``view`` under ``rule``."""
        return PlannedWeight(view, rule, plan_once(view, rule) if rule.quantizes else NOTHING)

    @property
    def on_weight(self) -> tuple[tuple[Technique, ...], OperandProgram | None]:
        """The techniques that act at the optimizer's step or keep state for the weight, and fprop's quantizer of the
        weight, which they receive. Without such techniques the quantizer is None."""
        program = self.plan.program
        keeping = {slot.technique for slot in program.state} if program is not None else set()
        stages = ("before_step", "after_step")
        acting = tuple(t for t in self.rule.techniques if t.name in keeping or acts_at(t, *stages))
        return acting, program.fprop.right if acting and program is not None else None


def _slots(possible: Iterable[PlannedWeight], name: str) -> tuple[StateSlot, ...]:
    """Return every slot that a ``possible`` decision needs, once; raise CaptureError if two with one name differ."""
    slots: dict[str, tuple[StateSlot, Rule]] = {}
    for planned in possible:
        for slot in () if planned.plan.program is None else planned.plan.program.state:
            buffer = f"{slot.technique}_{slot.label}"
            first, rule = slots.setdefault(buffer, (slot, planned.rule))
            if (first.technique, first.entry.name, first.entry.operand) != (
                slot.technique, slot.entry.name, slot.entry.operand,
            ):  # fmt: skip
                raise CaptureError(
                    f"entry {first.entry.name!r} of technique {first.technique} and entry {slot.entry.name!r} of "
                    f"{slot.technique} would share a buffer, {buffer}; rename one of the entries",
                    site=name,
                )
            if dataclasses.replace(first.entry, init=slot.entry.init) != slot.entry:
                raise CaptureError(
                    f"rules {rule.name!r} and {planned.rule.name!r} may both decide this weight, and keep different "
                    f"state under the name {slot.technique}.{slot.label}; tell the rules apart by module",
                    site=name,
                )
    return tuple(slot for slot, _ in slots.values())


def _reads_quantized(technique: Technique) -> bool:
    """Return whether a technique may quantize each weight at the optimizer's step."""
    reading = (hook for hook in hooks_of(technique) if hook.reads_quantized)
    return any(hook.acts_at("before_step") or hook.acts_at("after_step") for hook in reading)


def _in_each_dtype(init: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    return in_each_dtype(init(weight))


def _canonically(init: Callable[[Tensor], Tensor], weight: Weight, stored: Tensor) -> Tensor:
    turned = weight.stored_transposed
    return init(stored.mT).mT.contiguous() if turned else init(stored)


class Weight:
    """A weight that the policy quantizes, or may quantize.

    Attributes:
        module, fqn, parameter_name: the owner of the parameter, its fully qualified name, and the parameter's name.
        possible: the decisions that the policy may take, several where rules distinguish producers. A captured graph
            shows which decision holds (:meth:`settle`), and :attr:`choices` then has only that one.
        stored_transposed: whether the parameter is stored ``[K, N]`` (Hugging Face Conv1D) rather than ``[N, K]``.
        autocast: whether torch.autocast casts the weight for its product, as the latest captured graph shows.
        slots: the state that techniques keep for the weight, under any of the possible rules.
        shared: returns the present value of an entry that siblings share; None if they share none.
    """

    def __init__(
        self, module: nn.Module, fqn: str, parameter_name: str, possible: tuple[PlannedWeight, ...], transposed: bool
    ) -> None:
        self.module, self.fqn, self.parameter_name = module, fqn, parameter_name
        self.possible, self.stored_transposed = possible, transposed
        self._settled: PlannedWeight | None = possible[0] if len(possible) == 1 else None
        self._captured, self.autocast = False, True
        self._sharded: Tensor | None = None
        self.slots = _slots(possible, self.name)
        self.shared: Callable[[StateSlot], Tensor] | None = None

    def add_entries(self, module_state: state.State) -> None:
        """Add the entries of techniques for this weight to the state of the module."""
        by_name = {t.name: t for planned in self.possible for t in planned.rule.techniques}
        for slot in self.slots:
            init = contract.initial(by_name[slot.technique], slot.entry, self.name)
            init = partial(_in_each_dtype, init) if slot.shared else init
            init = partial(_canonically, init, self) if slot.entry.canonical else init
            module_state.add(self.buffer(slot), init, lambda: self.stored, persistent=not slot.shared)

    def settle(self, use: WeightUse) -> None:
        """Take over the decision that a captured graph shows.

        Raises:
            CaptureError: another product with this weight has another decision, and techniques act on the weight; the
                forward computes the weight by a parametrization of its own; or the product multiplies with a part whose
                scales differ from those that techniques compute.
        """
        if not self.is_held:  # parametrizations that join between forwards have the model planned anew
            raise CaptureError(COMPUTED_INSIDE, site=self.place)
        site, stored = use.site, self.stored
        if site.op == "linear" and stored.dim() == 3 and site.numel is not None and site.numel < stored.numel():
            # A loop multiplies with one matrix of the stack at a time, so each expert has its own statistics.
            site = dataclasses.replace(site, op="grouped", numel=stored.numel())
        planned = PlannedWeight.of(site, use.decision.rule)
        if stored.dim() == 2:
            self._require_one_quantizer(planned, use, stored.mT if use.transposed else stored)
        earlier = self._settled if self._captured else None
        if earlier is not None and earlier.on_weight != planned.on_weight:
            raise CaptureError(
                f"two products use this weight; rule {earlier.rule.name!r} decides one product and rule "
                f"{planned.rule.name!r} the other, but techniques act on the weight itself; let one rule decide both",
                site=self.place,
            )
        turned, self.autocast = self.stored_transposed != use.transposed, use.autocast
        self._captured, self._settled, self.stored_transposed = True, planned, use.transposed
        for slot in self.slots if turned else ():
            if slot.entry.canonical and (module_state := state.State.of(self.module)) is not None:
                module_state.renew(self.buffer(slot))

    def _require_one_quantizer(self, planned: PlannedWeight, use: WeightUse, whole: Tensor) -> None:
        """Raise CaptureError if a technique quantizes the parameter, ``whole`` as ``[N, K]``, at the optimizer's step,
        and the product multiplies with a part of it that has other scales."""
        program, (n, k) = planned.plan.program, whole.shape
        names = [t.name for t in planned.rule.techniques if _reads_quantized(t)]
        if not names or program is None or use.part == (range(n), range(k)):
            return
        along = bool(program.fprop.transforms or program.apart)  # both need whole rows
        part = None if use.part is None or (along and len(use.part[1]) < k) else use.part
        if part is None or not program.fprop.right.quantizes_alone(*part, (n, k)):
            raise CaptureError(
                f"technique {names[0]} quantizes this parameter as one matrix at the optimizer's step, and a product "
                "multiplies with a part or another shape of it, which has other scales. Give each product a parameter "
                "of its own, drop the technique, or write a rule that keeps the product",
                site=self.place,
            )

    def require_settled(self) -> None:
        """Raise CaptureError if several rules may decide the weight and no graph has shown its product."""
        if self._settled is None:
            names = " or ".join(repr(planned.rule.name) for planned in self.possible)
            raise CaptureError(
                f"whether rule {names} decides this weight depends on what computes the input of its product, and no "
                "product with the weight was captured; tell the rules apart by module instead of producer",
                site=self.place,
            )

    @property
    def is_used(self) -> bool:
        """Return whether a product uses the weight; for a parameter of three axes only a graph shows that."""
        return self._captured or self.view.op != "grouped"

    @property
    def is_captured(self) -> bool:
        """Return whether a captured graph has shown the product that the weight is multiplied in."""
        return self._captured

    @property
    def choices(self) -> tuple[PlannedWeight, ...]:
        """The decision, or the possible decisions as long as no graph has shown the product."""
        return self.possible if self._settled is None else (self._settled,)

    @property
    def view(self) -> SiteView:
        """The weight's site, as a graph shows it if one has captured its product."""
        return self.choices[0].view

    @property
    def rule(self) -> Rule:
        """The rule that decides the weight."""
        return self.choices[0].rule

    @property
    def plan(self) -> Plan:
        """The plan of the weight's site."""
        return self.choices[0].plan

    @property
    def name(self) -> str:
        """The fully qualified name of the parameter."""
        return f"{self.fqn}.{self.parameter_name}" if self.fqn else self.parameter_name

    @property
    def place(self) -> str:
        """The name with the other names of the module, for errors."""
        return f"{self.name}{self.view.aliases}"

    @property
    def stored(self) -> Tensor:
        """The parameter that the module holds now: under FSDP it is sharded or gathered; if a source gives the weight,
        it has no data."""
        parameter = self.module._parameters.get(self.parameter_name)
        if parameter is None:
            parameter = None if self.source is None else self.source.stand_in
        if parameter is None:
            raise CaptureError(
                "the module no longer has this parameter, as after weight_norm, spectral_norm or pruning; call the "
                "model, or fp4graph.apply(model, policy) again, and then prepare_optimizer",
                site=self.place,
            )
        return parameter

    @property
    def values(self) -> Tensor:
        """The weight's values as they are now."""
        return self.stored if self.source is None else self.source.values(self.module)

    @property
    def source(self) -> Source | None:
        """The source of a weight that is not a parameter now, or None."""
        if self.module._parameters.get(self.parameter_name) is not None:
            return None
        return next((source for source in sources_of(self.module) if source.name == self.parameter_name), None)

    @property
    def is_held(self) -> bool:
        """Return whether the module has the weight, as a parameter or from a source."""
        return self.module._parameters.get(self.parameter_name) is not None or self.source is not None

    @property
    def parameter(self) -> Tensor:
        """The parameter that the optimizer holds: under FSDP it is sharded, even while the module's is gathered."""
        current = self.stored
        if is_sharded(current):
            self._sharded = current
        return current if self._sharded is None else self._sharded

    @property
    def key(self) -> Tensor:
        """The noise key of the module."""
        return self.module.get_buffer(state.KEY)

    def buffer(self, slot: StateSlot) -> str:
        """Return the name of the module's buffer with a technique's entry for this weight."""
        prefix = "" if self.parameter_name == "weight" else f"{self.parameter_name}_"
        return state.buffer_name(f"{prefix}{slot.technique}_{slot.label}")

    def entry(self, slot: StateSlot) -> Tensor:
        """Return a technique's entry for this weight."""
        if slot.shared and self.shared is not None:  # the buffer holds the value of the last forward
            return self.shared(slot)
        return self.module.get_buffer(self.buffer(slot))

    def entries(self, technique: Technique) -> dict[str, Tensor]:
        """Return a technique's state tensors for this weight, by their labels."""
        return {slot.label: self.entry(slot) for slot in self.slots if slot.technique == technique.name}

    def canonical(self, x: Tensor) -> Tensor:
        """Gather ``x``, which is laid out and sharded like the weight, and return it as ``[..., N, K]``."""
        return whole(x).mT if self.stored_transposed else whole(x)

    def as_stored(self, x: Tensor) -> Tensor:
        """Lay out and shard ``x [..., N, K]``, which is equal on all processes, like the weight."""
        return like(x.mT if self.stored_transposed else x, self.parameter)
