"""A policy under a budget: the format of each GEMM of each group of linears that the loss suffers least from."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from filelock import FileLock, Timeout
from rich.table import Table
from torch import nn
from torch.utils import _pytree as pytree

from fp4graph.errors import Error
from fp4graph.files import write
from fp4graph.lab import jsonlines
from fp4graph.lab.knapsack import Choice, Floats, Knapsack, Limit
from fp4graph.lab.policy_writer import Treatment, written
from fp4graph.lab.runs.run import finite
from fp4graph.lab.sensitivity import Score, sensitivity
from fp4graph.lab.siblings import Call, Loss, call_of, groups_of, weights_of
from fp4graph.model.api import apply
from fp4graph.model.explain import Explanation, explain
from fp4graph.numerics.spec import QuantSpec
from fp4graph.policy import DEFAULT_INDEX, Policy, Rule, Specs, load_policy
from fp4graph.technique.operands import Gemm, Operand
from fp4graph.training import prepare_optimizer

#: The format that quantizes nothing.
EXACT = "bf16"
FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8-block", EXACT)
_BITS_EXACT = 16.0
#: The quantities that a budget bounds, by the names of search's arguments, and those that it bounds from below.
BUDGETS = {"bits": "bits per weight", "fp4_flops": "share of FLOPs in FP4", "complexity": "Ω", "overhead": "overhead"}
FROM_BELOW = ("fp4_flops",)
#: The file of scores in a search's folder, its lock, and the format of its first line.
SCORES, LOCK, FILE_FORMAT = "scores.jsonl", "search.lock", "fp4graph.search"
#: How often a policy that exceeds a measured overhead is searched again under a smaller bound.
_ROUNDS = 6


def bits_per_element(spec: QuantSpec | None, row: int) -> float:
    """Return the stored bits of one element and its share of the block's scale; 16 in high precision.

    A scale is stored in whole bytes, as FP32 in four. ``row`` is the length of a line, for blocks that are lines; of a
    scale per tensor nothing counts.
    """
    if spec is None:
        return _BITS_EXACT
    sizes = {"row": (row,), "tensor": (math.inf,)}
    elements = spec.block if isinstance(spec.block, tuple) else sizes.get(str(spec.block), (spec.block,))
    return spec.element.code_bits + 8 * math.ceil(spec.scale.format.code_bits / 8) / math.prod(map(float, elements))


@dataclass(frozen=True)
class Format:
    """A policy that quantizes all of its sites alike.

    Attributes:
        rule: the rule that quantizes; None for a policy that quantizes nothing.
        modules: the modules whose sites it quantizes.
        whole: True if the three GEMMs of a site cannot differ, because a technique acts on them or an operand of the
            backward reads one of fprop.
    """

    policy: Policy
    rule: Rule | None
    modules: frozenset[str]

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def whole(self) -> bool:
        specs = self.rule.specs.values() if self.rule is not None else ()
        reads = any(spec is not None and spec.source == "fprop" for spec in specs)
        return self.rule is not None and bool(self.rule.techniques or self.rule.reuses or reads)

    def fits(self, group: Iterable[str]) -> bool:
        """Return whether the format can be given to all modules of a group."""
        return self.rule is None or self.modules.issuperset(group)

    def spec(self, operand: Operand) -> QuantSpec | None:
        return None if self.rule is None else self.rule.specs[operand]

    def in_fp4(self, gemm: Gemm) -> bool:
        """Return whether both operands of a GEMM have elements of four bits."""
        specs = [self.spec(operand) for operand in Operand if operand.gemm is gemm]
        return all(spec is not None and spec.element.code_bits <= 4 for spec in specs)


@dataclass(frozen=True)
class Option:
    """What was chosen for one group of siblings.

    Attributes:
        formats: the names of the formats of fprop, dgrad and wgrad.
        increase: the predicted loss increase, the sum of the scores.
    """

    modules: tuple[str, ...]
    formats: tuple[str, str, str]
    increase: float


@dataclass(frozen=True)
class Budget:
    """A bound, and the value that the policy reaches; ``name`` is a key of :data:`BUDGETS`."""

    name: str
    bound: float
    reached: float

    def __str__(self) -> str:
        return f"{bound_text(self.name, self.bound)}, reached {self.reached:.4g}"


def bound_text(name: str, bound: float) -> str:
    """Return a budget in words."""
    return f"{BUDGETS[name]} at {'least' if name in FROM_BELOW else 'most'} {bound:.4g}"


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
        policy: the policy, loaded from ``text``.
        text: the policy file.
        choices: an option for each group, in the order of the model.
        predicted: the predicted loss increase, the sum of those of the choices.
        measured: the measured increases of fprop, dgrad and wgrad, each of all sites together, added.
        budgets: each bound with the value reached.
        scores: what was measured.
    """

    policy: Policy
    text: str
    choices: tuple[Option, ...]
    predicted: float
    measured: float
    budgets: tuple[Budget, ...]
    scores: tuple[Score, ...]

    def save(self, file: str | PathLike[str]) -> None:
        """Write the policy file."""
        write(Path(file), self.text)

    def table(self) -> Table:
        """Return the choices as a table for a terminal."""
        table = Table(title="; ".join(map(str, self.budgets)), title_justify="left")
        for column in ("modules", "fprop", "dgrad", "wgrad", "increase"):
            table.add_column(column, overflow="fold", justify="right" if column == "increase" else "left")
        for each in self.choices:
            table.add_row("\n".join(each.modules), *each.formats, f"{each.increase:+.3g}")
        table.caption = f"predicted loss increase {self.predicted:+.4g}, measured together {self.measured:+.4g}"
        return table


@dataclass(frozen=True)
class Candidates:
    """The groups of linears of a model, and the formats that each may take.

    An *item* is what a format is chosen for: a GEMM of a group, or all three where GEMMs are not chosen apart.

    Attributes:
        formats: each with an explanation of the model under it.
        groups: the modules of each group of siblings.
        items: the number of a group, and GEMMs.
    """

    formats: tuple[Format, ...]
    explanations: tuple[Explanation, ...]
    groups: tuple[tuple[str, ...], ...]
    items: tuple[tuple[int, tuple[Gemm, ...]], ...]
    weights: Mapping[int, Mapping[int, nn.Parameter]]
    call: Call

    @classmethod
    def of(cls, model: nn.Module, loss: Loss, batch: Any, formats: Sequence[Any], *, apart: bool) -> Candidates:
        """Return the candidates of ``model`` as ``loss`` calls it on ``batch``.

        Raises:
            Error: a format is no uniform policy, fits no linear, or is named twice; or nothing may stay as it is and a
                group has no format.
        """
        policies = [load_policy(each) for each in formats]
        names = [policy.name for policy in policies]
        if len(set(names)) < len(names) or len(names) < 2:
            raise Error(f"a search chooses between two or more formats of different names; got {', '.join(names)}")
        call = call_of(model, loss, batch)
        explanations = tuple(explain(model, policy, call.args, call.kwargs) for policy in policies)
        chosen = tuple(map(_format, explanations))
        quantizable = set().union(*(each.modules for each in chosen))
        modules = tuple(dict.fromkeys(site.module for site in explanations[0].sites if site.module in quantizable))
        groups = groups_of(model, modules, call.inputs)
        for group in groups:
            if not any(each.fits(group) for each in chosen):
                raise Error(
                    f"no format quantizes all of {', '.join(group)}, which go together; add {EXACT!r} to formats"
                )
        gemms = [(gemm,) for gemm in Gemm] if apart else [tuple(Gemm)]
        items = tuple((number, own) for number in range(len(groups)) for own in gemms)
        named = dict(model.named_modules(remove_duplicate=False))
        weights = {
            number: {id(weight): weight for module in group for weight in weights_of(named[module])}
            for number, group in enumerate(groups)
        }
        return cls(chosen, explanations, groups, items, weights, call)

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.formats]

    def flops(self, number: int) -> int:
        """Return the FLOPs of one GEMM of a group."""
        return sum(site.flops or 0 for site in self.explanations[0].sites if site.module in self.groups[number])

    def limits(self, bounds: Mapping[str, float], cost: Callable[[Policy], float] | None) -> dict[str, Limit]:
        """Return the limit of each bound. A bound from below is one of the negated use from above."""
        shape = len(self.items), len(self.formats)
        limits = {}
        if "bits" in bounds:
            use = np.zeros(shape)
            total = sum(weight.numel() for own in self.weights.values() for weight in own.values())
            for item, (number, gemms) in enumerate(self.items):
                if Gemm.FPROP in gemms:
                    for column, each in enumerate(self.formats):
                        spec = each.spec(Operand.FPROP_WEIGHT)
                        stored = (
                            w.numel() * bits_per_element(spec, w.shape[-1]) for w in self.weights[number].values()
                        )
                        use[item, column] = sum(stored) / total
            limits["bits"] = Limit(use, bounds["bits"])
        work = np.array([len(gemms) * self.flops(number) for number, gemms in self.items], dtype=float)
        if "fp4_flops" in bounds:
            shares = np.array(
                [[np.mean([f.in_fp4(g) for g in gemms]) for f in self.formats] for _, gemms in self.items]
            )
            whole = 3 * self.explanations[0].flops
            limits["fp4_flops"] = Limit(-shares * work[:, None] / whole, -bounds["fp4_flops"])
        if "complexity" in bounds:
            limits["complexity"] = Limit(np.zeros(shape), bounds["complexity"], self._complexities)
        if "overhead" in bounds and cost is not None:
            costs = np.array([cost(each.policy) - 1 if each.rule is not None else 0.0 for each in self.formats])
            limits["overhead"] = Limit(work[:, None] / work.sum() * costs, bounds["overhead"] - 1)
        return limits

    @property
    def _techniques(self) -> list[str]:
        return sorted({name for each in self.formats for name in each.policy.weights})

    @property
    def _complexities(self) -> Floats:
        """The weight of each technique, the largest of all formats."""
        return np.array([max(f.policy.weights.get(name, 0.0) for f in self.formats) for name in self._techniques])

    def knapsack(self, finite_costs: Any = True) -> Knapsack:
        """Return the problem of choosing a format for each item, among those whose costs are finite."""
        fits = np.array([[each.fits(self.groups[number]) for each in self.formats] for number, _ in self.items])
        needs = np.array([[name in f.policy.weights for name in self._techniques] for f in self.formats], dtype=bool)
        whole = [
            (column, [item for item, (own, _) in enumerate(self.items) if own == number])
            for column, each in enumerate(self.formats)
            for number in range(len(self.groups) if each.whole else 0)
        ]
        return Knapsack(fits & finite_costs, needs.reshape(len(self.formats), -1), whole)

    def require(self, limits: Mapping[str, Limit]) -> None:
        """Raise an Error that says the nearest feasible value unless some choice satisfies ``limits``."""
        knapsack = self.knapsack()
        for name, limit in limits.items():
            for others in ([], [other for other in limits.values() if other is not limit]):
                least = knapsack.least(limit, others)
                if least is not None and least > limit.most + 1e-9 * abs(limit.most):
                    raise Error(
                        f"no policy of {', '.join(self.names)} has {bound_text(name, value_of(name, limit.most))}"
                        f"{' beside the other bounds' if others else ''}; the nearest is "
                        f"{value_of(name, least):.6g}: relax the budget, or give other formats"
                    )

    def costs(self, scores: Iterable[Score], caution: float) -> Floats:
        """Return the cost of each item under each format: max(0, increase) + caution · error, summed over its sites."""
        return self._summed(scores, lambda s: max(s.increase, 0.0) + caution * float(np.nan_to_num(s.error)))

    def predictions(self, scores: Iterable[Score]) -> Floats:
        """Return the loss increase of each item under each format, infinite where a score is."""
        return self._summed(scores, lambda score: score.increase)

    def errors(self, scores: Iterable[Score]) -> Floats:
        """Return the squared standard error of each item under each format, zero where it is unknown."""
        return self._summed(scores, lambda score: float(np.nan_to_num(score.error)) ** 2)

    def _summed(self, scores: Iterable[Score], value: Callable[[Score], float]) -> Floats:
        table = {
            (s.policy, site.removeprefix("(root)"), s.operands[0].split(".")[0]): s for s in scores for site in s.sites
        }
        costs = np.zeros((len(self.items), len(self.formats)))
        for item, (number, gemms) in enumerate(self.items):
            for column, each in enumerate(self.formats):
                for module in self.groups[number] if each.rule is not None and each.fits(self.groups[number]) else ():
                    for gemm in gemms:
                        if any(each.spec(operand) for operand in Operand if operand.gemm is gemm):
                            score = table.get((each.name, module, str(gemm)))
                            if score is None:
                                raise Error(f"there is no score of {gemm} of {module} under {each.name}; measure by "
                                            "('site', 'gemm')")  # fmt: skip
                            costs[item, column] += value(score)
        return costs

    def simplified(
        self, knapsack: Knapsack, choice: Choice, costs: Floats, squared: Floats, limits: Sequence[Limit]
    ) -> Choice:
        """Return a choice with fewer treatments, within ``limits``, that costs at most one standard error more.

        While that holds, all groups of one treatment get another's, the pair first that costs least.
        """
        rows = np.arange(len(choice))
        most = costs[rows, choice].sum() + math.sqrt(squared[rows, choice].sum())
        per_group = len(self.items) // len(self.groups)
        while True:
            table = choice.reshape(len(self.groups), per_group)
            treatments = np.unique(table, axis=0)
            merged = []
            for old, new in itertools.permutations(treatments, 2):
                other = np.where((table == old).all(1)[:, None], new, table).ravel()
                if knapsack.allowed[rows, other].all() and all(
                    knapsack.used(each, other) <= each.most for each in limits
                ):
                    merged.append((costs[rows, other].sum(), tuple(other)))
            least, best = min(merged, default=(math.inf, ()))
            if not least <= most:
                return choice
            choice = np.array(best)

    def chosen(self, choice: Choice) -> list[tuple[Format, Format, Format]]:
        """Return the formats of fprop, dgrad and wgrad of each group."""
        by_gemm: list[dict[Gemm, Format]] = [{} for _ in self.groups]
        for (number, gemms), column in zip(self.items, choice, strict=True):
            by_gemm[number] |= dict.fromkeys(gemms, self.formats[column])
        return [(own[Gemm.FPROP], own[Gemm.DGRAD], own[Gemm.WGRAD]) for own in by_gemm]

    def increases(self, choice: Choice, costs: Floats) -> list[float]:
        """Return the predicted loss increase of each group."""
        values = costs[np.arange(len(choice)), choice]
        return [
            sum(v for v, (own, _) in zip(values, self.items, strict=True) if own == n) for n in range(len(self.groups))
        ]

    def text(self, choice: Choice, costs: Floats, name: str, description: str, header: Sequence[str]) -> str:
        """Return the policy file of a choice."""
        treated: dict[tuple[Format, Format, Format], dict[str, float]] = {}
        increases = self.increases(choice, costs)
        for group, chosen, increase in zip(self.groups, self.chosen(choice), increases, strict=True):
            treated.setdefault(chosen, {}).update({module: increase / len(group) for module in group})
        ops: dict[str, set[str]] = {}
        for site in self.explanations[0].sites:
            if site.module is not None and site.op in ("linear", "grouped") and (site.rule_index or 0) >= DEFAULT_INDEX:
                ops.setdefault(site.module, set()).add(site.op)
        return written(
            name, description, header,
            [Treatment(_rule(chosen), own, f"{sum(own.values()):+.3g}") for chosen, own in treated.items()],
            ops=ops, blocks=self.explanations[0].blocks,
            bases={key: value for each in self.formats for key, value in each.policy.base_formats},
        )  # fmt: skip

    def check(self, model: nn.Module, policy: Policy, choice: Choice) -> None:
        """Raise an Error unless every operand of the model has under ``policy`` the spec that was chosen."""
        explanation = explain(model, policy, self.call.args, self.call.kwargs)
        chosen = {m: own for group, own in zip(self.groups, self.chosen(choice), strict=True) for m in group}
        specs = {
            f.name: [site.operands for site in e.sites] for f, e in zip(self.formats, self.explanations, strict=True)
        }
        for number, site in enumerate(explanation.sites):
            formats = dict(zip(Gemm, chosen.get(site.module or "", ()), strict=False))
            for operand in Operand:
                wanted = specs[formats[operand.gemm].name][number][operand] if formats else None
                if site.operands[operand] != wanted:
                    raise Error(f"{policy.name} gives {operand} of {site.module} {site.operands[operand]} and not "
                                f"{wanted}; please report the model")  # fmt: skip


def value_of(name: str, use: float) -> float:
    """Return the value of a budget, as it is given, that a limit's use stands for."""
    return {"fp4_flops": -use, "overhead": use + 1}.get(name, use)


def _format(explanation: Explanation) -> Format:
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
    if policy.ever_quantizes and not quantized:
        raise Error(
            f"format {policy.name!r} fits no site of the model: {explanation.problem or 'it keeps all'}; leave it out"
        )
    rules = [
        policy.default if site.rule_index == DEFAULT_INDEX else policy.rules[site.rule_index or 0] for site in quantized
    ]
    for site, rule in zip(quantized, rules, strict=True):
        if site.op not in ("linear", "grouped") or site.module is None:
            raise Error(
                f"{said}it quantizes a {site.op} in {site.module}, and a search chooses for linears and experts"
            )
        if (rule.specs, rule.techniques, rule.reuses) != (rules[0].specs, rules[0].techniques, rules[0].reuses):
            raise Error(f"{said}rules {rules[0].name!r} and {rule.name!r} quantize differently; give two policies")
    return Format(
        policy, rules[0] if rules else None, frozenset(site.module for site in quantized if site.module is not None)
    )


def _rule(chosen: tuple[Format, Format, Format]) -> Rule:
    """Return the rule, without predicates, that gives fprop, dgrad and wgrad their formats."""
    by_gemm = dict(zip(Gemm, chosen, strict=True))
    specs = Specs(tuple(by_gemm[operand.gemm].spec(operand) for operand in Operand))
    if not any(specs.values()):
        return Rule(name=EXACT, keep="high precision pays here")
    first = chosen[0].rule
    if first is not None and set(chosen) == {chosen[0]}:
        return Rule(name=chosen[0].name, specs=specs, reuses=first.reuses, techniques=first.techniques)
    gemms: dict[str, list[str]] = {}
    for gemm, each in by_gemm.items():
        gemms.setdefault(each.name, []).append(str(gemm))
    return Rule(name=", ".join(f"{' and '.join(own)} {name}" for name, own in gemms.items()), specs=specs)


def search(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    formats: Sequence[Any] = FORMATS,
    bits: float | None = None,
    fp4_flops: float | None = None,
    complexity: float | None = None,
    overhead: float | None = None,
    by: Sequence[str] = ("site", "gemm"),
    scores: Iterable[Score] | None = None,
    caution: float = 1.0,
    simplify: bool = True,
    cost: Callable[[Policy], float] | None = None,
    backend: str = "inductor",
    folder: str | PathLike[str] | None = None,
    name: str = "searched",
    **options: Any,
) -> Search:
    """Return the policy whose predicted loss is least within a budget.

    Every format is measured at one linear and one GEMM at a time (:func:`fp4graph.sensitivity`). The loss of a policy
    is predicted as the sum of its scores: effects are taken to add up. The formats of all GEMMs are chosen exactly, by
    integer programming::

        minimize  Σ_g Σ_f x[g, f] · Σ_{s in g} (max(0, increase[s, f]) + caution · error[s, f])   within the budget,
                  Σ_f x[g, f] = 1,  x[g, f] in {0, 1}

    where g is a GEMM of a group of siblings (:func:`fp4graph.lab.siblings.groups_of`), s a site and f a format.

    Args:
        model: a plain model, trained as far as the policy is to fit it; it stays as it is.
        loss, batches: as for :func:`fp4graph.sensitivity`.
        formats: uniform policies, each as for :func:`fp4graph.apply`. A format with techniques, or whose backward reads
            operands of fprop, takes all three GEMMs of a site or none.
        bits: the most bits per weight, scales included, on average over the weights of all linears that some format
            quantizes. Weights are stored as fprop reads them, so this binds fprop alone.
        fp4_flops: the least share of FLOPs whose operands both have four bits, of all matrix work of a training step.
        complexity: the largest Ω.
        overhead: the largest ``cost``. Costs of mixed policies are interpolated by FLOPs; the result is measured.
        by: ("site", "gemm"), or ("site",) for one format for the three GEMMs of a site.
        scores: scores of the formats by ("site", "gemm"), to be used instead of measuring.
        caution: standard errors that are added to each increase, so that no score is trusted that noise makes small.
            An increase below 0 counts as 0 for the same reason.
        simplify: give groups the formats of others while the costs stay within one standard error of the least (the
            one-standard-error rule, Breiman et al. 1984), so that the policy has fewer rules.
        cost: returns the cost of a policy relative to no quantization; by default the time of a training step on this
            machine under ``backend``, in alternation with the unquantized model.
        folder: keeps every score as soon as it is measured; a search that was stopped goes on there.
        name: of the policy.
        options: further arguments of :func:`fp4graph.sensitivity`.

    Raises:
        Error: there is no budget, or one that nothing satisfies; formats are no uniform policies or fit no linear; a
            loss is not finite; or the folder holds another search.
    """
    asked = {"bits": bits, "fp4_flops": fp4_flops, "complexity": complexity, "overhead": overhead}
    bounds = {key: float(value) for key, value in asked.items() if value is not None}
    if not bounds or not all(map(math.isfinite, bounds.values())):
        raise Error(f"a search needs a finite budget; give one or several of {', '.join(BUDGETS)}")
    if tuple(by) not in (("site", "gemm"), ("site",)):
        raise Error(f"formats are chosen by ('site', 'gemm') or by ('site',), and not by {by!r}")
    if not (batches := list(batches)):
        raise Error("there are no batches to measure the loss on; give at least one")
    candidates = Candidates.of(model, loss, batches[0], formats, apart="gemm" in by)
    if overhead is not None and cost is None:
        cost = _Timer(model, loss, batches[0], backend)
    limits = candidates.limits(bounds, cost)
    candidates.require(limits)
    if scores is None:
        scores = _scores(model, loss, batches, candidates, folder, options)
    scores = tuple(scores)
    costs, plain = candidates.costs(scores, caution), candidates.predictions(scores)
    knapsack = candidates.knapsack(np.isfinite(costs))
    description = "; ".join(bound_text(key, bound) for key, bound in bounds.items())
    for _ in range(_ROUNDS):
        choice = knapsack.solve(np.where(np.isfinite(costs), costs, 0.0), list(limits.values()))
        if choice is None:
            raise Error("all that the budget leaves makes the loss infinite; relax it, or give other formats")
        if simplify:
            choice = candidates.simplified(knapsack, choice, costs, candidates.errors(scores), list(limits.values()))
        policy = load_policy(yaml.safe_load(candidates.text(choice, plain, name, description, ())))
        reached = {key: value_of(key, knapsack.used(limit, choice)) for key, limit in limits.items()}
        reached |= {"complexity": policy.complexity} if "complexity" in bounds else {}
        if cost is None or overhead is None:
            break
        reached["overhead"] = cost(policy)
        if reached["overhead"] <= overhead:
            break
        # The square overshoots: the bound itself would approach a cost that interpolation underestimates, from above.
        tighter = limits["overhead"].most * ((overhead - 1) / (reached["overhead"] - 1)) ** 2
        limits["overhead"] = dataclasses.replace(limits["overhead"], most=tighter)
        candidates.require(limits)
    else:
        raise Error(f"no policy was measured to have {bound_text('overhead', bounds['overhead'])}; relax the budget")
    candidates.check(model, policy, choice)
    budgets = tuple(Budget(key, bound, reached[key]) for key, bound in bounds.items())
    increases = candidates.increases(choice, plain)
    measured = 0.0
    if policy.quantizes:
        together = sensitivity(model, loss, batches, [policy], by="gemm", **options).scores
        measured = sum(score.increase for score in together)
    names = [(a.name, b.name, c.name) for a, b, c in candidates.chosen(choice)]
    choices = tuple(map(Option, candidates.groups, names, increases))
    header = _header(model, candidates, len(batches), budgets, sum(increases), measured, plain, policy)
    text = candidates.text(choice, plain, name, description, header)
    return Search(load_policy(yaml.safe_load(text)), text, choices, sum(increases), measured, budgets, scores)


def _header(
    model: nn.Module, candidates: Candidates, batches: int, budgets: Sequence[Budget],
    predicted: float, measured: float, costs: Floats, policy: Policy,
) -> list[str]:  # fmt: skip
    """Return the comment of a policy file: what was measured, and what to expect."""
    uniform = ", ".join(
        f"{each.name} {costs[:, column].sum():+.3g}"
        for column, each in enumerate(candidates.formats)
        if each.rule is not None and candidates.knapsack().allowed[:, column].all()
    )
    modules = sum(map(len, candidates.groups))
    return [
        f"The formats that cost a {type(model).__name__} the least loss within a budget, found by fp4graph.search.",
        "",
        f"model      {modules} linears in {len(candidates.groups)} groups that go together",
        f"measured   on {batches} batches, one linear and GEMM at a time; the numbers below are increases of the loss",
        *(f"budget     {budget}" for budget in budgets),
        f"predicted  {predicted:+.3g} as the sum of all; measured together {measured:+.3g}",
        *([f"uniform    {uniform}, predicted likewise"] if uniform else []),
        "",
        f"Ω = {policy.complexity:g}",
    ]


def _scores(
    model: nn.Module, loss: Loss, batches: Sequence[Any], candidates: Candidates,
    folder: str | PathLike[str] | None, options: Mapping[str, Any],
) -> tuple[Score, ...]:  # fmt: skip
    """Measure the formats at every site and GEMM; in ``folder`` each score is kept at once, and found again.

    Raises:
        Error: another process writes in the folder, or it holds scores of something else.
    """
    policies = [each.policy for each in candidates.formats if each.rule is not None]
    if not policies:
        return ()
    measure = functools.partial(sensitivity, model, loss, batches, policies, by=("site", "gemm"), **options)
    if folder is None:
        return measure().scores
    digest = hashlib.sha256(repr((sorted(options.items()), [policy.fingerprint for policy in policies])).encode())
    for tensor in pytree.tree_leaves((model.state_dict(), batches)):
        content = tensor.detach().cpu().contiguous() if isinstance(tensor, torch.Tensor) else None
        digest.update(
            repr(tensor).encode() if content is None else content.flatten().view(torch.uint8).numpy().tobytes()
        )
    file = Path(folder) / SCORES
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(file.with_name(LOCK)).acquire(timeout=0)
    except Timeout:
        raise Error(f"{folder} is in use by another search; let it end, or give another folder") from None
    with lock:
        jsonlines.cut_torn_line(file)
        first, *lines = ([line for _, line in jsonlines.read(file)] if file.exists() else []) or [{}]
        about = {"format": FILE_FORMAT, "version": 1, "of": digest.hexdigest()}
        if not first:
            jsonlines.append(file, [about])
        elif first != about:
            raise Error(f"{file} holds scores of another model, loss, batches or formats; give another folder")
        known = [_read(line) for line in lines]
        return measure(known=known, report=lambda score: jsonlines.append(file, [_plain(score)])).scores


def _plain(score: Score) -> dict[str, Any]:
    return dict(finite(dataclasses.asdict(score)))


def _read(line: Mapping[str, Any]) -> Score:
    """Return the score of a line; an increase that is not finite is infinite, and its error NaN."""
    numbers = {"increase": math.inf, "error": math.nan}
    numbers |= {key: line[key] for key in numbers if line[key] is not None}
    return Score(**{**line, "sites": tuple(line["sites"]), "operands": tuple(line["operands"]), **numbers})


class _Timer:
    """Measures the time of a training step under a policy relative to the unquantized model, step by step in turn."""

    def __init__(self, model: nn.Module, loss: Loss, batch: Any, backend: str, steps: int = 9) -> None:
        self._model, self._loss, self._batch, self._backend, self._steps = model, loss, batch, backend, steps

    def __call__(self, policy: Policy) -> float:
        models = [apply(copy.deepcopy(self._model), each, backend=self._backend) for each in (policy, EXACT)]
        optimizers = [prepare_optimizer(each, torch.optim.SGD(each.parameters(), lr=0.0)) for each in models]
        seconds: list[list[float]] = [[], []]
        for _ in range(self._steps):
            for each, optimizer, own in zip(models, optimizers, seconds, strict=True):
                start = time.perf_counter()
                self._loss(each, self._batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                own.append(time.perf_counter() - start)
        return statistics.median(seconds[0][2:]) / statistics.median(seconds[1][2:])
