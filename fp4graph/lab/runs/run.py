"""A training run as data: its settings, and its outcome."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from fp4graph.errors import Error
from fp4graph.graph.backend import BACKENDS
from fp4graph.text import suggest

#: Seeds are below this: torch's generators take 64 bits, and tasks add the number of an epoch.
SEEDS = 2**63
NAMES = {
    "optimizer": ("adam", "adamw", "sgd", "stablespam"),
    "dtype": ("fp32", "bf16"),
    "schedule": ("constant", "cosine", "timm"),
    "backend": BACKENDS,
}


def _whole(first: int, end: float) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and first <= value < end


def _number(end: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and type(value) is not bool and 0 <= value < end


#: What each number must be, and the test of it.
NUMBERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("batch_size", "accumulate", "steps", "validate_every", "validation_batches"),
        ("a whole number of at least 1", _whole(1, sys.maxsize)),
    ),
    "workers": ("a whole number of at least 0", _whole(0, math.inf)),
    "seed": (f"a whole number of at least 0 and at most {SEEDS - 1}", _whole(0, SEEDS)),
    **dict.fromkeys(("lr", "epochs"), ("a positive number", lambda value: bool(value) and _number(math.inf)(value))),
    **dict.fromkeys(("weight_decay", "clip"), ("a number of [0, inf)", _number(math.inf))),
    "warmup": ("a number of [0, 1)", _number(1)),
}


@dataclass(frozen=True)
class Run:
    """Everything that determines a training run, as plain data. The task's recipe chooses what is None.

    ``fp4graph train --help`` explains the options of these names. Besides:

    Attributes:
        policy: a shipped policy's name, a policy file's path, or a policy as data; loss scaling is a technique of it.
        optimizer: stablespam counts in Ω as the technique ``stable_spam`` does.
        optimizer_options: arguments of the optimizer's constructor besides lr and weight_decay.
        seed: of weights, order of the data, what the model draws, and the policy's noise; of synthetic data too.
        weight_decay: of weights; vectors (biases, norms' gains) do not decay.
        schedule: constant, or cosine to a hundredth of lr; after warm-up. ``timm`` is the cosine of timm's scheduler,
            whose warm-up begins at 1e-6 and takes the place of the cosine's beginning.
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
        for name, value in vars(self).items():
            if value is not None and name in NAMES and value not in NAMES[name]:
                raise Error(f"unknown {name} {value!r}; {suggest(str(value), NAMES[name])}")
            what, fits = NUMBERS.get(name, ("", bool))
            if value is not None and what and not fits(value):
                raise Error(f"{name} must be {what}; got {value!r}")
        if self.epochs is not None and self.steps is not None:
            raise Error("epochs and steps both say how long to train; give one of them")

    def to_json(self) -> dict[str, Any]:
        """Return plain data, which :meth:`from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read the data that :meth:`to_json` wrote; raise an Error for a key that is unknown or a value out of range."""
        known = {item.name for item in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown or "task" not in data:
            what = f"it has {', '.join(map(repr, unknown))}" if unknown else "it names no task"
            keys = ", ".join(sorted(known))
            raise Error(f"this is not a run of this version of fp4graph: {what}; known keys: {keys}")
        return cls(**data)


@dataclass(frozen=True)
class Validation:
    """Means after ``step`` steps.

    ``train_loss`` is over the samples since the validation before, ``validation_loss`` and ``metrics`` (by name:
    ``accuracy``, ...) over the validation samples.
    """

    step: int
    train_loss: float
    validation_loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        validation_loss: M of the score: the loss after the last step. NaN where the training diverged.
        train_loss: mean over the steps since the validation before the last; NaN likewise.
        seconds: wall time of training and validations, compilation included, making data and model not.
        diverged: a loss became NaN or infinite, and the training was ended there.
        complexity: Ω, of the policy and the optimizer.
        quantized, sites: matrix products of the model that are quantized, and all of them.
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
    """Return ``value`` with None for every number in it that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
