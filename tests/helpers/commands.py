"""The command line, run in this process."""

from __future__ import annotations

from typing import NamedTuple

from typer.testing import CliRunner

from fp4graph.__main__ import app
from fp4graph.errors import Error


class Done(NamedTuple):
    """A command's exit code, its standard output, and its standard error or the text of its Error."""

    code: int
    out: str
    err: str


def run(*arguments: object) -> Done:
    """Run ``fp4graph`` with these arguments."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, Error):
        return Done(1, result.stdout, str(result.exception))
    return Done(result.exit_code, result.stdout, result.stderr)
