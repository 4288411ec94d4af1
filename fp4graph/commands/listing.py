"""``fp4graph techniques`` and ``fp4graph policies``: list what is installed, or describe one technique or policy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table

from fp4graph.commands.deferred import defer_torch
from fp4graph.commands.output import AsJson, installed_registry, show, warn
from fp4graph.errors import Error, suggest

Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="The name to describe in full, instead of a list.")]


def techniques(name: Name = None, as_json: AsJson = False) -> None:
    """List the techniques that policies can use, or describe one."""
    defer_torch()
    from fp4graph.commands import catalogue, reference

    registry = installed_registry()
    if name is not None:
        technique = _entry(name, registry.techniques, "technique")
        page = reference.technique_page(technique, registry)
        return show(catalogue.technique_data(technique, registry), page=page, as_json=as_json)
    rows = [catalogue.technique_row(technique, registry) for _, technique in sorted(registry.techniques.items())]
    table = Table("name", "Ω", "compute", "memory", "fusable", "plugin")
    for row in rows:
        fusable = "yes" if row["fusable"] else "no"
        weight = "by options" if row["complexity"] is None else f"{row['complexity']:g}"
        table.add_row(row["name"], weight, row["compute"], row["memory"], fusable, row["plugin"])
    return show(rows, table, as_json=as_json)


def policies(
    name: Name = None,
    as_json: AsJson = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of policy files, for editors.")
    ] = False,
) -> None:
    """List the policies that can be named, or describe one."""
    defer_torch()
    from fp4graph.commands import catalogue, reference
    from fp4graph.policy import ALIASES, load_policy, shipped_policies

    registry = installed_registry()
    if schema:
        from fp4graph.policy.editor import json_schema

        return show(json_schema(registry), "", as_json=True)
    shipped = shipped_policies(registry)
    if name is not None:
        _entry(name, shipped, "policy")
        policy = load_policy(name, registry)
        return show(catalogue.policy_data(policy), page=reference.policy_page(policy), as_json=as_json)
    table = Table("name", "Ω", "techniques", "description")
    rows = []
    for listed, path in shipped.items():
        try:
            policy = load_policy(path, registry)
        except Error as error:
            warn(f"policy {listed!r} cannot be loaded: {error}")
            continue
        description = f"another name of {ALIASES[listed]}" if listed in ALIASES else policy.description
        rows.append(catalogue.policy_row(policy) | {"name": listed, "description": description})
        table.add_row(listed, f"{policy.complexity:g}", ", ".join(rows[-1]["techniques"]), description)
    return show(rows, table, as_json=as_json)


def _entry(name: str, entries: Mapping[str, Any], kind: str) -> Any:
    if name not in entries:
        if os.path.isfile(name):
            raise Error(f"{name!r} is a file, and this command shows what is installed; fp4graph check shows a file")
        raise Error(f"unknown {kind} {name!r}; {suggest(name, entries)}")
    return entries[name]
