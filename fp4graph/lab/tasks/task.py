"""A task: a problem, and the recipe that trains it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fp4graph.errors import Error
from fp4graph.lab.data.loading import Batch, Order, Samples
from fp4graph.lab.runs.run import Run
from fp4graph.policy import Policy, Rule

#: The source of most recipes.
PAPER = '"Elucidating the design space of FP4 training", appendix, Table 11'


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A task's defaults for :class:`Run`; one of ``epochs``, ``steps`` and ``tokens`` sets the training's length."""

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
class Settings(Recipe, Run):
    """A run whose settings are all decided, from which a problem is made; its length is :meth:`total_steps`."""

    device: str
    backend: str

    @property
    def parameter_dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype]

    def total_steps(self, problem: Problem) -> int:
        """Return the number of optimizer steps of the training."""
        if self.steps:
            return self.steps
        batch = self.batch_size * self.accumulate
        if self.tokens:
            return math.ceil(self.tokens / (problem.tokens_per_sample * batch))
        assert self.epochs is not None, f"the recipe of {self.task} has no length"
        return math.ceil(self.epochs * problem.samples / batch)


class Problem(ABC):
    """A model, on the CPU and in fp32, and the data to train it on; both are functions of the seed.

    ``samples`` is the number of training samples in an epoch, and ``dtype`` the parameters' dtype in training.
    ``blocks`` names the model's blocks if ``block: true`` does not find them, because they are not a repeated stack.
    """

    model: nn.Module
    samples: int
    blocks: tuple[str, ...] | None = None
    tokens_per_sample: int = 1

    def __init__(
        self, settings: Settings, train: Samples | None, held_out: Samples, *, like_loader: bool = False
    ) -> None:
        self.batch_size, self.dtype, self.seed = settings.batch_size, settings.parameter_dtype, settings.seed
        self.held_out = held_out
        if train is not None:
            self.train, self.order = train, Order(len(train), self.batch_size, self.seed, like_loader)
            self.samples = self.order.samples
        torch.manual_seed(settings.seed)

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield training batches without end, from number ``start`` on. They are on the CPU, have one shape, and are
        functions of the seed and their number. A problem without ``train`` must override this method."""
        for number, batch in enumerate(self.train.batches(self.order.rows(start)), start):
            yield self.prepared(batch, number, training=True)

    def validation(self) -> Iterator[Batch]:
        """Yield the validation batches, the same each time; the last may be shorter."""
        rows = torch.split(torch.arange(len(self.held_out)), self.batch_size)
        for number, batch in enumerate(self.held_out.batches((0, chosen) for chosen in rows)):
            yield self.prepared(batch, number, training=False)

    def prepared(self, batch: Batch, number: int, training: bool) -> Batch:
        """Return ``batch`` with its random parts, which are a function of the batch's number."""
        return batch

    @abstractmethod
    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return ``loss`` and other metrics of each sample by name, fp32 ``[samples]``; the batch is on the device."""

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics to report from the validation means of :meth:`measure`."""
        return {name: value for name, value in means.items() if name != "loss"}


@dataclass(frozen=True)
class Task:
    """A model, its data and a recipe, under a name. An ``embedded`` task needs no external data.

    ``source`` cites the origin of the recipe. ``data`` describes the values of ``--data``; None forbids ``--data``.
    """

    family: str
    name: str
    description: str
    recipe: Recipe
    make: Callable[[Settings], Problem]
    source: str = "this project"
    data: str | None = None
    embedded: bool = False

    def settings(self, run: Run) -> Settings:
        """Return the settings of ``run``, with the recipe's in place of None; raise an Error if they do not fit."""
        if run.data is not None and self.data is None:
            raise Error(f"task {self.name!r} makes its data itself; leave --data out")
        recipe = self.recipe
        if run.steps or run.epochs:
            recipe = replace(recipe, steps=None, epochs=None, tokens=None)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if run.device != "auto":
            device = run.device
            try:
                torch.empty(0, device=device)
            except (RuntimeError, AssertionError) as error:
                reason = str(error).splitlines()[0]
                raise Error(f"device {device!r} cannot be used: {reason}; give another --device") from None
        backend = run.backend or ("inductor" if torch.device(device).type == "cuda" else "eager")
        chosen = {name: value for name, value in vars(run).items() if value is not None}
        return Settings(**vars(run) | vars(recipe) | chosen | {"device": device, "backend": backend})


def placed(policy: Policy, blocks: Sequence[str]) -> Policy:
    """Return ``policy`` with each rule's ``block``, ``first_blocks`` and ``last_blocks`` replaced by module names.

    ``blocks`` are :attr:`Problem.blocks`, in the order in which they run. A rule that holds in no block is left out.

    Raises:
        PolicyError: a rule also has ``module``, or has ``block: false``, which a list of modules cannot express; or a
            required rule holds in no block.
    """
    rules = tuple(each for rule in policy.rules if (each := _placed(rule, blocks)) is not None)
    phases = tuple(replace(phase, policy=placed(phase.policy, blocks)) for phase in policy.phases)
    return replace(policy, rules=rules, phases=phases)


def _placed(rule: Rule, blocks: Sequence[str]) -> Rule | None:
    match = rule.match
    if match.block is None and match.first_blocks is None and match.last_blocks is None:
        return rule
    if match.block is False or match.module is not None:
        raise rule.error(
            "this task's model has blocks of several kinds: a rule can have block: true, first_blocks or last_blocks, "
            "but neither block: false nor a module beside them; name the modules instead"
        )
    first, last = match.first_of(len(blocks)), match.last_of(len(blocks))
    names = tuple(f"{name}.*" for name in blocks[max(0, len(blocks) - last) : first])
    if not names and rule.required:
        raise rule.error(
            f"no block is both in first_blocks and in last_blocks of this task's {len(blocks)} blocks; for either, "
            "write two rules, or set required: false"
        )
    if not names:
        return None
    update = {"module": names, "block": None, "first_blocks": None, "last_blocks": None}
    return replace(rule, match=match.model_copy(update=update))
