"""The optimizers that were prepared for an applied model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from fp4graph.errors import CaptureError
from fp4graph.model.prepare import PhasePlan
from fp4graph.model.weight import Weight
from fp4graph.numerics.sharding import is_sharded
from fp4graph.technique import OPTIMIZER_STAGES, acts_at

Prepare = Callable[[nn.Module, torch.optim.Optimizer], Any]
#: The stages at the optimizer's step that act on one weight.
_STAGES = ("before_step", "after_step")


class PreparedOptimizers:
    """The optimizers that techniques of one model act through, and the ids of the quantized weights that they hold."""

    def __init__(self) -> None:
        self.parameters: set[int] = set()
        self._prepared: list[tuple[weakref.ref[torch.optim.Optimizer], Prepare]] = []

    def add(self, optimizer: torch.optim.Optimizer, parameters: Collection[int], prepare: Prepare) -> None:
        """Add an optimizer, with the ids of the weights it holds and the function that prepared it."""
        self.parameters |= set(parameters)
        self._prepared = [entry for entry in self._prepared if entry[0]() is not optimizer]
        self._prepared.append((weakref.ref(optimizer), prepare))

    def prepare_again(self, plan: PhasePlan) -> None:
        """Prepare the optimizers for the policy that the root of ``plan`` has now.

        An optimizer whose parameters have all left the model, such as that of merged adapters, is forgotten, and where
        techniques act on weights that train, one that holds no weight that they act on, not even one that is frozen
        now and may train later.
        """
        root, acted = plan.root, [weight.parameter for weight in plan.weights if _acting(weight)]
        trains = any(parameter.requires_grad for parameter in acted)
        ids = {id(parameter) for parameter in (acted if trains else root.parameters())}
        self._prepared = [entry for entry in self._prepared if _holds(entry[0](), ids)]
        for reference, prepare in self._prepared:
            if (optimizer := reference()) is not None:
                prepare(root, optimizer)

    def check(self, plan: PhasePlan) -> None:
        """Raise CaptureError for a technique that acts at the optimizer's step without a prepared optimizer, or that
        would choose channels of a frozen weight, which no step measures."""
        on_all = OPTIMIZER_STAGES - {*_STAGES}
        acting = sorted(t.name for t in plan.techniques() if acts_at(t, *on_all))
        if acting and not self._prepared:
            raise CaptureError(
                f"technique {', '.join(acting)} acts at the optimizer's step, but no optimizer was prepared: call "
                "fp4graph.prepare_optimizer(model, optimizer) before training"
            )
        for weight in plan.weights:
            if not weight.parameter.requires_grad and (chooser := _chooser(weight)) is not None:
                rule = weight.rule
                raise CaptureError(
                    f"{rule.file or 'rule'}:{rule.line}: technique {chooser} chooses channels by measurements at the "
                    f"optimizer's step, and {weight.name} is frozen, so that no step measures it: train it, or give "
                    "frozen layers a rule of their own, which keeps them or quantizes them without the technique"
                )
            needs = _acting(weight)
            foreign = bool(self._prepared) and not isinstance(weight.stored, nn.Parameter)  # from functional_call
            held = foreign or id(weight.parameter) in self.parameters
            if needs and weight.parameter.requires_grad and not held:
                raise CaptureError(
                    f"technique {', '.join(needs)} acts on {weight.name} at the optimizer's step, but no optimizer "
                    "that holds it was prepared: call fp4graph.prepare_optimizer(model, optimizer) before training, "
                    "or give a Trainer FP4GraphCallback"
                )


def _acting(weight: Weight) -> list[str]:
    """Return the names of the techniques that act on ``weight`` at the optimizer's step."""
    return sorted(technique.name for technique in weight.rule.techniques if acts_at(technique, *_STAGES))


def _chooser(weight: Weight) -> str | None:
    """Return the technique that chooses input channels of ``weight`` by the technique's state, or None."""
    program = weight.plan.program
    kept = {slot.technique for slot in program.state} if program is not None else set()
    names = (t.name for t in weight.rule.techniques if acts_at(t, "partition") and acts_at(t, "after_step"))
    return next((name for name in names if name in kept), None)


def _holds(optimizer: torch.optim.Optimizer | None, ids: Collection[int]) -> bool:
    """Return whether an optimizer holds a parameter with one of the ``ids``, or a sharded one: while FSDP has gathered
    parameters, the module holds other tensors than the optimizer."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]] if optimizer else []
    return any(id(parameter) in ids or is_sharded(parameter) for parameter in held)
