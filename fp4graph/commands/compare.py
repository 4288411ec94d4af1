"""``fp4graph compare``: train a task under several policies, and put the results side by side."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fp4graph.commands.train import progress_of
from fp4graph.errors import Error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fp4graph.experiments.run import Run


def compare(
    task: Annotated[str, typer.Argument(metavar="TASK", help="What to train; fp4graph train --list names the tasks.")],
    policies: Annotated[
        list[str] | None, typer.Option(help="Names or files; repeat the option or put commas between. [required]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, data order and noise.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per policy, of as many seeds from --seed on.")] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="Length of each training, in steps. [the task's]")] = None,
    epochs: Annotated[float | None, typer.Option(help="The same in epochs.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. [the task's]")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples per forward pass. [the task's]")] = None,
    accumulate: Annotated[int | None, typer.Option(min=1, help="Forward passes per step. [the task's]")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adam, adamw, sgd or stablespam. [the task's]")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of matrices. [the task's]")] = None,
    schedule: Annotated[str | None, typer.Option(help="constant, cosine or timm. [the task's]")] = None,
    warmup: Annotated[float | None, typer.Option(help="Share of the steps. [the task's]")] = None,
    clip: Annotated[float | None, typer.Option(help="Norm of the gradient; 0 for none. [the task's]")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of parameters: fp32 or bf16. [the task's]")] = None,
    autocast: Annotated[bool | None, typer.Option("--autocast/--no-autocast", help="GEMMs in bf16.")] = None,
    validate_every: Annotated[int | None, typer.Option(min=1, help="Steps between validations.")] = None,
    validation_batches: Annotated[int | None, typer.Option(min=1, help="At most so many. [all]")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto is CUDA where there is one.")] = "auto",
    backend: Annotated[str | None, typer.Option(help="eager, aot_eager or inductor.")] = None,
    data: Annotated[str | None, typer.Option(help="Where the task's data is.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that load data.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder of results. [runs/compare-TASK]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the comparison in --output.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Train a task under several policies, from the same weights and on the same data, and compare them.

    fp4graph compare digits-augmented --policies bf16,microscaling,tetrajet
    """
    options = dict(locals())
    names = [name.strip() for text in policies or [] for name in text.split(",") if name.strip()]
    if not names:
        raise Error("say which policies to compare, such as --policies bf16,tetrajet; fp4graph policies lists them")
    from fp4graph.experiments import compare as comparing
    from fp4graph.experiments.run import Run

    shared = {field.name: options[field.name] for field in dataclasses.fields(Run) if field.name in options}
    runs = [Run(**shared | {"policy": name, "seed": number}) for name in names for number in range(seed, seed + seeds)]
    folder = output or Path("runs") / f"compare-{task}"

    @contextmanager
    def shown(run: Run) -> Iterator[tuple[Any, Any]]:
        console = Console(stderr=True, highlight=False, quiet=as_json)
        if not console.is_terminal:
            console.print(f"{run.task} under {run.policy}, seed {run.seed}", soft_wrap=True)
        with progress_of(run, quiet=as_json) as functions:
            yield functions

    results = comparing.compare(runs, folder, resume=resume, progress=shown)
    if as_json:
        print((folder / comparing.RESULTS).read_text(encoding="utf-8"), end="")
        return
    console = Console(highlight=False)
    wide = console if console.is_terminal else Console(highlight=False, width=140)
    wide.print(comparing.title(results), comparing.table(results), sep="\n")
    wide.print(
        "train, val.: loss of the last validation and of the training before it; sites: matrix products quantized, "
        "of all\nms/step: median after the first steps, without reading the data; 1st step: with compilation",
        f"results: {folder / comparing.RESULTS}, picture: {folder / comparing.PICTURE}",
        sep="\n",
        soft_wrap=True,
    )
