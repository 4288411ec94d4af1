"""A training run as data: its settings, and its outcome."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from fp4graph.errors import Error, suggest
from fp4graph.graph.backend import BACKENDS

#: The upper bound of seeds: torch's generators take 64 bits, and tasks add the number of an epoch.
SEEDS = 2**63
NAMES = {
    "optimizer": ("adam", "adamw", "sgd", "stablespam"), "dtype": ("fp32", "bf16"),
    "schedule": ("constant", "cosine", "timm"), "backend": BACKENDS,
}  # fmt: skip
#: The numeric fields. A row has names of fields, what they must be in words, the same as an interval [first, end), and
#: their type.
NUMBERS = (
    (("batch_size", "accumulate", "steps", "validate_every", "validation_batches"), "a whole number of at least 1",
     (1, sys.maxsize), int),
    (("workers",), "a whole number of at least 0", (0, math.inf), int),
    (("seed",), f"a whole number of at least 0 and at most {SEEDS - 1}", (0, SEEDS), int),
    (("lr", "epochs"), "a positive number", (math.ulp(0), math.inf), float),
    (("weight_decay", "clip"), "a number of [0, inf)", (0, math.inf), float),
    (("warmup",), "a number of [0, 1)", (0, 1), float),
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """The settings of a training run, as plain data. A setting of None takes its value from the task's recipe.

    ``fp4graph train --help`` explains the options of the same names.

    Attributes:
        policy: a shipped policy's name, a policy file's path, or a policy as data. It also sets loss scaling.
        optimizer: stablespam adds as much to Ω as the technique ``stable_spam``.
        optimizer_options: arguments of the optimizer's constructor besides lr and weight_decay.
        seed: of weights, the order of data, the model's random numbers, the policy's noise, and synthetic data.
        weight_decay: of weights; vectors (biases, norms' gains) do not decay.
        schedule: after warm-up, constant or a cosine down to lr/100. ``timm`` is the cosine of timm's scheduler: the
            warm-up starts at a learning rate of 1e-6 and replaces the first steps of the cosine.
    """

    task: str
    policy: str | Mapping[str, Any] = "bf16"
    optimizer: str | None = None
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    lr: float | None = None
    weight_decay: float | None = None
    schedule: str | None = None
    warmup: float | None = None
    clip: float | None = None
    batch_size: int | None = None
    accumulate: int | None = None
    epochs: float | None = None
    steps: int | None = None
    validate_every: int | None = None
    validation_batches: int | None = None
    dtype: str | None = None
    autocast: bool | None = None
    device: str = "auto"
    backend: str | None = None
    mode: str | None = None
    data: str | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        for name, choices in NAMES.items():
            if (value := getattr(self, name)) is not None and value not in choices:
                raise Error(f"unknown {name} {value!r}; {suggest(str(value), choices)}")
        for names, what, (first, end), kind in NUMBERS:
            for name in names:
                value = getattr(self, name)
                fits = type(value) is int or (kind is float and isinstance(value, float))
                if value is not None and not (fits and first <= value < end):
                    raise Error(f"{name} must be {what}; got {value!r}")
        if self.autocast is not None and not isinstance(self.autocast, bool):
            raise Error(f"autocast must be true or false; got {self.autocast!r}")
        if not isinstance(self.optimizer_options, Mapping):
            raise Error(f"optimizer_options must be a mapping; got {self.optimizer_options!r}")
        if self.epochs is not None and self.steps is not None:
            raise Error("epochs and steps both set the length of the training; give only one")

    def to_json(self) -> dict[str, Any]:
        """Return plain data, which :meth:`from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read the data that :meth:`to_json` wrote; raise an Error for an unknown key or a value out of its range."""
        names = sorted(item.name for item in dataclasses.fields(cls))
        unknown = sorted(set(data).difference(names))
        if unknown or "task" not in data:
            what = f"it has {', '.join(map(repr, unknown))}" if unknown else "it names no task"
            raise Error(f"this is not a run of this version of fp4graph: {what}; known keys: {', '.join(names)}")
        return cls(**data)


@dataclass(frozen=True)
class Validation:
    """Means after ``step`` steps: ``train_loss`` over the steps since the previous validation, the others over the
    validation samples."""

    step: int
    train_loss: float
    validation_loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run; losses are NaN if it diverged.

    Attributes:
        validation_loss: the loss after the last step, M in the formula of the score.
        train_loss: mean over the steps between the last two validations.
        seconds: wall time of training, validations and compilation, without preparing data and model.
        diverged: a loss became NaN or infinite, which ended the training.
        complexity: Ω, of the policy and the optimizer.
        quantized, sites: the number of the model's quantized matrix products, and of all its matrix products.
    """

    validation_loss: float
    train_loss: float
    metrics: Mapping[str, float]
    steps: int
    seconds: float
    diverged: bool
    complexity: float
    quantized: int
    sites: int
    parameters: int
    history: tuple[Validation, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data; a loss that is not finite becomes None."""
        return dict(finite(dataclasses.asdict(self)))


def finite(value: Any) -> Any:
    """Return ``value`` with every number that is not finite replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
