"""``fp4graph diagnose``: the first quantity of a run that left its normal range."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from fp4graph.commands.output import AsJson, show


def diagnose(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of fp4graph train, or of statistics.")],
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Folder of a run with the same settings, under bf16 for instance."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Name the operand, loss or gradient norm that first left its normal range, and a technique that addresses it.

    fp4graph diagnose runs/digits-tetrajet-0 --baseline runs/digits-bf16-0
    """
    from fp4graph.lab.diagnose import diagnose as diagnosis_of

    diagnosis = diagnosis_of(run, baseline)
    parts: list[RenderableType] = [diagnosis.headline, *(f"Not recorded: {what}" for what in diagnosis.missing)]
    if diagnosis.findings:
        parts.insert(1, diagnosis.table())
    show(diagnosis.to_json(), *parts, as_json=as_json)
