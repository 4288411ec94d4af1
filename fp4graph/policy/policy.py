"""A resolved policy: frozen data, all names looked up, all exceptions applied."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import yaml

from fp4graph.errors import PolicyError, nearest
from fp4graph.numerics.formats import ScaleFormat
from fp4graph.policy import dump
from fp4graph.policy.document import Place
from fp4graph.policy.match import Match, Range
from fp4graph.policy.rule import (
    CLOSING,
    DEFAULT,
    DEFAULT_INDEX,
    DISTINGUISHED_PRODUCERS,
    KEPT,
    NAMED_ROLES,
    Decision,
    Rule,
)
from fp4graph.technique import Technique
from fp4graph.technique.site import SiteView

_NOT_BY_DEFAULT = (
    "the default action quantizes linear, matmul and grouped; write a rule with op: sdpa for fused attention, with "
    "op: conv for convolutions"
)


@dataclass(frozen=True)
class Expect:
    """Assertions about the captured graphs of a model: how many sites are quantized, and how many are kept.

    Attributes:
        places: for each assertion, by its name, the place where it is written.
        policy: the place where the policy begins that makes or inherits the assertions.
    """

    quantized: Range | None = None
    kept: Range | None = None
    places: Mapping[str, Place] = field(default_factory=dict, compare=False)
    policy: Place = field(default=Place(), compare=False)

    def error(self, name: str, message: str) -> PolicyError:
        """Return an error at one assertion, or at the policy that inherits the assertion."""
        place = self.places.get(name, Place())
        if place.file == self.policy.file:
            return place.error(message)
        return self.policy.error(f"{message} (the expectation is inherited from {place.file}:{place.line})")

    def check(self, quantized: int, total: int) -> None:
        """Raise a PolicyError unless ``quantized`` of ``total`` sites meets the assertions."""
        for name, expected, count in (("quantized", self.quantized, quantized), ("kept", self.kept, total - quantized)):
            if expected is not None and count not in expected:
                raise self.error(
                    name,
                    f"expected {expected} {name} site(s), found {count} of {total}; "
                    "fp4graph.explain shows the rule of each site: correct the rules or the expectation",
                )


@dataclass(frozen=True)
class Phase:
    """A change of the policy during a training.

    Attributes:
        at: the number of training forwards before the phase begins (int), or their share of all forwards (float).
        policy: the policy in force from then until the next phase; it has no phases itself.
    """

    at: int | float
    policy: Policy
    place: Place = field(default=Place(), compare=False)

    def start(self, total_forwards: int | None) -> int:
        """Return the number of training forwards before the phase begins; raise PolicyError if it is unknown."""
        if isinstance(self.at, int):
            return self.at
        if total_forwards is None:
            raise self.place.error(
                f"a phase begins at {self.at:g} of the training, whose length is not known; pass it to "
                "fp4graph.apply(..., total_forwards=...) or fp4graph.set_total_forwards(model, ...)"
            )
        return round(self.at * total_forwards)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The rules that say which sites of a model are quantized, and how.

    Policies with equal content are equal and have equal hashes, whatever files they were read from.

    Attributes:
        rules: the rules in order; the first that matches a site decides about it.
        default: the rule for the sites that no other rule matches.
        techniques: the techniques declared for the whole policy.
        phases: the later phases of a training, in order.
        implied: techniques that the specs imply, as ``rounding: stochastic`` implies ``stochastic_rounding``.
        file: the file that the policy was read from, or None.
    """

    name: str
    description: str = ""
    rules: tuple[Rule, ...] = ()
    default: Rule = DEFAULT
    techniques: tuple[Technique, ...] = ()
    phases: tuple[Phase, ...] = ()
    expect: Expect = Expect()
    implied: tuple[Technique, ...] = field(default=(), compare=False)
    file: str | None = field(default=None, compare=False)
    #: Pairs of a scale format made with ``max`` and the name of the format that a policy file writes beside ``max``.
    base_formats: tuple[tuple[ScaleFormat, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for kind in (int, float):  # only the length of a training orders a number and a share
            _check_order([(phase, phase.at) for phase in self.phases if isinstance(phase.at, kind)])

    def places(self, site: SiteView) -> tuple[int, ...]:
        """Return, in order, the indices of the rules whose predicates on module and block hold for ``site``, then the
        index of the default or of the closing rule for its role."""
        indices = (index for index, rule in enumerate(self.rules) if rule.match.holds_at(site))
        return (*indices, self._last(site.role)[0])

    def _last(self, role: str | None) -> tuple[int, Rule]:
        """Return the default, or the closing rule for ``role``, with its index."""
        if role is None or (self.default.quantizes and role not in NAMED_ROLES):
            return DEFAULT_INDEX, self.default
        return CLOSING[role]

    def decide(self, site: SiteView, places: Collection[int] | None = None) -> Decision:
        """Return the first rule that matches ``site``, or the default. All lookups from site to rule use this method.

        Args:
            site: the site; a predicate on a field that is unknown (None) does not hold.
            places: the result of :meth:`places` for the site's module, needed if ``site`` does not name the module.
        """
        for decision in self._candidates(site, places):
            if decision.rule.match.fits(site):
                return decision
        kept = dataclasses.replace(self.default, keep=_NOT_BY_DEFAULT, specs=KEPT, techniques=())
        return Decision(kept, DEFAULT_INDEX)

    def _candidates(self, site: SiteView, places: Collection[int] | None) -> Iterator[Decision]:
        """Yield, in order, the decisions that the place, the role and the operation of ``site`` allow."""
        indices = self.places(site) if places is None else places
        roles = {index: role for role, (index, _) in CLOSING.items()}
        # The graph may show a role that the module's name does not show, and the name one that the graph does not.
        role = site.role or next((roles[index] for index in indices if index in roles), None)
        for place in indices:
            index, rule = (place, self.rules[place]) if place >= 0 else self._last(role)
            if rule.speaks_of(site.op) and rule.admits(role):
                yield Decision(rule, index)

    def decide_weight(self, site: SiteView) -> tuple[tuple[SiteView, Decision], ...]:
        """Return the possible decisions about a weight before its graph is captured, each with its site.

        Only the graph shows the producer of the product's input. So the policy decides once for every producer that a
        rule names or a technique distinguishes, and once for all other producers.
        """
        named = {producer for rule in self.rules for producer in rule.match.producer or ()}
        sites = [dataclasses.replace(site, producer=p) for p in (None, *sorted({*named, *DISTINGUISHED_PRODUCERS}))]
        return tuple((view, self.decide(view)) for view in sites)

    def may_quantize(self, site: SiteView, places: Collection[int] | None = None) -> bool:
        """Return whether a site with the operation and the place of ``site`` is quantized for some sizes and producer.

        ``places`` is the argument of :meth:`decide`.
        """
        for decision in self._candidates(site, places):
            if decision.rule.quantizes or decision.rule.match.fits_all:
                return decision.rule.quantizes
        return False

    def phase(self, count: int, total_forwards: int | None) -> int:
        """Return the number of phases that have begun after ``count`` training forwards.

        Raises:
            PolicyError: a phase does not begin after the previous one, or the start of a phase is unknown.
        """
        starts = [(phase, phase.start(total_forwards)) for phase in self.phases]
        _check_order(starts)
        return sum(start <= count for _, start in starts)

    def in_phase(self, index: int) -> Policy:
        """Return the policy in force after ``index`` phases have begun; 0 is the policy before all phases."""
        return self.phases[index - 1].policy if index else self

    @property
    def quantizes(self) -> bool:
        """Return whether any site of any model can be quantized before the first phase; False for a baseline.

        Rules after one that matches every site are never reached.
        """
        for rule in self.rules:
            if rule.quantizes or rule.match == Match():
                return rule.quantizes
        return self.default.quantizes

    @property
    def ever_quantizes(self) -> bool:
        """Return whether any site of any model can be quantized, in any phase."""
        return self.quantizes or any(phase.policy.quantizes for phase in self.phases)

    @property
    def complexity(self) -> float:
        """Ω: the sum of the weights of the techniques in use, declared or implied, one weight per name.

        A declared technique counts even if no site can use it, as in the tables of "Elucidating the design space of
        FP4 training".
        """
        return math.fsum(self.weights.values())  # exact, hence the same in any order

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each technique in use, by name; if its options differ between rules, the largest weight."""
        weights: dict[str, float] = {}
        for technique in self._counted:
            weight = float(technique.complexity)
            weights[technique.name] = max(weight, weights.get(technique.name, weight))
        return weights

    @property
    def used(self) -> tuple[Technique, ...]:
        """One technique of each name in use, declared or implied."""
        return tuple({technique.name: technique for technique in self._counted[::-1]}.values())

    @property
    def _counted(self) -> tuple[Technique, ...]:
        """The techniques that Ω counts: those that any phase uses."""
        of_rules = (technique for rule in (*self.rules, self.default) for technique in rule.techniques)
        of_phases = (technique for phase in self.phases for technique in phase.policy._counted)
        return tuple(dict.fromkeys((*self.techniques, *of_rules, *self.implied, *of_phases)))

    def to_data(self) -> dict[str, Any]:
        """Return the policy as mappings, lists and values that load as an equal policy."""
        bases = dict(self.base_formats)
        data = {
            "version": 1,
            "name": self.name,
            "description": self.description,
            "default": dump.default_data(self.default, bases),
            "rules": [dump.rule_data(rule, self.techniques, bases) for rule in self.rules],
            "techniques": [dump.technique_data(technique) for technique in self.techniques],
            "phases": [{"at": phase.at, **phase.policy._changes()} for phase in self.phases],
            "expect": {
                name: dump.range_data(count)
                for name, count in (("quantized", self.expect.quantized), ("kept", self.expect.kept))
                if count is not None
            },
        }
        return {key: value for key, value in data.items() if value not in ("", [], {}) or key == "default"}

    def _changes(self) -> dict[str, Any]:
        """Return the keys that a phase may have. Empty rules are kept: they replace the rules before the phase."""
        data = self.to_data()
        return {"rules": [], **{key: data[key] for key in ("default", "rules", "techniques") if key in data}}

    def to_yaml(self) -> str:
        """Return YAML that loads as an equal policy: ``extends`` is resolved, and defaults are left out."""
        return yaml.safe_dump(self.to_data(), sort_keys=False, allow_unicode=True, width=120)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.to_yaml(), quote=False)}</pre>"

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that changes behaviour: all but the policy's name, description and file.

        Formats are hashed with all their numbers, because a plugin may change a format and keep its name. The code of
        techniques is not hashed; caches of compiled code add it to their key.
        """
        content = self.to_data()
        del content["name"]
        content.pop("description", None)
        policies = (self, *(phase.policy for phase in self.phases))
        specs = [spec for p in policies for rule in (*p.rules, p.default) for spec in rule.specs.six if spec]
        formats = {element for spec in specs for element in spec.elements} | {spec.scale.format for spec in specs}
        content["formats"] = sorted(repr(dataclasses.astuple(number_format)) for number_format in formats)
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()


def _check_order(starts: Sequence[tuple[Phase, int | float]]) -> None:
    """Raise a PolicyError at the first phase that does not begin after the phase before it."""
    for (_, earlier), (phase, later) in itertools.pairwise(starts):
        if later <= earlier:
            raise phase.place.error(f"this phase begins at {later}, and the one above it at {earlier}; reorder them")


def check_modules(policy: Policy, names: Iterable[str]) -> None:
    """Raise a PolicyError at the first required rule, in any phase, whose ``module`` globs match none of a model's
    module ``names``.

    One match per list of globs is enough, so that one policy can fit several families of models.
    """
    modules = [name for name in names if name]
    for rule in (rule for each in (policy, *(phase.policy for phase in policy.phases)) for rule in each.rules):
        globs = rule.match.module
        if rule.required and globs is not None and not any(rule.match.names(name) for name in ("", *modules)):
            close = [match for glob in globs for match in nearest(glob, modules, count=3, cutoff=0.5)]
            more = ", ..." if modules[5:] else ""
            hint = f"the nearest are {', '.join(close)}" if close else f"the model has {', '.join(modules[:5])}{more}"
            hint = hint if modules else "the model has no modules but the root, whose name is ''"
            raise rule.error(
                f"no module of the model is called {' or '.join(map(repr, globs))}; {hint}. "
                "Correct the glob, or set required: false"
            )
