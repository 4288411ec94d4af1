"""``fp4graph compare``: train a task under several policies, and put the results side by side."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fp4graph.commands.output import AsJson, wide_console
from fp4graph.commands.run_options import run_options
from fp4graph.commands.train import Report, Tick, progress_of
from fp4graph.errors import Error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fp4graph.experiments.run import Run


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
    from fp4graph.experiments import compare as comparing
    from fp4graph.experiments.run import Run

    first = settings.pop("seed", 0)
    numbers = range(first, first + seeds)
    runs = [Run(task, name, seed=number, workers=workers, **settings) for name in names for number in numbers]
    folder = output or Path("runs") / f"compare-{task}"

    @contextmanager
    def shown(run: Run) -> Iterator[tuple[Tick, Report]]:
        console = Console(stderr=True, highlight=False, quiet=as_json)
        if not console.is_terminal:
            console.print(f"{run.task} under {run.policy}, seed {run.seed}", soft_wrap=True)
        with progress_of(run, quiet=as_json) as functions:
            yield functions

    results = comparing.compare(runs, folder, resume=resume, progress=shown)
    if as_json:
        print((folder / comparing.RESULTS).read_text(encoding="utf-8"), end="")
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
