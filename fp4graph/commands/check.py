"""``fp4graph check`` and ``fp4graph explain``: show the resolved policy, and its effect on a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from fp4graph.commands.deferred import defer_torch
from fp4graph.commands.models import HELP, named_model
from fp4graph.commands.output import AsJson, PolicyArgument, installed_registry, show
from fp4graph.errors import Error
from fp4graph.files import write

if TYPE_CHECKING:
    from fp4graph.commands.catalogue import Native
    from fp4graph.policy import Policy, Rule

TargetOption = Annotated[
    str | None,
    typer.Option(help="Hardware or library: show which GEMMs it runs natively, why not others: b200, te, vllm, ..."),
]


def check(
    policy: PolicyArgument,
    model: Annotated[str | None, typer.Option(help=f"A model that the policy must fit: {HELP}")] = None,
    target: TargetOption = None,
    as_json: AsJson = False,
) -> None:
    """Load a policy and print it resolved: its rules, and the quantizers of the six operands."""
    if model is None:
        defer_torch()
    from fp4graph.commands import catalogue
    from fp4graph.policy import load_policy

    loaded = load_policy(policy, installed_registry())
    explanation = _explanation(model, loaded) if model else None
    data = catalogue.policy_data(loaded) | ({"model": explanation.to_json(target=target)} if explanation else {})
    native = [] if target is None else _native_on(target, loaded)
    data |= {"target": [row._asdict() for row in native]}
    heading = f"{loaded.name}   Ω {loaded.complexity:g}   fingerprint {loaded.fingerprint[:12]}\n{loaded.description}\n"
    if not loaded.ever_quantizes:
        heading += "This policy quantizes nothing: every rule and the default keep high precision.\n"
    tables = [_rule_table(rule) for rule in (*loaded.rules, loaded.default)]
    for phase in loaded.phases:
        rules = (*phase.policy.rules, phase.policy.default)
        tables += [f"{catalogue.phase_heading(phase).capitalize()}:\n", *map(_rule_table, rules)]
    if target:
        tables.append(_target_table(target, native))
    shown = [] if explanation is None else [str(explanation), *([explanation.on(target)] if target else [])]
    show(data, heading, *tables, *shown, as_json=as_json)
    if explanation and explanation.problem:
        raise Error(f"{model}: {explanation.problem}")


def _native_on(target: str, policy: Policy) -> list[Native]:
    """Return the rows of a policy and of its phases; the name of a phase's rule begins with the phase."""
    from fp4graph.commands import catalogue

    rows = catalogue.native_on(target, policy)
    for phase in policy.phases:
        begins = catalogue.phase_heading(phase)
        nothing = [catalogue.Native("nothing is quantized", "", "", "exact", "")]
        found = catalogue.native_on(target, phase.policy) or nothing
        rows += [row._replace(rule=f"{begins}: {row.rule}") for row in found]
    return rows


def _target_table(target: str, rows: Sequence[Native]) -> RenderableType:
    from fp4graph.graph import targets

    table = Table("rule", "op", "GEMM", "", "why", title=f"on {targets.target(target).title}", title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def _rule_table(rule: Rule) -> RenderableType:
    from fp4graph.commands import catalogue

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
    model: Annotated[str, typer.Option(help=HELP)],
    input_size: Annotated[
        str | None, typer.Option(help="Input shape without the batch, such as 3x224x224, or a text's length.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, max=10**9, help="Batch size of the captured forward; 2 by default.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Print a separate line for each site.")] = False,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Show which code quantizes each operand on this machine, and why.")
    ] = False,
    target: TargetOption = None,
    page: Annotated[Path | None, typer.Option("--html", help="Write a page to this file, for a browser.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the effect of a policy on each matrix product of a model, without changing the model."""
    from fp4graph.policy import load_policy

    explanation = _explanation(model, load_policy(policy, installed_registry()), input_size, batch_size)
    if page is not None:
        write(page, explanation.to_html(target=target))
    tables = [explanation.schedule(every=every)] if schedule else []
    tables += [explanation.on(target, every=every)] if target else []
    shown = tables or [explanation.table(every=every)]
    shown += [f"{page} shows this in a browser"] if page is not None else []
    show(explanation.to_json(schedule=schedule, target=target), *shown, as_json=as_json)
    if explanation.problem:
        raise Error(f"{model}: {explanation.problem}")


def _explanation(model: str, policy: Policy, input_size: str | None = None, batch_size: int | None = None) -> Any:
    """Return the explanation of ``policy`` on a new model; raise an Error if the model or its forward fails."""
    import fp4graph

    named = named_model(model, input_size=input_size, batch_size=batch_size, device="meta")
    try:
        return fp4graph.explain(named.model, policy, named.args, named.kwargs)
    except Error:
        raise
    except Exception as error:
        inputs = [tuple(x.shape) for x in (*named.args, *named.kwargs.values()) if hasattr(x, "shape")]
        raise Error(
            f"{model}: the forward raised {type(error).__name__}: {error}; its inputs had the shapes "
            f"{', '.join(map(str, inputs))}. Give another shape with --input-size, or return (model, args) from a "
            "factory"
        ) from error
