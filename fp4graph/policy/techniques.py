"""Resolves the techniques that a policy declares, and checks them: conflicts, requirements, fit, and effect."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, TypeVar

from fp4graph.errors import Error, PluginError, PolicyWarning, suggest
from fp4graph.numerics.spec import QuantSpec
from fp4graph.policy.document import Node
from fp4graph.policy.match import Match
from fp4graph.policy.rule import DISTINGUISHED_PRODUCERS, Specs, checked_plan, plan_specs, plans
from fp4graph.policy.schema import TechniqueEntry
from fp4graph.policy.validation import Path, refuse_contested, shown, validate
from fp4graph.policy.words import dotted
from fp4graph.technique import (
    STAGES,
    BlockScale,
    OperandSpecs,
    Technique,
    acts_at,
    gemms_at,
    operands_at,
    parts_of,
)
from fp4graph.technique.operands import ADDRESSES
from fp4graph.technique.registry import Registry
from fp4graph.technique.site import SiteView

#: Stages that the engine calls only at sites where a part ``normalizes``.
_GROUP_STAGES = ("group_statistic", "group_gradient")
_T = TypeVar("_T")
#: The largest complexity of a technique, so that sums stay finite.
MOST_COMPLEX = 1000


@dataclass(frozen=True)
class Declared:
    """A technique and the path of its declaration."""

    technique: Technique
    path: Path

    @property
    def name(self) -> str:
        return self.technique.name


def override(techniques: Sequence[Declared], by: Sequence[Declared]) -> list[Declared]:
    """Return ``techniques``, each replaced by its namesake in ``by``, then the remaining techniques of ``by``."""
    replacing = {declared.name: declared for declared in by}
    replaced = [replacing.pop(declared.name, declared) for declared in techniques]
    return [*replaced, *replacing.values()]


class TechniqueResolver:
    """Resolves and checks the techniques of one document, looked up in ``registry``."""

    def __init__(self, document: Node, registry: Registry) -> None:
        self._document = document
        self._registry = registry
        self._inert: dict[Path, list[str | None]] = {}  # by declaration: for each rule, why it has no effect, or None
        self._kept: dict[Path, set[str]] = {}  # operands named in options that no rule quantizes

    def declared(self, entries: Iterable[TechniqueEntry], path: Path) -> list[Declared]:
        """Return the techniques of the list at ``path``."""
        declared: list[Declared] = []
        for index, entry in enumerate(entries):
            at = (*path, index)
            if any(earlier.name == entry.name for earlier in declared):
                raise self._document.error(at, f"technique {entry.name!r} is listed twice; keep one of them")
            declared.append(Declared(self._technique(entry, at), at))
        return declared

    def _technique(self, entry: TechniqueEntry, path: Path) -> Technique:
        refuse_contested(self._document, self._registry, entry.name, path)
        if entry.name not in self._registry.techniques:
            cause = self._registry.why_missing(entry.name)
            hint = suggest(entry.name, self._registry.techniques)
            raise self._document.error(path, f"unknown technique {entry.name!r}{cause}; {hint}")
        node = self._document.get(*path)
        options = node.child(entry.name) or Node({}, node.place)
        options = Node({}, options.place) if options.value is None else options
        try:
            technique = validate(self._registry.techniques[entry.name], options, (*path, entry.name), "option")
        except Error:
            raise
        except Exception as error:  # of a validator that does not expect these values
            message = f"options of technique {entry.name!r}: {type(error).__name__}: {error}"
            raise PluginError(message, plugin=self._registry.origin(entry.name)) from error
        for name, field in type(technique).model_fields.items():
            written, kind = entry.options.get(field.alias or name), type(getattr(technique, name))
            # Pydantic reads true as 1 and '3' as 3. YAML reads 1e-8 as text, so text may be a float.
            if kind in (int, float) and isinstance(written, bool if kind is float else bool | str):
                option, what = (*path, entry.name, field.alias or name), "number" if kind is float else "whole number"
                raise self._document.error(option, f"{dotted(option)} must be a {what}; got {shown(written)}")
        try:
            hash(technique)
        except TypeError as error:
            raise PluginError(
                f"options of technique {entry.name!r} cannot be hashed ({error}); declare tuples, not lists or dicts",
                plugin=self._registry.origin(entry.name),
            ) from None
        return self._weighed(technique)

    def _weighed(self, technique: Technique) -> Technique:
        """Return ``technique``; raise PluginError unless its complexity is a number that Ω can add."""
        try:
            weight: Any = technique.complexity
            is_number = issubclass(type(weight), Real) and not isinstance(weight, bool)
            fits = is_number and 0 <= weight <= MOST_COMPLEX
            message = f"complexity must be a number from 0 to {MOST_COMPLEX:,}; got {weight!r}"
        except Exception as error:  # noqa: BLE001  # a bug of the technique
            fits, message = False, f"complexity: {type(error).__name__}: {error}"
        if not fits:
            origin = self._registry.origin(technique.name)
            raise PluginError(f"technique {technique.name!r}: {message}", plugin=origin)
        return technique

    def implied(self, specs: Specs) -> list[Technique]:
        """Return the techniques that ``specs`` imply, declared or not."""
        implied = (
            self._implied_by(technique, spec)
            for technique in self._registry.techniques.values()
            for spec in dict.fromkeys(specs.six)
            if spec is not None
        )
        return [technique for technique in implied if technique is not None]

    def _implied_by(self, technique: type[Technique], spec: QuantSpec) -> Technique | None:
        """Return the technique that ``spec`` implies, or None. A technique that fails only warns: techniques are asked
        even if the policy does not declare them."""
        try:
            implied = technique.implied_by(spec)
            return None if implied is None else self._weighed(implied)
        except Exception as error:  # noqa: BLE001  # a bug of the technique
            cause = f"technique {technique.name!r}, implied_by: {type(error).__name__}: {error}"
            warning = PluginError(f"{cause}; it is left out of Ω", plugin=self._registry.origin(technique.name))
            warnings.warn(str(warning), PolicyWarning, stacklevel=2)
            return None

    def check_together(self, techniques: Sequence[Declared], specs: Specs) -> None:
        """Raise PolicyError if techniques at one site conflict, or if a technique that another requires is missing.

        Techniques that the specs imply count as well.
        """
        named = {declared.name for declared in techniques}
        implied = {technique.name: technique for technique in self.implied(specs) if technique.name not in named}
        present = {**{declared.name: declared.technique for declared in techniques}, **implied}
        for index, declared in enumerate(techniques):
            technique = declared.technique
            rivals = {*(earlier.name for earlier in techniques[:index]), *implied}
            for rival in sorted(rivals):
                if rival in technique.conflicts or technique.name in present[rival].conflicts:
                    origin = " (implied by the specs)" if rival in implied else ""
                    raise self._document.error(
                        declared.path,
                        f"techniques {technique.name!r} and {rival!r}{origin} cannot share a site; remove one of them",
                    )
            missing = sorted(technique.requires - present.keys())
            if missing:
                raise self._document.error(
                    declared.path,
                    f"technique {technique.name!r} requires {' and '.join(map(repr, missing))}; add it to techniques",
                )

    def check_fit(self, techniques: Sequence[Declared], specs: Specs, match: Match) -> None:
        """Plan sites of which only the rule is known, so that a technique that does not fit is an error at load.

        Also record which techniques have no effect under the rule, for :meth:`check_effect`.
        """
        acting = {technique.name for technique in self.implied(specs)}
        sites = [
            SiteView(None, op, None, None, None, None, producer)
            for op in _probed(match)
            for producer in match.producer or (None, *DISTINGUISHED_PRODUCERS)
        ]
        planned_at = [self._probe(site, techniques, specs, acting) for site in sites]
        by_name = {declared.name: declared.technique for declared in techniques}
        parts = [part for technique in by_name.values() for site in sites for part in parts_of(technique, site)]
        normalized = any(isinstance(part, BlockScale) and part.normalizes for part in parts)
        for declared in techniques:
            reason = self._call(declared, "inert", partial(declared.technique.inert, planned_at[0], by_name))
            if reason is None and declared.name not in acting:
                reason = "it acts on no operand that is quantized"
            elif reason is None and not normalized and _acts_on_groups_alone(declared.technique):
                reason = "it acts on statistics of groups, and no technique of its rule normalizes by one"
            self._inert.setdefault(declared.path, []).append(reason)
        quantized = {operand for operand, spec in planned_at[0].items() if spec is not None}
        for declared in techniques:
            for named in declared.technique.addresses_given.values():
                kept = {name for name in named if not {*ADDRESSES[name]} & quantized}
                self._kept[declared.path] = kept & self._kept.get(declared.path, kept)

    def _probe(self, site: SiteView, techniques: Sequence[Declared], specs: Specs, acting: set[str]) -> OperandSpecs:
        """Return the specs planned for one site, and add the techniques that act there to ``acting``."""
        by_name = {declared.name: declared.technique for declared in techniques}
        declarations = {declared.name: declared for declared in techniques}

        def plan(technique: Technique, site: SiteView, before: OperandSpecs) -> OperandSpecs:
            after = self._call(declarations[technique.name], "plan", partial(checked_plan, technique, site, before))
            if dict(before) != dict(after):
                acting.add(technique.name)
            return after

        planned = plan_specs(by_name.values(), site, specs, plan)
        for declared in techniques:
            answer: object = self._call(declared, "check", partial(declared.technique.check, planned, by_name))
            if answer is not None:
                plugin = self._registry.origin(declared.name)
                raise PluginError(f"check() must raise ValueError or return None; got {answer!r}", plugin=plugin)
        for declared in techniques:
            self._call(declared, "parts", partial(require_one_element, declared.technique, site, planned))
            if self._call(declared, "parts", partial(acts, declared.technique, site, planned)):
                acting.add(declared.name)
        return planned

    def check_effect(self, shared: Iterable[Declared]) -> None:
        """Warn about techniques without effect under any rule; ``shared`` are the techniques of the whole policy.

        Ω counts them nevertheless, as the papers do.

        Raises:
            PolicyError: an option names an operand that no rule quantizes.
        """
        for path, kept in self._kept.items():
            if kept:
                raise self._document.error(
                    path, f"no rule quantizes operand {sorted(kept)[0]!r}, which the technique names; remove it there"
                )
        for declared in shared:
            self._inert.setdefault(declared.path, [])
        for path, reasons in self._inert.items():
            if all(reasons):
                entry = self._document.get(*path).plain()
                name = entry if isinstance(entry, str) else next(iter(entry))
                why = reasons[0] if reasons else "no rule quantizes its sites"
                warning = self._document.error(path, f"technique {name!r} has no effect here: {why}; remove it")
                warnings.warn(str(warning), PolicyWarning, stacklevel=2)

    def _call(self, declared: Declared, stage: str, method: Callable[[], _T]) -> _T:
        """Call one method of a technique; raise its ValueError as a PolicyError with the technique's line."""
        try:
            return method()
        except ValueError as error:
            raise self._document.error(declared.path, f"technique {declared.name!r}: {error}") from None
        except Error:
            raise
        except Exception as error:
            plugin = self._registry.origin(declared.name)
            raise PluginError(f"{stage}() failed: {type(error).__name__}: {error}", plugin=plugin) from error


def _probed(match: Match) -> tuple[str, ...]:
    """Return the kinds of operation for which a rule is planned at load. ``grouped`` is left out beside other kinds: a
    technique that does not fit experts is refused only for a model that has experts."""
    ops: tuple[str, ...] = match.op or ("linear", "matmul")
    return tuple(op for op in ops if op != "grouped") or ops


def require_one_element(technique: Technique, site: SiteView, planned: OperandSpecs) -> None:
    """Raise ValueError if a technique rounds elements, or gives their surrogate gradient, where each block chooses its
    element format."""
    stages = ("round", "element_surrogate")
    rounding = (part for part in parts_of(technique, site) if any(map(part.acts_at, stages)))
    for operand in sorted({operand for part in rounding for operand in part.operands or ()}):
        spec = planned[operand]
        if spec is not None and spec.others:
            raise ValueError(
                f"it needs a single element format, and the blocks of {operand} choose between "
                f"{' and '.join(each.name for each in spec.elements)}; name one element there"
            )


def _acts_on_groups_alone(technique: Technique) -> bool:
    """Return whether a technique acts on statistics of groups or their gradients, and on nothing else."""
    others = (stage for stage in STAGES if stage not in _GROUP_STAGES)
    return acts_at(technique, *_GROUP_STAGES) and not acts_at(technique, *others) and not plans(technique)


def acts(technique: Technique, site: SiteView, planned: OperandSpecs) -> bool:
    """Return whether a technique acts on a quantized operand or GEMM of ``site``, its weight, or the whole model."""
    quantized = {operand for operand, spec in planned.items() if spec is not None}
    operands = operands_at(technique, site)
    # A technique that names no operands and has hooks around the optimizer acts on weights. Products of activations
    # have no weight.
    steps_weight = acts_at(technique, "before_step", "after_step") and not operands and site.multiplies_weight
    gemms = {operand.gemm for operand in quantized}
    return bool(operands & quantized or gemms_at(technique, site) & gemms) or steps_weight or technique.per_model
