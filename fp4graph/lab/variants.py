"""Policies derived from one policy: all but some operands in high precision, or all but some sites.

TetraJet (Chen et al. 2025) Table 1 enables its quantizers Q1 to Q6 one at a time. "Pretraining Large Language Models
with MXFP4 on Native FP4 Hardware" enables fprop, then dgrad, then wgrad.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import yaml

from fp4graph.errors import Error, suggest
from fp4graph.numerics.spec import QuantSpec
from fp4graph.policy import KEPT, Expect, Policy, Rule, Specs, load_policy
from fp4graph.policy.rule import DEFAULT_INDEX
from fp4graph.technique import Technique, overrides
from fp4graph.technique.operands import ADDRESSES, GROUPS, Gemm, Operand
from fp4graph.technique.site import SiteView

#: The operands that each variant quantizes, by what is varied and by the variant's name.
VARIANTS: dict[str, dict[str, tuple[Operand, ...]]] = {
    "operand": {f"Q{number}": (operand,) for number, operand in enumerate(Operand, 1)},
    "gemm": {gemm.value: GROUPS[gemm] for gemm in Gemm} | {"fprop+dgrad": GROUPS["fprop"] + GROUPS["dgrad"]},
}


def variants(policy: Any, by: str = "operand") -> dict[str, Policy]:
    """Return the policies of an ablation by their names, in the order of its table.

    The first is "none", which quantizes nothing, and the last "all", the policy itself. Between them ``by="operand"``
    has TetraJet's Q1 to Q6, each alone, and ``by="gemm"`` has fprop, dgrad, wgrad, and fprop with dgrad. A variant
    whose operands the policy keeps anyway is left out.

    Args:
        policy: as for :func:`fp4graph.apply`. A derived policy is named after it: "tetrajet-Q1".

    Raises:
        PolicyError: a technique does not go with a part of the policy.
    """
    if by not in VARIANTS:
        raise Error(f"variants differ by operand or by gemm, and not by {by!r}; {suggest(str(by), VARIANTS)}")
    whole = load_policy(policy)
    parts = {name: only(whole, operands, f"{whole.name}-{name}") for name, operands in VARIANTS[by].items()}
    parts = {name: part for name, part in parts.items() if part.ever_quantizes}
    return {"none": only(whole, (), f"{whole.name}-none"), **parts, "all": whole}


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


def at(policy: Policy, sites: Mapping[int, Collection[str]]) -> tuple[Rule, ...]:
    """Return the rules of ``policy`` restricted to modules, without its phases.

    Args:
        sites: the names of the modules whose sites each rule decides, by the rule's position; -1 is the default.
    """
    rules = []
    for index, modules in sites.items():
        rule = policy.default if index == DEFAULT_INDEX else policy.rules[index]
        match = rule.match.model_copy(update={"module": tuple(map(glob.escape, modules))})
        rules.append(dataclasses.replace(rule, match=match, required=False))
    return tuple(rules)
