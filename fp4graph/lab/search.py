"""A policy under a budget: the format of each GEMM of each group of linears that the loss suffers least from."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.table import Table
from torch import nn

from fp4graph.errors import Error
from fp4graph.files import write
from fp4graph.graph.site import Site
from fp4graph.lab.knapsack import Choice, Floats, Knapsack, Limit
from fp4graph.lab.policy_writer import Treatment, written
from fp4graph.lab.siblings import Loss, call_of, groups_of, weights_of
from fp4graph.model.explain import Explanation, explain
from fp4graph.numerics.spec import QuantSpec
from fp4graph.policy import DEFAULT_INDEX, Policy, Rule, Specs, load_policy
from fp4graph.technique.operands import Gemm, Operand

#: The format that quantizes nothing.
EXACT = "bf16"
FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8-block", EXACT)
_BITS_EXACT = 16.0
#: Names and units of the budgets, and whether each is a bound from below.
BUDGETS = {"bits": "bits per weight", "fp4_flops": "share of FLOPs in FP4", "complexity": "Ω", "overhead": "overhead"}


def bits_per_element(spec: QuantSpec | None, row: int) -> float:
    """Return the stored bits of one element and its share of the block's scale; 16 in high precision.

    A scale is stored in whole bytes, as FP32 in four. ``row`` is the length of a line, for blocks that are lines; of a
    scale per tensor nothing counts.
    """
    if spec is None:
        return _BITS_EXACT
    sizes = {"row": (row,), "tensor": (math.inf,)}
    elements = spec.block if isinstance(spec.block, tuple) else sizes.get(str(spec.block), (spec.block,))
    return spec.element.code_bits + 8 * math.ceil(spec.scale.format.code_bits / 8) / math.prod(map(float, elements))


@dataclass(frozen=True)
class Format:
    """A policy that quantizes all of its sites alike.

    Attributes:
        rule: the rule that quantizes; None for a policy that quantizes nothing.
        modules: the modules whose sites it quantizes.
        whole: True if the three GEMMs of a site cannot differ, because a technique acts on them or an operand of the
            backward reads one of fprop.
    """

    policy: Policy
    rule: Rule | None
    modules: frozenset[str]

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def whole(self) -> bool:
        specs = self.rule.specs.values() if self.rule is not None else ()
        reads = any(spec is not None and spec.source == "fprop" for spec in specs)
        return self.rule is not None and bool(self.rule.techniques or self.rule.reuses or reads)

    def spec(self, operand: Operand) -> QuantSpec | None:
        return None if self.rule is None else self.rule.specs[operand]

    def in_fp4(self, gemm: Gemm) -> bool:
        """Return whether both operands of a GEMM have elements of four bits."""
        specs = [self.spec(operand) for operand in Operand if operand.gemm is gemm]
        return all(spec is not None and spec.element.code_bits <= 4 for spec in specs)


@dataclass(frozen=True)
class Option:
    """What was chosen for the modules of one group.

    Attributes:
        formats: the names of the formats of fprop, dgrad and wgrad.
        increase: the predicted loss increase, that is the sum of the scores.
    """

    modules: tuple[str, ...]
    formats: tuple[str, str, str]
    increase: float


@dataclass(frozen=True)
class Budget:
    """A bound, and the value that the policy reaches; ``name`` is a key of :data:`BUDGETS`."""

    name: str
    bound: float
    reached: float

    def __str__(self) -> str:
        sign = ">=" if self.name == "fp4_flops" else "<="
        return f"{BUDGETS[self.name]} {sign} {self.bound:g}, reached {self.reached:.4g}"


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
        policy: the policy, loaded from ``text``.
        text: the policy file.
        choices: an option for each group, in the order of the model.
        predicted: the predicted loss increase, the sum of those of the choices.
        measured: the loss increase of the policy's fprop over the batches.
        budgets: each bound with the value reached.
    """

    policy: Policy
    text: str
    choices: tuple[Option, ...]
    predicted: float
    measured: float
    budgets: tuple[Budget, ...]

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
        table.caption = f"predicted loss increase {self.predicted:+.4g}, measured in fprop {self.measured:+.4g}"
        return table


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
    scores: Sensitivity | None = None,
    caution: float = 1.0,
    cost: Callable[[Policy], float] | None = None,
    backend: str = "inductor",
    folder: str | PathLike[str] | None = None,
    name: str = "searched",
    **options: Any,
) -> Search:
    """Return the policy whose predicted loss is least within a budget.

    Every format is measured at one linear and one GEMM at a time (:func:`fp4graph.sensitivity`). The loss of a policy
    is predicted as the sum of its scores: effects are taken to add up. The formats x of all GEMMs are chosen exactly,
    by integer programming::

        minimize  Σ_g Σ_f x[g, f] · Σ_{sites of g} (increase + caution · error)    within the budget,  Σ_f x[g, f] = 1

    where g is a GEMM of a group of siblings (:func:`fp4graph.lab.siblings.groups_of`) and f a format.

    Args:
        model: a plain model, trained as far as the policy is to fit it.
        loss, batches: as for :func:`fp4graph.sensitivity`.
        formats: uniform policies, each as for :func:`fp4graph.apply`. A format with techniques, or whose backward reads
            operands of fprop, takes all three GEMMs of a site or none.
        bits: the most bits per weight, scales included, on average over the weights of all linears that may be
            quantized. Weights are stored as fprop reads them, so this binds fprop alone.
        fp4_flops: the least share of FLOPs whose operands both have four bits, of all matrix work of a training step.
        complexity: the largest Ω.
        overhead: the largest ``cost``. The costs of mixed policies are interpolated by FLOPs; the result is measured.
        by: ("site", "gemm"), or ("site",) for one format for the three GEMMs of a site.
        scores: scores of these formats by ("site", "gemm"), instead of measuring.
        caution: standard errors that are added to each increase: a score that only noise makes small is not trusted.
        cost: returns the cost of a policy relative to no quantization; by default the time of a training step on this
            machine, under ``backend``, in alternation with the unquantized model.
        folder: keeps every score as soon as it is measured; a search that was stopped goes on there.
        name: of the policy.
        options: further arguments of :func:`fp4graph.sensitivity`.

    Raises:
        Error: no budget or one that nothing satisfies, formats that are no uniform policies or fit no linear, a loss
            that is not finite, or a folder of another search.
    """
    bounds = {"bits": bits, "fp4_flops": fp4_flops, "complexity": complexity, "overhead": overhead}
    asked = {key: float(value) for key, value in bounds.items() if value is not None}
    if not asked or not all(map(math.isfinite, asked.values())):
        raise Error(f"a search needs a finite budget; give one or several of {', '.join(BUDGETS)}")
    if tuple(by) not in (("site", "gemm"), ("site",)):
        raise Error(f"a search chooses by ('site', 'gemm') or by ('site',), and not by {by!r}")
    if not (batches := list(batches)):
        raise Error("there are no batches to measure the loss on; give at least one")
    candidates = Candidates.of(model, loss, batches[0], formats, apart="gemm" in by)
    losses = [_loss(model, loss, batch) for batch in batches]
    if not all(map(math.isfinite, losses)):
        raise Error(f"the loss of batch {[*map(math.isfinite, losses)].index(False)} is not finite before anything is "
                    "quantized; correct the model or the batch")  # fmt: skip
    if overhead is not None and cost is None:
        cost = _Timer(model, loss, batches[0], backend)
    limits = candidates.limits(asked, cost)
    candidates.require(limits)
    if scores is None:
        scores = _scores(model, loss, batches, candidates, losses, folder, options)
    costs, increases = candidates.costs(scores, caution), candidates.costs(scores, 0.0)
    knapsack = candidates.knapsack(np.isfinite(costs))
    for _ in range(_ROUNDS):
        choice = knapsack.solve(np.nan_to_num(costs, posinf=0.0), list(limits.values()))
        if choice is None:
            raise Error("the options that the budget leaves make the loss infinite; relax it, or give other formats")
        text = candidates.text(choice, increases, name, header)
        policy = candidates.loaded(text, choice)
        ...
