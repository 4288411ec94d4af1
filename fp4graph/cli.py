"""What is installed, whether a policy is right, and what it would do to a model."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.table import Table

from fp4graph.errors import Error
from fp4graph.numerics.spec import QuantSpec
from fp4graph.operands import Operand
from fp4graph.policy import Policy, Rule, load_policy
from fp4graph.policy.validation import keys
from fp4graph.registry import Registry, default_registry, suggest
from fp4graph.technique import STAGES, Technique, overrides

app = typer.Typer(
    name="fp4graph", help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
PolicyArgument = Annotated[str, typer.Argument(metavar="POLICY", help="A policy file, or a shipped policy's name.")]


@app.command()
def policies(as_json: AsJson = False) -> None:
    """List the policies that can be called by name."""
    registry = _registry()
    table = Table("name", "Ω", "techniques", "description")
    rows = []
    for name, path in sorted(registry.policies.items()):
        try:
            policy = load_policy(path, registry)
        except Error as error:
            _warn(f"policy {name!r} cannot be loaded: {error}")
            continue
        used = [technique.name for technique in policy.used]
        rows.append({"name": name, "complexity": policy.complexity, "techniques": used} | _about(policy))
        table.add_row(name, f"{policy.complexity:g}", ", ".join(used), policy.description)
    _show(rows, table, as_json=as_json)


@app.command()
def techniques(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Describe this one in full.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the techniques that policies can use, or describe one."""
    registry = _registry()
    if name is not None:
        return _describe(name, registry, as_json)
    rows = [_row(technique, registry) for _, technique in sorted(registry.techniques.items())]
    table = Table("name", "Ω", "compute", "memory", "fusable", "plugin")
    for row in rows:
        fusable = "yes" if row["fusable"] else "no"
        table.add_row(row["name"], _weight(row), row["compute"], row["memory"], fusable, row["plugin"])
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
    data = _data(loaded) | ({"model": explanation.to_json()} if explanation else {})
    heading = f"{loaded.name}   Ω {loaded.complexity:g}   fingerprint {loaded.fingerprint[:12]}\n{loaded.description}\n"
    tables = [_rule_table(rule) for rule in (*loaded.rules, loaded.default)]
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


# ------------------------------------------------------------------ as plain data


def _about(policy: Policy) -> dict[str, Any]:
    return {"description": policy.description, "file": policy.file}


def _data(policy: Policy) -> dict[str, Any]:
    return {
        "name": policy.name,
        **_about(policy),
        "complexity": policy.complexity,
        "techniques": [technique.name for technique in policy.used],
        "fingerprint": policy.fingerprint,
        "rules": [_rule_data(rule) for rule in policy.rules],
        "default": _rule_data(policy.default),
        "yaml": policy.to_yaml(),
    }


def _rule_data(rule: Rule) -> dict[str, Any]:
    return {
        "name": rule.name,
        "file": rule.file,
        "line": rule.line,
        "required": rule.required,
        "match": str(rule.match),
        "keep": rule.keep,
        "operands": {operand.value: _words(spec) for operand, spec in rule.specs.items()},
        "reuses": sorted(operand.value for operand in rule.reuses),
        "techniques": [technique.name for technique in rule.techniques],
    }


def _words(spec: QuantSpec | None) -> dict[str, str] | None:
    """One operand's spec, column by column."""
    if spec is None:
        return None
    block = "×".join(map(str, spec.block)) if isinstance(spec.block, tuple) else str(spec.block)
    scale = [spec.scale.format.name, spec.scale.rounding]
    scale += [spec.scale.convention] if spec.scale.convention != "decode" else []
    scale += [spec.scale.zero] if spec.scale.zero != "nearest_subnormal" else []
    bits = f", {spec.random_bits} bits" if spec.random_bits != 24 else ""
    return {
        "element": spec.element.name,
        "block": block,
        "scale": " ".join(scale),
        "rounding": f"nearest, ties {spec.ties}" if spec.rounding == "nearest" else f"stochastic{bits}",
        "source": spec.source + (", from master" if spec.from_master else ""),
    }


def _row(technique: type[Technique], registry: Registry) -> dict[str, Any]:
    try:
        complexity = technique().complexity
    except ValidationError:  # has an option without default
        complexity = None
    return {
        "name": technique.name,
        "complexity": complexity,
        "compute": technique.overhead.compute,
        "memory": technique.overhead.memory,
        "fusable": technique.overhead.fusable,
        "plugin": registry.origin(technique.name),
    }


def _option(field: FieldInfo) -> dict[str, Any]:
    default = {} if field.is_required() else {"default": field.get_default(call_default_factory=True)}
    kind = field.annotation
    shown = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    return {"type": shown.replace("typing.", ""), "required": field.is_required(), **default}


# ------------------------------------------------------------------ as text


def _describe(name: str, registry: Registry, as_json: bool) -> None:
    """One technique in full."""
    if name not in registry.techniques:
        raise Error(f"unknown technique {name!r}; {suggest(name, registry.techniques)}")
    technique = registry.techniques[name]
    row = _row(technique, registry)
    doc = inspect.getdoc(technique) or ""
    options = dict(zip(keys(technique), map(_option, technique.model_fields.values()), strict=True))
    stages = [stage for stage in STAGES if overrides(technique, stage)]
    table = Table("option", "type", "default")
    for key, option in options.items():
        table.add_row(key, option["type"], "required" if option["required"] else repr(option["default"]))
    fusable = "fusable" if row["fusable"] else "not fusable"
    heading = (
        f"{name}   Ω {_weight(row)}   plugin {row['plugin']}\n"
        f"compute {row['compute']}, memory {row['memory']}, {fusable}\n\n{doc}\n"
    )
    data = row | {"doc": doc, "options": options, "stages": stages}
    _show(data, heading, *([table] if options else []), f"stages: {', '.join(stages) or 'none'}", as_json=as_json)


def _weight(row: dict[str, Any]) -> str:
    return "by options" if row["complexity"] is None else f"{row['complexity']:g}"


def _rule_table(rule: Rule) -> Table | str:
    place = f" ({Path(rule.file).name}:{rule.line})" if rule.file else ""
    optional = "" if rule.required or rule.name == "default" else ", may match nothing"
    heading = f"{rule.name}{place}: {rule.match if rule.name != 'default' else 'every other site'}{optional}"
    if rule.keep is not None:
        return f"{heading}\nkept in high precision: {rule.keep}\n"
    table = Table("", "operand", "element", "block", "scale", "rounding", "source", title=heading, title_justify="left")
    for number, operand in enumerate(Operand, start=1):
        words = _words(rule.specs[operand])
        exact = "high precision, of the dequantized fprop operand" if operand in rule.reuses else "high precision"
        table.add_row(f"Q{number}", operand.value, *(words.values() if words else (exact,)))
    if rule.techniques:
        table.caption = "techniques: " + ", ".join(map(_spelled, rule.techniques))
    return table


def _spelled(technique: Technique) -> str:
    options = technique.model_dump(mode="json", by_alias=True)
    return f"{technique.name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"


def _show(data: Any, *parts: Table | str, as_json: bool) -> None:
    """Print ``data`` as JSON, or ``parts`` for a person."""
    if as_json:
        print(json.dumps(data, indent=2, ensure_ascii=False, default=str))
        return
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140)
    for part in parts:
        console.print(part)


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
