"""``fp4graph report``: one HTML page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4graph.commands.output import say


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of fp4graph train, or of statistics.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The page to write. [RUN/report.html]")] = None,
) -> None:
    """Write a self-contained HTML page about a run: curves, sites, and statistics of quantization.

    fp4graph report runs/digits-tetrajet-0
    """
    from fp4graph.lab.report import write_report

    path = write_report(run, output)
    say(f"{path}: {path.stat().st_size / 1e6:.1f} MB, open it in a browser")
