"""Ablations: trainings that quantize one operand, or one GEMM, and nothing else.

TetraJet (Chen et al. 2025) Table 1 enables its quantizers Q1 to Q6 one at a time and compares final results.
"Pretraining Large Language Models with MXFP4 on Native FP4 Hardware" enables fprop, dgrad and wgrad, and counts how
many more tokens a training needs to reach a target loss. Both work here with any policy, model and data.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from fp4graph.errors import Error
from fp4graph.files import read_json, write
from fp4graph.lab.runs.run import finite
from fp4graph.numerics.spec import QuantSpec
from fp4graph.policy import KEPT, Expect, Policy, Rule, Specs, load_policy
from fp4graph.technique import Technique, overrides
from fp4graph.technique.operands import ADDRESSES, Gemm, Operand
from fp4graph.technique.site import SiteView
from fp4graph.text import suggest

#: Progress (steps, tokens) and validation loss, in the order of the training.
Curve = Sequence[tuple[float, float]]
Train = Callable[[Policy, int], Curve]

_OF_GEMM = {gemm.value: frozenset(operand for operand in Operand if operand.gemm is gemm) for gemm in Gemm}
#: The operands that each variant quantizes, by the variant's name.
VARIANTS: dict[str, frozenset[Operand]] = {
    "none": frozenset(),
    **{f"Q{number}": frozenset({operand}) for number, operand in enumerate(Operand, 1)},
    **_OF_GEMM,
    "fprop+dgrad": _OF_GEMM["fprop"] | _OF_GEMM["dgrad"],
    "all": frozenset(Operand),
}
FORMAT, VERSION = "fp4graph.ablation", 1


def only(policy: Policy, operands: Collection[Operand], name: str | None = None) -> Policy:
    """Return ``policy`` with all operands but these in high precision, wherever it quantizes.

    An operand with ``source: fprop`` quantizes the original where fprop's operand is exact. Where only its own
    quantizer is off, it reads fprop's quantized operand: the straight-through gradient of the remaining network.
    Techniques that have nothing left to act on are dropped.
    """
    phases = tuple(dataclasses.replace(phase, policy=only(phase.policy, operands)) for phase in policy.phases)
    rules = [_only(rule, operands) for rule in (*policy.rules, policy.default)]
    specs = [rule.specs for rule in rules]
    rules = [dataclasses.replace(rule, techniques=_left_with_work(rule.techniques, specs)) for rule in rules]
    derived = dataclasses.replace(
        policy,
        name=name or policy.name,
        rules=tuple(rules[:-1]),
        default=rules[-1],
        techniques=_left_with_work(policy.techniques, specs),
        phases=phases,
    )
    if not derived.quantizes:
        return dataclasses.replace(derived, implied=(), phases=(), expect=Expect())
    return load_policy(yaml.safe_load(derived.to_yaml()))  # what specs amount to, and what does not fit, is found anew


def _left_with_work(techniques: Collection[Technique], specs: Sequence[Specs]) -> tuple[Technique, ...]:
    """Return the techniques that still act on something; exact operands are removed from their lists of operands."""
    site = SiteView(None, "linear", None, None, None, producer="swiglu")
    quantized = {operand for each in specs for operand, spec in each.items() if spec is not None}
    gemms = {operand.gemm for operand in quantized}
    left = []
    for technique in techniques:
        given = technique.addresses_given
        still = {o: tuple(name for name in names if set(ADDRESSES[name]) & quantized) for o, names in given.items()}
        if not all(still.values()):
            continue
        technique = technique.model_copy(update=still)
        acts_on, pairs, plans = technique.acts_on(site), technique.pairs(site), overrides(technique, "plan")
        changes = plans and any(dict(technique.plan(site, each)) != dict(each) for each in specs)
        idle = (acts_on or pairs or plans) and not (acts_on & quantized or pairs & gemms or changes)
        if overrides(technique, "partition"):  # it names no operands of its own
            by_name = {each.name: each for each in techniques}
            idle = all(technique.inert(each, by_name) is not None for each in specs if any(each.values()))
        if technique.per_model or (quantized and not idle):
            left.append(technique)
    return tuple(left)


def _only(rule: Rule, operands: Collection[Operand]) -> Rule:
    if not rule.quantizes:
        return rule
    specs: list[QuantSpec | None] = []
    reuses: set[Operand] = set()
    for operand in Operand:
        spec, first = rule.specs[operand], operand.fprop
        fprop_is_on = first in operands and rule.specs[first] is not None if first is not None else False
        from_fprop = operand in rule.reuses or (spec is not None and spec.source == "fprop")
        if operand in operands and spec is not None:
            specs.append(spec if fprop_is_on else dataclasses.replace(spec, source="original"))
            continue
        specs.append(None)
        if from_fprop and fprop_is_on:
            reuses.add(operand)
    if not any(specs):
        why = "nothing that the rule quantizes is in this variant"
        return dataclasses.replace(rule, keep=why, specs=KEPT, reuses=frozenset(), techniques=())
    return dataclasses.replace(rule, specs=Specs(tuple(specs)), reuses=frozenset(reuses))


@dataclass(frozen=True)
class VariantResult:
    """The results of one variant over seeds.

    Attributes:
        final, spread: mean and standard deviation (0 for one seed) of the last loss; NaN where a seed diverged.
        excess, excess_spread: the same of the difference to the last loss of the variant "none" and the same seed.
        reached: progress at which the mean curve reaches the target, None where it does not.
        extra: the share by which ``reached`` exceeds that of "none".
    """

    variant: str
    final: float
    spread: float
    excess: float
    excess_spread: float
    reached: float | None
    extra: float | None


@dataclass(frozen=True)
class Ablation:
    """The curves of ``policy``, by variant and seed, over a ``progress`` such as "step" or "token".

    ``target`` is the loss to be reached. Its default is the highest of the lowest losses of the variants' mean curves,
    so that all of them reach it.
    """

    policy: str
    curves: Mapping[str, Mapping[int, Curve]]
    target: float
    progress: str = "step"

    @cached_property
    def results(self) -> tuple[VariantResult, ...]:
        """The results of every variant."""
        return tuple(map(self._result, self.curves))

    def mean(self, variant: str) -> list[tuple[float, float]]:
        """Return the mean loss of a variant over its seeds, at each progress that all of them have."""
        first, *others = (dict(curve) for curve in self.curves[variant].values())
        shared = [at for at in first if all(at in other for other in others)]
        return [(at, statistics.fmean(curve[at] for curve in (first, *others))) for at in shared]

    def _result(self, variant: str) -> VariantResult:
        finals = {seed: _final(curve) for seed, curve in self.curves[variant].items()}
        exact = {seed: _final(curve) for seed, curve in self.curves.get("none", {}).items()}
        excess = [finals[seed] - exact[seed] for seed in finals if seed in exact]
        reached = reaches(self.mean(variant), self.target)
        base = reaches(self.mean("none"), self.target) if "none" in self.curves else None
        return VariantResult(
            variant,
            statistics.fmean(finals.values()),
            _deviation(list(finals.values())),
            statistics.fmean(excess) if excess else math.nan,
            _deviation(excess),
            reached,
            None if reached is None or not base else reached / base - 1,
        )

    def table(self) -> Table:
        """Return a table for a terminal."""
        seeds = max(len(curves) for curves in self.curves.values())
        title = f"{self.policy}, one part at a time: {seeds} seed{'s' * (seeds > 1)}, target loss {self.target:.4g}"
        table = Table(title=title, title_justify="left")
        for column in ("quantized", "final loss", "± sd", "excess over none", "± sd", f"{self.progress} to target",
                       "extra"):  # fmt: skip
            table.add_column(column, justify="left" if column == "quantized" else "right")
        for each in self.results:
            losses = f"{each.final:.4f}", f"{each.spread:.4f}", f"{each.excess:+.4f}", f"{each.excess_spread:.4f}"
            reached = "never" if each.reached is None else f"{each.reached:,.0f}"
            table.add_row(each.variant, *losses, reached, "-" if each.extra is None else f"{each.extra:+.0%}")
        return table


def ablation(
    policy: Any,
    train: Train,
    *,
    variants: Iterable[str] = tuple(VARIANTS),
    seeds: Iterable[int] = (0,),
    target: float | None = None,
    progress: str = "step",
    directory: str | PathLike[str] | None = None,
) -> Ablation:
    """Train under each part of ``policy`` by itself, and compare the results.

    Args:
        policy: as for :func:`fp4graph.apply`.
        train: called with (policy, seed), trains a model from the start and returns its validation losses as pairs
            (progress, loss); everything but the policy should be a function of the seed.
        variants: some of VARIANTS, by name; "none" is the baseline that the others are compared with.
        target, progress: as for :class:`Ablation`.
        directory: where ``ablation.json`` keeps every training, so that an interrupted ablation goes on.

    Raises:
        Error: an unknown variant, or ``directory`` holds the ablation of another policy.
        PolicyError: a technique does not go with a part of the policy.
    """
    loaded, chosen, seeds = load_policy(policy), list(dict.fromkeys(variants)), tuple(seeds)
    for name in chosen:
        if name not in VARIANTS:
            raise Error(f"unknown variant {name!r}; {suggest(name, VARIANTS)}")
    policies = {name: only(loaded, VARIANTS[name], f"{loaded.name}-{name}") for name in chosen}  # errors come first
    file = Path(directory) / "ablation.json" if directory is not None else None
    about = {"format": FORMAT, "version": VERSION, "policy": loaded.name, "fingerprint": loaded.fingerprint}
    curves = _saved(file, loaded) if file is not None else {}
    for seed in seeds:
        for name in chosen:
            if seed not in curves.setdefault(name, {}):
                curves[name][seed] = [(float(at), float(loss)) for at, loss in train(policies[name], seed)]
                if file is not None:
                    write(file, json.dumps(finite({**about, "curves": curves}), indent=1) + "\n")
    wanted = {name: {seed: curves[name][seed] for seed in seeds} for name in chosen}
    compared = Ablation(loaded.name, wanted, math.nan, progress)
    if target is None:
        lowest = [min((loss for _, loss in compared.mean(name)), default=math.nan) for name in wanted]
        target = max((loss for loss in lowest if math.isfinite(loss)), default=math.nan)
    return dataclasses.replace(compared, target=target)


def reaches(curve: Curve, target: float) -> float | None:
    """Return the progress at which ``curve`` first reaches ``target``, linear between its points, or None."""
    former: tuple[float, float] | None = None
    for at, loss in curve:
        if loss <= target:
            if former is None or loss == former[1] or not math.isfinite(former[1]):
                return at
            return former[0] + (at - former[0]) * (former[1] - target) / (former[1] - loss)
        former = at, loss
    return None


def _final(curve: Curve) -> float:
    return curve[-1][1] if curve else math.nan


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _saved(file: Path, policy: Policy) -> dict[str, dict[int, Curve]]:
    if not file.exists():
        return {}
    content = read_json(file)
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") != VERSION:
        raise Error(f"{file} is not an ablation of this version of fp4graph")
    if content["fingerprint"] != policy.fingerprint:
        raise Error(f"{file} is of policy {content['policy']!r} as it was then, which differs; give another directory")
    return {
        name: {int(seed): [(at, math.nan if loss is None else loss) for at, loss in own[seed]] for seed in own}
        for name, own in content["curves"].items()
    }
