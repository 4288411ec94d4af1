"""What is installed, whether a policy is right, and what it would do to a model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from fp4graph.commands import reference
from fp4graph.commands.compare import compare
from fp4graph.commands.pareto import pareto
from fp4graph.commands.report import report
from fp4graph.commands.score import score
from fp4graph.commands.sweep import sweep
from fp4graph.commands.train import train
from fp4graph.errors import Error
from fp4graph.policy import Policy, Rule, load_policy
from fp4graph.technique.registry import Registry, default_registry
from fp4graph.text import suggest

app = typer.Typer(
    name="fp4graph", help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)

app.command()(train)
app.command()(compare)
app.command()(sweep)
app.command()(score)
app.command()(pareto)
app.command()(report)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
PolicyArgument = Annotated[str, typer.Argument(metavar="POLICY", help="A policy file, or a shipped policy's name.")]


@app.command()
def policies(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Describe this one in full.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the policies that can be called by name, or describe one."""
    registry = _registry()
    if name is not None:
        if name not in registry.policies:
            raise Error(f"unknown policy {name!r}; {suggest(name, registry.policies)}")
        policy = load_policy(name, registry)
        return _show(reference.policy_data(policy), Markdown(reference.policy_page(policy)), as_json=as_json)
    table = Table("name", "Ω", "techniques", "description")
    rows = []
    for listed, path in sorted(registry.policies.items()):
        try:
            policy = load_policy(path, registry)
        except Error as error:
            _warn(f"policy {listed!r} cannot be loaded: {error}")
            continue
        row = reference.policy_row(policy) | {"name": listed}
        rows.append(row)
        table.add_row(listed, f"{policy.complexity:g}", ", ".join(row["techniques"]), policy.description)
    return _show(rows, table, as_json=as_json)


@app.command()
def techniques(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Describe this one in full.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the techniques that policies can use, or describe one."""
    registry = _registry()
    if name is not None:
        if name not in registry.techniques:
            raise Error(f"unknown technique {name!r}; {suggest(name, registry.techniques)}")
        technique = registry.techniques[name]
        page = Markdown(reference.technique_page(technique, registry))
        return _show(reference.technique_data(technique, registry), page, as_json=as_json)
    rows = [reference.technique_row(technique, registry) for _, technique in sorted(registry.techniques.items())]
    table = Table("name", "Ω", "compute", "memory", "fusable", "plugin")
    for row in rows:
        fusable = "yes" if row["fusable"] else "no"
        weight = "by options" if row["complexity"] is None else f"{row['complexity']:g}"
        table.add_row(row["name"], weight, row["compute"], row["memory"], fusable, row["plugin"])
    return _show(rows, table, as_json=as_json)


@app.command()
def check(
    policy: PolicyArgument,
    model: Annotated[str | None, typer.Option(help="A timm model that the policy must fit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Load a policy and print what it came to: its rules, and what happens to the six operands."""
    loaded = load_policy(policy, _registry())
    explanation = _explanation(model, loaded, None, 2) if model else None
    data = reference.policy_data(loaded) | ({"model": explanation.to_json()} if explanation else {})
    heading = f"{loaded.name}   Ω {loaded.complexity:g}   fingerprint {loaded.fingerprint[:12]}\n{loaded.description}\n"
    tables: list[Any] = [_rule_table(rule) for rule in (*loaded.rules, loaded.default)]
    for phase in loaded.phases:
        tables += [f"{reference.phase_heading(phase).capitalize()}:\n"]
        tables += [_rule_table(rule) for rule in (*phase.policy.rules, phase.policy.default)]
    _show(data, heading, *tables, *([str(explanation)] if explanation else []), as_json=as_json)
    if explanation and explanation.problem:
        raise Error(f"{model}: {explanation.problem}")


@app.command()
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
    explanation = _explanation(model, load_policy(policy, _registry()), input_size, batch_size)
    _show(explanation.to_json(), str(explanation), as_json=as_json)


def main() -> None:
    """Run the command. An error of ours is one line on stderr and exit status 1."""
    try:
        app()
    except Error as error:
        print(error, file=sys.stderr)
        sys.exit(1)


# ------------------------------------------------------------------ reading


def _registry() -> Registry:
    """The installed registry, its broken plugins named on stderr."""
    registry = default_registry()
    for failure in registry.failures.values():
        _warn(str(failure))
    return registry


def _explanation(model: str, policy: Policy, input_size: str | None, batch_size: int) -> Any:
    try:
        import timm
    except ImportError:
        raise Error("models are made by timm, which is not installed; pip install 'fp4graph[vision]'") from None
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


# ------------------------------------------------------------------ as text


def _rule_table(rule: Rule) -> Table | str:
    place = f" ({Path(rule.file).name}:{rule.line})" if rule.file else ""
    heading = f"{rule.name}{place}{reference.rule_heading(rule).removeprefix(rule.name)}"
    if rule.keep is not None:
        return f"{heading}\nkept in high precision: {rule.keep}\n"
    table = Table(*reference.COLUMNS, title=heading, title_justify="left")
    for row in reference.rule_rows(rule):
        table.add_row(*row)
    if rule.techniques:
        table.caption = "techniques: " + ", ".join(map(reference.spelled, rule.techniques))
    return table


def _show(data: Any, *parts: Table | Markdown | str, as_json: bool) -> None:
    """Print ``data`` as JSON, or ``parts`` for a person; Markdown as it is, unless on a terminal."""
    if as_json:
        print(json.dumps(data, indent=2, ensure_ascii=False, default=str))
        return
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140)
    for part in parts:
        if isinstance(part, Markdown) and not console.is_terminal:
            print(part.markup, end="")
        else:
            console.print(part)


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
