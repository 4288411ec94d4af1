"""Compares policies on a training: every policy under every seed, recorded so that a kill loses no finished run."""

from __future__ import annotations

import inspect
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from multiprocessing import get_context
from os import PathLike
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fp4graph.errors import Error, needs
from fp4graph.lab.comparison import timing
from fp4graph.lab.comparison.check import check
from fp4graph.lab.comparison.files import write_all
from fp4graph.lab.comparison.record import Line, Record, folder_of, name_of, recording, title_of
from fp4graph.lab.comparison.result import Comparison
from fp4graph.lab.comparison.runs import orphan_watch, train_once
from fp4graph.lab.comparison.training import Log, Train
from fp4graph.lab.runs.waiting import waiting
from fp4graph.policy import Policy, load_policy

__all__ = ["Comparison", "Log", "compare"]

#: The number of records of statistics per training; the steps between records while a training's length is unknown.
RECORDS, EVERY = 8, 50
#: The note about a training that ignores its seed.
SAME_LOSS = (
    "{} has the same loss under every seed, so the intervals are meaningless: train() sets a fixed seed. Call "
    "torch.manual_seed with the argument seed, or not at all"
)
#: Seconds between two writings of the page during the trainings.
PAGE_EVERY = 30.0


def compare(
    train: Train,
    policies: Any,
    *,
    seeds: int | Sequence[int] = 3,
    folder: str | PathLike[str] | None = None,
    baseline: Any = "bf16",
    processes: int = 1,
    timing: bool = True,
    statistics: int | None = None,
) -> Comparison:
    """Run a training under every policy and every seed, and compare the losses.

    >>> def train(policy, seed, log):
    ...     model = fp4graph.apply(make_model(), policy, seed=seed)
    ...     optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters()))
    ...     for step, batch in enumerate(batches, 1):
    ...         ...
    ...         log(step, loss)
    >>> print(fp4graph.compare(train, ["nvfp4", "tetrajet"], folder="runs/mine"))

    Before the first training, ``train`` runs under each policy up to the model's first call, where the policy is
    checked. Another call with the same folder resumes: it skips finished runs, repeats failed runs, and may add
    policies and seeds. The random generators of Python, NumPy and torch are seeded before each run and restored after.

    Args:
        train: ``train(policy, seed, log)`` applies the policy, trains, and calls ``log(step, loss, **metrics)``. It
            returns the final loss, a mapping with ``loss`` and metrics, or None for the last logged loss. It may be a
            generator of (step, loss), or return a Hugging Face ``Trainer`` or a Lightning ``(trainer, module[,
            datamodule])``, which ``compare`` then runs. ``log.folder`` is a folder for checkpoints of this run.
        policies: a path, a shipped policy's name, a dict or a policy, or a list of these; the baseline is added. A
            string may hold several names, separated by commas.
        seeds: the number of seeds (0, 1, ...), or a list of seeds.
        folder: holds the result, see :class:`Comparison`; ``runs/compare-NAME`` by default.
        baseline: the policy that the others are compared with.
        processes: the number of trainings at a time; above 1 they run in processes that must be able to import
            ``train``.
        timing: measure the time per step after the trainings, each policy in alternation with the baseline.
        statistics: the number of steps between records of the operands' statistics in the first seed's runs; by default
            an eighth of the baseline's steps, 0 for no records.

    Raises:
        Error: a policy does not fit the model (before any training); ``folder`` is in use or holds another comparison;
            ``train`` takes other arguments, neither returned nor logged a loss, or gave a metric the name of a column.
            A run that raises is recorded as failed, with its traceback in ``traceback.txt``, and the other runs go on.
    """
    for package in ("matplotlib", "jinja2", "scipy", "pandas"):
        needs(package, f"the result is written with {package}", "analysis")
    loaded, numbers = _policies(policies, baseline), _seeds(seeds)
    _require_fit(train, processes)
    place = Path(folder) if folder is not None else Path("runs") / folder_of(train)
    with recording(place.absolute(), train, loaded) as record:
        job = _Job(train, loaded, numbers, record, statistics)
        try:
            if pending := job.pending:
                job.notes += check(train, list(dict.fromkeys(policy for policy, _ in pending)), numbers[0])
            job.train(processes)
            if timing:
                job.time()
        finally:
            if record.runs:
                write_all(job.result())
    return job.result()


def _require_fit(train: Train, processes: int) -> None:
    """Raise an Error if ``train`` does not take a policy, a seed and a log, or if other processes cannot import it."""
    if not callable(train):
        raise Error(f"compare calls a function as train(policy, seed, log); got {train!r:.80}")
    if type(processes) is not int or processes < 1:
        raise Error(f"processes must be a whole number of at least 1; got {processes!r}")
    try:
        inspect.signature(train, follow_wrapped=False).bind("policy", 0, print)
    except ValueError:  # a built-in without a signature
        pass
    except TypeError as error:
        raise Error(f"compare calls {name_of(train)} as train(policy, seed, log): {error}") from None
    try:
        pickle.dumps(train if processes > 1 else None)
    except Exception as error:
        what = "processes= needs a train() that other processes can import; define it at the top of a module"
        raise Error(f"{what}: {error}") from error


class _Job:
    """The work of one call of :func:`compare`."""

    def __init__(
        self, train: Train, policies: list[Policy], seeds: list[int], record: Record, statistics: int | None
    ) -> None:
        self._train, self._policies, self._seeds = train, policies, seeds
        self._record, self._statistics = record, statistics
        # A notebook's stream claims to be a terminal but cannot redraw lines; rich's Jupyter mode shows lines apart.
        terminal = False if Console().is_jupyter else None
        plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False, "force_jupyter": False}
        self._console = Console(stderr=True, force_terminal=terminal, **plain)
        self.notes: list[str] = []

    @property
    def pending(self) -> list[tuple[Policy, int]]:
        """The runs that have not finished, by seed; within a seed the baseline comes first."""
        runs = [(policy, seed) for seed in self._seeds for policy in self._policies]
        return [(policy, seed) for policy, seed in runs if not self._record.finished(policy, seed)]

    def train(self, processes: int) -> None:
        """Do the pending runs, one after the other or in processes, and show a table and a bar."""
        pending, written, console = self.pending, time.monotonic(), self._console
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        bar = Progress(*columns, TextColumn("{task.fields[status]}", markup=False), console=console)
        total = len(self._policies) * len(self._seeds)
        task = bar.add_task("", total=total, completed=total - len(pending), status="")
        table = self.result().table()

        def progress(policy: Policy, seed: int, step: int, loss: float | str) -> None:
            done = loss if isinstance(loss, str) else f"step {step:,}, loss {loss:.4g}"
            bar.update(task, status=f"{policy.name}, seed {seed}: {done}")

        if len(pending) < total:
            console.print(f"{total - len(pending)} of {total} runs are in {self._record.folder} already")
        live = Live(get_renderable=lambda: Group(table, bar), console=console, transient=True)
        with live if console.is_terminal else nullcontext():
            for line in self._runs(pending, processes, progress):
                self._record.add(line)
                bar.advance(task)
                if not console.is_terminal:
                    loss = "no loss" if line["loss"] is None else f"loss {line['loss']:.4g}"
                    console.print(f"{line['policy']}, seed {line['seed']}: {line['state']}, {loss}")
                table = self.result().table()
                if time.monotonic() - written > PAGE_EVERY:
                    write_all(self.result())
                    written = time.monotonic()

    def _runs(
        self, pending: Sequence[tuple[Policy, int]], processes: int, progress: Callable[[Policy, int, int, Any], None]
    ) -> Iterator[Line]:
        """Yield the line of each run as it ends."""
        alone = 1 if processes > 1 else len(pending)  # the length of the first run sets the statistics' interval
        for run in pending[:alone]:
            yield self._alone(run, progress)
        if not (others := pending[alone:]):
            return
        options: dict[str, Any] = {"mp_context": get_context("spawn"), "initializer": orphan_watch}
        with ProcessPoolExecutor(min(processes, len(others)), **options) as pool:
            try:
                for done in as_completed([pool.submit(train_once, *self._arguments(*run)) for run in others]):
                    yield done.result()
            except BrokenProcessPool:
                raise Error(
                    "a process ended: memory ran out (call compare again with fewer processes), or it could not import "
                    "train() (define it in a module, not in a notebook), or it called compare itself (call compare "
                    "under if __name__ == '__main__':). The finished runs are kept"
                ) from None
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _alone(self, run: tuple[Policy, int], progress: Callable[[Policy, int, int, Any], None]) -> Line:
        """Train in this process; until the first step, say that the training compiles."""
        policy, seed = run

        def say(text: str, first: bool) -> None:
            if first and not self._console.is_terminal:
                self._console.print(f"{policy.name}, seed {seed}: {text}")
            progress(policy, seed, 0, text)

        with waiting(say) as stepped:

            def look(policy: Policy, seed: int, step: int, loss: float) -> None:
                stepped()
                progress(policy, seed, step, loss)

            return train_once(*self._arguments(policy, seed), look)

    def _arguments(self, policy: Policy, seed: int) -> tuple[Train, Policy, int, Path, int | None]:
        """Return the arguments of :func:`train_once`."""
        length = self._record.runs.get((self._policies[0].name, self._seeds[0]), {}).get("step")
        every = max(1, length // RECORDS) if length else EVERY
        interval = every if self._statistics is None else self._statistics or None
        folder = self._record.folder / f"{policy.name}-{seed}"
        return self._train, policy, seed, folder, interval if seed == self._seeds[0] else None

    def time(self) -> None:
        """Measure the time per step of every policy that has no steady measurement yet."""
        baseline, *others = self._policies
        for policy in others:
            pair = {"fingerprint": policy.fingerprint, "baseline": baseline.fingerprint}
            recorded = self._record.timings.get(policy.name, {})
            done = pair.items() <= recorded.items() and recorded.get("spread", 0.0) <= timing.STEADY
            if done or not self.result().of(policy.name):
                continue
            self._console.print(f"timing {policy.name}: its first steps and those of {baseline.name}, in alternation")
            try:
                measured = timing.timed(self._train, baseline, policy, self._seeds[0])
            except Exception as error:  # noqa: BLE001  # a failed timing leaves the losses valid
                self.notes.append(f"the time of {policy.name} was not measured: {type(error).__name__}: {error}")
                continue
            if not measured:
                self.notes.append(f"the trainings are too short to measure the time of {policy.name}")
            self._record.add({"kind": "timing", "policy": policy.name, **pair, **measured})

    def result(self) -> Comparison:
        """Return the result so far."""
        names = [policy.name for policy in self._policies]
        runs = [run for (name, seed), run in self._record.runs.items() if name in names and seed in self._seeds]
        notes = dict.fromkeys([*self.notes, *(run["note"] for run in runs if run["note"])])
        losses = [run["loss"] for run in runs if run["policy"] == names[0] and run["state"] == "finished"]
        if len(losses) > 1 and len({*losses}) == 1:
            notes[SAME_LOSS.format(names[0])] = None
        timings = {name: line for name, line in self._record.timings.items() if name in names and "ratio" in line}
        for name, line in list(timings.items()):
            if (spread := line.get("spread", 0.0)) > timing.STEADY:
                del timings[name]
                notes[
                    f"the time of {name} is not shown: its ratios to {names[0]} spread by {100 * spread:.0f} %: the "
                    "machine was busy. Call compare again on a quiet machine to measure it"
                ] = None
        return Comparison(
            self._record.folder, title_of(self._train), names[0], tuple(self._policies),
            tuple(self._seeds), tuple(runs), timings, tuple(notes),
        )  # fmt: skip


def _policies(policies: Any, baseline: Any) -> list[Policy]:
    """Return the policies with the baseline first."""
    if isinstance(policies, Policy | Mapping | PathLike):
        policies = [policies]
    named = [name.strip() for name in policies.split(",")] if isinstance(policies, str) else policies
    loaded, faults = [], []
    for policy in (baseline, *filter(None, named)):
        try:
            loaded.append(load_policy(policy))
        except Error as error:
            faults.append(f"\n  {policy}: {error}")
    if faults:
        raise Error(f"{len(faults)} of the policies cannot be loaded, so nothing was trained:{''.join(faults)}")
    first, *others = loaded
    others = [policy for policy in others if (policy.name, policy.fingerprint) != (first.name, first.fingerprint)]
    names = [policy.name for policy in (first, *others)]
    if not others:
        raise Error(f"there is no policy to compare with the baseline {first.name!r}; name one, such as tetrajet")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise Error(f"two of the policies are called {twice!r}; give each another name")
    return [first, *others]


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not numbers or any(type(seed) is not int or seed < 0 for seed in numbers) or len({*numbers}) < len(numbers):
        raise Error(f"seeds must be a number of at least 1, or a list of different whole numbers >= 0; got {seeds!r}")
    return numbers
