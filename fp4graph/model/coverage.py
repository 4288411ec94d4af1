"""Checks that the graphs captured in a model's first forward contain the sites that the policy is written for."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from torch import nn

from fp4graph.errors import CaptureError, PolicyError, PolicyWarning
from fp4graph.graph.blocks import pattern_of
from fp4graph.graph.operations import RECURRENT
from fp4graph.graph.plan import NOTHING
from fp4graph.graph.site import Site, WeightUse
from fp4graph.model import hooks
from fp4graph.model.capture import Capture
from fp4graph.model.prepare import PhasePlan
from fp4graph.policy import CLOSING, DEFAULT_INDEX, NAMED_ROLES, Policy
from fp4graph.policy.document import Place
from fp4graph.policy.rule import DISTINGUISHED_PRODUCERS, plans
from fp4graph.policy.techniques import acts
from fp4graph.technique import Technique
from fp4graph.technique.operands import Gemm

#: A captured site, and the names of the modules that its graph serves, the site's own module first.
ServedSite = tuple[Site, list[str | None]]
_RECURRENT = f"{RECURRENT}, and Dynamo does not capture them"


def check(plan: PhasePlan, capture: Capture) -> list[WeightUse]:
    """Raise PolicyError or CaptureError if the captured graphs lack sites that the policy is written for.

    Add the recurrent layers, which Dynamo does not capture, to the sites of ``capture``. Return the weight uses of
    modules that share another module's graph.
    """
    served = served_sites(plan.root, capture)
    try:
        check_captured(plan, capture)
        if set(plan.names.blocks) == {""}:
            check_share(plan, capture.sites, capture.uses.values())
        check_sites(plan.policy, each_served(served, plan))
        warn_of_idle(capture.sites, capture.uses.values())
        warn_of_padding(capture.sites, capture.uses.values())
    finally:  # explain lists the sites beside the error
        _add_recurrent(plan, capture)
    served_by = {name: names[0] for _, names in served for name in names[1:] if name is not None}
    return [
        dataclasses.replace(use, module=name)
        for name, first in served_by.items()
        for (owner, _), use in capture.uses.items()
        if owner == first
    ]


def _add_recurrent(plan: PhasePlan, capture: Capture) -> None:
    known = {site.module for site in capture.sites if site.op == "recurrent"}
    for name, module in plan.root.named_modules():
        if isinstance(module, nn.RNNBase) and name not in known:
            shape = (module.num_layers, module.input_size, module.hidden_size)
            site = Site(name, "recurrent", (shape,), None, _RECURRENT, dict(NOTHING.specs), False, supported=False)
            capture.sites.append(site)


def check_captured(plan: PhasePlan, capture: Capture) -> None:
    """Raise CaptureError for a called module whose product is in no graph."""
    captured = {site.module for site in capture.sites}
    for module in sorted(name for name in capture.marked - captured if name is not None):
        if _ran_uncaptured(module, plan, capture):
            raise CaptureError(
                "the module was called, but the product with its weight was not captured and ran in high precision. "
                "There may be a graph break between the module's hooks and its forward, or a loop or a disabled "
                "function around the product. Remove the cause (for a loop over experts in transformers, set "
                "experts_implementation='grouped_mm'), "
                f"{'leave out strict=True of fp4graph.apply, ' * capture.strict}or keep the module by a rule",
                site=module or "(root)",
            )


def served_sites(root: nn.Module, capture: Capture) -> list[ServedSite]:
    """Return each captured site with the names of the modules that its graph serves.

    Where FSDP or a graph break has blocks compiled one by one, blocks with equal tags share a graph.
    """
    if capture.graphs < 2:
        return [(site, [site.module]) for site in capture.sites]
    captured = {site.module for site in capture.sites}
    tags = {hook.name: hook.tag for _, _, hook in hooks.mark_hooks(root)}
    alike: dict[Any, list[str]] = {}
    for name, module in root.named_modules():
        alike.setdefault((pattern_of(name), type(module), tags.get(name)), []).append(name)
    sharing: dict[str | None, list[str]] = {}
    for names in alike.values():
        if (first := next((name for name in names if name in captured), None)) is not None:
            sharing[first] = [name for name in names if name not in captured]
    return [(site, [site.module, *sharing.get(site.module, ())]) for site in capture.sites]


def each_served(served: Iterable[ServedSite], plan: PhasePlan) -> list[Site]:
    """Return one site for every module that the captured sites serve.

    Modules that share the graph of a quantized site have one rule, because their tags are equal. Kept sites have no
    tags, so this function looks up the rule of each further module, and does not know the producer of its input.
    """
    sites: list[Site] = []
    for site, names in served:
        for name in names:
            served_site = dataclasses.replace(site, module=name)
            decided = site.rule_index is not None and site.rule_index >= DEFAULT_INDEX
            if name != site.module and decided and site.supported and not site.quantized:
                decision = plan.policy.decide(plan.names.view(name, site.op, _sizes(site)), None)
                if not decision.rule.quantizes:
                    index, rule = decision.index, decision.rule.name
                    served_site = dataclasses.replace(served_site, rule_index=index, rule=rule)
            sites.append(served_site)
    return sites


def _sizes(site: Site) -> tuple[int | None, int | None, int | None]:
    """Return K, N and the number of elements of the second factor of a product; three None if a size is unknown."""
    if site.sizes is None:
        return None, None, None
    _, features, outputs = site.sizes
    return features, outputs, prod(map(int, site.shapes[1]))


def _decided_before(policy: Policy, index: int, sites: Sequence[Site]) -> list[Site]:
    """Return the sites that rule ``index`` could match if an earlier rule did not decide them."""
    rule = policy.rules[index]
    decided = (site for site in sites if site.rule_index in range(index))
    of_kind = (site for site in decided if rule.match.may_name(site.module) and rule.speaks_of(site.op))
    blocks = rule.match.needs_blocks
    return [site for site in of_kind if not blocks or policy.rules[site.rule_index or 0].match.needs_blocks]


def check_sites(policy: Policy, sites: Sequence[Site]) -> None:
    """Raise PolicyError if a required rule has no site, if nothing is quantized, or if ``expect`` fails."""
    matched = {site.rule_index for site in sites}
    products = sorted({f"{s.module or '(root)'} ({s.op})" for s in sites if s.rule_index is not None})
    for index, rule in enumerate(policy.rules):
        if rule.required and index not in matched:
            shown = ", ".join(products[:8]) + (" ..." if len(products) > 8 else "")
            convolutions = sum(site.op == "conv" for site in sites)
            hint = f", whose {convolutions} convolutions only a rule with 'op: conv' quantizes" if convolutions else ""
            roles = {CLOSING[role][0]: role for role in NAMED_ROLES}
            named = next((s for s in sites if s.rule_index in roles and rule.match.names(s.module)), None)
            remedy = "give it 'required: false' if that is meant"
            if policy.file not in (None, rule.file):
                remedy = f"{policy.file} inherits it: write rules there that fit this model, or extend another policy"
            ahead = _decided_before(policy, index, sites)
            if rule.match.first_blocks and rule.match.last_blocks:
                hint, remedy = "", "a block must be in both first_blocks and last_blocks; for either, write two rules"
            if rule.quantizes and ahead and not any(site.quantized for site in sites):
                names = ", ".join(dict.fromkeys(repr(policy.rules[s.rule_index or 0].name) for s in ahead))
                hint = ""
                remedy = (
                    f"rules before it ({names}) keep every site that it could match; change those rules, use another "
                    "policy, or give the model more blocks"
                )
            if named is not None:
                role = roles[named.rule_index or 0]
                remedy = f"{named.module} is one of the {role}s, which only a rule that says 'role: {role}' quantizes"
            raise Place(rule.file, rule.line).error(
                f"rule {rule.name!r} matches no site of this model{hint}; {remedy}. "
                f"Sites: {shown or 'none, the model has no matrix product'}"
            )
    quantized = sum(site.quantized for site in sites)
    if not quantized and policy.quantizes:
        raise PolicyError(
            f"policy {policy.name!r} quantizes no site of this model "
            f"({len(products)} products found); fp4graph.explain(model, policy, args) lists them with the reasons",
            file=policy.file,
        )
    policy.expect.check(quantized, sum(site.rule_index is not None for site in sites))


def warn_of_idle(sites: Iterable[Site], uses: Iterable[WeightUse]) -> None:
    """Warn about techniques that act on none of the captured sites whose rules declare them.

    Loading a policy warns about techniques that are idle in every model. This check finds techniques for an input that
    this model lacks, such as ``smooth_swiglu``. It skips techniques that plan specs, and rules that also quantize
    products of activations, because those products use no weight.
    """
    not_judged = {site.rule_index for site in sites if site.quantized and site.op not in ("linear", "grouped", "conv")}
    declared: dict[Technique, list[WeightUse]] = {}
    judged = [use for use in uses if use.decision.rule.quantizes]
    for use in judged:
        for technique in use.decision.rule.techniques:
            declared.setdefault(technique, []).append(use)
    for technique, its_uses in declared.items():
        if plans(technique) or any(use.decision.index in not_judged for use in its_uses):
            continue
        if any(acts(technique, use.site, use.decision.rule.specs) for use in its_uses):
            continue
        rule, first = its_uses[0].decision.rule, its_uses[0].site
        other_inputs = (dataclasses.replace(first, producer=kind) for kind in DISTINGUISHED_PRODUCERS)
        if not any(acts(technique, site, rule.specs) for site in other_inputs):
            continue  # idle in every model
        producers = ", ".join(sorted({use.site.producer or "other modules" for use in its_uses}))
        warning = Place(rule.file, rule.line).error(
            f"technique {technique.name!r} has no effect in this model, judged by the first forward: it acts on none "
            f"of the {len(its_uses)} weights whose rule declares it, such as the weight of {first}, because their "
            f"inputs come from {producers}. Remove it, unless later forwards run more of the model"
        )
        warnings.warn(str(warning), PolicyWarning, stacklevel=2)


def warn_of_padding(sites: Iterable[Site], uses: Iterable[WeightUse]) -> None:
    """Warn about a rule whose block length divides no axis of the layers that the rule quantizes.

    Only axes that fprop and dgrad contract count, because wgrad contracts tokens, whose number differs from batch to
    batch. One axis that fits prevents the warning, since a classifier may have any number of outputs. The check skips
    rules that quantize products of activations, and block lengths along an axis of unknown size.
    """
    not_judged = {site.rule_index for site in sites if site.quantized and site.op not in ("linear", "grouped", "conv")}
    by_rule: dict[int, list[WeightUse]] = {}
    for use in uses:
        if use.decision.rule.quantizes and use.decision.index not in not_judged:
            by_rule.setdefault(use.decision.index, []).append(use)
    for its_uses in by_rule.values():
        rule = its_uses[0].decision.rule
        sizes: dict[int, set[int | None]] = {}
        for operand, spec in rule.specs.items():
            if spec is None or operand.gemm is Gemm.WGRAD or isinstance(spec.block, str):
                continue
            length = spec.block if isinstance(spec.block, int) else spec.block[-1]
            axis = "in_features" if operand.gemm is Gemm.FPROP else "out_features"
            sizes.setdefault(length, set()).update(getattr(use.site, axis) for use in its_uses)
        for length, axis_sizes in sizes.items():
            known = sorted(size for size in axis_sizes if size is not None)
            if len(known) == len(axis_sizes) and all(size % length for size in known):
                shown = ", ".join(map(str, known[:8])) + (" ..." if known[8:] else "")
                warning = rule.error(
                    f"a block of {length} divides none of the axes that it quantizes, of {shown} elements: each axis "
                    "is filled up with zeros to whole blocks, which no hardware does; choose a block that divides them"
                )
                warnings.warn(str(warning), PolicyWarning, stacklevel=2)


def check_share(plan: PhasePlan, sites: Sequence[Site], uses: Iterable[WeightUse]) -> None:
    """Raise PolicyError if a policy is written for blocks, and a model without blocks stays mostly unquantized."""
    policy = plan.policy
    if not any(rule.quantizes and rule.match.needs_blocks for rule in policy.rules):
        return
    recurrent = sum(
        parameter.numel()
        for module in plan.root.modules()
        if isinstance(module, nn.RNNBase | nn.RNNCellBase)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 2
    )
    if (share := quantized_share(sites, uses, recurrent)) < 0.5:
        names = sorted({site.module or "(root)" for site in sites if site.quantized})
        outcome = f"only {', '.join(names[:8])} would be quantized" if names else "nothing would be quantized"
        raise PolicyError(
            f"policy {policy.name!r} is written for a repeated stack of blocks (block: true), and this model "
            f"has none that fp4graph recognises: {outcome}, {share:.0%} of "
            "the matrix work of its layers. Write a policy that extends it, with rules that name what to quantize, "
            "such as match: {op: linear} for every linear layer or match: {op: conv} for every convolution; recurrent "
            "layers cannot be quantized",
            file=policy.file,
        )


def quantized_share(sites: Iterable[Site], uses: Iterable[WeightUse], recurrent: int) -> float:
    """Return the share of the matrix work of layers that is quantized.

    Work is counted in captured FLOPs, without attention and without sites that a rule keeps by name. Recurrent layers,
    which no graph shows, are counted by ``recurrent``, the number of elements of their matrices.
    """
    layers = [site for site in sites if site.op not in ("matmul", "sdpa", "attention")]
    layers = [site for site in layers if site.quantized or site.rule_index in (None, -1)]
    work = sum(site.flops or 0 for site in layers)
    share = sum(site.flops or 0 for site in layers if site.quantized) / work if work else 1.0
    if not recurrent:
        return share
    quantized = sum(use.site.numel or 0 for use in uses if use.decision.rule.quantizes)
    return min(share, quantized / (quantized + recurrent))


def _ran_uncaptured(name: str, plan: PhasePlan, capture: Capture) -> bool:
    """Return whether the product of module ``name``, which was called but has no site, ran outside of all graphs
    although the policy may quantize it."""
    module = plan.root.get_submodule(name)
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
        return any(weight.fqn == name for weight in plan.weights)
    if hooks.has_sharded_forward(plan.root):  # the owners of parameters are not always known
        stacked = any(weight.fqn == name and weight.stored.dim() == 3 for weight in plan.weights)
        alike = any(pattern_of(site.module or "") == pattern_of(name) for site in capture.sites)
        return stacked and not alike
    if capture.graphs < 2:
        return False  # without a graph break a parameter that no graph reads was not used
    matrices = {key for key, p in module._parameters.items() if p is not None and min((1, *p.shape)[-2:]) > 1}
    reads = any((name, key) in capture.read for key in matrices)
    return bool(matrices) and not reads and plan.policy.may_quantize(plan.names.view(name, "linear"))
