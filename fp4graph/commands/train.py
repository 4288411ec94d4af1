"""``fp4graph train``: train a task under a policy and print the outcome."""

from __future__ import annotations

import importlib.util
import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from fp4graph.commands.output import AsJson, new_console, print_json, warn, wide_console
from fp4graph.commands.run_options import run_options
from fp4graph.errors import Error, install, needs, suggest

if TYPE_CHECKING:
    from fp4graph.lab.runs.run import Outcome, Run

#: The streams of a record, and the extra that installs each library.
EXTRAS = {"tensorboard": "analysis", "wandb": "wandb", "mlflow": "mlflow"}
STREAMS = (*EXTRAS, "none")
#: Seconds between lines about steps where there is no terminal.
EVERY = 30.0
#: The functions that a training calls with (step, steps, loss) and with (step, validation loss).
Tick = Callable[[int, int, float], None]
Report = Callable[[int, float], None]


@run_options
def train(
    task: Annotated[str | None, typer.Argument(metavar="TASK", help="What to train; --list names the tasks.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the tasks with their recipes.")] = False,
    policy: Annotated[str, typer.Option(help="A shipped policy's name, or a policy file.")] = "bf16",
    optimizer_option: Annotated[
        list[str] | None, typer.Option(help="name=value for the optimizer's constructor; repeat it for more.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that load data.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run's record. [runs/TASK-POLICY-OPTIMIZER-SEED]")
    ] = None,
    statistics: Annotated[
        int | None,
        typer.Option(min=1, metavar="STEPS", help="Steps between records of each site's quantization statistics."),
    ] = None,
    stream: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A further destination of the record: tensorboard, wandb, mlflow or none; repeat it for more. "
            "[tensorboard, if installed]",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint in --output.")] = False,
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Train a task under a policy: a paper's task, or a small task that runs anywhere.

    fp4graph train gaussian --policy nvfp4 --optimizer stablespam
    """
    if show:
        return _list(as_json)
    if task is None:
        raise Error("give a task to train, such as gaussian; fp4graph train --list names them all")
    from fp4graph.lab.runs import train as training

    options = _options(optimizer_option or [])
    run = training.Run(task, policy, workers=workers, optimizer_options=options, **settings)
    if resume and output is None:
        raise Error("--resume needs the folder of the run; give it with --output")
    folder = output or _unused(run)
    with streams_of(stream, run, folder) as opened, progress_of(run, quiet=as_json) as (tick, report):
        outcome = training.train(
            run, report=report, tick=tick, directory=folder, resume=resume, statistics=statistics, stream=opened
        )
    if as_json:
        return print_json({"run": run.to_json(), "outcome": outcome.to_json(), "record": str(folder)})
    console = new_console()
    console.print(_summary(run, outcome))
    return console.print(f"record: {folder}", soft_wrap=True)


def _options(pairs: list[str]) -> dict[str, Any]:
    """Return ``["betas=[0.9, 0.95]", "eps=1e-6"]`` as keyword arguments; values that are not JSON are text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (equals and name.isidentifier()):
            raise Error(f"--optimizer-option takes name=value; got {pair!r}")
        try:
            options[name] = json.loads(text)
        except (ValueError, RecursionError):
            options[name] = text
    return options


@contextmanager
def streams_of(names: list[str] | None, run: Run, folder: Path) -> Iterator[list[Any] | None]:
    """Open the streams ``names``, and yield them for ``Statistics``; None without names. W&B and MLflow begin a run."""
    from fp4graph.policy import load_policy

    if names is None and importlib.util.find_spec("tensorboard") is None:
        warn(f"the record has no TensorBoard events, because tensorboard is not installed; {install('analysis')}")
    load_policy(run.policy)  # a mistake ends the command before a tracker's run begins
    chosen = list(dict.fromkeys(names or []))
    for name in chosen:
        if name not in STREAMS:
            raise Error(f"unknown stream {name!r}; {suggest(name, STREAMS)}")
        if name in EXTRAS:
            needs(name, f"records stream to {name} with its library", EXTRAS[name])
    with ExitStack() as running:
        opened: list[Any] = [folder / "tensorboard"] if "tensorboard" in chosen else []
        if "wandb" in chosen:
            wandb: Any = importlib.import_module("wandb")
            opened.append(running.enter_context(wandb.init(name=folder.name, config=run.to_json())))
        if "mlflow" in chosen:
            mlflow: Any = importlib.import_module("mlflow")
            running.enter_context(mlflow.start_run(run_name=folder.name))
            mlflow.log_params(run.to_json())
            opened.append(mlflow)
        yield opened if chosen else None


def _unused(run: Run) -> Path:
    """Return the path of a new folder, so that earlier records stay unchanged."""
    parts = run.task, Path(str(run.policy)).stem, run.optimizer, run.seed
    name = "-".join(str(part) for part in parts if part is not None)
    folders = itertools.chain([Path("runs") / name], (Path("runs") / f"{name}.{n}" for n in itertools.count(2)))
    return next(folder for folder in folders if not folder.exists())


@contextmanager
def progress_of(run: Run, *, quiet: bool) -> Iterator[tuple[Tick, Report]]:
    """Show a training's progress on stderr: a bar on a terminal, else a line per validation and per half a minute."""
    from fp4graph.lab.runs.waiting import waiting

    console = new_console(stderr=True, quiet=quiet)
    name, status = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[status]}"))
    columns = name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), status
    validation, live = "", console.is_terminal
    begun: tuple[int, float] | None = None
    spoken = time.monotonic()
    with Progress(*columns, console=console, disable=not live) as shown, ExitStack() as until_first_step:
        bar_of_run = shown.add_task(f"{run.task}, {run.policy}", total=None, status="preparing")

        def say(text: str, first: bool) -> None:
            shown.update(bar_of_run, status=text)
            if first and not live:
                console.print(text)

        stepped = until_first_step.enter_context(waiting(say))

        def tick(step: int, steps: int, loss: float) -> None:
            nonlocal begun, spoken
            stepped()
            now = time.monotonic()
            begun = begun or (step, now)  # the first step compiles
            rate = f", {(step - begun[0]) / (now - begun[1]):.3g} steps/s" if step > begun[0] else ""
            shown.update(bar_of_run, completed=step, total=steps, status=f"loss {loss:.4g}{validation}{rate}")
            if not live and now - spoken > EVERY:
                spoken = now
                console.print(f"step {step} of {steps}: loss {loss:.4g}{rate}")

        def report(step: int, loss: float) -> None:
            nonlocal validation
            validation = f", validation {loss:.4g}"
            if not console.is_terminal:
                console.print(f"step {step}: validation loss {loss:.4g}")

        yield tick, report


def _summary(run: Run, outcome: Outcome) -> Table:
    """Return the outcome as a table of two columns."""
    table = Table(title=f"{run.task} under {run.policy}", title_justify="left", show_header=False)
    if outcome.diverged:
        table.add_row("result", f"diverged: the loss of step {outcome.steps} or of its validation is not finite")
    else:
        table.add_row("validation loss", f"{outcome.validation_loss:.4g}")
        table.add_row("training loss", f"{outcome.train_loss:.4g}")
        for name, value in outcome.metrics.items():
            table.add_row(name, f"{value:.4g}")
    table.add_row("Ω", f"{outcome.complexity:g}")
    table.add_row("matrix products", f"{outcome.quantized} of {outcome.sites} quantized")
    table.add_row("parameters", f"{outcome.parameters:,}")
    table.add_row("steps, seconds", f"{outcome.steps:,}, {outcome.seconds:.1f}")
    return table


def _list(as_json: bool) -> None:
    """Print every task with its recipe."""
    from fp4graph.lab.tasks import TASKS

    if as_json:
        keys = ("name", "family", "description", "source", "embedded", "data")
        rows = [{key: getattr(task, key) for key in keys} | {"recipe": vars(task.recipe)} for task in TASKS.values()]
        print_json(rows)
        return
    columns = (Column("task", no_wrap=True), "family", "what", "data", "batch", "lr", "length")
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for task in TASKS.values():
        recipe = task.recipe
        batch = str(recipe.batch_size) + (f" × {recipe.accumulate}" if recipe.accumulate > 1 else "")
        length = f"{recipe.epochs:g} epochs" if recipe.epochs else f"{recipe.steps} steps"
        length = f"{recipe.tokens / 1e9:g}B tokens" if recipe.tokens else length
        table.add_row(task.name, task.family, task.description, task.data or "", batch, f"{recipe.lr:g}", length)
    wide_console().print(table)
