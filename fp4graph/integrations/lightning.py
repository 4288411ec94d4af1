"""Applies a policy in Lightning's ``Trainer``."""

from __future__ import annotations

import math
from os import PathLike
from typing import Any

import lightning
from torch import nn

from fp4graph.errors import Error
from fp4graph.integrations.length import forwards
from fp4graph.model.api import apply, set_total_forwards
from fp4graph.model.runtime import require_runtime
from fp4graph.policy import Policy, load_policy
from fp4graph.training import grad_scaler, prepare_optimizer
from fp4graph.training.origin import check_policy, written_under


class FP4GraphLightningCallback(lightning.Callback):  # type: ignore[misc,unused-ignore]
    """Makes an unmodified LightningModule train under a policy.

    >>> trainer = lightning.Trainer(callbacks=[FP4GraphLightningCallback("tetrajet", "net")])

    The policy is applied before the optimizers are made, and the optimizers are prepared before the first step.
    Checkpoints are Lightning's: they hold the state of techniques among the module's weights, and the policy in the
    callback's state. If a phase begins at a share of the training, ``total_forwards`` is the number of batches that the
    Trainer expects.

    Args:
        policy: as for :func:`fp4graph.apply`. options: further arguments of :func:`fp4graph.apply`.
        part: the attribute of the LightningModule that holds the model to compile; by default the only child with
            parameters.
        same_policy: False lets training resume from a checkpoint of another policy.

    Raises:
        Mismatch: a checkpoint of another policy or seed, or without a policy, is loaded, or training resumes from one
            of another length while a phase begins at a share of it.
        Error: the LightningModule has no child ``part``, or not exactly one child with parameters while ``part`` is
            None; or training begins without ``precision="16-mixed"`` under a policy that scales the loss.
    """

    def __init__(
        self,
        policy: str | PathLike[str] | dict[str, Any] | Policy,
        part: str | None = None,
        *,
        same_policy: bool = True,
        **options: Any,
    ) -> None:
        self.policy, self.part, self.same_policy, self.options = load_policy(policy), part, same_policy, options
        self._model: nn.Module | None = None
        self._resumed: dict[str, Any] | None = None  # the callback's state in the loaded checkpoint

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Apply the policy, once, before Lightning configures optimizers and loads a checkpoint."""
        model, self._resumed = self._part_of(pl_module), None
        if self._model is not model:
            self._model = apply(model, self.policy, **self.options)

    def _part_of(self, pl_module: nn.Module) -> nn.Module:
        kind = type(pl_module).__name__
        children = {name: child for name, child in pl_module.named_children() if [*child.parameters()]}
        if self.part is None and len(children) != 1:
            raise Error(f"{kind} has the parts {', '.join(children) or 'none'}; give the one to quantize as part=")
        part = self.part or next(iter(children))
        if part not in children:
            raise Error(f"{kind} has no part {part!r} with parameters; it has {', '.join(children) or 'none'}")
        return children[part]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Prepare the optimizers that train the part."""
        assert self._model is not None
        policy = require_runtime(self._model, "FP4GraphLightningCallback").policy
        if grad_scaler(self._model).is_enabled() and getattr(trainer.precision_plugin, "scaler", None) is None:
            raise Error(
                f"policy {policy.name!r} scales the loss; Lightning does so only with precision='16-mixed': set it"
            )
        if any(isinstance(phase.at, float) for phase in policy.phases):
            trainer.fit_loop.setup_data()  # num_training_batches is infinite before
            steps, accumulation = trainer.estimated_stepping_batches, trainer.accumulate_grad_batches
            if 0 < steps < math.inf:  # -1: nothing limits the training
                set_total_forwards(self._model, forwards(int(steps), trainer.num_training_batches, accumulation))
        if self._resumed is not None:  # the length of this training was unknown when the checkpoint was loaded
            self._check(self._resumed)
        held = {id(parameter) for parameter in self._model.parameters()}
        for optimizer in trainer.optimizers:
            if any(id(parameter) in held for group in optimizer.param_groups for parameter in group["params"]):
                prepare_optimizer(self._model, optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the origin of the training for a checkpoint."""
        return {} if self._model is None else {"written_under": written_under(self._model)}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Compare the policy with the checkpoint's policy; a checkpoint without this callback has no policy."""
        if self.same_policy and self._model is not None:
            self._resumed = checkpoint["callbacks"].get(self.state_key, {})
            self._check(self._resumed)

    def _check(self, saved: dict[str, Any]) -> None:
        assert self._model is not None
        check_policy("the checkpoint", saved.get("written_under"), self._model)
