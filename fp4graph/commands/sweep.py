"""``fp4graph sweep``: search a space of policies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from fp4graph.commands.output import say, wide_console
from fp4graph.commands.run_options import run_options
from fp4graph.errors import Error, needs
from fp4graph.files import write


@run_options
def sweep(
    task: Annotated[str, typer.Option(help="What to train; `fp4graph train --list` names the tasks.")],
    trials: Annotated[int, typer.Option(min=1, help="Results in total; baselines and earlier results count.")] = 40,
    workers: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 1,
    space: Annotated[str, typer.Option(help="A search space: a shipped space's name, or a file.")] = "design-space",
    output: Annotated[Path | None, typer.Option(help="Folder for results; by default runs/sweep-TASK.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="Database URL or SQLite file; by default sweep.db in the output folder.")
    ] = None,
    study: Annotated[str | None, typer.Option(help="The study's name in the database; by default the task's.")] = None,
    sampler: Annotated[str, typer.Option(help="How to choose configurations: random or tpe.")] = "random",
    pruner: Annotated[str, typer.Option(help="When to give up a trial: none, median or hyperband.")] = "none",
    rule: Annotated[str, typer.Option(help="Formula of the score S: text or table, see sweep-results.")] = "table",
    patience: Annotated[
        float,
        typer.Option(
            min=6,
            help="Seconds after which a worker without a heartbeat counts as dead; a study keeps its first value.",
        ),
    ] = 60.0,
    retry_failed: Annotated[bool, typer.Option(help="Run failed configurations again.")] = False,
    export_policy: Annotated[
        int | None, typer.Option(metavar="TRIAL", help="Only write the policy file of this trial.")
    ] = None,
    **settings: Any,
) -> None:
    """Search a space of policies for low cost and low loss on a task.

    After a stop or a kill, the same command resumes. Several machines with the same --storage URL share the work.
    """
    needs("optuna", "sweeps need Optuna", "sweep")
    import optuna

    from fp4graph.commands.sweep_tables import Progress, best_table
    from fp4graph.lab.runs.run import Run
    from fp4graph.lab.sweeps.database import url_of
    from fp4graph.lab.sweeps.pareto import png
    from fp4graph.lab.sweeps.results import to_csv, to_json
    from fp4graph.lab.sweeps.space import load_space
    from fp4graph.lab.sweeps.study import Manifest, Study
    from fp4graph.lab.sweeps.workers import Job, Workers
    from fp4graph.lab.tasks import task_named

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    score_rule = known_rule(rule)
    folder = output or Path("runs") / f"sweep-{task}"
    url = url_of(storage or folder / "sweep.db", existing=export_policy is not None)
    name = study or task
    if export_policy is not None:
        say(str(export(Study.open(url, name), export_policy, folder)))
        return

    run = Run(task, **settings)
    task_named(task).settings(run)  # reports mistakes before the sweep begins
    searched = load_space(space)
    logs = folder / "logs"
    job = Job(url, name, trials, sampler, pruner, run.device, str(logs), workers)
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Error(f"{folder} cannot be written: {error.strerror}; give another folder with --output") from None
    created = Study.create(url, name, Manifest.of(searched, run.to_json(), patience), pruner)
    if retry_failed:
        created.excuse_failed()

    console = wide_console()
    size = searched.size()
    title = f"{task} over {searched.name}, {size:,}{'+' if size == 1_000_000 else ''} configurations"
    with (
        interrupts() as signals,
        Progress(console, trials, score_rule, title) as progress,
        Workers(job, created) as running,
    ):
        for current, events in running.watch(lambda: bool(signals)):
            progress.show(current, events)

    results = created.results()
    write(folder / "results.csv", to_csv([results]))
    write(folder / "results.json", to_json([results]))
    console.print(best_table(results, score_rule))
    files = ["results.csv", "results.json"]
    if any(s.scores[score_rule] is not None for s in results.complete):
        write(folder / "pareto.png", png([results], score_rule))
        files.append("pareto.png")
    console.print(f"{folder}: {', '.join(files)}", soft_wrap=True)
    done = sum(s.trial.finished for s in results.trials)
    if refused := results.count("refused"):
        console.print(f"{refused} configurations were refused as impossible; results.csv has the reasons")
    if signals and done < trials:
        console.print(f"interrupted with {done} of {trials} results; the same command resumes", soft_wrap=True)
        raise typer.Exit(130)
    if done < trials:
        console.print(f"the space has no more configurations: {done} results")


@contextmanager
def interrupts() -> Iterator[list[float]]:
    """Yield the times of Ctrl-C and SIGTERM; the first signal only prints a message, and the caller must stop.

    To withdraw the running trials, the sweep needs SQLAlchemy's session and Optuna's list of trials, which a
    KeyboardInterrupt could corrupt. A signal a second or more after the first does raise KeyboardInterrupt, for users
    who do not wait for an unreachable database.
    """
    times: list[float] = []

    def note(*_: object) -> None:
        times.append(time.monotonic())
        if len(times) == 1:
            with suppress(OSError):  # bypasses Python's buffers, which the signal may have interrupted
                os.write(2, b"\nstopping, and withdrawing the running trials; interrupt again to stop at once\n")
        elif times[-1] - times[0] >= 1:  # ignores an accidental double press
            raise KeyboardInterrupt

    # A shell's background jobs ignore SIGINT, and go on ignoring it.
    handled = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in handled}
    try:
        yield times
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def export(study: Any, number: int, folder: Path) -> Path:
    """Write the policy of a trial into ``folder``; raise an Error if the trial does not exist."""
    trials = {trial.number: trial for trial in study.trials()}
    if number not in trials:
        existing = f"it has {min(trials)} to {max(trials)}" if trials else "it has no trials yet"
        raise Error(f"study {study.name!r} has no trial {number}; {existing}")
    trial = trials[number]
    settings = "".join(f", {key} {value}" for key, value in trial.run.items())
    reason = ": " + " ".join(trial.result["reason"].split()) if trial.result.get("reason") else ""  # a comment's line
    outcome = f"validation loss {trial.loss:.6g}" if trial.state == "complete" else f"{trial.state}{reason}"
    note = (
        f"# Trial {number} of the sweep {study.name!r}: {trial.summary}\n"
        f"# Trained on {study.manifest.task!r} with fp4graph {study.manifest.fp4graph}{settings}: {outcome}\n"
    )
    path = folder / "policies" / f"trial-{number}.yaml"
    write(path, note + trial.policy)
    return path


def known_rule(name: str) -> Any:
    """Return ``name`` if it is a rule of the score; else raise an Error."""
    from fp4graph.lab.sweeps.results import Rule

    if name not in get_args(Rule):
        raise Error(f"unknown rule {name!r} of the score; known: {', '.join(get_args(Rule))}")
    return name
