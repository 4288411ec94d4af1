"""Resolves a written policy: rules, default, phases and expectations.

:mod:`~fp4graph.policy.specs` resolves the quantize blocks, :mod:`~fp4graph.policy.techniques` the techniques.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from fp4graph.errors import PolicyWarning
from fp4graph.policy.adapters import names_adapters
from fp4graph.policy.document import Node, merge
from fp4graph.policy.policy import Expect, Phase, Policy
from fp4graph.policy.rule import DEFAULT, KEPT, Rule
from fp4graph.policy.schema import (
    MOST_RULES,
    DefaultSection,
    PhaseSection,
    PolicySection,
    QuantizeSection,
    RulesAheadSection,
    RuleSection,
)
from fp4graph.policy.specs import Exceptions, SpecResolver
from fp4graph.policy.techniques import Declared, TechniqueResolver, override
from fp4graph.policy.validation import Path, validate
from fp4graph.technique.registry import Registry


def resolve(document: Node, name: str, file: str | None, registry: Registry) -> Policy:
    """Return the policy that ``document`` writes, its ``extends`` already merged; ``name`` is the default name."""
    resolver = _Resolver(document, registry)
    written = resolver.written
    if (count := _rules_in_force(document)) > MOST_RULES:
        raise document.error(
            ("phases",), f"the policy has {count} rules, counted again in every phase; at most {MOST_RULES} are read"
        )
    title = written.name or name
    phases = tuple(_phase(document, registry, title, index, section) for index, section in enumerate(written.phases))
    places = {name: document.where("expect", name) for name in ("quantized", "kept")}
    expect = Expect(written.expect.quantized, written.expect.kept, places, document.place)
    policy = replace(resolver.policy(name, file), phases=phases, expect=expect)
    wanted = expect.quantized
    if wanted is not None and 0 not in wanted and not policy.ever_quantizes:
        message = f"expected {wanted} quantized site(s), and no rule quantizes; correct the rules or the expectation"
        raise expect.error("quantized", message)
    idle = [each.name for each in policy.techniques if not (policy.ever_quantizes or each.per_model)]
    if idle:
        message = f"no rule quantizes, so {', '.join(idle)} has no effect here; remove it, or add rules"
        warnings.warn(str(document.where("techniques").error(message)), PolicyWarning, stacklevel=2)
    return policy


def _at(rule: Rule, elsewhere: bool) -> str:
    return f", the other in {rule.file}:{rule.line}" if elsewhere else ""


def _rules_in_force(document: Node) -> int:
    """Return the number of rules of the policy and of its phases; inherited rules count again in each phase."""
    inherited = len(document.get("rules").value) if "rules" in document.value else 0
    count = inherited
    for phase in document.get("phases").value if "phases" in document.value else ():
        rules = phase.child("rules")
        ahead = rules.child("before") if rules else None
        count += len(rules.value) if rules and not ahead else inherited + len(ahead.value if ahead else ())
    return count


def listed(written: PolicySection, document: Node) -> tuple[RuleSection, ...]:
    """Return the rules of a policy without ``extends``; raise PolicyError for ``before``, which needs ``extends``."""
    if isinstance(written.rules, RulesAheadSection):
        raise document.error(
            ("rules",), "'before' puts rules ahead of inherited ones, and this policy extends no other; write a list"
        )
    return written.rules


def _phase(document: Node, registry: Registry, name: str, index: int, section: PhaseSection) -> Phase:
    """Return a phase: the policy overridden by the keys of the phase, without expectations and phases."""
    path: Path = ("phases", index)
    node = document.get(*path)
    changes = {key: item for key, item in node.value.items() if key in ("default", "rules", "techniques")}
    overrides = Exceptions(section.operands, (*path, "operands"))
    changed = merge(document, Node(changes, node.place, node.keys))
    policy = _Resolver(changed, registry, overrides).policy(f"{name}, phase {index + 1}")
    if section.operands and not policy.quantizes:
        raise document.error(
            overrides.path, "nothing is quantized in this phase, so these exceptions do nothing; remove them"
        )
    return Phase(section.at, policy, node.place)


class _Resolver:
    """Resolves the rules, default and techniques of one document; ``overrides`` are the exceptions of a phase."""

    def __init__(self, document: Node, registry: Registry, overrides: Exceptions | None = None) -> None:
        self.written = validate(PolicySection, document if overrides is None else document.without("phases"))
        self._document = document
        self._in_phase = overrides is not None
        self._specs = SpecResolver(document, registry, overrides)
        self._techniques = TechniqueResolver(document, registry)

    def policy(self, name: str, file: str | None = None) -> Policy:
        """Return the policy without phases and expectations."""
        written = self.written
        shared = self._techniques.declared(written.techniques, ("techniques",))
        sections = listed(written, self._document)
        rules = tuple(self._rule(index, section, shared) for index, section in enumerate(sections))
        default = self._default(shared)
        if not rules and written.default is None:
            raise self._document.error(
                (), "nothing says what to quantize; add rules, or 'default: keep' for a high-precision baseline"
            )
        if written.default is None and not any(rule.quantizes for rule in rules):
            raise self._document.error(
                ("rules",), "no rule quantizes; add one, or 'default: keep' to say that this is intended"
            )
        self._check_names(rules)
        quantizes = any(rule.quantizes for rule in (*rules, default))
        if not quantizes:
            self._techniques.check_together(shared, KEPT)
        if not self._in_phase:  # a technique without effect in one phase may have an effect in another
            self._techniques.check_effect(shared if quantizes else [])
        return Policy(
            name=written.name or name,
            description=written.description.strip(),
            rules=rules,
            default=default,
            techniques=tuple(declared.technique for declared in shared),
            implied=tuple(dict.fromkeys(t for rule in (*rules, default) for t in self._techniques.implied(rule.specs))),
            file=file,
            base_formats=tuple(self._specs.base_formats.items()),
        )

    def _check_names(self, rules: Sequence[Rule]) -> None:
        """Raise PolicyError if two rules share a name, at the rule that is not inherited."""
        first: dict[str, int] = {}
        for index, rule in enumerate(rules):
            namesake = rules[first.setdefault(rule.name, index)]
            if namesake is not rule:
                ahead = namesake.file != rule.file  # the extending file put its rule ahead, by ``before``
                blamed, kept = (first[rule.name], rule) if ahead else (index, namesake)
                raise self._document.error(
                    ("rules", blamed, "name"),
                    f"two rules are called {rule.name!r}{_at(kept, ahead)}; rename one, so that reports tell them "
                    "apart",
                )

    def _rule(self, index: int, section: RuleSection, shared: Sequence[Declared]) -> Rule:
        path: Path = ("rules", index)
        place = self._document.get(*path).place
        rule = Rule(
            name=section.name or f"rule {index + 1}",
            match=section.match,
            keep=section.keep,
            required=section.required,
            file=place.file,
            line=place.line,
        )
        if section.quantize is None:
            return rule
        adapter_globs = [glob for glob in rule.match.module or () if names_adapters(glob)]
        if adapter_globs and rule.match.role is None and not rule.match.names_adapters:
            raise self._document.error(
                (*path, "match", "module"),
                f"{adapter_globs[0]!r} names adapters and other globs of the list do not, so it is unclear whether "
                "the rule quantizes the adapters of every layer that it matches; give adapters a rule of their own, or "
                "say 'role: adapter' for adapters alone",
            )
        rule_techniques = self._techniques.declared(section.techniques, (*path, "techniques"))
        for declared in rule_techniques:
            if declared.technique.per_model:
                raise self._document.error(
                    declared.path,
                    f"technique {declared.name!r} acts on the whole model; move it to the policy's techniques",
                )
        exceptions = Exceptions(section.operands, (*path, "operands"))
        techniques = override(shared, rule_techniques)
        return self._quantizing(rule, section.quantize, (*path, "quantize"), exceptions, techniques)

    def _default(self, shared: Sequence[Declared]) -> Rule:
        section = self.written.default
        place = self._document.where("default") if section is not None else self._document.place
        rule = replace(DEFAULT, file=place.file, line=place.line)
        if not isinstance(section, DefaultSection):
            return rule
        exceptions = Exceptions(section.operands, ("default", "operands"))
        return self._quantizing(replace(rule, keep=None), section, ("default",), exceptions, shared)

    def _quantizing(
        self, rule: Rule, section: QuantizeSection, path: Path, exceptions: Exceptions, techniques: Sequence[Declared]
    ) -> Rule:
        """Return ``rule`` with its specs and techniques, checked."""
        specs, reuses = self._specs.resolve(section, path, exceptions)
        self._techniques.check_together(techniques, specs)
        self._techniques.check_fit(techniques, specs, rule.match)
        return replace(rule, specs=specs, reuses=reuses, techniques=tuple(each.technique for each in techniques))
