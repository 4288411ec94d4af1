"""A task: a problem to make, and the recipe to train it by."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from fp4graph.errors import Error
from fp4graph.lab.data.loading import Batch, Order, Samples, each_once
from fp4graph.lab.runs.run import Run
from fp4graph.policy import Policy, Rule

#: The source of most recipes.
PAPER = '"Elucidating the design space of FP4 training", appendix, Table 11'


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a task sets, under the names of :class:`Run`; its length is one of ``epochs``, ``steps`` and ``tokens``."""

    lr: float
    batch_size: int
    epochs: float | None = None
    steps: int | None = None
    tokens: float | None = None
    optimizer: str = "adam"
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup: float = 0.0
    clip: float = 0.0
    accumulate: int = 1
    dtype: str = "fp32"
    autocast: bool = False
    validations: int = 20
    validation_batches: int | None = None


@dataclass(frozen=True, kw_only=True)
class Settings(Recipe):
    """A run with everything chosen, from which a problem is made; its length is :meth:`total_steps`."""

    run: Run
    device: torch.device
    backend: str

    @property
    def seed(self) -> int:
        return self.run.seed

    @property
    def parameter_dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the run with everything chosen but its length."""
        placed = {"device": str(self.device), "backend": self.backend}
        return self.run.to_json() | {name: getattr(self, name) for name in CHOSEN} | placed

    def total_steps(self, problem: Problem) -> int:
        """Return the steps of the optimizer of the whole training."""
        run, batch = self.run, self.batch_size * self.accumulate
        if steps := run.steps or (None if run.epochs else self.steps):
            return steps
        if self.tokens is not None and not run.epochs:
            return math.ceil(self.tokens / (problem.tokens_per_sample * batch))
        epochs = run.epochs or self.epochs
        assert epochs is not None, f"the recipe of {run.task} has no length"
        return math.ceil(epochs * problem.samples / batch)


#: The fields of a recipe that a run may set as well, without those of its length.
CHOSEN = sorted({field.name for field in fields(Recipe)} & {field.name for field in fields(Run)} - {"epochs", "steps"})


class Problem(ABC):
    """A model, on the CPU and in fp32, and the data to train it on; both are functions of the seed.

    ``dtype`` is the dtype that parameters will have, ``samples`` the number of training samples, which make an epoch.
    ``blocks`` names the model's blocks, where ``block: true`` finds no repeated stack by itself.
    """

    model: nn.Module
    samples: int
    blocks: tuple[str, ...] | None = None
    tokens_per_sample: int = 1

    def __init__(self, settings: Settings) -> None:
        self.batch_size, self.dtype, self.seed = settings.batch_size, settings.parameter_dtype, settings.seed
        torch.manual_seed(settings.seed)

    @abstractmethod
    def batches(self, start: int) -> Iterator[Batch]:
        """Yield training batches without end, from number ``start`` on: on the CPU, all of one shape, functions of the
        seed and their number."""

    @abstractmethod
    def validation(self) -> Iterator[Batch]:
        """Yield the validation batches, the same each time; the last may be shorter."""

    @abstractmethod
    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return ``loss`` and other metrics of each sample of a batch on the device, by name: fp32 ``[samples]``."""

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics to report, given the validation means of what :meth:`measure` returns."""
        return {name: value for name, value in means.items() if name != "loss"}


class Passes(Problem):
    """A problem that goes through ``train`` in passes, in an order of that class, and validates on ``held_out``."""

    def __init__(self, settings: Settings, train: Samples, held_out: Samples, order: type[Order] = Order) -> None:
        super().__init__(settings)
        self.train, self.held_out = train, held_out
        self.order = order(len(train), settings.batch_size, settings.seed)
        self.samples = self.order.samples

    def batches(self, start: int) -> Iterator[Batch]:
        for number, batch in enumerate(self.train.batches(self.order.rows(start)), start):
            yield self.prepared(batch, number, training=True)

    def validation(self) -> Iterator[Batch]:
        for number, batch in enumerate(self.held_out.batches(each_once(len(self.held_out), self.batch_size))):
            yield self.prepared(batch, number, training=False)

    def prepared(self, batch: Batch, number: int, training: bool) -> Batch:
        """Return ``batch`` with what is drawn for it, a function of its number."""
        return batch


@dataclass(frozen=True)
class Task:
    """A model, its data and a recipe, under a name. An ``embedded`` task runs without data from elsewhere.

    ``source`` says where these come from. ``data`` says what ``--data`` takes, and is None for a task that takes none.
    """

    family: str
    name: str
    description: str
    recipe: Recipe
    make: Callable[[Settings], Problem]
    source: str = "ours"
    data: str | None = None
    embedded: bool = False

    def settings(self, run: Run) -> Settings:
        """Return the settings of ``run``; what it leaves open is the recipe's. Raise an Error where they do not fit."""
        if run.data is not None and self.data is None:
            raise Error(f"task {self.name!r} makes its own data; leave --data out")
        chosen = {name: value for name in CHOSEN if (value := getattr(run, name)) is not None}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if run.device != "auto":
            try:
                torch.empty(0, device=run.device)
                device = torch.device(run.device)
            except (RuntimeError, AssertionError) as error:
                raise Error(f"device {run.device!r} cannot be used: {str(error).splitlines()[0]}") from None
        backend = run.backend or ("inductor" if device.type == "cuda" else "eager")
        return Settings(**vars(self.recipe) | chosen, run=run, device=device, backend=backend)


def placed(policy: Policy, blocks: Sequence[str]) -> Policy:
    """Return ``policy`` with each rule's ``block``, ``first_blocks`` and ``last_blocks`` written as module names.

    ``blocks`` are :attr:`Problem.blocks`, in the order in which they run.

    Raises:
        PolicyError: a rule says ``block: false``, or ``module`` besides, which a list of modules cannot express.
    """
    rules = tuple(_placed(rule, blocks) for rule in policy.rules)
    phases = tuple(replace(phase, policy=placed(phase.policy, blocks)) for phase in policy.phases)
    return replace(policy, rules=rules, phases=phases)


def _placed(rule: Rule, blocks: Sequence[str]) -> Rule:
    match = rule.match
    if match.block is None and match.first_blocks is None and match.last_blocks is None:
        return rule
    if match.block is False or match.module is not None:
        raise rule.error(
            "this task's model has blocks of several kinds, for which a rule can say block: true, first_blocks and "
            "last_blocks, but not block: false or module besides; name its modules instead"
        )
    first, last = match.first_of(len(blocks)), match.last_of(len(blocks))
    names = tuple(f"{name}.*" for name in blocks[max(0, len(blocks) - last) : first])
    return replace(rule, match=match.model_copy(update={
        "module": names, "block": None, "first_blocks": None, "last_blocks": None,
    }))  # fmt: skip
