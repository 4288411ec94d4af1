"""``fp4graph check`` and ``fp4graph explain``: what a policy resolves to, and its effect on a timm model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from fp4graph.commands import catalogue
from fp4graph.commands.output import AsJson, PolicyArgument, installed_registry, show
from fp4graph.errors import Error
from fp4graph.lab.data.extras import needs
from fp4graph.policy import Policy, Rule, load_policy
from fp4graph.text import suggest


def check(
    policy: PolicyArgument,
    model: Annotated[str | None, typer.Option(help="A timm model that the policy must fit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Load a policy and print what it resolves to: its rules, and what happens to the six operands."""
    loaded = load_policy(policy, installed_registry())
    explanation = _explanation(model, loaded) if model else None
    data = catalogue.policy_data(loaded) | ({"model": explanation.to_json()} if explanation else {})
    heading = f"{loaded.name}   Ω {loaded.complexity:g}   fingerprint {loaded.fingerprint[:12]}\n{loaded.description}\n"
    if not loaded.ever_quantizes:
        heading += "This policy quantizes nothing: no rule quantizes, and the default keeps.\n"
    tables = [_rule_table(rule) for rule in (*loaded.rules, loaded.default)]
    for phase in loaded.phases:
        rules = (*phase.policy.rules, phase.policy.default)
        tables += [f"{catalogue.phase_heading(phase).capitalize()}:\n", *map(_rule_table, rules)]
    show(data, heading, *tables, *([str(explanation)] if explanation else []), as_json=as_json)
    if explanation and explanation.problem:
        raise Error(f"{model}: {explanation.problem}")


def _rule_table(rule: Rule) -> RenderableType:
    place = f" ({Path(rule.file).name}:{rule.line})" if rule.file else ""
    heading = f"{rule.name}{place}{catalogue.rule_heading(rule).removeprefix(rule.name)}"
    if rule.keep is not None:
        return f"{heading}\nkept in high precision: {rule.keep}\n"
    table = Table(*catalogue.COLUMNS, title=heading, title_justify="left")
    for row in catalogue.rule_rows(rule):
        table.add_row(*row)
    if rule.techniques:
        table.caption = "techniques: " + ", ".join(map(catalogue.spelled, rule.techniques))
    return table


def explain(
    policy: PolicyArgument,
    model: Annotated[str, typer.Option(help="Name of a timm model.")],
    input_size: Annotated[
        str | None, typer.Option(help="Input shape without the batch, as 3x224x224; by default the model's own.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=10**9, help="Batch size of the captured forward.")] = 2,
    every: Annotated[bool, typer.Option("--all", help="Give each site a line of its own.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a policy would do to each matrix product of a timm model, without doing it."""
    explanation = _explanation(model, load_policy(policy, installed_registry()), input_size, batch_size)
    show(explanation.to_json(), explanation.table(every=every), as_json=as_json)


def _explanation(model: str, policy: Policy, input_size: str | None = None, batch_size: int = 2) -> Any:
    """Return the explanation of ``policy`` on a new timm model; raise an Error if there is none, or no such shape."""
    needs("timm", "models are made by timm", "vision")
    import timm
    import torch

    import fp4graph

    if not timm.is_model(model):
        raise Error(f"timm has no model {model!r}; {suggest(model, timm.list_models())[:400]}")
    built: Any = timm.create_model(model)
    sizes = list(built.default_cfg["input_size"]) if not input_size else input_size.split("x")
    if not all(str(size).isdecimal() and len(str(size)) < 10 and int(size) for size in sizes):
        raise Error(f"--input-size {input_size!r} is not a shape; write sizes with x between them, such as 3x224x224")
    return fp4graph.explain(built, policy, (torch.zeros(batch_size, *map(int, sizes)),))
