"""Applies a policy in ``transformers.Trainer``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
import yaml
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from fp4graph.errors import Error
from fp4graph.integrations.length import forwards
from fp4graph.model.api import apply, set_total_forwards
from fp4graph.model.runtime import runtime_of
from fp4graph.policy import Policy, load_policy
from fp4graph.training import grad_scaler, prepare_optimizer
from fp4graph.training.origin import check_policy, written_under


class FP4GraphCallback(TrainerCallback, ExportableState):
    """Makes an unmodified Trainer train under a policy.

    >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[FP4GraphCallback("tetrajet")])

    The policy is applied when the Trainer is constructed, before the model is wrapped or a checkpoint is loaded; the
    optimizer is prepared when training begins. Evaluation and ``resume_from_checkpoint`` work unchanged: checkpoints
    hold the techniques' state in the model's file, and the policy in ``trainer_state.json``. If a phase begins
    at a share of the training, ``total_forwards`` is the number of batches in ``max_steps`` steps.

    Args:
        policy, backend, seed, dynamic, mode, options: as for :func:`fp4graph.apply`.
        same_policy: False lets training resume from a checkpoint of another policy.

    Raises:
        Mismatch: training resumes from a checkpoint of another policy or seed, from one without a policy, or from one
            of another length while a phase begins at a share of it.
        Error: the callback was added to the Trainer too late to resume or to evaluate, or training begins without
            ``fp16=True`` under a policy that scales the loss.
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
        """Return the entry for ``trainer_state.json``: this callback's arguments, and the origin of the training."""
        policy = yaml.safe_load(self.policy.to_yaml())
        return {
            "args": {"policy": policy, **self.options, "same_policy": self.same_policy},
            "attributes": {"written_under": self.written_under},
        }

    def on_init_end(self, *_: Any, model: nn.Module | None = None, **others: Any) -> None:
        """Apply the policy to the model of a new Trainer."""
        if model is not None:
            self._apply(model)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        train_dataloader: Any = None,
        **others: Any,
    ) -> None:
        """Prepare the optimizer, after model and optimizer were made and a checkpoint was loaded."""
        assert model is not None
        assert optimizer is not None
        if runtime_of(model) is None:  # Trainer(model_init=...) made a new model, or add_callback() was called late
            if state.global_step > 0:
                raise Error(
                    "training resumes, but no policy was applied when the checkpoint was loaded: give the model and "
                    "this callback to the constructor, Trainer(model, ..., callbacks=[FP4GraphCallback(...)])"
                )
            self._apply(model)
        if any(isinstance(phase.at, float) for phase in self.policy.phases):
            batches = len(train_dataloader) if has_length(train_dataloader) else math.inf
            set_total_forwards(model, forwards(state.max_steps, batches, args.gradient_accumulation_steps))
            self.written_under = written_under(model)
        if self.same_policy and state.global_step > 0:
            check_policy("the checkpoint", self._saved(state), model)
        # Accelerate's wrapper has no hooks.
        inner = getattr(optimizer, "optimizer", optimizer)
        if grad_scaler(model).is_enabled() and getattr(optimizer, "scaler", None) is None:
            raise Error(f"policy {self.policy.name!r} scales the loss; Trainer does so only with fp16=True: set it")
        prepare_optimizer(model, inner)

    def on_prediction_step(self, *_: Any, model: nn.Module | None = None, **others: Any) -> None:
        """Refuse an evaluation if the callback was added too late to apply the policy."""
        if model is not None and runtime_of(model) is None:
            raise Error(
                "this evaluation would be in high precision, because the callback was added after the Trainer was "
                "made. Give it to the constructor, Trainer(model, ..., callbacks=[FP4GraphCallback(...)])"
            )

    def _apply(self, model: nn.Module) -> None:
        apply(model, self.policy, **self.options)
        self.written_under = written_under(model)

    def _saved(self, state: TrainerState) -> Mapping[str, Any] | None:
        """Return the origin of the loaded checkpoint from the trainer state."""
        callbacks: Any = state.stateful_callbacks  # a dict, despite its annotation
        saved = callbacks.get(type(self).__name__)
        saved = saved[-1] if isinstance(saved, list) else saved  # a list for several callbacks of this class
        return None if saved is None else saved["attributes"]["written_under"]
