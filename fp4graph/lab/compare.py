"""Comparing policies on a task: the same weights and the same data under each, one run after the other.

A comparison's folder has a folder for each run (:mod:`fp4graph.lab.runs.folder`), ``comparison.json`` and
``loss.png``. The two files are replaced after every run.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import nn

from fp4graph.errors import Error, PolicyError
from fp4graph.files import replacing, write
from fp4graph.lab.data.extras import needs
from fp4graph.lab.pictures.style import PALETTE, styled, subplots
from fp4graph.lab.runs.folder import Ended, read_outcome, read_run
from fp4graph.lab.runs.run import Run
from fp4graph.lab.runs.train import train
from fp4graph.lab.tasks import Problem, placed, task_named
from fp4graph.model.explain import explain
from fp4graph.policy import Policy, load_policy

RESULTS, PICTURE = "comparison.json", "loss.png"
#: Reasons that an error gives for what a policy does not quantize.
SHOWN = 8


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
        Error: two runs have the same policy name and seed, policies do not fit the task's model, the task is not what a
            run needs, or without ``resume`` the folder holds one of the runs. All this but the last is found before the
            first training.
    """
    for run in runs:
        task_named(run.task).settings(run)
    needs("matplotlib", "pictures are drawn by matplotlib", "analysis")
    policies, faults = _loaded(runs)
    names = [f"{policies[_label(run)].name}-{run.seed}" for run in runs if _label(run) in policies]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Error(f"two of the policies are called {twice.rpartition('-')[0]!r}; give each another name")
    if faults := faults | _faults(runs[0], policies):
        reasons = "".join(f"\n  {name}: {fault}" for name, fault in faults.items())
        raise Error(f"{len(faults)} of the policies cannot train {runs[0].task}, so none was trained:{reasons}")
    results: list[Result] = []
    for run, name in zip(runs, names, strict=True):
        with progress(run) as (tick, report), suppress(Ended):
            train(run, directory=folder / name, resume=resume, tick=tick, report=report)
        done, outcome = read_run(folder / name), read_outcome(folder / name)
        assert outcome is not None
        results.append(Result(done["policy_name"], run.seed, done, outcome))
        _keep(results, folder)
    return results


def _label(run: Run) -> str:
    """Return how the caller names the policy of a run."""
    return run.policy if isinstance(run.policy, str) else str(run.policy.get("name"))


def _loaded(runs: Sequence[Run]) -> tuple[dict[str, Policy], dict[str, str]]:
    """Return the policies of ``runs``, and the errors of those that cannot be loaded."""
    policies, faults = {}, {}
    for label, policy in {_label(run): run.policy for run in runs}.items():
        try:
            policies[label] = load_policy(policy)
        except PolicyError as error:
            faults[label] = str(error)
    return policies, faults


def _faults(run: Run, policies: Mapping[str, Policy]) -> dict[str, str]:
    """Return the errors that the model of ``run`` raises under ``policies``, captured on fake tensors.

    A model that cannot be captured so, whatever the policy, is left to its training.
    """
    quantizing = {label: policy for label, policy in policies.items() if policy.quantizes or policy.phases}
    if not quantizing:
        return {}
    task = task_named(run.task)
    settings = task.settings(run)
    with torch.random.fork_rng(), torch.autocast("cpu", torch.bfloat16, enabled=settings.autocast):
        problem = task.make(settings)
        problem.model.to(settings.parameter_dtype).train()
        call = _first_call(problem)
        faults = {label: fault for label, policy in quantizing.items() if (fault := _fault(problem, policy, call))}
        return {} if faults and _fault(problem, load_policy("bf16"), call) else faults


class _Called(BaseException):
    """Ends the first call of a model, with its arguments; no Exception, so that no task catches it."""


def _first_call(problem: Problem) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the first call of the model in a training."""

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Called(args, kwargs)

    handle = problem.model.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        problem.measure(problem.model, next(problem.batches(0)))
    except _Called as call:
        args, kwargs = call.args
        return args, kwargs
    finally:
        handle.remove()
    raise AssertionError(f"{type(problem).__name__} does not call its model")


def _fault(problem: Problem, policy: Policy, call: tuple[tuple[Any, ...], dict[str, Any]]) -> str | None:
    """Return the error that training under ``policy`` would raise at its first forward, or at that of a phase."""
    try:
        if problem.blocks is not None:
            policy = placed(policy, problem.blocks)
        for one in (policy, *(phase.policy for phase in policy.phases)):
            explanation = explain(problem.model, one, *call)
            if explanation.problem is not None:
                kept = Counter((site.rule, site.reason) for site in explanation.sites if not site.quantized)
                reasons = [
                    f"{number} {f'by rule {rule!r}' if rule else 'by default'} ({reason})"
                    for (rule, reason), number in kept.most_common(SHOWN)
                ]
                return explanation.problem + f"\n    Kept: {', '.join(reasons)}" * (not explanation.quantized)
    except Error as error:
        return str(error)
    return None


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
