"""Options, printing and the registry, which the commands share."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.markdown import Markdown

from fp4graph.technique.registry import Registry, default_registry

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
PolicyArgument = Annotated[str, typer.Argument(metavar="POLICY", help="A policy file, or a shipped policy's name.")]


def show(data: Any, *parts: RenderableType, as_json: bool) -> None:
    """Print ``data`` as JSON, or ``parts`` for a person; Markdown is printed as it is, unless on a terminal."""
    if as_json:
        print_json(data)
        return
    console = wide_console(markup=False)
    for part in parts:
        if isinstance(part, Markdown) and not console.is_terminal:
            print(part.markup, end="")
        else:
            console.print(part)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False, default=str))


def wide_console(**options: Any) -> Console:
    """Return a console for tables: as wide as the terminal, or 140 columns elsewhere."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140, **options)


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def installed_registry() -> Registry:
    """Return the installed registry, and name its broken plugins on stderr."""
    registry = default_registry()
    for failure in registry.failures.values():
        warn(str(failure))
    return registry
