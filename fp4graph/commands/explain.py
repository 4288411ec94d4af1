"""``fp4graph explain``: the effect of a policy on a timm model."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fp4graph.commands.output import AsJson, PolicyArgument, installed_registry, show
from fp4graph.errors import Error
from fp4graph.experiments.data.extras import needs
from fp4graph.policy import Policy, load_policy
from fp4graph.text import suggest


def explain(
    policy: PolicyArgument,
    model: Annotated[str, typer.Option(help="Name of a timm model.")],
    input_size: Annotated[
        str | None, typer.Option(help="Input shape without the batch, as 3x224x224; by default the model's own.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size of the captured forward.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Show what a policy would do to each matrix product of a timm model, without doing it."""
    explanation = explanation_of(model, load_policy(policy, installed_registry()), input_size, batch_size)
    show(explanation.to_json(), str(explanation), as_json=as_json)


def explanation_of(model: str, policy: Policy, input_size: str | None, batch_size: int) -> Any:
    """Return the explanation of ``policy`` on a new timm model.

    Raises:
        Error: timm is not installed or has no such model, or ``input_size`` is not a shape.
    """
    needs("timm", "models are made by timm", "vision")
    import timm
    import torch

    import fp4graph

    if not timm.is_model(model):
        raise Error(f"timm has no model {model!r}; {suggest(model, timm.list_models())[:400]}")
    built: Any = timm.create_model(model)
    shape = _shape(input_size) if input_size else tuple(built.default_cfg["input_size"])
    return fp4graph.explain(built, policy, (torch.zeros(batch_size, *shape),))


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise Error(f"--input-size {text!r} is not a shape; write sizes with x between them, such as 3x224x224")
    return tuple(int(size) for size in sizes)
