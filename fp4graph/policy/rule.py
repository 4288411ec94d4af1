"""Rules of a resolved policy, and their decisions about sites."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fp4graph.errors import PolicyError
from fp4graph.numerics.spec import QuantSpec
from fp4graph.policy.document import Place
from fp4graph.policy.match import Match
from fp4graph.technique import OperandSpecs, Technique
from fp4graph.technique.operands import Operand
from fp4graph.technique.site import SiteView


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
#: Producers that techniques distinguish, whether or not a rule names them.
DISTINGUISHED_PRODUCERS = ("swiglu",)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Selects sites, and either quantizes them or keeps them in high precision.

    Attributes:
        name: the rule's name in reports.
        match: the predicates on a site.
        keep: the reason why the sites stay in high precision, or None if they are quantized.
        specs: the specs of the six operands; all None for a rule that keeps.
        reuses: the operands in high precision that read the dequantized fprop operand instead of the original.
        techniques: the policy's techniques, then the rule's, which replace the policy's techniques of the same name.
        required: whether a model in which the rule matches no site is an error.
        file, line: where the rule was read from, or None.
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
        """Return whether the rule decides about operations of kind ``op``. Without ``op`` in its match, a rule that
        quantizes decides about linear, matmul and grouped, and a rule that keeps decides about all kinds."""
        if self.match.op is None:
            return not self.quantizes or op in ("linear", "matmul", "grouped")
        return op in self.match.op

    def admits(self, role: str | None) -> bool:
        """Return whether the rule may decide about sites of ``role``. To quantize a router or an adapter, a rule must
        name its role; for adapters, globs that name adapters suffice."""
        if self.match.role is not None:
            return role in self.match.role
        if role == "adapter" and self.match.names_adapters:
            return True
        return not self.quantizes or role not in NAMED_ROLES

    def error(self, message: str) -> PolicyError:
        """Return an error of this rule, with its place and name."""
        return Place(self.file, self.line).error(f"rule {self.name!r}: {message}")


#: The default rule of a policy that writes no default.
DEFAULT = Rule(name="default", keep="no rule matches", required=False)
#: The roles whose sites are quantized only by a rule that names the role.
NAMED_ROLES = frozenset({"adapter", "router"})
#: The position of the default, which follows all rules of the policy.
DEFAULT_INDEX = -1
#: Each role's closing rule and its position. For sites of that role, the closing rule takes the place of the default.
CLOSING: Mapping[str, tuple[int, Rule]] = {
    role: (index, Rule(name=f"{role}s", keep=f"{why}; a rule with 'role: {role}' would quantize it", required=False))
    for index, role, why in (
        (-2, "adapter", "an adapter is a small part of the work and the only part that trains"),
        (-3, "router", "a router chooses experts, and errors in its output send tokens to other experts"),
        (-4, "head", "the head computes the model's output, and recipes keep it"),
    )
}


@dataclass(frozen=True)
class Decision:
    """A policy's decision about one site: the rule and its position in the policy. The default has position -1, and
    the closing rules for roles have lower positions."""

    rule: Rule
    index: int


def plans(technique: Technique | type[Technique]) -> bool:
    """Return whether a technique overrides :meth:`Technique.plan`."""
    cls = technique if isinstance(technique, type) else type(technique)
    return cls.plan is not Technique.plan


def checked_plan(technique: Technique, site: SiteView, specs: OperandSpecs) -> OperandSpecs:
    """Return the result of :meth:`Technique.plan`; raise TypeError unless it maps all six operands to specs or None."""
    result = technique.plan(site, specs)
    if result is None:
        return specs
    if not isinstance(result, Mapping):
        raise TypeError(f"plan() must return a mapping of operands to specs; got {result!r}")
    if set(result) != set(Operand):
        wrong = sorted({str(key) for key in {*result} ^ {*Operand}})
        raise TypeError(f"plan() must return all six operands and nothing else; wrong or missing: {', '.join(wrong)}")
    for operand, spec in result.items():
        if not isinstance(spec, QuantSpec | None):
            raise TypeError(f"plan() must return a QuantSpec or None for each operand; got {spec!r} for {operand}")
    return result


def plan_specs(
    techniques: Iterable[Technique],
    site: SiteView,
    specs: OperandSpecs,
    plan: Callable[[Technique, SiteView, OperandSpecs], OperandSpecs] = checked_plan,
) -> OperandSpecs:
    """Return the specs after each of ``techniques``, in order, has planned ``site``.

    ``plan`` calls one technique; a caller may pass a function that names the technique in errors.
    """
    for technique in techniques:
        specs = plan(technique, site, specs)
    return specs
