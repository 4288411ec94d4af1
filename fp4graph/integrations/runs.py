"""Runs the Trainer of Hugging Face or Lightning that a user's function returns, and logs its steps and losses.

A log is called as ``log(step, loss)``; ``log.tick(step)`` notes the end of a step with unknown loss, and ``log.points``
holds the logged pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp4graph.errors import Error
from fp4graph.model.runtime import runtime_of
from fp4graph.policy import Policy


def run(result: Any, policy: Policy, seed: int, log: Any) -> Any:
    """Run ``result`` if it is a Trainer, or a tuple of Lightning's Trainer and its module, and return the final loss;
    else return ``result``."""
    trainer, *parts = result if isinstance(result, tuple | list) and result else (result,)
    if _is_a(trainer, "transformers.trainer"):
        return _hugging_face(trainer, policy, seed, log)
    if parts and (_is_a(trainer, "lightning.pytorch.trainer") or _is_a(trainer, "pytorch_lightning.trainer")):
        return _lightning(trainer, parts, log)
    return result


def _is_a(value: Any, module: str) -> bool:
    """Return whether ``value`` is a Trainer of ``module``, without importing the module."""
    return any(kind.__name__ == "Trainer" and kind.__module__.startswith(module) for kind in type(value).__mro__)


def _hugging_face(trainer: Any, policy: Policy, seed: int, log: Any) -> float | None:
    """Run a Trainer, under ``policy`` unless the user's function has applied a policy.

    Return the evaluation loss; without evaluation data, the training loss, or None if losses were logged.

    Raises:
        Error: the evaluation gives several losses, which is known before the training, or none.
    """
    from transformers import TrainerCallback

    from fp4graph.integrations.trainer import FP4GraphCallback

    if isinstance(trainer.eval_dataset, dict):
        raise Error(
            f"the Trainer evaluates on the datasets {', '.join(trainer.eval_dataset)}, and compare needs one loss: "
            "give one eval_dataset, or call train() yourself and return the loss, {'loss': ..., **metrics}"
        )

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
        metrics = trainer.evaluate()
        if "eval_loss" not in metrics:
            names = ", ".join(metrics)
            raise Error(f"the Trainer's evaluation has no eval_loss, only {names}; give eval_dataset labels")
        return float(metrics["eval_loss"])
    return None if log.points else float(done.training_loss)


def _lightning(trainer: Any, parts: list[Any], log: Any) -> Any:
    """Fit ``parts``, ``[module]`` or ``[module, datamodule]``; return the validation loss that it logs, or None."""
    package = type(trainer).__module__.rpartition(".trainer")[0].partition(".trainer")[0]
    base: Any = getattr(__import__(package, fromlist=["Callback"]), "Callback")  # noqa: B009  # unknown to mypy

    class Logging(base):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if loss is None:  # a skipped batch, or a module that optimizes by hand and returns no loss
                log.tick(trainer.global_step)
            elif not log.points or trainer.global_step > log.points[-1][0]:  # once per step, not per batch
                log(trainer.global_step, loss)

    trainer.callbacks.append(Logging())
    trainer.fit(*parts[:1], datamodule=parts[1] if len(parts) > 1 else None)
    return next((v for name, v in trainer.callback_metrics.items() if "val" in name and "loss" in name), None)
