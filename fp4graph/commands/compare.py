"""``fp4graph compare``: train a task or a user's function under several policies, and compare the losses."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from fp4graph.commands.models import imported
from fp4graph.commands.output import AsJson, print_json, wide_console
from fp4graph.commands.run_options import run_options
from fp4graph.errors import Error

if TYPE_CHECKING:
    from fp4graph.lab.comparison.training import Log
    from fp4graph.lab.runs.run import Run
    from fp4graph.policy import Policy

#: Settings that do not change the computation (such as the device), or that a comparison sets.
NOT_COMPARED = ("device", "backend", "mode", "workers", "policy", "seed")


@dataclass(frozen=True, repr=False)
class TaskTraining:
    """A built-in task as a training: trains ``run`` under a policy and a seed, and records it in the log's folder."""

    run: Run

    def __str__(self) -> str:
        return self.run.task

    def __repr__(self) -> str:
        return str({name: value for name, value in self.run.to_json().items() if name not in NOT_COMPARED})

    def __call__(self, policy: Policy, seed: int, log: Log) -> dict[str, Any]:
        """Train, from a checkpoint if there is one; return the last validation's loss and metrics."""
        from fp4graph.lab.runs.folder import Ended, read_metrics, read_outcome
        from fp4graph.lab.runs.train import train

        def tick(step: int, steps: int, loss: float) -> None:
            if math.isfinite(loss):  # else the training ends, and records the divergence
                log(step, loss)

        run = replace(self.run, policy=yaml.safe_load(policy.to_yaml()), seed=seed)
        with suppress(Ended):  # a kill came after the end of the run, before the comparison recorded it
            train(run, directory=log.folder, resume=True, tick=tick)
        outcome = read_outcome(log.folder)
        assert outcome is not None
        if outcome["diverged"]:
            log(outcome["steps"], math.nan)
        training = [line["train_loss"] for line in read_metrics(log.folder) if "validation_loss" in line]
        metrics = {"train_loss": training[-1]} if training else {}
        return {"loss": outcome["validation_loss"], **metrics, **outcome["metrics"]}


@run_options
def compare(
    task: Annotated[
        str | None, typer.Argument(metavar="[TASK]", help="What to train; fp4graph train --list names the tasks.")
    ] = None,
    train: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="A function train(policy, seed, log) instead of a task.")
    ] = None,
    policies: Annotated[
        list[str] | None, typer.Option(help="Names or files; repeat the option or separate with commas. [required]")
    ] = None,
    baseline: Annotated[str, typer.Option(help="The policy that the others are compared with.")] = "bf16",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per policy, from --seed on.")] = 3,
    processes: Annotated[int, typer.Option(min=1, help="Trainings at a time.")] = 1,
    timing: Annotated[
        bool, typer.Option(help="Measure the time per step after the trainings, in alternation with the baseline.")
    ] = True,
    statistics: Annotated[
        int | None, typer.Option(min=0, metavar="STEPS", help="Steps between records of the first seed; 0 for none.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that load data.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder of results. [runs/compare-NAME]")] = None,
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Train under several policies and seeds, from the same weights and on the same data, and compare the losses.

    The same command resumes the comparison in the folder.

    fp4graph compare digits-augmented --policies microscaling,tetrajet

    fp4graph compare --train mypkg.train:fn --policies nvfp4,tetrajet --seeds 3
    """
    names = ",".join(policies or [])
    if not names.strip(", "):
        raise Error("give the policies to compare, such as --policies nvfp4,tetrajet; fp4graph policies lists them")
    if (task is None) == (train is None):
        raise Error("give either a task to train, such as digits, or your function with --train mypkg.train:fn")
    from fp4graph.lab import compare as comparing
    from fp4graph.lab.runs.run import Run
    from fp4graph.lab.tasks import task_named

    first = settings.pop("seed", 0)
    if task is not None:
        run = Run(task, workers=workers, **settings)
        task_named(task).settings(run)  # refuses settings that do not fit the task
        function: Any = TaskTraining(run)
    else:
        chosen = [name for name, value in {**settings, "workers": workers}.items() if value != vars(Run(""))[name]]
        if chosen:
            raise Error(f"--{chosen[0].replace('_', '-')} is only for tasks; leave it out, and set it in {train}")
        function = imported(str(train))
    result = comparing.compare(
        function, names, seeds=range(first, first + seeds), folder=output or Path("runs") / f"compare-{task or train}",
        baseline=baseline, processes=processes, timing=timing, statistics=statistics,
    )  # fmt: skip
    if as_json:
        print_json(result.to_json())
    else:
        result.print(wide_console())
    if failed := sum(run["state"] == "failed" for run in result.runs):
        raise Error(f"{failed} of {len(result.runs)} runs failed; the same command repeats them")
