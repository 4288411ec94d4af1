"""``fp4graph techniques``: the techniques that policies can use."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markdown import Markdown
from rich.table import Table

from fp4graph.commands import catalogue, reference
from fp4graph.commands.output import AsJson, installed_registry, show
from fp4graph.errors import Error
from fp4graph.text import suggest


def techniques(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Describe this one in full.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the techniques that policies can use, or describe one."""
    registry = installed_registry()
    if name is not None:
        if name not in registry.techniques:
            raise Error(f"unknown technique {name!r}; {suggest(name, registry.techniques)}")
        technique = registry.techniques[name]
        page = Markdown(reference.technique_page(technique, registry))
        return show(catalogue.technique_data(technique, registry), page, as_json=as_json)
    rows = [catalogue.technique_row(technique, registry) for _, technique in sorted(registry.techniques.items())]
    table = Table("name", "Ω", "compute", "memory", "fusable", "plugin")
    for row in rows:
        fusable = "yes" if row["fusable"] else "no"
        weight = "by options" if row["complexity"] is None else f"{row['complexity']:g}"
        table.add_row(row["name"], weight, row["compute"], row["memory"], fusable, row["plugin"])
    return show(rows, table, as_json=as_json)
