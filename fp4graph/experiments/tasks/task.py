"""What a task is: a problem to make, and the recipe to train it by."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp4graph.errors import Error
from fp4graph.experiments.run import Run

#: Parameters' dtypes, by the names that a run gives them.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: What a run may leave to its task's recipe and settings hold as it is.
CHOSEN = (
    "optimizer", "lr", "weight_decay", "schedule", "warmup", "clip", "batch_size", "accumulate", "validation_batches",
    "autocast",
)  # fmt: skip
#: Tensors with the samples along their first axis.
Batch = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a task trains with unless a run says otherwise; names as in :class:`Run`, whose values are all given here.

    Attributes:
        epochs, steps, tokens: length of the training, one of them.
        validations: about so many during a training.
    """

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


@dataclass(frozen=True)
class Settings:
    """A run with everything chosen: what a problem is made from. Attributes as in :class:`Run`."""

    run: Run
    recipe: Recipe
    optimizer: str
    lr: float
    weight_decay: float
    schedule: str
    warmup: float
    clip: float
    batch_size: int
    accumulate: int
    validation_batches: int | None
    dtype: torch.dtype
    autocast: bool
    device: torch.device
    backend: str

    @property
    def seed(self) -> int:
        return self.run.seed

    @property
    def data(self) -> str | None:
        return self.run.data

    def to_json(self) -> dict[str, Any]:
        """As plain data: the run with everything chosen but its length."""
        chosen = {name: getattr(self, name) for name in CHOSEN}
        names = {dtype: name for name, dtype in DTYPES.items()}
        placed = {"dtype": names[self.dtype], "device": str(self.device), "backend": self.backend}
        return {**self.run.to_json(), **chosen, **placed}

    def steps(self, problem: Problem) -> int:
        """Steps of the optimizer of the whole training."""
        run, recipe = self.run, self.recipe
        if run.steps is not None:
            return run.steps
        if run.epochs is None and recipe.steps is not None:
            return recipe.steps
        if run.epochs is None and recipe.tokens is not None:
            return math.ceil(recipe.tokens / (problem.tokens_per_sample * self.batch_size * self.accumulate))
        epochs = run.epochs or recipe.epochs
        assert epochs is not None, f"the recipe of {run.task} has no length"
        return math.ceil(epochs * problem.samples / (self.batch_size * self.accumulate))


class Problem(ABC):
    """A model and the data to train it on.

    Attributes:
        model: on the CPU, in fp32; its weights are a function of the seed.
        dtype: of the parameters it will have, and so of the model's input.
        blocks: names of the modules that are its blocks, where they are not one repeated stack that
            ``block: true`` finds by itself.
        samples: to train on; so many are an epoch.
        tokens_per_sample: of a language model's; 1 elsewhere.
    """

    model: nn.Module
    dtype: torch.dtype
    samples: int
    blocks: tuple[str, ...] | None = None
    tokens_per_sample: int = 1

    @abstractmethod
    def batches(self, start: int) -> Iterator[Batch]:
        """Training batches without end, from number ``start`` on: on the CPU, all of one shape, each a function of the
        seed and its number."""

    @abstractmethod
    def validation(self) -> Iterator[Batch]:
        """The validation batches, the same each time; the last may be shorter."""

    @abstractmethod
    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """``loss`` and other metrics of each sample: name to fp32 ``[samples]``.

        Args:
            model: :attr:`model`, or what it was wrapped into.
            batch: on the device.
        """

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        """The metrics to report, from the validation means of what :meth:`measure` gives."""
        return {name: value for name, value in means.items() if name != "loss"}


Family = Literal["regression", "classification", "diffusion", "language"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Something to train, by name.

    Attributes:
        description: model and data, in one sentence.
        data: what ``--data`` takes, or None where the task needs none.
        source: where model, data and recipe come from.
        embedded: whether it runs at once, without data from elsewhere.
        make: the problem of a run.
    """

    name: str
    family: Family
    description: str
    source: str
    recipe: Recipe
    make: Callable[[Settings], Problem]
    data: str | None = None
    embedded: bool = False

    def settings(self, run: Run) -> Settings:
        """``run``, with what it leaves open taken from the recipe.

        Raises:
            Error: the run names data and the task takes none, or the device is not there.
        """
        if run.data is not None and self.data is None:
            raise Error(f"task {self.name!r} makes its own data; leave --data out")

        def chosen(name: str) -> Any:
            value = getattr(run, name)
            return getattr(self.recipe, name) if value is None else value

        device = device_named(run.device)
        return Settings(
            run=run,
            recipe=self.recipe,
            dtype=DTYPES[chosen("dtype")],
            device=device,
            backend=run.backend or ("inductor" if device.type == "cuda" else "eager"),
            **{name: chosen(name) for name in CHOSEN},
        )


def device_named(name: str) -> torch.device:
    """``name``, or for ``auto`` CUDA where there is one.

    Raises:
        Error: torch does not know such a device, or it is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise Error(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device
