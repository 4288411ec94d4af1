"""Calls a user's training function, whatever it returns, and keeps the losses that it logs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp4graph.errors import Error
from fp4graph.lab import jsonlines
from fp4graph.lab.comparison.record import LOG
from fp4graph.lab.runs.run import finite
from fp4graph.model.runtime import runtime_of
from fp4graph.policy import Policy

#: ``train(policy, seed, log)``.
Train = Callable[[Policy, int, "Log"], Any]


class Stop(BaseException):
    """Ends a training from inside ``log``. It is no Exception, so that no training catches it."""


class NoLoss(Error):
    """A training has neither returned a loss nor logged one."""


class Log:
    """What a training calls with its losses: ``log(step, loss, **metrics)``.

    Every call adds a line to ``log.jsonl`` in :attr:`folder`. A training that goes on from a checkpoint of its own,
    after a kill, continues the former lines; one that begins again replaces them.

    Attributes:
        folder: a folder of this run, where the training may keep checkpoints; ``log.jsonl``, ``traceback.txt`` and
            ``statistics`` in it are written by fp4graph.
        points: each logged step with its loss.
        metrics: the last value of each metric.
        begun: whether this attempt has logged.
    """

    def __init__(self, folder: Path, look: Callable[[int, float | None], None]) -> None:
        """``look`` is called with each step and its loss, None for a step without one; it may raise :class:`Stop`."""
        self.folder, self._look, self._file = folder, look, folder / LOG
        folder.mkdir(parents=True, exist_ok=True)
        former = [line for _, line in jsonlines.read(self._file)] if self._file.exists() else []
        self.points = [(line["step"], math.nan if line["loss"] is None else line["loss"]) for line in former]
        self.metrics: dict[str, float] = {}
        self.begun = False

    def __call__(self, step: int, loss: Any, /, **metrics: Any) -> None:
        """Log the loss of a step, a number or a tensor with one element."""
        step, value = int(step), number(loss)
        self.metrics |= {name: number(metric) for name, metric in metrics.items()}
        if not self.begun:
            self.begun = True
            self.points = [point for point in self.points if point[0] < step]
            self._file.write_bytes(b"".join(map(self._line, self.points)))
        self.points.append((step, value))
        jsonlines.append(self._file, [finite({"step": step, "loss": value, **self.metrics})])
        self._look(step, value)

    def tick(self, step: int) -> None:
        """Note that a step has ended whose loss is not known."""
        self._look(step, None)

    @staticmethod
    def _line(point: tuple[int, float]) -> bytes:
        return jsonlines.line(finite({"step": point[0], "loss": point[1]}))


def number(value: Any) -> float:
    """Return a loss or a metric as a float.

    Raises:
        Error: ``value`` is no number.
    """
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise Error(f"a loss is a number or a tensor with one element; got {type(value).__name__}") from None


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
        NoLoss: nothing was returned or logged. Anything that the training raises passes through.
    """
    result = train(policy, seed, log)
    trainer, *parts = result if isinstance(result, tuple | list) and result else (result,)
    if isinstance(result, Generator):
        result = _exhausted(result, log)
    elif _is_a(trainer, "transformers.trainer"):
        result = _hugging_face(trainer, policy, seed, log)
    elif parts and (_is_a(trainer, "lightning.pytorch.trainer") or _is_a(trainer, "pytorch_lightning.trainer")):
        result = _lightning(trainer, parts, log)
    metrics = dict(log.metrics)
    if isinstance(result, Mapping):
        metrics |= {str(name): number(value) for name, value in result.items() if name != "loss"}
        result = result.get("loss")
    if result is not None:
        return number(result), metrics
    if not log.points:
        raise NoLoss(
            f"train(policy {policy.name!r}, seed {seed}) returned no loss and logged none, so there is nothing to "
            "compare; call log(step, loss) in the loop, or return the final loss"
        )
    return log.points[-1][1], metrics


def _is_a(value: Any, module: str) -> bool:
    """Return whether ``value`` is a Trainer of ``module``, which is not imported for the question."""
    return any(kind.__name__ == "Trainer" and kind.__module__.startswith(module) for kind in type(value).__mro__)


def _exhausted(steps: Generator[Any, Any, Any], log: Log) -> Any:
    """Log what a generator yields, (step, loss) or (step, loss, metrics); return what it returns."""
    try:
        while True:
            step, loss, *metrics = next(steps)
            log(step, loss, **(metrics[0] if metrics else {}))
    except StopIteration as end:
        return end.value
    finally:
        steps.close()


def _hugging_face(trainer: Any, policy: Policy, seed: int, log: Log) -> float | None:
    """Run a Trainer, under ``policy`` unless its factory has applied it; return its evaluation loss if it has one."""
    from transformers import TrainerCallback

    from fp4graph.integrations.trainer import FP4GraphCallback

    class Logging(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            log.tick(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs and "loss" in logs:
                log(state.global_step, logs["loss"])

    if runtime_of(trainer.model) is None:
        trainer.add_callback(FP4GraphCallback(policy, seed=seed))
    trainer.add_callback(Logging())
    done = trainer.train()
    if trainer.eval_dataset is not None:
        return number(trainer.evaluate()["eval_loss"])
    return None if log.points else number(done.training_loss)


def _lightning(trainer: Any, parts: list[Any], log: Log) -> float | None:
    """Fit ``(module[, datamodule])``; return the validation loss that the module logs, if it logs one."""
    package = type(trainer).__module__.rpartition(".trainer")[0].partition(".trainer")[0]
    base: Any = getattr(__import__(package, fromlist=["Callback"]), "Callback")  # noqa: B009  # mypy does not know it

    class Logging(base):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
            if not log.points or trainer.global_step > log.points[-1][0]:  # else a batch of an accumulated step
                log(trainer.global_step, loss)

    trainer.callbacks.append(Logging())
    trainer.fit(*parts[:1], datamodule=parts[1] if len(parts) > 1 else None)
    losses = [value for name, value in trainer.callback_metrics.items() if "val" in name and "loss" in name]
    return number(losses[0]) if losses else None
