"""Rules of a resolved policy, and what they decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fp4graph.errors import PolicyError
from fp4graph.numerics.spec import QuantSpec
from fp4graph.policy.document import Place
from fp4graph.policy.match import Match
from fp4graph.technique import OperandSpecs, Technique, checked_plan
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
#: Producers that some technique distinguishes, whatever the rules say.
DISTINGUISHED_PRODUCERS = ("swiglu",)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The sites that match, and what happens to them.

    Attributes:
        name: the rule's name in reports.
        match: the predicates on a site.
        keep: why the sites stay in high precision, or None where they are quantized.
        specs: the specs of the six operands; all None for a rule that keeps.
        reuses: the operands in high precision that read the dequantized fprop operand instead of the original.
        techniques: the policy's and then the rule's own; one of the rule's takes the place of its namesake.
        required: whether it is an error that the rule matches no site.
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
        """Return whether the rule decides about operations of kind ``op``; one that keeps and names none, about all."""
        if self.match.op is None:
            return not self.quantizes or op in ("linear", "matmul", "grouped")
        return op in self.match.op

    def holds_at(self, site: SiteView) -> bool:
        """Return whether the predicates on the place hold for ``site``; only a rule that says so quantizes adapters."""
        said = not site.adapter or not self.quantizes or bool(self.match.adapter)
        return said and self.match.holds_at(site)

    def error(self, message: str) -> PolicyError:
        """Return an error of this rule, with its place and name."""
        return Place(self.file, self.line).error(f"rule {self.name!r}: {message}")


#: The default of a policy that names none.
DEFAULT = Rule(name="default", keep="no rule matches", required=False)
#: The last rule of every policy for adapters, in the place of the default.
ADAPTERS = Rule(
    name="adapters",
    keep="an adapter is little of the work and all that trains; a rule with 'adapter: true' would quantize it",
    required=False,
)
#: The positions of both rules, after the last of the policy's own.
DEFAULT_INDEX, ADAPTERS_INDEX = -1, -2


@dataclass(frozen=True)
class Decision:
    """A policy's decision about one site: the rule, and its position in the policy; -1 is the default, -2 the rule for
    adapters."""

    rule: Rule
    index: int


def plan_specs(
    techniques: Iterable[Technique],
    site: SiteView,
    specs: OperandSpecs,
    plan: Callable[[Technique, SiteView, OperandSpecs], OperandSpecs] = checked_plan,
) -> OperandSpecs:
    """Return the specs after each of ``techniques``, in order, has planned ``site``.

    ``plan`` calls one technique, for a caller that names the technique in errors.
    """
    for technique in techniques:
        specs = plan(technique, site, specs)
    return specs
