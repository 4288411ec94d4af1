"""The formats that each group of linears of a model may take, what they use of a budget, and the policy of a choice."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from fp4graph.errors import Error
from fp4graph.lab.knapsack import Bools, Choice, Floats, solve, total, within
from fp4graph.lab.policy_writer import Treatment, written
from fp4graph.lab.quantities import bits_per_element, in_fp4
from fp4graph.lab.sensitivity import Score
from fp4graph.lab.siblings import Call, Loss, call_of, groups_of, weights_of
from fp4graph.model.explain import Explanation, explain
from fp4graph.policy import DEFAULT_INDEX, KEPT, Policy, Rule, Specs, load_policy
from fp4graph.technique.operands import Gemm, Operand

#: The format that quantizes nothing.
EXACT = "bf16"
#: The quantities that a budget bounds, by the names of search's arguments.
BUDGETS = {"bits": "bits per weight", "fp4_flops": "share of FLOPs in FP4", "complexity": "Ω", "overhead": "overhead"}
_LINEAR = ("linear", "grouped")


def bound_text(name: str, bound: float) -> str:
    """Return a budget in words."""
    return f"{BUDGETS[name]} at {'least' if name == 'fp4_flops' else 'most'} {bound:.4g}"


def use_of(name: str, value: float) -> float:
    """Return the use, to be bounded from above, that a budget's value stands for."""
    return {"fp4_flops": -value, "overhead": value - 1}.get(name, value)


def value_of(name: str, use: float) -> float:
    """Return the value of a budget that a use stands for."""
    return {"fp4_flops": -use, "overhead": use + 1}.get(name, use)


@dataclass(frozen=True)
class Format:
    """A policy that quantizes all of its sites alike.

    Attributes:
        rule: the rule that quantizes; None for a policy that quantizes nothing.
        explanation: of the model under the policy.
        modules: the modules whose sites it quantizes.
        whole: True if the three GEMMs of a site cannot differ, because a technique acts on them or an operand of the
            backward reads one of fprop.
    """

    policy: Policy
    rule: Rule | None
    explanation: Explanation
    modules: frozenset[str]
    whole: bool

    @classmethod
    def of(cls, explanation: Explanation) -> Format:
        """Return the format that a policy is, given what it does to the model.

        Raises:
            Error: it treats some of its sites differently from others, quantizes anything but linears, changes in the
                course of a training, acts on the optimizer, or fits no linear.
        """
        policy = explanation.policy
        said = f"{policy.name!r} is no uniform format: "
        if any(technique.per_model for technique in policy.used):
            raise Error(f"{said}it has techniques of the whole model; leave them out, and add them to the policy found")
        quantized = [site for site in explanation.sites if site.quantized]
        if not quantized:
            if policy.ever_quantizes:
                why = explanation.problem or "it keeps all"
                raise Error(f"format {policy.name!r} fits no site of the model: {why}; leave it out")
            return cls(policy, None, explanation, frozenset(), whole=False)
        first: Rule | None = None
        for site in quantized:
            if site.op not in _LINEAR or site.module is None:
                what = f"a {site.op} in {site.module}"
                raise Error(f"{said}it quantizes {what}, and a search chooses for linears and experts")
            rule = policy.default if site.rule_index == DEFAULT_INDEX else policy.rules[site.rule_index or 0]
            first = first or rule
            if (rule.specs, rule.techniques, rule.reuses) != (first.specs, first.techniques, first.reuses):
                raise Error(f"{said}rules {first.name!r} and {rule.name!r} quantize differently; give two policies")
        assert first is not None
        reads = any(spec is not None and spec.source == "fprop" for spec in first.specs.values())
        modules = frozenset(site.module for site in quantized if site.module is not None)
        return cls(policy, first, explanation, modules, whole=bool(first.techniques or first.reuses or reads))

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def specs(self) -> Specs:
        return KEPT if self.rule is None else self.rule.specs

    def fits(self, group: Iterable[str]) -> bool:
        """Return whether the format can be given to all modules of a group."""
        return self.rule is None or self.modules.issuperset(group)


@dataclass(frozen=True)
class Candidates:
    """The groups of linears of a model, and the options that each has.

    Attributes:
        groups: the modules of each group of siblings.
        options: ``[options, 3]``, the numbers of the formats of fprop, dgrad and wgrad.
        allowed: ``[groups, options]``, whether the formats fit the group.
        uses: ``[groups, options]``, what an option uses of a budget, by the budget's name; of Ω it is no sum.
    """

    formats: tuple[Format, ...]
    groups: tuple[tuple[str, ...], ...]
    options: Choice
    allowed: Bools
    uses: dict[str, Floats]
    call: Call = field(repr=False)

    @classmethod
    def of(cls, model: nn.Module, loss: Loss, batch: Any, formats: Sequence[Any], *, apart: bool) -> Candidates:
        """Return the candidates of ``model`` as ``loss`` calls it on ``batch``.

        Args:
            apart: whether the three GEMMs of a group may have different formats.

        Raises:
            Error: a format is no uniform policy, fits no linear, or is named twice; or nothing may stay as it is and a
                group has no format.
        """
        policies = [load_policy(each) for each in formats]
        names = [policy.name for policy in policies]
        if len(set(names)) < len(names) or len(names) < 2:
            raise Error(f"a search chooses between two or more formats of different names; got {', '.join(names)}")
        call = call_of(model, loss, batch)
        chosen = tuple(Format.of(explain(model, policy, call.args or (), call.kwargs)) for policy in policies)
        explanation, quantizable = chosen[0].explanation, frozenset[str]().union(*(each.modules for each in chosen))
        modules = dict.fromkeys(site.module for site in explanation.sites if site.module in quantizable)
        groups = groups_of(model, [module for module in modules if module is not None], call.inputs)
        fits: Bools = np.array([[each.fits(group) for each in chosen] for group in groups])
        for group, fitting in zip(groups, fits, strict=True):
            if not fitting.any():
                what = f"all of {', '.join(group)}, which go together"
                raise Error(f"no format quantizes {what}; add {EXACT!r} to formats")
        free = [number for number, each in enumerate(chosen) if not each.whole]
        uniform = {(number,) * 3 for number in range(len(chosen))}
        options = np.array(sorted(uniform.union(itertools.product(free, repeat=3) if apart else ())))
        self = cls(chosen, groups, options, np.all(fits[:, options], axis=-1), {}, call)
        self.uses.update(self._uses(dict(model.named_modules(remove_duplicate=False))))
        return self

    @property
    def explanation(self) -> Explanation:
        return self.formats[0].explanation

    @property
    def _work(self) -> Floats:
        """The FLOPs of one GEMM of each group."""
        sites = self.explanation.sites
        work = [sum(site.flops or 0 for site in sites if site.module in group) for group in self.groups]
        return np.array(work, dtype=float)

    def _uses(self, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Floats]]:
        specs = [each.specs[Operand.FPROP_WEIGHT] for each in self.formats]
        bits, numel = np.zeros((len(self.groups), len(specs))), 0
        for row, group in enumerate(self.groups):
            for weight in {id(w): w for name in group for w in weights_of(modules[name])}.values():
                bits[row] += [weight.numel() * bits_per_element(spec, weight.shape[-1]) for spec in specs]
                numel += weight.numel()
        yield "bits", bits[:, self.options[:, 0]] / numel
        fp4 = np.array([[in_fp4(each.specs, gemm) for gemm in Gemm] for each in self.formats])
        gemms = fp4[self.options, range(3)].sum(-1)
        yield "fp4_flops", -np.outer(self._work, gemms) / (3 * self.explanation.flops)

    def price(self, cost: Callable[[Policy], float]) -> None:
        """Add the use of ``overhead``: the cost of each format above 1, interpolated by FLOPs."""
        above = np.array([cost(each.policy) - 1 if each.rule is not None else 0.0 for each in self.formats])
        self.uses["overhead"] = np.outer(self._work / self._work.sum(), above[self.options].mean(-1))

    def _limits(self, most: Mapping[str, float]) -> list[tuple[Floats, float]]:
        return [(self.uses[name], bound) for name, bound in most.items() if name != "complexity"]

    def _by_complexity(self) -> list[tuple[float, Bools]]:
        """Return Ω of each set of formats with techniques, and the options that it leaves, from the least Ω."""
        costly = [number for number, each in enumerate(self.formats) if each.policy.weights]
        sets: list[tuple[float, Bools]] = []
        for kept in itertools.product((False, True), repeat=len(costly)):
            weights: Counter[str] = Counter()
            for number in itertools.compress(costly, kept):
                weights |= Counter(self.formats[number].policy.weights)  # the largest of each
            left_out = set(costly).difference(itertools.compress(costly, kept))
            sets.append((math.fsum(weights.values()), np.all(np.isin(self.options, [*left_out], invert=True), axis=1)))
        return sorted(sets, key=lambda each: each[0])

    def best(self, costs: Floats, most: Mapping[str, float]) -> Choice | None:
        """Return the choice of least costs within ``most``, the uses by name, among finite ones; None if there is none.

        Ω is no sum over groups: the problem is solved for each set of formats that it allows.
        """
        allowed, limits = self.allowed & np.isfinite(costs), self._limits(most)
        costs = np.where(allowed, costs, 0.0)
        sets = [usable for value, usable in self._by_complexity() if value <= most.get("complexity", math.inf)]
        choices = [solve(costs, allowed & usable, limits) for usable in (sets if "complexity" in most else sets[-1:])]
        return min((each for each in choices if each is not None), key=lambda each: total(costs, each), default=None)

    def _least(self, name: str, most: Mapping[str, float]) -> float | None:
        """Return the least possible use of ``name`` within ``most``; None if nothing satisfies these."""
        if name != "complexity":
            choice = self.best(self.uses[name], most)
            return None if choice is None else total(self.uses[name], choice)
        for value, _ in self._by_complexity():
            if self.best(np.zeros(self.allowed.shape), {**most, name: value}) is not None:
                return value
        return None

    def require(self, most: Mapping[str, float]) -> None:
        """Raise an Error that says the nearest feasible value unless some choice is within ``most``."""
        for name, bound in most.items():
            for others in ({}, {other: most[other] for other in most if other != name}):
                least = self._least(name, others)
                if least is not None and least > bound + 1e-9 * abs(bound):
                    raise Error(
                        f"no policy of {', '.join(each.name for each in self.formats)} has "
                        f"{bound_text(name, value_of(name, bound))}{' beside the other bounds' if others else ''}; the "
                        f"nearest is {value_of(name, least):.6g}: relax the budget, or give other formats"
                    )

    def summed(self, scores: Iterable[Score], value: Callable[[Score], float]) -> Floats:
        """Return the sum of the values of the scores of each option, ``[groups, options]``.

        Scores may be of whole groups or of single sites.
        """
        by_gemm: defaultdict[tuple[str, str], list[Score]] = defaultdict(list)
        for score in scores:
            by_gemm[score.policy, score.operands[0].partition(".")[0]].append(score)
        values = np.zeros((len(self.groups), len(self.formats), 3))
        for (column, each), (place, gemm) in itertools.product(enumerate(self.formats), enumerate(Gemm)):
            if not any(each.specs[operand] for operand in Operand if operand.gemm is gemm):
                continue
            scored = {site.removeprefix("(root)"): s for s in by_gemm[each.name, str(gemm)] for site in s.sites}
            for row, group in enumerate(self.groups):
                if not each.fits(group):
                    continue
                if missing := [module for module in group if module not in scored]:
                    raise Error(f"there is no score of {gemm} of {missing[0]} under {each.name}; measure by "
                                "('site', 'gemm')")  # fmt: skip
                values[row, column, place] = sum(map(value, {id(s): s for s in map(scored.get, group) if s}.values()))
        summed: Floats = values[:, self.options, range(3)].sum(-1)
        return summed

    def simplified(self, choice: Choice, costs: Floats, squared: Floats, most: Mapping[str, float]) -> Choice:
        """Return a choice with fewer options, within ``most``, that costs at most one standard error more.

        While that holds, all groups of one option get another's, the pair first that costs least. ``squared`` has the
        squared standard errors.
        """
        limit, limits = total(costs, choice) + math.sqrt(total(squared, choice)), self._limits(most)
        rows = np.arange(len(choice))
        while True:
            pairs = itertools.permutations(np.unique(choice), 2)
            merged = [np.where(choice == old, new, choice) for old, new in pairs]
            merged = [other for other in merged if self.allowed[rows, other].all() and within(limits, other)]
            best = min(merged, key=lambda other: (total(costs, other), tuple(other)), default=None)
            if best is None or not total(costs, best) <= limit:
                return choice
            choice = best

    def chosen(self, option: int) -> tuple[Format, Format, Format]:
        """Return the formats of fprop, dgrad and wgrad of an option."""
        fprop, dgrad, wgrad = (self.formats[number] for number in self.options[option])
        return fprop, dgrad, wgrad

    def text(self, choice: Choice, increases: Floats, name: str, description: str, header: Sequence[str]) -> str:
        """Return the policy file of a choice; ``increases`` are the predicted ones, ``[groups, options]``."""
        treated: dict[int, dict[str, float]] = {}
        for row, (group, option) in enumerate(zip(self.groups, choice, strict=True)):
            own = dict.fromkeys(group, increases[row, option] / len(group))
            treated.setdefault(option, {}).update(own)
        ops: dict[str, set[str]] = {}
        for site in self.explanation.sites:
            if site.module is not None and site.op in _LINEAR and (site.rule_index or 0) >= DEFAULT_INDEX:
                ops.setdefault(site.module, set()).add(site.op)
        treatments = [
            Treatment(_rule(*self.chosen(option)), own, f"{sum(own.values()):+.3g}") for option, own in treated.items()
        ]
        bases = {key: value for each in self.formats for key, value in each.policy.base_formats}
        return written(name, description, header, treatments, ops=ops, blocks=self.explanation.blocks, bases=bases)

    def check(self, model: nn.Module, policy: Policy, choice: Choice) -> None:
        """Raise an Error unless every operand of the model has under ``policy`` the spec that was chosen."""
        formats = {m: self.chosen(option) for group, option in zip(self.groups, choice, strict=True) for m in group}
        for number, site in enumerate(explain(model, policy, self.call.args or (), self.call.kwargs).sites):
            own = dict(zip(Gemm, formats.get(site.module or "", ()), strict=False))
            for operand in Operand:
                wanted = own[operand.gemm].explanation.sites[number].operands[operand] if own else None
                if site.operands[operand] != wanted:
                    raise Error(f"{policy.name} gives {operand} of {site.module} {site.operands[operand]} and not "
                                f"{wanted}; please report the model")  # fmt: skip


def _rule(*chosen: Format) -> Rule:
    """Return the rule, without predicates, that gives fprop, dgrad and wgrad their formats."""
    by_gemm = dict(zip(Gemm, chosen, strict=True))
    specs = Specs(tuple(by_gemm[operand.gemm].specs[operand] for operand in Operand))
    if not any(specs.values()):
        return Rule(name=EXACT, keep="high precision pays here")
    first = chosen[0]
    if first.rule is not None and all(each is first for each in chosen):
        return Rule(name=first.name, specs=specs, reuses=first.rule.reuses, techniques=first.rule.techniques)
    gemms: dict[str, list[str]] = {}
    for gemm, each in by_gemm.items():
        gemms.setdefault(each.name, []).append(str(gemm))
    return Rule(name=", ".join(f"{' and '.join(own)} {name}" for name, own in gemms.items()), specs=specs)
