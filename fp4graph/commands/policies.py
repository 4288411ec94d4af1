"""``fp4graph policies``: the policies that can be called by name."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markdown import Markdown
from rich.table import Table

from fp4graph.commands import catalogue, reference
from fp4graph.commands.output import AsJson, installed_registry, show, warn
from fp4graph.errors import Error
from fp4graph.policy import ALIASES, load_policy, shipped_policies
from fp4graph.text import suggest


def policies(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Describe this one in full.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the policies that can be called by name, or describe one."""
    registry = installed_registry()
    if name is not None:
        if name not in (known := shipped_policies(registry)):
            raise Error(f"unknown policy {name!r}; {suggest(name, known)}")
        policy = load_policy(name, registry)
        return show(catalogue.policy_data(policy), Markdown(reference.policy_page(policy)), as_json=as_json)
    table = Table("name", "Ω", "techniques", "description")
    rows = []
    for listed, path in shipped_policies(registry).items():
        try:
            policy = load_policy(path, registry)
        except Error as error:
            warn(f"policy {listed!r} cannot be loaded: {error}")
            continue
        description = f"another name of {ALIASES[listed]}" if listed in ALIASES else policy.description
        row = catalogue.policy_row(policy) | {"name": listed, "description": description}
        rows.append(row)
        table.add_row(listed, f"{policy.complexity:g}", ", ".join(row["techniques"]), description)
    return show(rows, table, as_json=as_json)
