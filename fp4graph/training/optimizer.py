"""Hooks techniques act through around the user's own ``optimizer.step()``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fp4graph.errors import Error
from fp4graph.ops import contract
from fp4graph.runtime import Runtime, Weight, runtime_of
from fp4graph.technique import Technique, overrides

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741  # the optimizer


@dataclass(frozen=True)
class WeightUpdate:
    """One weight at an optimizer step.

    Attributes:
        name: fully qualified name of the parameter. parameter: itself, as stored.
        state: the technique's entries for it, by entry name, as stored; written in place.
        optimizer, group: the user's optimizer, and the parameter group the weight is in.
        quantize: the operand program of ``fprop.weight`` outside the graph: dequantized values of a tensor of the
            weight's shape.
    """

    name: str
    parameter: Tensor
    state: Mapping[str, Tensor]
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    quantize: Callable[[Tensor], Tensor]


def prepare_optimizer(model: nn.Module, optimizer: O) -> O:
    """Attach the policy's optimizer-side techniques to ``optimizer`` and return it.

    Nothing is attached where the policy has none, so the line can stay in every training script. Preparing an
    optimizer again, after applying another policy, replaces the hooks.

    Raises:
        Error: the model is not applied, or the optimizer does not hold a weight that a technique keeps state for.
    """
    runtime = runtime_of(model)
    if runtime is None:
        raise Error("prepare_optimizer() takes a model that fp4graph.apply has prepared")
    for handle in optimizer.__dict__.pop("_fp4graph_handles", ()):
        handle.remove()
    acting = [
        (weight, technique)
        for weight in runtime.weights
        for technique in weight.rule.techniques
        if overrides(technique, "before_step") or overrides(technique, "after_step")
    ]
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for weight, technique in acting:
        if weight.parameter.requires_grad and id(weight.parameter) not in held:
            raise Error(
                f"technique {technique.name} acts on {weight.name}, which this optimizer does not hold; pass it "
                "model.parameters() of the applied model"
            )
    runtime.has_optimizer = True
    if acting:
        handles = (
            optimizer.register_step_pre_hook(_hook(acting, runtime, "before_step")),
            optimizer.register_step_post_hook(_hook(acting, runtime, "after_step")),
        )
        optimizer.__dict__["_fp4graph_handles"] = handles
    return optimizer


def _hook(acting: list[tuple[Weight, Technique]], runtime: Runtime, stage: str) -> Callable[..., None]:
    chosen = [(weight, technique) for weight, technique in acting if overrides(technique, stage)]

    @torch.no_grad()
    def run(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for weight, technique in chosen:
            parameter = weight.parameter
            update = WeightUpdate(
                weight.name,
                parameter,
                weight.entries(technique),
                optimizer,
                groups.get(id(parameter), {}),
                lambda w, weight=weight: weight.quantize(w, runtime.step),  # type: ignore[misc]
            )
            with contract.at(weight.name):
                contract.run(technique, stage, update)

    return run
