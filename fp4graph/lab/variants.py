"""Policies derived from one policy, with only some operands quantized.

TetraJet (Chen et al. 2025) Table 1 enables its quantizers Q1 to Q6 one at a time. "Pretraining Large Language Models
with MXFP4 on Native FP4 Hardware" enables fprop, then dgrad, then wgrad.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import yaml

from fp4graph.errors import Error, suggest
from fp4graph.numerics.spec import QuantSpec
from fp4graph.policy import KEPT, Expect, Policy, Rule, Specs, load_policy
from fp4graph.policy.rule import checked_plan, plans
from fp4graph.technique import Technique, acts_at, gemms_at, operands_at
from fp4graph.technique.operands import ADDRESSES, GROUPS, Gemm, Operand
from fp4graph.technique.site import SiteView

#: The operands that each variant quantizes, by kind of ablation and by name.
VARIANTS: dict[str, dict[str, tuple[Operand, ...]]] = {
    "operand": {f"Q{number}": (operand,) for number, operand in enumerate(Operand, 1)},
    "gemm": {gemm.value: GROUPS[gemm] for gemm in Gemm} | {"fprop+dgrad": GROUPS["fprop"] + GROUPS["dgrad"]},
}


def variants(policy: Any, by: str = "operand") -> dict[str, Policy]:
    """Return the policies of an ablation by name, in the order of its table.

    The first is "none", which quantizes nothing; the last is "all", the policy itself. Between them ``by="operand"``
    has TetraJet's Q1 to Q6, each alone, and ``by="gemm"`` has fprop, dgrad, wgrad, and fprop with dgrad. Variants that
    would quantize nothing are left out. A derived policy is named like "tetrajet-Q1".

    Raises:
        PolicyError: a technique does not fit what a variant quantizes.
    """
    if by not in VARIANTS:
        raise Error(f"by must be 'operand' or 'gemm'; got {by!r}; {suggest(str(by), VARIANTS)}")
    loaded = load_policy(policy)
    parts = {name: only(loaded, operands, f"{loaded.name}-{name}") for name, operands in VARIANTS[by].items()}
    parts = {name: part for name, part in parts.items() if part.ever_quantizes}
    return {"none": only(loaded, (), f"{loaded.name}-none"), **parts, "all": loaded}


def only(policy: Policy, operands: Collection[Operand], name: str | None = None) -> Policy:
    """Return ``policy`` with only ``operands`` quantized, wherever the policy quantizes them.

    An operand with ``source: fprop`` reads what fprop quantized. If fprop's operand is now exact, the operand quantizes
    the original. If the operand itself is not in ``operands``, the backward multiplies with fprop's quantized operand:
    the straight-through gradient. Techniques with nothing left to act on are dropped.
    """
    phases = tuple(dataclasses.replace(phase, policy=only(phase.policy, operands)) for phase in policy.phases)
    rules = [_only(rule, operands) for rule in (*policy.rules, policy.default)]
    specs = [rule.specs for rule in rules]
    *rules, default = (dataclasses.replace(rule, techniques=_left(rule.techniques, specs)) for rule in rules)
    derived = dataclasses.replace(
        policy, name=name or policy.name, rules=tuple(rules), default=default, phases=phases,
        techniques=_left(policy.techniques, specs),
    )  # fmt: skip
    if not derived.ever_quantizes:
        return dataclasses.replace(derived, implied=(), phases=(), expect=Expect())
    return load_policy(yaml.safe_load(derived.to_yaml()))  # resolves the specs and checks them again


def _left(techniques: Collection[Technique], specs: Sequence[Specs]) -> tuple[Technique, ...]:
    """Return the techniques that still act on an operand, without exact operands in their options."""
    site = SiteView(None, "linear", None, None, None, producer="swiglu")
    quantized = {operand for each in specs for operand, spec in each.items() if spec is not None}
    gemms = {operand.gemm for operand in quantized}
    left = []
    for technique in techniques:
        still = {option: tuple(name for name in names if set(ADDRESSES[name]) & quantized)
                 for option, names in technique.addresses_given.items()}  # fmt: skip
        if not all(still.values()):
            continue
        technique = technique.model_copy(update=still)
        operands, pairs = operands_at(technique, site), gemms_at(technique, site)
        changes = any(dict(checked_plan(technique, site, each)) != dict(each) for each in specs)
        idle = (operands or pairs or plans(technique)) and not (operands & quantized or pairs & gemms or changes)
        if acts_at(technique, "partition"):  # the technique has no list of operands
            by_name = {each.name: each for each in techniques}
            idle = all(technique.inert(each, by_name) is not None for each in specs if any(each.values()))
        if technique.per_model or (quantized and not idle):
            left.append(technique)
    return tuple(left)


def _only(rule: Rule, operands: Collection[Operand]) -> Rule:
    on = {operand for operand in operands if rule.specs[operand] is not None}
    if not on and rule.quantizes:
        why = "nothing that the rule quantizes is in this variant"
        return dataclasses.replace(rule, keep=why, specs=KEPT, reuses=frozenset(), techniques=())
    if not on:
        return rule
    specs: list[QuantSpec | None] = []
    reuses: set[Operand] = set()
    for operand, spec in rule.specs.items():
        fprop_is_on, from_fprop = operand.fprop in on, operand in rule.reuses or (spec and spec.source == "fprop")
        if operand not in on and fprop_is_on and from_fprop:
            reuses.add(operand)
        if spec is not None and not fprop_is_on:
            spec = dataclasses.replace(spec, source="original")
        specs.append(spec if operand in on else None)
    return dataclasses.replace(rule, specs=Specs(tuple(specs)), reuses=frozenset(reuses))
