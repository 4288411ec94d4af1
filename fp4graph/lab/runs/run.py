"""A training run as data: its settings, and its outcome."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from fp4graph.errors import Error
from fp4graph.graph.backend import BACKENDS
from fp4graph.text import suggest

OPTIMIZERS = ("adam", "adamw", "sgd", "stablespam")
DTYPES = ("fp32", "bf16")
#: Seeds are below this: torch's generators take 64 bits, and tasks add the number of an epoch.
SEEDS = 2**63
SCHEDULES = ("constant", "cosine", "timm")


@dataclass(frozen=True)
class Run:
    """Everything that determines a training run, as plain data. The task's recipe chooses what is None.

    Attributes:
        task: name of a task (``fp4graph train --list``).
        policy: a shipped policy's name, a policy file's path, or a policy as data; loss scaling is a technique of it.
        optimizer: adam, adamw, sgd or stablespam. The last counts in Ω as the technique ``stable_spam`` does.
        optimizer_options: arguments of the optimizer's constructor besides lr and weight_decay.
        seed: of weights, order of the data, what the model draws, and the policy's noise; of synthetic data too.
        lr: learning rate, its highest where a schedule changes it.
        weight_decay: of weights; vectors (biases, norms' gains) do not decay.
        schedule: constant, or cosine to a hundredth of lr; after warm-up. ``timm`` is the cosine of timm's scheduler,
            whose warm-up begins at 1e-6 and takes the place of the cosine's beginning.
        warmup: share of the steps over which lr grows to its value, linearly.
        clip: largest norm of the gradient; 0 for none.
        batch_size, accumulate: samples per forward pass, and forward passes per step of the optimizer.
        epochs, steps: length of the training, one of them. A step is one of the optimizer.
        validate_every: steps between validations; the last step is always followed by one.
        validation_batches: at most so many batches per validation.
        dtype: of the parameters. With bf16 everything is: there is no fp32 copy of the weights.
        autocast: run matrix products in bf16 from fp32 parameters.
        device: ``auto``, cpu, cuda, cuda:1, ...
        backend: of torch.compile: eager, aot_eager or inductor; None is inductor on CUDA and eager elsewhere.
        mode: of torch.compile with inductor: max-autotune, reduce-overhead, ...
        data: a file or folder, or a name that the task knows.
        workers: processes that load data.
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
        for name, known in (("optimizer", OPTIMIZERS), ("dtype", DTYPES), ("schedule", SCHEDULES),
                            ("backend", BACKENDS)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value not in known:
                raise Error(f"unknown {name} {value!r}; {suggest(str(value), known)}")
        for name in ("batch_size", "accumulate", "steps", "validate_every", "validation_batches"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= sys.maxsize):
                raise Error(f"{name} must be a whole number of at least 1; got {value!r}")
        for name, end in (("seed", SEEDS), ("workers", math.inf)):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < end:
                upto = f" and at most {SEEDS - 1}" if end == SEEDS else ""
                raise Error(f"{name} must be a whole number of at least 0{upto}; got {value!r}")
        for name in ("lr", "epochs"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise Error(f"{name} must be a positive number; got {value!r}")
        for name, most in (("weight_decay", math.inf), ("clip", math.inf), ("warmup", 1)):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 <= value < most):
                raise Error(f"{name} must be a number of [0, {most}); got {value!r}")
        if self.epochs is not None and self.steps is not None:
            raise Error("epochs and steps both say how long to train; give one of them")

    def to_json(self) -> dict[str, Any]:
        """Return plain data, which :meth:`from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read the data that :meth:`to_json` wrote.

        Raises:
            Error: a key is unknown, or a value is out of its range.
        """
        known = {item.name for item in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown or "task" not in data:
            what = f"it has {', '.join(map(repr, unknown))}" if unknown else "it names no task"
            known_keys = ", ".join(sorted(known))
            raise Error(f"this is not a run of this version of fp4graph: {what}; known keys: {known_keys}")
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
        first_step_seconds: of the first step that this process did: with compilation, without reading the data.
        step_seconds: median of the steps whose loss was looked at, the first five left out; None before.
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
    first_step_seconds: float | None = None
    step_seconds: float | None = None

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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
