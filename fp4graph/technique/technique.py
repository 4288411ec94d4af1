"""The base class of techniques: fields are options, and ``parts`` says where the technique acts.

A technique is frozen data (a pydantic model), so that equal options mean equal compiled code. Its methods plan:
they see the site and never a tensor. What it does to tensors is in its parts (:mod:`fp4graph.technique.parts`).
docs/techniques.md is the whole contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from inspect import signature
from itertools import combinations
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from fp4graph.numerics.spec import QuantSpec
from fp4graph.technique.facts import OperandSpecs, Overhead, StateEntry
from fp4graph.technique.operands import Gemm, Operand
from fp4graph.technique.options import OperandList
from fp4graph.technique.parts import KINDS, OptimizerHook, PairTransform, Part
from fp4graph.technique.site import SiteView


class Technique(BaseModel):
    """The base of every technique: a subclass sets ``name``, ``overhead`` and ``complexity``, declares its options as
    fields, and returns its parts."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    name: ClassVar[str]
    overhead: ClassVar[Overhead]  # shown by ``fp4graph techniques``
    #: Names of techniques that cannot share a site with this technique, and of techniques that it needs.
    conflicts: ClassVar[frozenset[str]] = frozenset()
    requires: ClassVar[frozenset[str]] = frozenset()
    #: True if the technique acts once for the whole model (on the loss, on all of an optimizer) and not rule by rule.
    #: Such a technique is declared for the policy, and acts even if nothing is quantized.
    per_model: ClassVar[bool] = False
    #: True if the technique acts on the weight of a linear layer or of experts, and not on an activation in its place.
    on_weight: ClassVar[bool] = False
    #: The plugin that offers the technique, for errors; set by the registry.
    plugin: ClassVar[str | None] = None

    @property
    def complexity(self) -> float:
        """The weight in a policy's Ω (Table 9 of "Elucidating the Design Space of FP4 Training"); may read options."""
        raise NotImplementedError(f"{type(self).__name__} declares no complexity")

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        """Return the parts by which the technique acts on the products of ``site``: the same parts at every call."""
        return ()

    @classmethod
    def implied_by(cls, spec: QuantSpec) -> Technique | None:
        """Return the technique that ``spec`` in a policy implies, with its options, or None. Ω counts the technique."""

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Raise ValueError if the options fit no site of a rule; called when a policy is loaded.

        ``specs`` are the rule's specs after every :meth:`plan`, ``techniques`` the techniques of the rule, by name.
        """

    def inert(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> str | None:
        """Return the reason why this technique changes nothing beside the others, or None. The author is warned."""

    def plan(self, site: SiteView, specs: OperandSpecs) -> OperandSpecs | None:
        """Return new specs of the operands, or None for no change. Raise ValueError if options do not fit the site."""

    @property
    def loss_scaler(self) -> Mapping[str, float] | None:
        """The arguments of the ``GradScaler`` that ``fp4graph.grad_scaler`` enables; None if no scaler is needed."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse options with names of members, and ``on_weight`` beside an option that lists operands, which would
        contradict each other."""
        members = {*vars(Technique), *Technique.__class_vars__}
        if taken := next((name for name in cls.model_fields if name in members), None):
            raise TypeError(
                f"{cls.__name__} has an option {taken}, which is a member of every technique; declare it as "
                f"{taken}: ClassVar[...], or give the option another name"
            )
        if cls.on_weight and (lists := ", ".join(cls.operand_lists())):
            raise TypeError(
                f"{cls.__name__} acts on_weight, and its option {lists} lists operands; declare one of the two"
            )

    @classmethod
    def operand_lists(cls) -> dict[str, OperandList]:
        """Return the options that list operands, by name: options of type :data:`~fp4graph.technique.Operands`."""
        marks = ((name, mark) for name, field in cls.model_fields.items() for mark in field.metadata)
        return {name: mark for name, mark in marks if isinstance(mark, OperandList)}

    @property
    def operands_listed(self) -> frozenset[Operand]:
        """The operands that the options list, by default or as a policy says; empty without such an option."""
        lists = self.operand_lists().items()
        return frozenset().union(*(mark.select(getattr(self, name)) for name, mark in lists))

    @property
    def addresses_given(self) -> dict[str, tuple[str, ...]]:
        """The lists of operands that the policy's author wrote, by option; defaults and scopes are left out."""
        written = {name: getattr(self, name) for name in self.operand_lists() if name in self.model_fields_set}
        return {name: value for name, value in written.items() if isinstance(value, tuple)}

    def specs_listed(self, specs: OperandSpecs) -> dict[Operand, QuantSpec]:
        """Return the specs of the listed operands that are quantized, in TetraJet's order."""
        listed = self.operands_listed
        return {o: spec for o in Operand if o in listed and (spec := specs.get(o)) is not None}


#: A site at which every technique has its parts, except for parts that only experts have.
_LINEAR = SiteView(None, "linear", None, None, None, producer="swiglu")
_ANYWHERE = (_LINEAR, replace(_LINEAR, op="grouped"))


@lru_cache(maxsize=4096)
def parts_of(technique: Technique, site: SiteView = _LINEAR) -> tuple[Part, ...]:
    """Return the checked parts of a technique at ``site``, by default an ordinary linear layer, each with its operands.

    Raises:
        TypeError: the parts break the contract: a field is wrong, two parts would draw the same bits, two entries of
            state have one name, or hooks depend on the site.
        ValueError: the technique refuses the site.
    """
    parts = technique.parts(site)
    if not isinstance(parts, tuple) or not all(isinstance(part, Part) for part in parts):
        raise TypeError(f"parts() must return a tuple of parts; got {parts!r}")
    resolved = tuple(_resolved(part, technique, site) for part in parts)
    for first, second in combinations((part for part in resolved if part.draws), 2):
        if first.key == second.key and (shared := _places(first) & _places(second)):
            raise TypeError(
                f"{type(first).__name__} and {type(second).__name__} are of one kind and would draw the same bits at "
                f"{min(shared)}; make them one part"
            )
    entries: dict[tuple[Operand, str], StateEntry] = {}
    for entry in (entry for part in resolved for entry in part.state):
        if entries.setdefault((entry.operand, entry.name), entry) != entry:
            raise TypeError(f"two different entries of state are called {entry.name!r} at {entry.operand}")
    written = [entry for entry in entries.values() if entry.writer == "graph" and site.multiplies_weight]
    observing = {operand: part for part in resolved if part.acts_at("observe") for operand in part.operands or ()}
    if unseen := next((entry for entry in written if entry.operand not in observing), None):
        rule = "has writer='graph', and no part observes that operand; define observe, or leave writer out"
        raise TypeError(f"entry {unseen.name!r} of {unseen.operand} {rule}")
    if observing and not written and site.multiplies_weight:
        name = type(next(iter(observing.values()))).__name__
        raise TypeError(f"{name} observes, and no entry of state has writer='graph'; give one that writer")
    if site.multiplies_weight and site not in _ANYWHERE and _hooks(resolved) != (hooks := _hooks(hooks_of(technique))):
        raise TypeError(f"hooks must not depend on the site: {_hooks(resolved)} here, {hooks} at a linear layer")
    return resolved


def _hooks(parts: Iterable[Part]) -> list[str]:
    return sorted(type(part).__name__ for part in parts if isinstance(part, OptimizerHook))


def _places(part: Part) -> frozenset[str]:
    """Return the operands at which a part draws, or the GEMMs of a pair transform."""
    return frozenset(map(str, part.gemms if isinstance(part, PairTransform) else part.operands or ()))


def _resolved(part: Part, technique: Technique, site: SiteView) -> Part:
    """Return ``part`` with its operands, checked."""
    name = type(part).__name__
    if not isinstance(part.options, type(technique)):
        raise TypeError(f"the options of {name} must be the technique itself; got {part.options!r}")
    if not part.acted and type(part) not in KINDS:
        raise TypeError(f"{name}, a {part.kind}, has no method and does nothing; define {' or '.join(part.stages)}")
    operands: Iterable[Operand] | None = part.operands
    if operands is None and technique.on_weight:
        operands = part.among & {Operand.FPROP_WEIGHT} if site.multiplies_weight else ()
    elif operands is None:
        operands = () if isinstance(part, OptimizerHook) else technique.operands_listed & part.among
    fields: dict[str, tuple[type, Any]] = {"operands": (Operand, operands), "state": (StateEntry, part.state)}
    fields |= {"gemms": (Gemm, part.gemms)} if isinstance(part, PairTransform) else {}
    for field, (kind, values) in fields.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise TypeError(f"{field} of {name} must be a set or tuple of {kind.__name__}; got {values!r}")
        if (foreign := next((value for value in values if not isinstance(value, kind)), None)) is not None:
            raise TypeError(f"{name} takes {kind.__name__} members only; got {foreign!r}")
    if part.mixes == "none" and part.acts_at("group_scale") and getattr(part, "group_granularity", None) is None:
        raise TypeError(f"{name} declares mixes = 'none' and no group_granularity of its γ; declare that granularity")
    if stray := {*operands} - part.among:
        acts = f"acts on {' and '.join(sorted(part.among))}" if part.among else "takes no operands"
        raise TypeError(f"{name} has the operand {min(stray)}, and a {part.kind} {acts}")
    for stage in part.acted:
        due = list(signature(getattr(next(kind for kind in KINDS if stage in kind.stages), stage)).parameters)[1:]
        try:
            signature(getattr(part, stage)).bind(*due)
        except TypeError as error:
            raise TypeError(f"{name}.{stage} must take ({', '.join(due)}): {error}") from None
    gemms: dict[str, Any] = {"gemms": frozenset(part.gemms)} if isinstance(part, PairTransform) else {}
    part = replace(part, operands=frozenset(operands), state=tuple(part.state), **gemms)
    try:
        hash(part)
    except TypeError as error:
        raise TypeError(f"fields of {name} must be hashable, as tuples are: {error}") from None
    return part


def _parts_anywhere(technique: Technique) -> Iterator[Part]:
    """Yield the parts of a technique at ordinary linear layers and at experts, unless it refuses the site."""
    for site in _ANYWHERE:
        with suppress(ValueError):
            yield from parts_of(technique, site)


def operands_at(technique: Technique, site: SiteView = _LINEAR) -> frozenset[Operand]:
    """Return the operands on which the parts of a technique act at ``site``, by default an ordinary linear layer."""
    return frozenset().union(*(part.operands or () for part in parts_of(technique, site)))


def gemms_at(technique: Technique, site: SiteView = _LINEAR) -> frozenset[Gemm]:
    """Return the GEMMs whose two operands a technique transforms at ``site``, by default an ordinary linear layer."""
    transforms = (part for part in parts_of(technique, site) if isinstance(part, PairTransform))
    return frozenset().union(*(part.gemms for part in transforms))


def acts_at(technique: Technique, *stages: str) -> bool:
    """Return whether some part of ``technique`` acts at one of ``stages`` somewhere."""
    return any(part.acts_at(stage) for part in _parts_anywhere(technique) for stage in stages)


def draws(technique: Technique) -> bool:
    """Return whether some part of ``technique`` draws somewhere."""
    return any(part.draws for part in _parts_anywhere(technique))


def hooks_of(technique: Technique) -> tuple[OptimizerHook, ...]:
    """Return the parts of ``technique`` that act around the optimizer's step; every site has the same parts."""
    for site in _ANYWHERE:
        with suppress(ValueError):
            return tuple(part for part in parts_of(technique, site) if isinstance(part, OptimizerHook))
    return ()
