"""A policy for ``transformers.Trainer``."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
import yaml
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from fp4graph.errors import Error
from fp4graph.model.api import apply, set_total_forwards
from fp4graph.model.runtime import runtime_of
from fp4graph.policy import Policy, load_policy
from fp4graph.training import grad_scaler, prepare_optimizer
from fp4graph.training.origin import check_policy, written_under


class FP4GraphCallback(TrainerCallback, ExportableState):
    """Makes an unmodified Trainer train under a policy.

    >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[FP4GraphCallback("tetrajet")])

    The policy is applied when the Trainer is constructed, before anything wraps the model or loads a checkpoint into
    it; the optimizer is prepared when training begins. Evaluation and ``resume_from_checkpoint`` work as always:
    checkpoints hold the techniques' state in the model's file, and the policy in ``trainer_state.json``. For policies
    with phases, ``total_forwards`` is ``max_steps`` times ``gradient_accumulation_steps``.

    Args:
        policy, backend, seed, dynamic, mode, options: as for :func:`fp4graph.apply`.
        same_policy: False lets training resume from a checkpoint of another policy.

    Raises:
        Mismatch: when training resumes from a checkpoint of another policy or seed, or of none.
        Error: the callback was added to the Trainer too late to resume or to evaluate. When training begins: the policy
            scales the loss, which the Trainer does with ``fp16=True`` only.
    """

    def __init__(
        self,
        policy: str | PathLike[str] | dict[str, Any] | Policy,
        *,
        backend: str = "inductor",
        seed: int | None = None,
        dynamic: bool | None = None,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        same_policy: bool = True,
    ) -> None:
        self.policy = load_policy(policy)
        self.options: dict[str, Any] = {"backend": backend, "seed": seed, "dynamic": dynamic}
        self.options |= {"mode": mode, "options": None if options is None else dict(options)}
        self.same_policy = same_policy
        self.written_under: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Return the entry for ``trainer_state.json``: how to make this callback, and the origin of the training."""
        policy = yaml.safe_load(self.policy.to_yaml())
        return {
            "args": {"policy": policy, **self.options, "same_policy": self.same_policy},
            "attributes": {"written_under": self.written_under},
        }

    def on_init_end(self, *_: Any, model: nn.Module | None = None, **others: Any) -> None:
        """Apply the policy to the model of a Trainer that was just made."""
        if model is not None:
            self._apply(model)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **others: Any,
    ) -> None:
        """Prepare the optimizer; by now model and optimizer are made, and a checkpoint is loaded."""
        assert model is not None
        assert optimizer is not None
        # Trainer(model_init=...) has made another model, or trainer.add_callback() came late.
        if runtime_of(model) is None:
            if state.global_step > 0:
                raise Error(
                    "training resumes, but the model was not applied when the checkpoint was loaded: give the model "
                    "and this callback to the constructor, Trainer(model, ..., callbacks=[FP4GraphCallback(...)])"
                )
            self._apply(model)
        if self.policy.phases:
            set_total_forwards(model, state.max_steps * args.gradient_accumulation_steps)
        if self.same_policy and state.global_step > 0:
            check_policy("the checkpoint", self._saved(state), model)
        # Accelerate's wrapper has no hooks of its own.
        inner = getattr(optimizer, "optimizer", optimizer)
        if grad_scaler(model).is_enabled() and getattr(optimizer, "scaler", None) is None:
            raise Error(f"policy {self.policy.name!r} scales the loss, and Trainer does so with fp16=True only")
        prepare_optimizer(model, inner)

    def on_prediction_step(self, *_: Any, model: nn.Module | None = None, **others: Any) -> None:
        """Refuse an evaluation in high precision, as the callback was added too late for the model to be applied."""
        if model is not None and runtime_of(model) is None:
            raise Error(
                "this evaluation would be in high precision: the callback came after the Trainer was made. Give it to "
                "the constructor, Trainer(model, ..., callbacks=[FP4GraphCallback(...)])"
            )

    def _apply(self, model: nn.Module) -> None:
        apply(model, self.policy, **self.options)
        self.written_under = written_under(model)

    def _saved(self, state: TrainerState) -> Mapping[str, Any] | None:
        """Return the origin of the loaded checkpoint, as the trainer state has it."""
        callbacks: Any = state.stateful_callbacks  # a dict by now, whatever its annotation says
        kept = callbacks.get(type(self).__name__)
        kept = kept[-1] if isinstance(kept, list) else kept  # one of each of several callbacks
        return None if kept is None else kept["attributes"]["written_under"]
