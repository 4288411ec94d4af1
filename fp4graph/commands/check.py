"""``fp4graph check``: load a policy and print what it resolves to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from fp4graph.commands import catalogue
from fp4graph.commands.explain import explanation_of
from fp4graph.commands.output import AsJson, PolicyArgument, installed_registry, show
from fp4graph.errors import Error
from fp4graph.policy import Rule, load_policy


def check(
    policy: PolicyArgument,
    model: Annotated[str | None, typer.Option(help="A timm model that the policy must fit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Load a policy and print what it resolves to: its rules, and what happens to the six operands."""
    loaded = load_policy(policy, installed_registry())
    explanation = explanation_of(model, loaded, None, 2) if model else None
    data = catalogue.policy_data(loaded) | ({"model": explanation.to_json()} if explanation else {})
    heading = f"{loaded.name}   Ω {loaded.complexity:g}   fingerprint {loaded.fingerprint[:12]}\n{loaded.description}\n"
    tables = [_rule_table(rule) for rule in (*loaded.rules, loaded.default)]
    for phase in loaded.phases:
        tables += [f"{catalogue.phase_heading(phase).capitalize()}:\n"]
        tables += [_rule_table(rule) for rule in (*phase.policy.rules, phase.policy.default)]
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
