"""Which techniques act around an optimizer's step, and what cannot act together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fp4graph.errors import Error
from fp4graph.model.prepare import PhasePlan
from fp4graph.model.weight import PlannedWeight, Weight
from fp4graph.technique import Technique, overrides
from fp4graph.technique.operands import Operand

#: Stages around the step: for each weight, then once for all parameters.
BEFORE, AFTER = ("before_step", "before_optimizer"), ("after_step", "after_optimizer")


def groups_by_parameter(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Return the group of each parameter, by the parameter's id."""
    return {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}


def acts_at(technique: Technique, stages: Iterable[str]) -> bool:
    """Return whether ``technique`` acts at any of ``stages``."""
    return any(overrides(technique, stage) for stage in stages)


def techniques(plan: PhasePlan) -> list[Technique]:
    """Return the techniques of a model that act around the step, in the policy's order."""
    return [technique for technique in plan.techniques() if acts_at(technique, (*BEFORE, *AFTER))]


def check_fit(plan: PhasePlan, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that a technique of one model could not act through."""
    acting, held = techniques(plan), groups_by_parameter(optimizer)
    for technique in acting:
        due = [w for w in plan.weights if concerns(technique, w) and w.parameter.requires_grad]
        if due and not any(id(weight.parameter) in held for weight in due):
            raise Error(
                f"technique {technique.name} acts on {due[0].name}, which this optimizer does not hold; pass it "
                "model.parameters() of the applied model"
            )
    # torch marks a step that runs hooks. Wrappers that skip Optimizer.__init__, as timm's Lookahead, run none until
    # they load a state, and then still none around saving.
    hooked = getattr(type(optimizer).step, "hooked", False) and hasattr(optimizer, "_optimizer_state_dict_pre_hooks")
    if acting and not hooked:
        raise Error(
            f"{type(optimizer).__name__} runs no hooks around its step(), through which technique "
            f"{', '.join(t.name for t in acting)} would act; if it wraps an optimizer, prepare that one"
        )


def check_options(plans: Sequence[PhasePlan]) -> None:
    """Refuse a technique that acts on the whole optimizer with several sets of options: each would act on all of it."""
    found: dict[str, Technique] = {}
    for plan in plans:
        for technique in techniques(plan):
            former = found.setdefault(technique.name, technique)
            if former != technique and acts_at(technique, (BEFORE[1], AFTER[1])):
                raise Error(
                    f"technique {technique.name} acts on the whole optimizer, and rules or models give it different "
                    f"options: {former!r} and {technique!r}; give it the same options everywhere"
                )


def check_uses(plans: Sequence[PhasePlan]) -> None:
    """Refuse a parameter whose uses have different techniques or weight quantizers: it is acted on once.

    Uses in high precision do not count, nor uses that may turn out to be so when their product is captured.
    """
    firsts: dict[int, Weight] = {}
    for weight in (weight for plan in plans for weight in plan.weights):
        if any(dict(planned.plan.specs)[Operand.FPROP_WEIGHT] is None for planned in weight.choices):
            continue
        first = firsts.setdefault(id(weight.parameter), weight)
        differences = [_difference(first, a, weight, b) for a in first.choices for b in weight.choices]
        if None not in differences:
            raise Error(f"{differences[0]}; put both under one rule, or keep one of them in high precision")


def _difference(first: Weight, a: PlannedWeight, second: Weight, b: PlannedWeight) -> str | None:
    """Return why two uses of one parameter, decided as ``a`` and ``b``, cannot be acted on together, or None."""
    former, own = _per_weight(a), _per_weight(b)
    if name := next((name for name in {**former, **own} if (name in former) != (name in own)), None):
        what = f"only {first.name if name in former else second.name} has technique {name}"
    elif name := next((name for name in own if own[name] != former[name]), None):
        what = f"{second.name} has technique {name} with other options"
    elif own and _quantizer(first, a) != _quantizer(second, b):
        what = f"{second.name} has another quantizer, and technique {', '.join(own)} acts on the parameter once"
    else:
        return None
    return f"{first.name}{_declared(a)} and {second.name}{_declared(b)} are one parameter, but {what}"


def _per_weight(planned: PlannedWeight) -> dict[str, Technique]:
    """Return the techniques that act on a weight at a step, by name."""
    stages = (BEFORE[0], AFTER[0])
    return {t.name: t for t in planned.rule.techniques if acts_at(t, stages) and _acts(t, planned)}


def _quantizer(weight: Weight, planned: PlannedWeight) -> object:
    """Return what :meth:`Weight.quantize` depends on besides noise and state; equal for equal quantizers."""
    program = planned.plan.program
    return program and (program.fprop.right, program.fprop.transforms, program.apart, weight.stored_transposed)


def _declared(planned: PlannedWeight) -> str:
    """Return the rule of a weight, in brackets."""
    place = f", {planned.rule.file}:{planned.rule.line}" if planned.rule.file else ""
    return f" (rule {planned.rule.name!r}{place})"


def in_order(plans: Sequence[PhasePlan]) -> list[Technique]:
    """Merge the models' acting techniques into one order that keeps each model's; equal techniques are one."""
    pending, merged = [techniques(plan) for plan in plans], list[Technique]()
    while any(pending):
        heads = [order[0] for order in pending if order]
        free = next((t for t in heads if not any(t in order[1:] for order in pending)), None)
        if free is None:
            raise Error(
                "models on one optimizer declare techniques in opposite orders: "
                f"{' and '.join(sorted({t.name for t in heads}))}; declare them in the same order in each policy"
            )
        merged.append(free)
        pending = [order[1:] if order and order[0] == free else order for order in pending]
    return merged


def concerns(technique: Technique, weight: Weight) -> bool:
    """Return whether ``technique`` acts on ``weight`` at a step, or may act as long as no graph has shown its product.

    A technique does not act where none of the operands that it names is quantized.
    """
    return any(technique in planned.rule.techniques and _acts(technique, planned) for planned in weight.choices)


def _acts(technique: Technique, planned: PlannedWeight) -> bool:
    operands, specs = technique.acts_on(planned.view), dict(planned.plan.specs)
    return not operands or any(specs[operand] is not None for operand in operands)
