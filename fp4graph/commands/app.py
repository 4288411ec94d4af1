"""Compare, train and explain FP4 quantization policies."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Annotated

import typer

from fp4graph.commands.check import check, explain
from fp4graph.commands.compare import compare
from fp4graph.commands.diagnose import diagnose
from fp4graph.commands.doctor import doctor
from fp4graph.commands.export import export
from fp4graph.commands.listing import policies, techniques
from fp4graph.commands.output import abridged, printable
from fp4graph.commands.report import report
from fp4graph.commands.search import search
from fp4graph.commands.strip_state import strip_state
from fp4graph.commands.sweep import sweep
from fp4graph.commands.sweep_results import sweep_results
from fp4graph.commands.train import train
from fp4graph.errors import Error

app = typer.Typer(name="fp4graph", help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)
_COMMANDS = (
    train, compare, search, sweep, sweep_results, report, diagnose, policies, techniques, check, explain, strip_state,
    export, doctor,
)  # fmt: skip
for _command in _COMMANDS:
    app.command()(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(metadata.version("fp4graph"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command. Print an Error or OSError on stderr, and exit with status 1."""
    with _printable_warnings():
        try:
            app()
        except (Error, OSError) as error:
            print(printable(abridged(str(error))), file=sys.stderr)
            sys.exit(1)


@contextmanager
def _printable_warnings() -> Iterator[None]:
    original = warnings.formatwarning
    warnings.formatwarning = lambda *args, **kwargs: printable(abridged(original(*args, **kwargs)))
    try:
        yield
    finally:
        warnings.formatwarning = original
