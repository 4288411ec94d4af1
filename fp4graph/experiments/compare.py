"""Comparing policies on a task: the same weights and the same data under each, one run after the other.

A comparison's folder has a folder for each run (:mod:`fp4graph.experiments.run_folder`), ``comparison.json`` and
``loss.png``. The two files are replaced after every run.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from fp4graph.analysis.style import PALETTE, styled, subplots
from fp4graph.errors import Error
from fp4graph.experiments.data.extras import needs
from fp4graph.experiments.run import Run
from fp4graph.experiments.run_folder import Ended, read_outcome, read_run
from fp4graph.experiments.tasks import task_named
from fp4graph.experiments.train import train
from fp4graph.files import replacing, write
from fp4graph.policy import load_policy

RESULTS, PICTURE = "comparison.json", "loss.png"


@dataclass(frozen=True)
class Result:
    """One run of a comparison, with the policy's name and the contents of ``run.json`` and ``outcome.json``."""

    policy: str
    seed: int
    run: Mapping[str, Any]
    outcome: Mapping[str, Any]


def compare(
    runs: Sequence[Run],
    folder: Path,
    *,
    resume: bool = False,
    progress: Callable[[Run], AbstractContextManager[tuple[Any, Any]]] = lambda run: nullcontext((None, None)),
) -> list[Result]:
    """Train every run, and keep results and a picture of the losses in ``folder``.

    Args:
        runs: runs of one task, which differ in policy or seed.
        resume: take over the runs in ``folder`` that have ended, and go on with one that has not.
        progress: a context around a run, which gives the functions that :func:`train` calls as ``tick`` and ``report``.

    Raises:
        Error: two runs have the same policy name and seed, a policy or the task is not what a run needs, or without
            ``resume`` the folder holds one of the runs.
    """
    names = [f"{load_policy(run.policy).name}-{run.seed}" for run in runs]  # before any training, so that none is lost
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Error(f"two of the policies are called {twice.rpartition('-')[0]!r}; give each another name")
    for run in runs:
        task_named(run.task).settings(run)
    needs("matplotlib", "pictures are drawn by matplotlib", "analysis")
    results: list[Result] = []
    for run, name in zip(runs, names, strict=True):
        with progress(run) as (tick, report), suppress(Ended):
            train(run, directory=folder / name, resume=resume, tick=tick, report=report)
        done, outcome = read_run(folder / name), read_outcome(folder / name)
        assert outcome is not None
        results.append(Result(done["policy_name"], run.seed, done, outcome))
        _keep(results, folder)
    return results


def _keep(results: Sequence[Result], folder: Path) -> None:
    kept = ("settings", "steps", "complexity", "parameters", "versions", "machine")
    runs = [{"policy": one.policy, **{key: one.run[key] for key in kept}, **one.outcome} for one in results]
    content = {
        "task": results[0].run["run"]["task"],
        "timing": "step_seconds: median of steps, the first ones left out, reading of the data not counted",
        "runs": runs,
    }
    write(folder / RESULTS, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    with replacing(folder / PICTURE) as file:
        _draw(results).savefig(file, dpi=130, format="png")


def title(results: Sequence[Result]) -> str:
    """Name what was trained and where."""
    settings = results[0].run["settings"]
    seeds = sorted({result.seed for result in results})
    gemms = "bfloat16 autocast" if settings["autocast"] else {"fp32": "float32", "bf16": "bfloat16"}[settings["dtype"]]
    drawn = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
    return (
        f"{settings['task']}, {results[0].run['steps']} steps of {settings['batch_size'] * settings['accumulate']}, "
        f"{gemms} GEMMs, {settings['device']}, backend {settings['backend']}, {drawn}"
    )


def table(results: Sequence[Result]) -> Table:
    """Tabulate the last losses, the task's metrics and the times, a row per policy.

    Of several seeds a row has the mean and the standard deviation. ``ratio`` is the time per step relative to the
    first policy that quantizes nothing, or to the first policy where all of them quantize.
    """
    rows = _by_policy(results)
    metrics = list(results[0].outcome["metrics"])
    baseline = next((own for own in rows.values() if not own[0].outcome["quantized"]), next(iter(rows.values())))
    usual = _mean(result.outcome["step_seconds"] for result in baseline)
    drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("policy", "Ω", "train", "val.", *metrics, "ms/step", "ratio", "1st step", "sites"):
        drawn.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for policy, own in rows.items():
        outcomes = [result.outcome for result in own]
        last = outcomes[0]
        seconds = _mean(outcome["step_seconds"] for outcome in outcomes)
        first = _mean(outcome["first_step_seconds"] for outcome in outcomes)
        drawn.add_row(
            policy,
            f"{last['complexity']:g}",
            _cell([outcome["train_loss"] for outcome in outcomes]),
            _cell([outcome["validation_loss"] for outcome in outcomes]),
            *(_cell([outcome["metrics"].get(name) for outcome in outcomes], name) for name in metrics),
            "-" if seconds is None else f"{1000 * seconds:.1f}",
            "-" if seconds is None or usual is None else f"{seconds / usual:.2f}×",
            "-" if first is None else f"{first:.1f} s",
            f"{last['quantized']}/{last['sites']}",
        )
    return drawn


def _cell(values: Sequence[float | None], metric: str = "") -> str:
    """Return the mean of ``values``, with the standard deviation of several; a run that diverged has no value."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return "diverged"
    factor, unit = (100, " %") if metric == "accuracy" else (1, "")
    mean = factor * statistics.fmean(numbers)
    form = ".1f" if unit else ".3f" if abs(mean) >= 0.1 else ".3g"
    spread = f" ± {factor * statistics.stdev(numbers):{form}}" if len(numbers) > 1 else ""
    return f"{mean:{form}}{spread}{unit}"


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None


def _by_policy(results: Sequence[Result]) -> dict[str, list[Result]]:
    rows: dict[str, list[Result]] = {}
    for result in results:
        rows.setdefault(result.policy, []).append(result)
    return rows


def _draw(results: Sequence[Result]) -> Any:
    """Draw the losses over the steps: validation solid, training dashed, one colour a policy, one line a run."""
    with styled():
        drawn, axes = subplots(4.5, width=7.5)
        for number, (policy, own) in enumerate(_by_policy(results).items()):
            colour = PALETTE[number % len(PALETTE)]
            for result in own:
                history = [entry for entry in result.outcome["history"] if entry["validation_loss"] is not None]
                steps = [entry["step"] for entry in history]
                label = policy if result is own[0] else None
                axes.plot(steps, [h["validation_loss"] for h in history], color=colour, marker=".", label=label)
                training = [math.nan if h["train_loss"] is None else h["train_loss"] for h in history]
                axes.plot(steps, training, color=colour, linestyle="--", linewidth=0.9, alpha=0.7)
        axes.set(xlabel="step", ylabel="loss (log scale)", yscale="log")
        axes.set_title(title(results), fontsize=9)
        axes.legend(title="validation, solid;\ntraining, dashed")
    return drawn
