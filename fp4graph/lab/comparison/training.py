"""Calls a user's training function, reads its result, and keeps the losses that it logs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp4graph.errors import Error
from fp4graph.files import write
from fp4graph.integrations import runs
from fp4graph.lab import jsonlines
from fp4graph.lab.comparison.record import LOG
from fp4graph.lab.runs.run import finite
from fp4graph.policy import Policy

#: ``train(policy, seed, log)``.
Train = Callable[[Policy, int, "Log"], Any]


class Stop(BaseException):
    """Ends a training from inside ``log``. Trainings do not catch a BaseException."""


class Incomparable(Error):
    """A training has neither returned nor logged a loss, or a metric of it has a reserved name."""


#: The names and headings of a comparison's columns, which metrics cannot have.
RESERVED = frozenset((
    "step", "policy", "loss", "deviation", "difference", "low", "high", "complexity", "ms_per_step", "ratio",
    "fp4_flops", "bits_per_weight", "quantized", "sites", "finished", "diverged", "failed",
    "difference, 95 %", "Ω", "ms/step", "FP4 FLOPs", "bits/weight", "runs",
))  # fmt: skip


class Log:
    """Records the losses of a training, which calls ``log(step, loss, **metrics)``.

    Every call adds a line to ``log.jsonl`` in :attr:`folder`. After a kill, a training that resumes from its checkpoint
    continues the earlier lines; a training that begins again replaces them.

    Attributes:
        folder: a folder of this run, where the training may keep checkpoints; fp4graph writes ``log.jsonl``,
            ``traceback.txt`` and ``statistics`` there.
        points: each logged step with its loss.
        metrics: the last value of each metric.
        begun: whether this attempt has logged.
    """

    def __init__(self, folder: Path, look: Callable[[int, float | None], None]) -> None:
        """Call ``look(step, loss)`` at each step, with None for an unknown loss; ``look`` may raise :class:`Stop`."""
        self.folder, self._look, self._file = folder, look, folder / LOG
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = [line for _, line in jsonlines.read(self._file, "step", "loss")]
        self.begun = False
        self._restore()

    def _restore(self) -> None:
        """Take the points and the metrics from the lines of earlier attempts."""
        self.points: list[tuple[int, float]] = [(line["step"], _read(line["loss"])) for line in self._lines]
        last = self._lines[-1] if self._lines else {}
        self.metrics = {name: _read(value) for name, value in last.items() if name not in ("step", "loss")}

    def __call__(self, step: int, loss: Any, /, **metrics: Any) -> None:
        """Log the loss of a step, a number or a tensor with one element."""
        step, value, metrics = int(step), number(loss), _numbers(metrics)
        if not self.begun:
            self._lines = [line for line in self._lines if line["step"] < step]
            write(self._file, b"".join(map(jsonlines.line, self._lines)))
            self._restore()
            self.begun = True
        self.metrics |= metrics
        self.points.append((step, value))
        jsonlines.append(self._file, [finite({"step": step, "loss": value, **self.metrics})])
        self._look(step, value)

    def tick(self, step: int) -> None:
        """Note the end of a step whose loss is unknown."""
        self._look(step, None)


def _read(value: float | None) -> float:
    """Return a number of a line, where None stands for a number that is not finite."""
    return math.nan if value is None else value


def number(value: Any) -> float:
    """Return a loss or a metric as a float; raise an Error if ``value`` is not a number."""
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise Error(f"a loss must be a number or a tensor with one element; got {type(value).__name__}") from None


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as floats; raise :class:`Incomparable` for a name that a comparison uses itself."""
    if taken := RESERVED.intersection(metrics):
        name = min(taken)
        raise Incomparable(f"a metric cannot be called {name!r}, as a column of compare's tables is; rename the metric")
    return {name: number(metric) for name, metric in metrics.items()}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's random numbers in this context, and restore them after it."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def call(train: Train, policy: Policy, seed: int, log: Log) -> tuple[float, dict[str, float]]:
    """Run a training to its end; return its final loss and metrics.

    Raises:
        Incomparable: the training neither returned nor logged a loss, or a metric has a reserved name. Exceptions of
            the training pass through.
    """
    result = train(policy, seed, log)
    result = _exhausted(result, log) if isinstance(result, Generator) else runs.run(result, policy, seed, log)
    metrics = dict(log.metrics)
    if isinstance(result, Mapping):
        metrics |= _numbers({str(name): value for name, value in result.items() if name != "loss"})
        result = result.get("loss")
    if result is not None:
        return number(result), metrics
    if not log.points:
        raise Incomparable(
            f"train(policy {policy.name!r}, seed {seed}) neither returned nor logged a loss, so there is nothing to "
            "compare; call log(step, loss) in the loop, or return the final loss"
        )
    return log.points[-1][1], metrics


def _exhausted(steps: Generator[Any, Any, Any], log: Log) -> Any:
    """Log each (step, loss) or (step, loss, metrics) that a generator yields; return its return value."""
    with closing(steps):
        while True:
            try:
                step, loss, *metrics = next(steps)
            except StopIteration as end:
                return end.value
            log(step, loss, **(metrics[0] if metrics else {}))
