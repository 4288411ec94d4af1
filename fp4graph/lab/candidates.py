"""The formats that each group of linears may take, and the cheapest choice of formats within a budget.

The choice is a multiple-choice knapsack, solved exactly by HiGHS.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from fp4graph.errors import Error, needs
from fp4graph.graph.site import Site
from fp4graph.lab.linears import Call, Loss, bits_per_element, call_of, groups_of, in_fp4, weights_of
from fp4graph.lab.policy_writer import Treatment, written
from fp4graph.lab.sensitivity import Score
from fp4graph.model.explain import explain
from fp4graph.model.explanation import Explanation
from fp4graph.numerics.spec import QuantSpec
from fp4graph.policy import DEFAULT_INDEX, Policy, Rule, Specs, load_policy
from fp4graph.technique.operands import GROUPS, Gemm, Operand

Floats = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Choice = np.ndarray[Any, np.dtype[np.int64]]
#: The pair ``use``, ``[items, options]``, and ``most`` of a bound Σᵢ use[i, option of i] <= most.
Limit = tuple[Floats, float]
#: Rounding may push a sum over its limit by this share of the limit.
_ROUNDING = 1e-9
#: The format that quantizes nothing.
EXACT = "bf16"
#: The bounded quantities, by search's arguments. ``fp4_flops`` is bounded from below, so its uses are negative.
BUDGETS = {"bits": "bits per weight", "fp4_flops": "share of FLOPs in FP4", "complexity": "Ω", "overhead": "overhead"}
_LINEAR = ("linear", "grouped")
_MEASURE = "measure by ('site', 'gemm')"


def total(table: Floats, choice: Choice) -> float:
    """Return Σᵢ table[i, option of i]."""
    return float(table[np.arange(len(choice)), choice].sum())


def within(limits: Sequence[Limit], choice: Choice) -> bool:
    return all(total(use, choice) <= most + _ROUNDING * abs(most) for use, most in limits)


def solve(costs: Floats, allowed: Bools, limits: Sequence[Limit] = ()) -> Choice | None:
    """Return the cheapest option of each item within ``limits``; None if nothing satisfies them.

    The variables are x[i, o] in {0, 1}::

        minimize  Σ costs·x   so that   Σₒ x[i, o] = 1,   Σ use·x <= most

    ``allowed`` tells which options an item has; ``costs`` are finite there. Both are ``[items, options]``.
    """
    needs("scipy", "the search is solved by SciPy", "analysis")
    from scipy import optimize, sparse

    items, options = allowed.shape
    objective = np.where(allowed, costs, 0.0).ravel()
    rows = [np.where(allowed, use, 0.0).ravel() for use, _ in limits]
    sizes = [np.abs(row).max() or 1.0 for row in rows]
    stricter = np.array([most + _ROUNDING * abs(most) for _, most in limits])
    one_each = optimize.LinearConstraint(sparse.kron(sparse.eye(items), np.ones((1, options))), 1, 1)
    while True:
        bounds = zip(rows, sizes, stricter, strict=True)
        solution = optimize.milp(
            objective * (1e3 / (np.abs(objective).max() or 1.0)),  # makes HiGHS's gap of 1e-6 negligible
            integrality=np.ones(items * options),
            bounds=optimize.Bounds(0, allowed.ravel().astype(float)),
            constraints=[one_each, *(optimize.LinearConstraint(row / s, -np.inf, most / s) for row, s, most in bounds)],
            options={"mip_rel_gap": 0.0},
        )
        if solution.x is None:
            return None
        choice: Choice = solution.x.reshape(items, options).argmax(1)
        if within(limits, choice):
            return choice
        # HiGHS satisfies a bound only to 1e-6. Tighten each bound that it exceeded.
        excess = np.array([total(use, choice) for use, _ in limits]) - stricter
        stricter = stricter - 2 * excess.clip(min=0)


def bound_text(name: str, bound: float) -> str:
    return f"{BUDGETS[name]} at {'least' if name == 'fp4_flops' else 'most'} {abs(bound):.4g}"


@dataclass(frozen=True)
class Format:
    """A policy that quantizes all of its sites alike."""

    policy: Policy
    rule: Rule  # the rule that quantizes; the default rule if the policy quantizes nothing
    explanation: Explanation  # of the model under the policy
    modules: frozenset[str]  # the modules of the sites that the policy quantizes
    joint: bool  # a site's GEMMs share the format: it has techniques, or its backward reads operands of fprop

    @classmethod
    def of(cls, explanation: Explanation) -> Format:
        """Return the format of an explained policy; raise an Error if the policy quantizes sites differently."""
        policy = explanation.policy
        problem = f"{policy.name!r} is not a uniform format: "
        if any(technique.per_model for technique in policy.used):
            raise Error(f"{problem}it has techniques of the whole model; leave them out, and add them to the result")
        quantized = [site for site in explanation.sites if site.quantized]
        if not quantized and policy.ever_quantizes:
            why = explanation.problem or "it keeps every site"
            raise Error(f"format {policy.name!r} fits no site of the model: {why}; leave it out")
        first = policy.default
        for number, site in enumerate(quantized):
            if site.op not in _LINEAR or site.module is None:
                what = f"a {site.op} in {site.module}"
                raise Error(f"{problem}it quantizes {what}; keep it, because a search covers only linears and experts")
            rule = policy.default if site.rule_index == DEFAULT_INDEX else policy.rules[site.rule_index or 0]
            first = first if number else rule
            if (rule.specs, rule.techniques, rule.reuses) != (first.specs, first.techniques, first.reuses):
                raise Error(f"{problem}rules {first.name!r} and {rule.name!r} quantize differently; give two policies")
        modules = frozenset(site.module for site in quantized if site.module is not None)
        reads = any(spec and spec.source == "fprop" for spec in first.specs.values())
        return cls(policy, first, explanation, modules, joint=bool(first.techniques or first.reuses or reads))

    @property
    def name(self) -> str:
        return self.policy.name

    def specs_at(self, site: Site) -> Mapping[Operand, QuantSpec | None]:
        """Return the specs under the format of a site that another policy has; none if the format keeps it whole."""
        place = site.module, site.op, site.occurrence
        sites = self.explanation.sites
        return next((each.operands for each in sites if (each.module, each.op, each.occurrence) == place), {})

    def fits(self, group: Iterable[str]) -> bool:
        """Return whether every module of a group can take the format."""
        return not self.rule.quantizes or self.modules.issuperset(group)


@dataclass(frozen=True)
class Candidates:
    """The groups of linears of a model, and the options of each group."""

    formats: tuple[Format, ...]
    groups: tuple[tuple[str, ...], ...]  # the modules of each group of siblings
    options: Choice  # [options, 3], the numbers of the formats of fprop, dgrad and wgrad
    allowed: Bools  # [groups, options], whether the formats fit the group
    uses: dict[str, Floats]  # [groups, options], the use of each budget that adds up over groups; Ω does not
    call: Call = field(repr=False)

    @classmethod
    def of(cls, model: nn.Module, loss: Loss, batch: Any, formats: Sequence[Any], *, apart: bool) -> Candidates:
        """Return the candidates of ``model`` as ``loss`` calls it on ``batch``.

        ``apart`` lets the three GEMMs of a group have different formats. Raises an Error if a format is not a uniform
        policy, fits no linear, or is named twice, or if no format fits a group.
        """
        policies = [load_policy(each) for each in formats]
        names = [policy.name for policy in policies]
        if len(set(names)) < len(names) or len(names) < 2:
            raise Error(f"a search chooses between two or more formats of different names; got {', '.join(names)}")
        if phased := next((policy.name for policy in policies if policy.phases), None):
            raise Error(f"{phased!r} is not a uniform format: it has phases; give the policy of one phase")
        call = call_of(model, loss, batch)
        chosen = tuple(Format.of(explain(model, policy, call.args, call.kwargs)) for policy in policies)
        quantizable = frozenset[str]().union(*(each.modules for each in chosen))
        sites = dict.fromkeys(site.module for site in chosen[0].explanation.sites if site.module in quantizable)
        groups = groups_of(model, [module for module in sites if module is not None], call.inputs)
        fits: Bools = np.array([[each.fits(group) for each in chosen] for group in groups])
        for group, fitting in zip(groups, fits, strict=True):
            if not fitting.any():
                what = f"all of {', '.join(group)}, which must share a format"
                raise Error(f"no format quantizes {what}; add {EXACT!r} to formats")
        free = [number for number, each in enumerate(chosen) if not each.joint]
        uniform = {(number,) * 3 for number in range(len(chosen))}
        options = np.array(sorted(uniform.union(itertools.product(free, repeat=3) if apart else ())))
        self = cls(chosen, groups, options, np.all(fits[:, options], axis=-1), {}, call)
        modules = dict(model.named_modules(remove_duplicate=False))
        weights = [{id(w): w for name in group for w in weights_of(modules[name])}.values() for group in groups]
        specs = [each.rule.specs[Operand.FPROP_WEIGHT] for each in chosen]
        bits: Floats = np.array([[sum(w.numel() * bits_per_element(spec, w.shape[-1]) for w in group) for spec in specs]
                                 for group in weights])  # fmt: skip
        fp4 = np.array([[in_fp4(each.rule.specs, gemm) for gemm in Gemm] for each in chosen])
        self.uses["bits"] = bits[:, options[:, 0]] / sum(w.numel() for group in weights for w in group)
        gemms = fp4[options, range(3)].sum(-1)
        self.uses["fp4_flops"] = -np.outer(self._work, gemms) / (3 * self.explanation.flops)
        return self

    @property
    def explanation(self) -> Explanation:
        """Of the format that quantizes most modules: a format that keeps a bilinear or the like leaves it whole."""
        return max(self.formats, key=lambda each: len(each.modules)).explanation

    @property
    def _work(self) -> Floats:
        """The FLOPs of one GEMM of each group."""
        sites = [site for site in self.explanation.sites if site.op in _LINEAR]  # without attention's products
        return np.array([sum(float(s.flops or 0) for s in sites if s.module in group) for group in self.groups])

    def price(self, cost: Callable[[Policy], float]) -> None:
        """Set the uses of ``overhead``: the costs of the formats, interpolated by FLOPs."""
        costs = np.array([cost(each.policy) if each.rule.quantizes else 1.0 for each in self.formats])
        self.uses["overhead"] = np.outer(self._work / self._work.sum(), costs[self.options].mean(-1))

    def _limits(self, most: Mapping[str, float]) -> list[Limit]:
        return [(self.uses[name], bound) for name, bound in most.items() if name != "complexity"]

    def _by_complexity(self) -> list[tuple[float, Bools]]:
        """Return Ω and the usable options of each set of formats with techniques, in ascending order of Ω."""
        costly = [number for number, each in enumerate(self.formats) if each.policy.weights]
        sets: list[tuple[float, Bools]] = []
        for kept in itertools.product((False, True), repeat=len(costly)):
            used, weights = set(itertools.compress(costly, kept)), Counter[str]()
            for number in used:
                weights |= Counter(self.formats[number].policy.weights)  # maxima
            usable: Bools = np.all(~np.isin(self.options, [*set(costly) - used]), axis=1)
            sets.append((math.fsum(weights.values()), usable))
        return sorted(sets, key=lambda each: each[0])

    def best(self, costs: Floats, most: Mapping[str, float]) -> Choice | None:
        """Return the cheapest choice within ``most``, the upper bounds by name; None if none has a finite cost.

        Ω does not add up over groups, so the problem is solved for each set of formats whose Ω is within its bound.
        """
        allowed, limits = self.allowed & np.isfinite(costs), self._limits(most)
        costs = np.where(allowed, costs, 0.0)
        sets = [usable for value, usable in self._by_complexity() if value <= most.get("complexity", math.inf)]
        choices = [solve(costs, allowed & usable, limits) for usable in (sets if "complexity" in most else sets[-1:])]
        return min((each for each in choices if each is not None), key=lambda each: total(costs, each), default=None)

    def _least(self, name: str, most: Mapping[str, float]) -> float:
        """Return the least possible use of ``name`` within ``most``; infinite if no choice is within ``most``."""
        if name == "complexity":
            free = np.zeros(self.allowed.shape)
            values = (value for value, _ in self._by_complexity())
            return next((value for value in values if self.best(free, {**most, name: value}) is not None), math.inf)
        choice = self.best(self.uses[name], most)
        return math.inf if choice is None else total(self.uses[name], choice)

    def require(self, most: Mapping[str, float]) -> None:
        """Raise an Error with the nearest feasible value if no choice is within ``most``."""
        for name, bound in most.items():
            for others in ({}, {other: most[other] for other in most if other != name}):
                least = self._least(name, others)
                if bound + _ROUNDING * abs(bound) < least < math.inf:
                    raise Error(
                        f"no policy of {', '.join(each.name for each in self.formats)} has {bound_text(name, bound)}"
                        f"{' beside the other bounds' if others else ''}; the nearest is {abs(least):.6g}: relax the "
                        "budget, or give other formats"
                    )

    def summed(self, scores: Iterable[Score], value: Callable[[Score], float]) -> Floats:
        """Add up ``value`` over the three GEMMs of each option in each group; return ``[groups, options]``.

        A group has one score for all of its modules, or one for each.
        """
        scored: dict[tuple[str, str, str], Score] = {}
        for score in scores:
            for site in score.sites:
                key = score.policy, score.operands[0].partition(".")[0], site.removeprefix("(root)")
                if scored.setdefault(key, score) != score:
                    raise Error(f"there are two scores of {key[1]} of {site} under {key[0]}; {_MEASURE}")
        values = np.zeros((len(self.groups), len(self.formats), 3))
        for (row, group), (column, each) in itertools.product(enumerate(self.groups), enumerate(self.formats)):
            for place, gemm in enumerate(Gemm):
                if not each.fits(group) or not any(each.rule.specs[operand] for operand in GROUPS[gemm]):
                    continue
                of_group = [scored.get((each.name, str(gemm), module)) for module in group]
                if None in of_group:
                    raise Error(
                        f"the scores lack {gemm} of {group[of_group.index(None)]} under {each.name}; {_MEASURE}"
                    )
                of_gemm = [score for score in dict.fromkeys(of_group) if score]
                if wide := next((s for s in of_gemm if not {*group, "(root)"}.issuperset(s.sites)), None):
                    raise Error(f"the score of {wide.unit!r} is that of {len(wide.sites)} modules; {_MEASURE}")
                values[row, column, place] = sum(map(value, of_gemm))
        summed: Floats = values[:, self.options, range(3)].sum(-1)
        return summed

    def simplified(self, choice: Choice, costs: Floats, squared: Floats, most: Mapping[str, float]) -> Choice:
        """Return a choice with fewer options, within ``most``, that costs at most one standard error more.

        Repeatedly moves all groups of one option to another option, by the move that costs least, while both conditions
        hold. ``squared`` has the squared standard errors.
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
        """Return the policy file of a choice; ``increases`` are the predicted loss increases, ``[groups, options]``."""
        treated: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for row, (group, option) in enumerate(zip(self.groups, choice, strict=True)):
            treated[option] |= dict.fromkeys(group, increases[row, option] / len(group))
        ops: defaultdict[str, set[str]] = defaultdict(set)
        for site in self.explanation.sites:
            if site.module is not None and site.op in _LINEAR and (site.rule_index or 0) >= DEFAULT_INDEX:
                ops[site.module].add(site.op)
        treatments = [Treatment(_rule(*self.chosen(option)), modules) for option, modules in treated.items()]
        bases = {key: value for each in self.formats for key, value in each.policy.base_formats}
        return written(name, description, header, treatments, ops=ops, blocks=self.explanation.blocks, bases=bases)

    def check(self, model: nn.Module, policy: Policy, choice: Choice) -> None:
        """Raise an Error if ``policy`` gives an operand of the model another spec than ``choice`` does."""
        formats = {m: self.chosen(option) for group, option in zip(self.groups, choice, strict=True) for m in group}
        for site in explain(model, policy, self.call.args, self.call.kwargs).sites:
            chosen = dict(zip(Gemm, formats.get(site.module or "", ()), strict=False))
            for operand in Operand:
                wanted = chosen[operand.gemm].specs_at(site).get(operand) if chosen else None
                if site.operands[operand] != wanted:
                    raise Error(f"{policy.name} gives {operand} of {site.module} {site.operands[operand]} instead of "
                                f"{wanted}; please report the model")  # fmt: skip


def _rule(*chosen: Format) -> Rule:
    """Return the rule, without predicates, that gives fprop, dgrad and wgrad their formats."""
    by_gemm = dict(zip(Gemm, chosen, strict=True))
    specs = Specs(tuple(by_gemm[operand.gemm].rule.specs[operand] for operand in Operand))
    if not any(specs.values()):
        return Rule(name=EXACT, keep="high precision pays here")
    first = chosen[0]
    if all(each is first for each in chosen):
        return Rule(name=first.name, specs=specs, reuses=first.rule.reuses, techniques=first.rule.techniques)
    gemms: dict[str, list[str]] = {}
    for gemm, each in by_gemm.items():
        gemms.setdefault(each.name, []).append(str(gemm))
    return Rule(name=", ".join(f"{' and '.join(names)} {name}" for name, names in gemms.items()), specs=specs)
