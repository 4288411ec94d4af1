"""A policy under a budget: chooses the format of each GEMM of each group of linears that increases the loss least."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from rich.table import Table
from torch import nn

from fp4graph.errors import Error
from fp4graph.files import write
from fp4graph.graph.nested import nested
from fp4graph.lab import jsonlines
from fp4graph.lab.candidates import BUDGETS, EXACT, Candidates, Floats, bound_text, total
from fp4graph.lab.comparison.record import locked, name_of, source_of
from fp4graph.lab.comparison.timing import timed
from fp4graph.lab.comparison.training import Log
from fp4graph.lab.linears import Loss
from fp4graph.lab.sensitivity import Score, sensitivity
from fp4graph.model.api import apply
from fp4graph.model.html import html
from fp4graph.policy import Policy, load_policy
from fp4graph.training import prepare_optimizer

FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8-block", EXACT)
#: The file of scores in a search's folder, its lock, and the format of its first line.
SCORES, LOCK, FILE_FORMAT = "scores.jsonl", "search.lock", "fp4graph.search"
#: The most searches under ever smaller bounds while the measured overhead exceeds the budget.
_ROUNDS = 6


class Option(NamedTuple):
    """The formats of fprop, dgrad and wgrad of one group of siblings, and the predicted loss increase."""

    modules: tuple[str, ...]
    formats: tuple[str, str, str]
    increase: float


class Budget(NamedTuple):
    """A bound and the value that the policy reaches; ``name`` is an argument of :func:`search`."""

    name: str
    bound: float
    reached: float

    def __str__(self) -> str:
        return f"{bound_text(self.name, self.bound)}, reached {self.reached:.4g}"


@dataclass(frozen=True)
class Search:
    """The result of a search."""

    policy: Policy
    text: str  # the policy file, from which ``policy`` is loaded
    choices: tuple[Option, ...]  # an option for each group, in the order of the model
    predicted: float  # the sum of the choices' loss increases
    measured: float  # the sum of the increases of fprop, dgrad and wgrad, each measured at all sites together
    budgets: tuple[Budget, ...]
    scores: tuple[Score, ...]

    def save(self, file: str | PathLike[str]) -> None:
        """Write the policy file."""
        write(Path(file), self.text)

    def table(self) -> Table:
        """Return the choices as a table for a terminal."""
        table = Table(title="; ".join(map(str, self.budgets)), title_justify="left")
        for column in ("modules", "fprop", "dgrad", "wgrad", "increase"):
            table.add_column(column, overflow="fold", justify="right" if column == "increase" else "left")
        for each in self.choices:
            table.add_row("\n".join(each.modules), *each.formats, f"{each.increase:+.3g}")
        table.caption = f"predicted loss increase {self.predicted:+.4g}, measured together {self.measured:+.4g}"
        return table

    def _repr_html_(self) -> str:
        return html(self.table())


def search(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    formats: Sequence[Any] = FORMATS,
    bits: float | None = None,
    fp4_flops: float | None = None,
    complexity: float | None = None,
    overhead: float | None = None,
    by: Sequence[str] = ("site", "gemm"),
    scores: Iterable[Score] | None = None,
    caution: float = 1.0,
    simplify: bool = True,
    cost: Callable[[Policy], float] | None = None,
    backend: str = "inductor",
    folder: str | PathLike[str] | None = None,
    name: str = "searched",
    **options: Any,
) -> Search:
    """Return the policy whose predicted loss is least within a budget.

    Every format is measured at one group of siblings (:func:`fp4graph.lab.linears.groups_of`) and one GEMM at a time
    (:func:`fp4graph.sensitivity`). The increases are assumed to add up. Integer programming solves exactly::

        minimize  Σ_g Σ_f x[g, f] · (max(0, increase[g, f]) + caution · error[g, f])   within the budget,
                  Σ_f x[g, f] = 1,  x[g, f] in {0, 1}

    where g is a group, and f the formats of its three GEMMs, whose increases and errors are added.

    Args:
        model: a plain model, trained to the stage for which the policy is wanted; it is not changed.
        loss, batches: as for :func:`fp4graph.sensitivity`; ``options`` are its further arguments.
        formats: uniform policies, each as for :func:`fp4graph.apply`. A format that has techniques, or whose backward
            reads operands of fprop, is chosen for all three GEMMs of a site or for none.
        bits: the most bits per weight, scales included, on average over all linears that some format quantizes. Weights
            are stored as fprop reads them, so this bound concerns fprop alone.
        fp4_flops: the least share of a training step's matrix FLOPs whose operands both have four bits.
        complexity: the largest Ω.
        overhead: the largest ``cost``, which is interpolated by FLOPs for mixed policies, but measured for the result.
        by: ("site", "gemm"), or ("site",) for one format for the three GEMMs of a site.
        scores: scores by ("site", "gemm") that replace the measurement. Where a score was only estimated, its estimate
            counts.
        caution: the number of standard errors added to each increase, against scores that are small by chance.
        simplify: prefer few rules, within one standard error of the least objective (Breiman et al. 1984).
        cost: returns the cost of a policy relative to no quantization; by default the time of a training step on this
            machine under ``backend``, in alternation with the unquantized model.
        folder: stores every score as soon as it is measured; an interrupted search resumes there.

    Raises:
        Error: no budget is given or nothing satisfies it; a format is not a uniform policy or fits no linear; a loss is
            not finite; or the folder holds another search.
    """
    arguments = {"bits": bits, "fp4_flops": fp4_flops, "complexity": complexity, "overhead": overhead}
    bounds = {key: float(value) for key, value in arguments.items() if value is not None}
    if not bounds or not all(map(math.isfinite, bounds.values())):
        raise Error(f"a search needs a finite budget; give one or more of {', '.join(BUDGETS)}")
    if tuple(by) not in (("site", "gemm"), ("site",)):
        raise Error(f"by must be ('site', 'gemm') or ('site',); got {by!r}")
    if options.get("keep"):
        raise Error("keep=True measures all formats but one, and their increases do not add up; leave keep out")
    if not (batches := list(batches)):
        raise Error("there are no batches to measure the loss on; give at least one")
    candidates = Candidates.of(model, loss, batches[0], formats, apart="gemm" in by)
    if overhead is not None:
        cost = cost or _step_time(model, loss, batches[0], backend)
        candidates.price(cost)
    most = {key: -bound if key == "fp4_flops" else bound for key, bound in bounds.items()}
    candidates.require(most)
    scores = _scores(model, loss, batches, candidates, folder, options) if scores is None else tuple(scores)
    costs = candidates.summed(scores, lambda s: max(s.value, 0.0) + caution * float(np.nan_to_num(s.error)))
    increases = candidates.summed(scores, lambda score: score.value)
    squared = candidates.summed(scores, lambda score: float(np.nan_to_num(score.error)) ** 2)
    description = "; ".join(bound_text(key, bound) for key, bound in bounds.items())
    for _ in range(_ROUNDS):
        choice = candidates.best(costs, most)
        if choice is None:
            raise Error("all policies within the budget make the loss infinite; relax the budget or give other formats")
        if simplify:
            choice = candidates.simplified(choice, costs, squared, most)
        policy = load_policy(yaml.safe_load(candidates.text(choice, increases, name, description, ())))
        reached = {key: abs(total(use, choice)) for key, use in candidates.uses.items()}
        reached["complexity"] = policy.complexity
        if cost is None or overhead is None:
            break
        reached["overhead"] = cost(policy)
        if reached["overhead"] <= overhead:
            break
        # Square the factor: without the square, costs above their interpolation would approach the bound forever.
        most["overhead"] = 1 + (most["overhead"] - 1) * ((overhead - 1) / (reached["overhead"] - 1)) ** 2
        candidates.require(most)
    else:
        raise Error(f"no policy was measured with {bound_text('overhead', bounds['overhead'])}; relax the budget")
    candidates.check(model, policy, choice)
    budgets = tuple(Budget(key, bound, reached[key]) for key, bound in bounds.items())
    predicted = [float(increases[row, option]) for row, option in enumerate(choice)]
    measured = 0.0
    if policy.quantizes:
        together = sensitivity(model, loss, batches, [policy], by="gemm", **options).scores
        measured = sum(score.value for score in together)
    numbers = [f"budget     {budget}" for budget in budgets]
    numbers.append(f"predicted  {sum(predicted):+.3g} as the sum of all; measured together {measured:+.3g}")
    if uniform := _uniform(candidates, increases):
        numbers.append(f"uniform    {', '.join(uniform)}, predicted likewise")
    count = sum(map(len, candidates.groups))
    header = [
        f"The formats that cost a {type(model).__name__} the least loss within a budget, found by fp4graph.search.", "",
        f"model      {count} linears in {len(candidates.groups)} groups, each with one choice of formats",
        f"measured   on {len(batches)} batches, one group and GEMM at a time; the numbers below are increases of the "
        "loss",
        *numbers, "", f"Ω = {policy.complexity:g}",
    ]  # fmt: skip
    text = candidates.text(choice, increases, name, description, header)
    names = [(a.name, b.name, c.name) for a, b, c in map(candidates.chosen, choice)]
    choices = tuple(map(Option, candidates.groups, names, predicted))
    return Search(load_policy(yaml.safe_load(text)), text, choices, sum(predicted), measured, budgets, scores)


def _uniform(candidates: Candidates, increases: Floats) -> list[str]:
    """Return in words the predicted increase of each format that fits every group."""
    return [
        f"{each.name} {increases[:, (candidates.options == number).all(-1)].sum():+.3g}"
        for number, each in enumerate(candidates.formats)
        if each.rule.quantizes and all(map(each.fits, candidates.groups))
    ]


def _scores(
    model: nn.Module, loss: Loss, batches: Sequence[Any], candidates: Candidates,
    folder: str | PathLike[str] | None, options: Mapping[str, Any],
) -> tuple[Score, ...]:  # fmt: skip
    """Measure the formats at every group and GEMM; store each score in ``folder``, and skip those stored there."""
    policies = [each.policy for each in candidates.formats if each.rule.quantizes]
    if not policies:
        return ()
    measured = functools.partial(
        sensitivity, model, loss, batches, policies, by=("site", "gemm"), together=candidates.groups, **options
    )
    if folder is None:
        return measured().scores
    fingerprints, function = [policy.fingerprint for policy in policies], (name_of(loss), source_of(loss))
    modes = [each.training for each in model.modules()], [each.requires_grad for each in model.parameters()]
    digest = hashlib.sha256(repr((sorted(options.items()), fingerprints, function, modes)).encode())
    for leaf in nested((model.state_dict(), batches), object):
        tensor = leaf.detach().cpu().contiguous() if isinstance(leaf, torch.Tensor) else None
        leaf = leaf.tolist() if isinstance(leaf, np.ndarray) else leaf  # repr leaves out the middle of long arrays
        digest.update(repr(leaf).encode() if tensor is None else tensor.flatten().view(torch.uint8).numpy().tobytes())
    file, header = Path(folder) / SCORES, {"format": FILE_FORMAT, "version": 3, "of": digest.hexdigest()}
    with locked(file.with_name(LOCK), lambda: "another search"):
        jsonlines.cut_torn_line(file)
        lines = [line for _, line in jsonlines.read(file)]
        if not lines:
            jsonlines.append(file, [header])
        elif (lines[0].get("format"), lines[0].get("version")) != (header["format"], header["version"]):
            raise Error(f"{file} was not written by this version of fp4graph; give another folder")
        elif lines[0] != header:
            raise Error(f"{file} holds scores of another model, loss, batches or formats; give another folder")
        known = map(Score.from_json, lines[1:])
        return measured(known=known, report=lambda score: jsonlines.append(file, [score.to_json()])).scores


def _step_time(model: nn.Module, loss: Loss, batch: Any, backend: str) -> Callable[[Policy], float]:
    """Return a function that measures the time of a training step under a policy, relative to the unquantized model."""

    def train(policy: Policy, seed: int, log: Log) -> None:
        trained = apply(copy.deepcopy(model).train(), policy, backend=backend, seed=seed)
        optimizer = prepare_optimizer(trained, torch.optim.SGD(trained.parameters(), lr=0.0))
        for step in itertools.count(1):
            loss(trained, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            log(step, 0.0)

    return lambda policy: timed(train, load_policy(EXACT), policy, 0)["ratio"]
