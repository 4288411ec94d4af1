"""``fp4graph compare``: train a task under several policies, and put the results side by side."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fp4graph.commands.output import AsJson, say, wide_console
from fp4graph.commands.run_options import run_options
from fp4graph.commands.train import progress_of
from fp4graph.errors import Error


@run_options
def compare(
    task: Annotated[str, typer.Argument(metavar="TASK", help="What to train; fp4graph train --list names the tasks.")],
    policies: Annotated[
        list[str] | None, typer.Option(help="Names or files; repeat the option or put commas between. [required]")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per policy, of as many seeds from --seed on.")] = 1,
    workers: Annotated[int, typer.Option(min=0, help="Processes that load data.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder of results. [runs/compare-TASK]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the comparison in --output.")] = False,
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Train a task under several policies, from the same weights and on the same data, and compare them.

    fp4graph compare digits-augmented --policies bf16,microscaling,tetrajet
    """
    names = [name.strip() for text in policies or [] for name in text.split(",") if name.strip()]
    if not names:
        raise Error("say which policies to compare, such as --policies bf16,tetrajet; fp4graph policies lists them")
    from fp4graph.lab import compare as comparing
    from fp4graph.lab.runs.run import Run

    first = settings.pop("seed", 0)
    numbers = range(first, first + seeds)
    runs = [Run(task, name, seed=number, workers=workers, **settings) for name in names for number in numbers]
    folder = output or Path("runs") / f"compare-{task}"
    progress = partial(progress_of, quiet=as_json, one_of_many=True)
    results = comparing.compare(runs, folder, resume=resume, progress=progress)
    if as_json:
        say((folder / comparing.RESULTS).read_text(encoding="utf-8").rstrip("\n"))
        return
    wide = wide_console()
    wide.print(comparing.title(results), comparing.table(results), sep="\n")
    wide.print(
        "train, val.: loss of the last validation and of the training before it; sites: matrix products quantized, "
        "of all\nms/step: median after the first steps, without reading the data; 1st step: with compilation",
        f"results: {folder / comparing.RESULTS}, picture: {folder / comparing.PICTURE}",
        sep="\n",
        soft_wrap=True,
    )
