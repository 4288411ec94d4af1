"""Selects the techniques that act around an optimizer's step, and refuses combinations that cannot act together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fp4graph.errors import Error
from fp4graph.model.prepare import PhasePlan
from fp4graph.model.weight import PlannedWeight, Weight
from fp4graph.technique import Technique, acts_at, operands_at
from fp4graph.technique.operands import Operand

#: Stages before and after the step; the first of a pair is called for each weight, the second once for the optimizer.
BEFORE, AFTER = ("before_step", "before_optimizer"), ("after_step", "after_optimizer")


def groups_by_parameter(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Map the id of each parameter to its parameter group."""
    return {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}


def techniques(plan: PhasePlan) -> list[Technique]:
    """Return the techniques of a model that act around the step, in the policy's order."""
    return [technique for technique in plan.techniques() if acts_at(technique, *BEFORE, *AFTER)]


def check_fit(plan: PhasePlan, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer through which a technique of the model of ``plan`` cannot act."""
    acting, held = techniques(plan), groups_by_parameter(optimizer)
    for technique in acting:
        weights = [weight for weight in plan.weights if concerns(technique, weight)]
        trained = [weight for weight in weights if weight.parameter.requires_grad]
        if trained and not any(id(weight.parameter) in held for weight in weights):  # a frozen one may train later
            raise Error(
                f"technique {technique.name} acts on {trained[0].name}, which this optimizer does not hold; pass the "
                "optimizer model.parameters() of the applied model"
            )
    # torch marks a step() that runs hooks as ``hooked``. Wrappers that skip Optimizer.__init__, such as timm's
    # Lookahead, run no step hooks until they load a state, and never run hooks around saving.
    hooked = getattr(type(optimizer).step, "hooked", False) and hasattr(optimizer, "_optimizer_state_dict_pre_hooks")
    if acting and not hooked:
        raise Error(
            f"{type(optimizer).__name__} runs no hooks around its step(), and technique "
            f"{', '.join(t.name for t in acting)} needs them; if it wraps an optimizer, prepare the wrapped one"
        )


def check_options(plans: Sequence[PhasePlan]) -> None:
    """Refuse several sets of options for a technique that acts on the whole optimizer, where each would act on it."""
    firsts: dict[str, Technique] = {}
    for plan in plans:
        for technique in techniques(plan):
            first = firsts.setdefault(technique.name, technique)
            if first != technique and acts_at(technique, BEFORE[1], AFTER[1]):
                raise Error(
                    f"technique {technique.name} acts on the whole optimizer, and rules or models give it different "
                    f"options: {first!r} and {technique!r}; give it the same options everywhere"
                )


def check_uses(plans: Sequence[PhasePlan]) -> None:
    """Refuse a parameter whose uses have different techniques or weight quantizers: techniques act on it once.

    Uses that are in high precision, or may turn out to be when their graph is captured, do not count.
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
    """Return why techniques cannot act once for both uses of a parameter, ``a`` and ``b``, or None if they can."""
    of_first, of_second = _per_weight(a), _per_weight(b)
    if name := next((name for name in {**of_first, **of_second} if (name in of_first) != (name in of_second)), None):
        reason = f"only {first.name if name in of_first else second.name} has technique {name}"
    elif name := next((name for name in of_second if of_second[name] != of_first[name]), None):
        reason = f"{second.name} has technique {name} with other options"
    elif of_second and _quantizer(first, a) != _quantizer(second, b):
        reason = f"{second.name} has another quantizer, and technique {', '.join(of_second)} acts on the parameter once"
    else:
        return None
    return f"{first.name}{_declared(a)} and {second.name}{_declared(b)} are one parameter, but {reason}"


def _per_weight(planned: PlannedWeight) -> dict[str, Technique]:
    """Return the techniques that act on a weight at a step, by name."""
    stages = (BEFORE[0], AFTER[0])
    return {t.name: t for t in planned.rule.techniques if acts_at(t, *stages) and _acts(t, planned)}


def _quantizer(weight: Weight, planned: PlannedWeight) -> object:
    """Return a value that is equal for equal quantizers: all that :mod:`fp4graph.model.weight_quantizer` reads, except
    noise and state."""
    program = planned.plan.program
    return program and (program.fprop.right, program.fprop.transforms, program.apart, weight.stored_transposed)


def _declared(planned: PlannedWeight) -> str:
    """Return the rule that decided about a weight, in words and in brackets."""
    place = f", {planned.rule.file}:{planned.rule.line}" if planned.rule.file else ""
    return f" (rule {planned.rule.name!r}{place})"


def in_order(plans: Sequence[PhasePlan]) -> list[Technique]:
    """Return the acting techniques of all models, equal ones once, in an order that agrees with each model's order."""
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
    """Return whether ``technique`` acts on ``weight`` at a step, or may act if the weight's graph is not captured yet.

    A technique does not act on a weight if all operands that it names stay in high precision.
    """
    return any(technique in planned.rule.techniques and _acts(technique, planned) for planned in weight.choices)


def _acts(technique: Technique, planned: PlannedWeight) -> bool:
    operands, specs = operands_at(technique, planned.view), dict(planned.plan.specs)
    return not operands or any(specs[operand] is not None for operand in operands)
