"""From the written form to the resolved one: exceptions applied, formats and techniques looked up."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from fp4graph.errors import Error, PluginError, PolicyError, PolicyWarning
from fp4graph.numerics.formats import ScaleFormat
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.policy.document import Node
from fp4graph.policy.match import Match
from fp4graph.policy.merge import merge
from fp4graph.policy.policy import DISTINGUISHED_PRODUCERS, Expect, Phase, Policy, Rule, Specs
from fp4graph.policy.schema import (
    DefaultSection,
    OperandException,
    PhaseSection,
    PolicySection,
    QuantizeSection,
    RuleSection,
    TechniqueEntry,
)
from fp4graph.policy.validation import dotted, validate
from fp4graph.technique import OperandSpecs, Technique, checked_plan, overrides
from fp4graph.technique.operands import ADDRESSES, GROUPS, Operand
from fp4graph.technique.registry import Registry
from fp4graph.technique.site import SiteView
from fp4graph.text import suggest

_Path = tuple[str | int, ...]


def resolve(document: Node, name: str, file: str | None, registry: Registry) -> Policy:
    """The policy that ``document``, free of ``extends``, describes; ``name`` where it does not name itself."""
    return _Resolver(document, registry).policy(name, file)


@dataclass(frozen=True)
class _Layer:
    """One quantize block and where it was written; ``section`` None says ``keep``, or ``fprop`` where it ``reuses``."""

    section: QuantizeSection | None
    path: _Path
    reuses: bool = False


@dataclass(frozen=True)
class _Late:
    """A phase's exceptions for operands, and where they were written."""

    exceptions: Mapping[str, OperandException]
    path: _Path


@dataclass(frozen=True)
class _Declared:
    """A technique and where it was declared."""

    technique: Technique
    path: _Path


class _Resolver:
    """Resolves one document; ``late`` are a phase's exceptions, which act after those of every rule."""

    def __init__(self, document: Node, registry: Registry, late: _Late | None = None) -> None:
        self._document = document
        self._registry = registry
        self._late = late
        self._in_phase = late is not None
        self._written = validate(PolicySection, document)
        self._base_formats: dict[ScaleFormat, str] = {}
        self._inert: dict[_Path, list[str | None]] = {}
        self._kept: dict[_Path, set[str]] = {}  # operands named in options that no rule quantizes

    def policy(self, name: str, file: str | None) -> Policy:
        phases = tuple(self._phase(index, section) for index, section in enumerate(self._written.phases))
        return replace(self._alone(name, file), phases=phases, expect=self._expect())

    def _alone(self, name: str, file: str | None = None) -> Policy:
        """The policy without phases and expectations."""
        written = self._written
        shared = self._techniques(written.techniques, ("techniques",))
        rules = tuple(self._rule(index, section, shared) for index, section in enumerate(written.rules))
        default = self._default(shared)
        if not rules and written.default is None:
            raise self._error(
                (), "nothing says what to quantize; add rules, or 'default: keep' for a high-precision baseline"
            )
        if written.default is None and not any(rule.quantizes for rule in rules):
            raise self._error(("rules",), "no rule quantizes; add one, or 'default: keep' to say that this is meant")
        self._check_names(rules)
        if not any(rule.quantizes for rule in (*rules, default)):
            self._check_together(shared, Specs((None,) * len(Operand)))
        if not self._in_phase:  # where what is declared for all phases may rest
            self._warn_inert(shared if any(rule.quantizes for rule in (*rules, default)) else [])
        return Policy(
            name=written.name or name,
            description=written.description.strip(),
            rules=rules,
            default=default,
            techniques=tuple(declared.technique for declared in shared),
            implied=tuple(dict.fromkeys(t for rule in (*rules, default) for t in self._implied(rule.specs))),
            file=file,
            base_formats=tuple(self._base_formats.items()),
        )

    def _phase(self, index: int, section: PhaseSection) -> Phase:
        """A phase is the policy with the phase's own keys over it; of expectations and phases it has none."""
        path: _Path = ("phases", index)
        node = self._document.get(*path)
        own = {key: item for key, item in node.value.items() if key in ("default", "rules", "techniques")}
        later = merge(self._document, Node(own, node.place, node.keys))
        late = _Late(section.operands, (*path, "operands"))
        policy = _Resolver(later, self._registry, late)._alone(f"{self._written.name or 'policy'}, phase {index + 1}")
        if section.operands and not policy.quantizes:
            raise self._error(late.path, "nothing is quantized in this phase, and so these do nothing; remove them")
        return Phase(section.at, policy, node.place)

    # ------------------------------------------------------------------ rules

    def _rule(self, index: int, section: RuleSection, shared: list[_Declared]) -> Rule:
        path: _Path = ("rules", index)
        place = self._document.get(*path).place
        specs, reuses = Specs((None,) * len(Operand)), frozenset[Operand]()
        techniques: list[_Declared] = []
        if section.quantize is not None:
            specs, reuses = self._specs(section.quantize, (*path, "quantize"), section.operands, (*path, "operands"))
            own = self._techniques(section.techniques, (*path, "techniques"))
            for declared in own:
                if declared.technique.per_model:
                    name = declared.technique.name
                    raise self._error(
                        declared.path, f"technique {name!r} acts on the whole model; move it to the policy's techniques"
                    )
            techniques = _override(shared, own)
            self._check_together(techniques, specs)
            self._check_fit(techniques, specs, section.match.build())
        return Rule(
            name=section.name or f"rule {index + 1}",
            match=section.match.build(),
            keep=section.keep,
            specs=specs,
            reuses=reuses,
            techniques=tuple(declared.technique for declared in techniques),
            required=section.required,
            file=place.file,
            line=place.line,
        )

    def _default(self, shared: list[_Declared]) -> Rule:
        section = self._written.default
        place = self._document.where("default") if section is not None else self._document.place
        if not isinstance(section, DefaultSection):
            return Rule(name="default", keep="no rule matches", required=False, file=place.file, line=place.line)
        specs, reuses = self._specs(section, ("default",), section.operands, ("default", "operands"))
        self._check_together(shared, specs)
        self._check_fit(shared, specs, Match())
        return Rule(
            name="default",
            specs=specs,
            reuses=reuses,
            techniques=tuple(declared.technique for declared in shared),
            required=False,
            file=place.file,
            line=place.line,
        )

    def _check_names(self, rules: Iterable[Rule]) -> None:
        seen: set[str] = set()
        for index, rule in enumerate(rules):
            if rule.name in seen:
                raise self._error(
                    ("rules", index, "name"),
                    f"two rules are called {rule.name!r}; rename one, so that reports tell them apart",
                )
            seen.add(rule.name)

    def _expect(self) -> Expect:
        written = self._written.expect
        return Expect(
            quantized=written.quantized.build() if written.quantized else None,
            kept=written.kept.build() if written.kept else None,
            places=tuple(
                (name, self._document.where("expect", name)) for name in ("quantized", "kept") if getattr(written, name)
            ),
        )

    # ------------------------------------------------------------------ specs

    def _specs(
        self, base: QuantizeSection, path: _Path, exceptions: Mapping[str, OperandException], exceptions_path: _Path
    ) -> tuple[Specs, frozenset[Operand]]:
        """Six specs, and who reuses fprop's operand.

        Groups act in the order they are written, then single operands: the most particular last.
        """
        layers = {operand: [_Layer(base, path)] for operand in Operand}
        for address, exception, where in self._ordered(exceptions, exceptions_path):
            section = exception if isinstance(exception, QuantizeSection) else None
            for operand in ADDRESSES[address]:
                if section is None or layers[operand][-1].section is None:
                    del layers[operand][1:]  # keep forgets the exceptions so far; what follows it starts from the base
                layers[operand].append(_Layer(section, (*where, address), exception == "fprop"))
                if exception == "fprop" and operand.fprop is None:
                    raise self._error(
                        (*where, address),
                        f"fprop has no meaning for {operand}: fprop multiplies no such tensor. Only dgrad.weight and "
                        "wgrad.input may say it; write keep for the others",
                    )
        specs = Specs(tuple(self._spec(operand, layers[operand]) for operand in Operand))
        if not any(specs.values()):
            last = self._late.path if self._late and self._late.exceptions else exceptions_path
            raise self._error(last, "all six operands are kept; write keep: with a reason instead of quantize")
        return specs, frozenset(operand for operand in Operand if layers[operand][-1].reuses)

    def _ordered(
        self, exceptions: Mapping[str, OperandException], path: _Path
    ) -> Iterator[tuple[str, OperandException, _Path]]:
        own = (exceptions, path)
        for given, where in (own, *([(self._late.exceptions, self._late.path)] if self._late else [])):
            for address in sorted(given, key=lambda address: address not in GROUPS):  # stable: groups keep their order
                yield address, given[address], where

    def _spec(self, operand: Operand, layers: list[_Layer]) -> QuantSpec | None:
        if layers[-1].section is None:
            return None
        given: dict[str, tuple[Any, _Path]] = {}
        scale: dict[str, tuple[Any, _Path]] = {}
        for layer in layers:
            if layer.section is None:
                continue
            given.update(_fields(layer.section, layer.path, without=("scale", "operands")))
            if layer.section.scale is not None:
                if layer.section.scale.format is not None:
                    scale.pop("max", None)  # belonged to the format that is replaced
                scale.update(_fields(layer.section.scale, (*layer.path, "scale")))
        if "element" in given:
            name, path = given["element"]
            given["element"] = (self._format(name, path, "element"), path)
        scale_spec = self._scale(scale, layers[-1].path)
        source, source_path = given.get("source", ("original", ()))
        if source == "fprop" and operand.fprop is None:
            raise self._error(
                source_path,
                f"source: fprop has no meaning for {operand}: fprop quantizes no such tensor before it. "
                "Only dgrad.weight and wgrad.input may say it",
            )
        try:
            return QuantSpec(scale=scale_spec, **{name: value for name, (value, _) in given.items()})
        except (TypeError, ValueError) as error:
            raise self._error(layers[-1].path, f"{dotted(layers[-1].path)}: {error}") from None

    def _scale(self, given: Mapping[str, tuple[Any, _Path]], fallback: _Path) -> ScaleSpec:
        values = {name: value for name, (value, _) in given.items() if name not in ("format", "max")}
        name, path = given.get("format", ("e8m0", fallback))
        number_format = self._format(name, path, "scale")
        if "max" in given:
            largest, path = given["max"]
            number_format = self._with_max(number_format, largest, path)
        try:
            return ScaleSpec(format=number_format, **values)
        except ValueError as error:
            _, path = given.get("rounding", given.get("convention", ("", fallback)))
            raise self._error(path, f"{dotted(path[:-1])}: {error}") from None

    def _with_max(self, number_format: ScaleFormat, largest: float, path: _Path) -> ScaleFormat:
        if largest == number_format.max:
            return number_format
        try:
            variant = number_format.with_max(largest)
        except ValueError as error:
            below = _below(number_format, largest)
            raise self._error(path, f"{dotted(path)}: {error}{below}") from None
        if self._registry.scales.get(variant.name) != variant:
            self._base_formats[variant] = number_format.name
        return variant

    def _format(self, name: str, path: _Path, kind: str) -> Any:
        table: Mapping[str, Any] = self._registry.elements if kind == "element" else self._registry.scales
        other, other_kind = (
            (self._registry.scales, "scale") if kind == "element" else (self._registry.elements, "element")
        )
        if name in table:
            self._refuse_contested(name, path)
            return table[name]
        if name in other:
            raise self._error(
                path, f"{name!r} is a format of {other_kind}s, not of {kind}s; known: {', '.join(sorted(table))}"
            )
        raise self._error(path, f"unknown {kind} format {name!r}; {suggest(name.lower(), table)}")

    # ------------------------------------------------------------------ techniques

    def _techniques(self, entries: Iterable[TechniqueEntry], path: _Path) -> list[_Declared]:
        declared: list[_Declared] = []
        for index, entry in enumerate(entries):
            here = (*path, index)
            if any(other.technique.name == entry.name for other in declared):
                raise self._error(here, f"technique {entry.name!r} is listed twice; keep one of them")
            declared.append(_Declared(self._technique(entry, here), here))
        return declared

    def _technique(self, entry: TechniqueEntry, path: _Path) -> Technique:
        self._refuse_contested(entry.name, path)
        if entry.name not in self._registry.techniques:
            failure = self._registry.failures.get(entry.name)
            cause = f" ({failure})" if failure else ""
            raise self._error(
                path, f"unknown technique {entry.name!r}{cause}; {suggest(entry.name, self._registry.techniques)}"
            )
        node = self._document.get(*path)
        options = node.child(entry.name) or Node({}, node.place)
        options = Node({}, options.place) if options.value is None else options
        technique = validate(self._registry.techniques[entry.name], options, (*path, entry.name), "option")
        for name, field in type(technique).model_fields.items():
            written = entry.options.get(field.alias or name)
            if isinstance(written, bool) and type(getattr(technique, name)) in (int, float):  # pydantic reads true as 1
                raise self._error(
                    (*path, entry.name, field.alias or name),
                    f"{dotted((*path, entry.name, field.alias or name))} must be a number; got {str(written).lower()}",
                )
        try:
            hash(technique)
        except TypeError as error:
            raise PluginError(
                f"options of technique {entry.name!r} cannot be hashed ({error}); declare tuples, not lists or dicts",
                plugin=self._registry.origin(entry.name),
            ) from None
        return technique

    def _refuse_contested(self, name: str, path: _Path) -> None:
        if name in self._registry.contested:
            raise self._error(path, f"{self._registry.contested[name]}; uninstall or rename one of the two")

    def _implied(self, specs: Specs) -> list[Technique]:
        found = (
            self._implied_by(technique, spec)
            for technique in self._registry.techniques.values()
            for spec in dict.fromkeys(specs.six)
            if spec is not None
        )
        return [technique for technique in found if technique is not None]

    def _implied_by(self, technique: type[Technique], spec: QuantSpec) -> Technique | None:
        """A failure is a warning only: every technique is asked, and the policy may not even name this one."""
        try:
            return technique.implied_by(spec)
        except Exception as error:  # noqa: BLE001  # a stranger's bug, named
            cause = f"technique {technique.name!r}, implied_by: {type(error).__name__}: {error}"
            warning = PluginError(f"{cause}; it is left out of Ω", plugin=self._registry.origin(technique.name))
            warnings.warn(str(warning), PolicyWarning, stacklevel=2)
            return None

    def _check_together(self, techniques: list[_Declared], specs: Specs) -> None:
        """What meets at one site must fit: ``conflicts`` and ``requires``, of techniques declared or implied."""
        named = {declared.technique.name for declared in techniques}
        implied = {t.name: t for t in self._implied(specs) if t.name not in named}
        present = {**{declared.technique.name: declared.technique for declared in techniques}, **implied}
        for index, declared in enumerate(techniques):
            mine = declared.technique
            rivals = {*(other.technique.name for other in techniques[:index]), *implied}
            for rival in sorted(rivals):
                if rival in mine.conflicts or mine.name in present[rival].conflicts:
                    spelled = " (what the specs amount to)" if rival in implied else ""
                    raise self._error(
                        declared.path,
                        f"techniques {mine.name!r} and {rival!r}{spelled} cannot share a site; remove one of them",
                    )
            missing = sorted(mine.requires - present.keys())
            if missing:
                raise self._error(
                    declared.path,
                    f"technique {mine.name!r} requires {' and '.join(map(repr, missing))}; add it to techniques",
                )

    def _check_fit(self, techniques: list[_Declared], specs: Specs, match: Match) -> None:
        """Plans sites of which nothing is known but the rule, so that a refusal comes at load and names its line."""
        acting = {technique.name for technique in self._implied(specs)}
        sites = [
            SiteView(None, op, None, None, None, None, producer)
            for op in match.op or ("linear", "matmul")
            for producer in match.producer or (None, *DISTINGUISHED_PRODUCERS)
        ]
        plans = [self._probe(site, techniques, specs, acting) for site in sites]
        by_name = {declared.technique.name: declared.technique for declared in techniques}
        with _refusals(self, techniques) as at:
            for technique, declared in zip(at("inert"), techniques, strict=True):
                reason = technique.inert(plans[0], by_name)
                if reason is None and technique.name not in acting:
                    reason = "it acts on no operand that is quantized"
                self._inert.setdefault(declared.path, []).append(reason)
        quantized = {operand for operand, spec in plans[0].items() if spec is not None}
        for declared in techniques:
            for named in declared.technique.addresses_given.values():
                kept = {name for name in named if not {*ADDRESSES[name]} & quantized}
                self._kept[declared.path] = kept & self._kept.get(declared.path, kept)

    def _probe(self, site: SiteView, techniques: list[_Declared], specs: Specs, acting: set[str]) -> OperandSpecs:
        """The specs that techniques make of ``specs`` at one site; those that do something there join ``acting``."""
        planned: OperandSpecs = specs
        by_name = {declared.technique.name: declared.technique for declared in techniques}
        with _refusals(self, techniques) as at:
            for technique in at("plan"):
                before, planned = planned, checked_plan(technique, site, planned)
                if dict(before) != dict(planned):
                    acting.add(technique.name)
            quantized = {operand for operand, spec in planned.items() if spec is not None}
            gemms = {operand.gemm for operand in quantized}
            for technique in at("check"):
                technique.check(planned, by_name)
            for technique in at("acts_on"):
                operands = technique.acts_on(site)
                # One that names no operands and has the optimizer's hooks acts on weights; a product of activations
                # has none.
                on_optimizer = (
                    not operands
                    and site.op == "linear"
                    and any(overrides(technique, stage) for stage in ("before_step", "after_step"))
                )
                if operands & quantized or technique.pairs(site) & gemms or on_optimizer or technique.per_model:
                    acting.add(technique.name)
        return planned

    def _warn_inert(self, shared: list[_Declared]) -> None:
        """A technique without effect under any rule is probably a mistake; Ω counts it all the same, as papers do."""
        for path, kept in self._kept.items():
            if kept:
                raise self._error(
                    path,
                    f"operand {sorted(kept)[0]!r} stays in high precision, where it has nothing to act on",
                )
        for declared in shared:
            self._inert.setdefault(declared.path, [])
        names = {path: self._document.get(*path) for path in self._inert}
        for path, reasons in self._inert.items():
            if all(reasons):
                entry = names[path].plain()
                name = entry if isinstance(entry, str) else next(iter(entry))
                why = reasons[0] if reasons else "no rule that it belongs to quantizes"
                warning = self._error(path, f"technique {name!r} has no effect here: {why}; remove it")
                warnings.warn(str(warning), PolicyWarning, stacklevel=2)

    def _error(self, path: _Path, message: str) -> PolicyError:
        return self._document.blame(*path).error(message)


@contextmanager
def _refusals(resolver: _Resolver, techniques: list[_Declared]) -> Iterator[Callable[[str], Iterator[Technique]]]:
    """Gives ``at(stage)``, which goes through the techniques; what one of them raises is an error with its line."""
    current: list[tuple[_Declared, str]] = []

    def at(stage: str) -> Iterator[Technique]:
        for declared in techniques:
            current[:] = [(declared, stage)]
            yield declared.technique

    try:
        yield at
    except ValueError as error:
        declared, _ = current[0]
        raise resolver._error(declared.path, f"technique {declared.technique.name!r}: {error}") from None
    except Exception as error:
        if isinstance(error, Error) or not current:
            raise
        declared, stage = current[0]
        plugin = resolver._registry.origin(declared.technique.name)
        raise PluginError(f"{stage}() failed: {type(error).__name__}: {error}", plugin=plugin) from error


def _fields(section: QuantizeSection | Any, path: _Path, without: tuple[str, ...] = ()) -> dict[str, tuple[Any, _Path]]:
    """What a block gives, each with its path."""
    return {name: (getattr(section, name), (*path, name)) for name in section.model_fields_set if name not in without}


def _override(techniques: list[_Declared], by: list[_Declared]) -> list[_Declared]:
    """``techniques`` with namesakes from ``by`` in their place, and the rest of ``by`` after them."""
    replacing = {declared.technique.name: declared for declared in by}
    first = [replacing.pop(declared.technique.name, declared) for declared in techniques]
    return [*first, *replacing.values()]


def _below(number_format: ScaleFormat, largest: float) -> str:
    try:
        below = max((value for value in number_format.values() if 0 < value <= largest), default=None)
    except ValueError:  # too many to list: such a format takes no other max
        return "; leave max out"
    return f"; the nearest below is {below:g}" if below is not None else ""
