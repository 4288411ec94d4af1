"""A resolved policy: frozen data, all names looked up, all exceptions applied."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fp4graph.errors import PolicyError
from fp4graph.numerics.formats import ScaleFormat
from fp4graph.numerics.spec import QuantSpec
from fp4graph.policy import dump
from fp4graph.policy.document import Place
from fp4graph.policy.match import Match, Range
from fp4graph.technique import Technique
from fp4graph.technique.operands import Operand
from fp4graph.technique.site import BlockPosition, SiteView
from fp4graph.text import nearest


@dataclass(frozen=True)
class Specs(Mapping[Operand, QuantSpec | None]):
    """The specs of the six operands, in the order of :class:`Operand`; None is high precision."""

    six: tuple[QuantSpec | None, ...]

    def __getitem__(self, operand: Operand) -> QuantSpec | None:
        return self.six[list(Operand).index(operand)]

    def __iter__(self) -> Iterator[Operand]:
        return iter(Operand)

    def __len__(self) -> int:
        return len(self.six)


KEPT = Specs((None,) * len(Operand))
#: Producers that some technique tells from others, whatever the rules say.
DISTINGUISHED_PRODUCERS = ("swiglu",)
_NOT_BY_DEFAULT = "the default action quantizes linear and matmul alone; write a rule with op: sdpa for fused attention"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What happens to the sites that ``match`` speaks of.

    Attributes:
        keep: why they stay in high precision, or None where they are quantized.
        specs: of the six operands; all None for a rule that keeps.
        reuses: those in high precision that read the dequantized fprop operand in place of the original.
        techniques: the policy's and then the rule's own, one of the rule's taking the place of its namesake.
        required: whether it is an error that the rule matches nothing.
    """

    name: str
    match: Match = field(default_factory=Match)
    keep: str | None = None
    specs: Specs = KEPT
    reuses: frozenset[Operand] = frozenset()
    techniques: tuple[Technique, ...] = ()
    required: bool = True
    file: str | None = field(default=None, compare=False)
    line: int | None = field(default=None, compare=False)

    @property
    def quantizes(self) -> bool:
        return self.keep is None

    def speaks_of(self, op: str) -> bool:
        """Whether it decides about operations of kind ``op``; without ``op``, one that keeps decides about all."""
        if self.match.op is None:
            return not self.quantizes or op in ("linear", "matmul")
        return op in self.match.op

    def error(self, message: str) -> PolicyError:
        """An error of this rule, with its place and name."""
        return Place(self.file, self.line).error(f"rule {self.name!r}: {message}")


@dataclass(frozen=True)
class Decision:
    """What a policy decides of one site.

    Attributes:
        rule: the one that decides. index: its position in the policy, -1 for the default.
    """

    rule: Rule
    index: int


@dataclass(frozen=True)
class Expect:
    """Assertions about the captured graphs of a model: how many of its sites are quantized and how many kept."""

    quantized: Range | None = None
    kept: Range | None = None
    places: tuple[tuple[str, Place], ...] = field(default=(), compare=False)

    def check(self, quantized: int, total: int) -> None:
        """Raise a PolicyError unless ``quantized`` of ``total`` sites is as expected."""
        for name, expected, found in (
            ("quantized", self.quantized, quantized),
            ("kept", self.kept, total - quantized),
        ):
            if expected is not None and found not in expected:
                place = dict(self.places).get(name, Place())
                raise place.error(
                    f"expected {expected} {name} site(s), found {found} of {total}; "
                    "fp4graph.explain shows the rule of each site: correct the rules or the expectation"
                )


@dataclass(frozen=True)
class Phase:
    """What a policy becomes in the course of a training.

    Attributes:
        at: training forwards before it begins (int), or their share of all of a training's (float).
        policy: in force from then on, until the next phase; it has no phases itself.
    """

    at: int | float
    policy: Policy
    place: Place = field(default=Place(), compare=False)

    def start(self, total_forwards: int | None) -> int:
        """Training forwards before it begins.

        Raises:
            PolicyError: it is a share, and the number of all is not known.
        """
        if isinstance(self.at, int):
            return self.at
        if total_forwards is None:
            raise self.place.error(
                f"a phase begins at {self.at:g} of the training, whose length is not known; give it to "
                "fp4graph.apply(..., total_forwards=...) or fp4graph.set_total_forwards(model, ...)"
            )
        return round(self.at * total_forwards)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which sites of a model are quantized and how.

    Equality and hash go by content; where a policy was read from is no part of it.

    Attributes:
        rules: in order; the first that matches a site decides.
        default: what a site gets that no rule matches.
        techniques: those declared for the whole policy.
        phases: what it becomes later, in order.
        implied: techniques that the specs amount to although nobody declared them, as ``rounding: stochastic`` does.
        file: where it was read from, or None.
    """

    name: str
    description: str = ""
    rules: tuple[Rule, ...] = ()
    default: Rule = Rule(name="default", keep="no rule matches", required=False)
    techniques: tuple[Technique, ...] = ()
    phases: tuple[Phase, ...] = ()
    expect: Expect = Expect()
    implied: tuple[Technique, ...] = field(default=(), compare=False)
    file: str | None = field(default=None, compare=False)
    #: Scale formats made with ``max``, by the name of the format they were made from: how to write them down.
    base_formats: tuple[tuple[ScaleFormat, str], ...] = field(default=(), compare=False, repr=False)

    def places(self, module: str | None, block: BlockPosition | None) -> tuple[int, ...]:
        """The rules, by index, whose predicates on the place hold for sites of ``module``."""
        return tuple(index for index, rule in enumerate(self.rules) if rule.match.holds_at(module, block))

    def decide(self, site: SiteView, places: Collection[int] | None = None) -> Decision:
        """The first rule that matches ``site``, or the default: the one lookup from a site to what happens to it.

        Args:
            site: with all that is known of it; a predicate on something unknown does not hold.
            places: what :meth:`places` gave for its module, where ``site`` does not name that.
        """
        if places is None:
            places = self.places(site.module, site.block)
        for index in places:
            rule = self.rules[index]
            if rule.speaks_of(site.op) and rule.match.fits(site):
                return Decision(rule, index)
        if self.default.quantizes and not self.default.speaks_of(site.op):
            return Decision(dataclasses.replace(self.default, keep=_NOT_BY_DEFAULT, specs=KEPT, techniques=()), -1)
        return Decision(self.default, -1)

    def decide_weight(self, site: SiteView) -> tuple[tuple[SiteView, Decision], ...]:
        """What may be decided of a weight before its graph is captured, each with the site that it would be.

        Only the graph tells what computes the input of its product. So this asks once for every producer that a rule
        names or a technique may tell from others, and once for any other.
        """
        named = {producer for rule in self.rules for producer in rule.match.producer or ()}
        sites = [dataclasses.replace(site, producer=p) for p in (None, *sorted({*named, *DISTINGUISHED_PRODUCERS}))]
        return tuple((one, self.decide(one)) for one in sites)

    def may_quantize(
        self,
        op: str,
        module: str | None,
        block: BlockPosition | None,
        places: Collection[int] | None = None,
    ) -> bool:
        """Whether some site of kind ``op`` in ``module`` could be quantized, its sizes and producer being unknown.

        Args:
            places: as of :meth:`decide`.
        """
        if places is None:
            places = self.places(module, block)
        for rule in (*(self.rules[index] for index in places), self.default):
            if rule.speaks_of(op) and (rule.quantizes or rule.match.fits_all):
                return rule.quantizes
        return False

    def phase(self, count: int, total_forwards: int | None) -> int:
        """How many phases have begun after ``count`` training forwards.

        Raises:
            PolicyError: a phase begins before the one above it, or when cannot be told.
        """
        starts = [phase.start(total_forwards) for phase in self.phases]
        for earlier, later, phase in zip(starts, starts[1:], self.phases[1:], strict=False):
            if later <= earlier:
                raise phase.place.error(
                    f"this phase begins at {later}, and the one above it at {earlier}; reorder them"
                )
        return sum(start <= count for start in starts)

    def in_phase(self, index: int) -> Policy:
        """The policy in force after ``index`` phases have begun: 0 is the one before all of them."""
        return self.phases[index - 1].policy if index else self

    @property
    def quantizes(self) -> bool:
        """Whether any site of any model can be quantized; False for a baseline."""
        return self.default.quantizes or any(rule.quantizes for rule in self.rules)

    @property
    def complexity(self) -> float:
        """Ω: the weights of the techniques in use, however spelled, summed over distinct names.

        A declared technique counts even if no site can use it, as in the tables of "Elucidating the design space of
        FP4 training".
        """
        return math.fsum(self.weights.values())  # exact, hence the same in any order

    @property
    def weights(self) -> dict[str, float]:
        """What each technique in use adds to Ω, by name; the largest weight where options differ from rule to rule."""
        weights: dict[str, float] = {}
        for technique in self._counted:
            weights[technique.name] = max(technique.complexity, weights.get(technique.name, technique.complexity))
        return weights

    @property
    def used(self) -> tuple[Technique, ...]:
        """One technique of each name in use, declared or implied."""
        return tuple({technique.name: technique for technique in self._counted[::-1]}.values())

    @property
    def _counted(self) -> tuple[Technique, ...]:
        """What Ω counts: what any phase uses."""
        later = (technique for phase in self.phases for technique in phase.policy._counted)
        return tuple(dict.fromkeys((*self._declared, *self.implied, *later)))

    @property
    def _declared(self) -> tuple[Technique, ...]:
        """The techniques of the policy and of its rules, each once."""
        own = (technique for rule in (*self.rules, self.default) for technique in rule.techniques)
        return tuple(dict.fromkeys((*self.techniques, *own)))

    def to_yaml(self) -> str:
        """The whole policy, ``extends`` resolved and defaults left out: text that loads as an equal policy."""
        return dump.to_yaml(self)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that changes behaviour: all but the policy's name, description and file.

        Formats count with all their numbers, so that a plugin's format that changes under its name is noticed. The
        code of techniques does not count; whoever caches compiled code adds it.
        """
        content = dump.to_data(self)
        del content["name"]
        content.pop("description", None)
        policies = (self, *(phase.policy for phase in self.phases))
        specs = [spec for p in policies for rule in (*p.rules, p.default) for spec in rule.specs.six if spec]
        formats = {spec.element for spec in specs} | {spec.scale.format for spec in specs}
        content["formats"] = sorted(repr(dataclasses.astuple(number_format)) for number_format in formats)
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()


def check_modules(policy: Policy, names: Iterable[str]) -> None:
    """Raise a PolicyError at the first required rule whose ``module`` globs fit none of a model's module ``names``.

    One glob of a list is enough: lists are how a policy fits several families of models.
    """
    known = list(names)
    for rule in policy.rules:
        globs = rule.match.module
        if rule.required and globs is not None and not any(rule.match.names(name) for name in known):
            near = [match for glob in globs for match in nearest(glob, known, count=3, cutoff=0.5)]
            hint = (
                f"the nearest are {', '.join(near)}" if near else f"the model has {', '.join(known[:5]) or 'none'}, ..."
            )
            raise rule.error(
                f"no module of the model is called {' or '.join(map(repr, globs))}; {hint}. "
                "Correct it, or say required: false"
            )
