"""The options, printing and registry that commands share."""

from __future__ import annotations

import glob
import json
import re
import sys
from collections.abc import Iterable
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

if TYPE_CHECKING:
    from fp4graph.technique.registry import Registry

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def policy_completions(incomplete: str) -> list[str]:
    """Return the shipped policies and the files that begin with ``incomplete``, for the shell's completion."""
    files = (file.name for file in resources.files("fp4graph_policies").iterdir())
    shipped = sorted(file.removesuffix(".yaml") for file in files if file.endswith(".yaml"))
    return [*(name for name in shipped if name.startswith(incomplete)), *glob.glob(f"{glob.escape(incomplete)}*")]


PolicyArgument = Annotated[
    str,
    typer.Argument(
        metavar="POLICY", help="A policy file, or a shipped policy's name.", autocompletion=policy_completions
    ),
]

_LONGEST = 10_000  # characters of a message that are printed
#: Characters that move a terminal's cursor, start its commands or change the direction of text, and lone surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def show(data: Any, *parts: RenderableType, page: str = "", as_json: bool) -> None:
    """Print ``data`` as JSON, or else ``parts`` and ``page``; render the Markdown of ``page`` only on a terminal."""
    if as_json:
        print_json(data)
        return
    console = wide_console()
    for part in parts:
        console.print(part)
    if not console.is_terminal:
        print(printable(page), end="")
    elif page:
        from rich.markdown import Markdown

        console.print(Markdown(page))


def print_json(data: Any) -> None:
    say(json.dumps(data, indent=2, ensure_ascii=False, default=str))


def say(message: str) -> None:
    """Print ``message``, with control characters as :func:`printable` writes them."""
    print(printable(message))


def warn(message: str) -> None:
    """Print a warning on stderr, with control characters as :func:`printable` writes them."""
    print(printable(f"warning: {message}"), file=sys.stderr)


class _PrintableConsole(Console):
    """A console that escapes control characters, which texts of policies and data may contain."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def new_console(**options: Any) -> Console:
    """Return a console that prints text literally: without markup and emoji, and with control characters escaped."""
    return _PrintableConsole(**{"highlight": False, "markup": False, "emoji": False} | options)


def wide_console() -> Console:
    """Return a console for tables, as wide as the terminal, or 140 columns without one."""
    return new_console(width=None if sys.stdout.isatty() else 140)


def installed_registry() -> Registry:
    """Return the registry of the installed plugins, and warn about each plugin that cannot be loaded."""
    from fp4graph.technique.registry import default_registry

    registry = default_registry()
    for failure in registry.failures.values():
        warn(str(failure))
    return registry


def printable(text: str) -> str:
    """Return ``text`` with control characters, except tabs and line feeds, as JSON escapes such as ``\\u001b``."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def abridged(text: str) -> str:
    """Return ``text``; leave out the middle if it has more than 10,000 characters."""
    left_out = len(text) - _LONGEST
    if left_out <= 0:
        return text
    return f"{text[: _LONGEST // 2]} [... {left_out} characters ...] {text[-_LONGEST // 2 :]}"
