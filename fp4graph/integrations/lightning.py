"""Applies a policy in Lightning's ``Trainer``."""

from __future__ import annotations

from os import PathLike
from typing import Any

import lightning
from torch import nn

from fp4graph.errors import Error
from fp4graph.model.api import apply
from fp4graph.policy import Policy, load_policy
from fp4graph.training import prepare_optimizer
from fp4graph.training.origin import check_policy, written_under


class FP4GraphLightningCallback(lightning.Callback):  # type: ignore[misc,unused-ignore]
    """Makes an unmodified LightningModule train under a policy.

    >>> trainer = lightning.Trainer(callbacks=[FP4GraphLightningCallback("tetrajet", "net")])

    The policy is applied before the optimizers are made, and the optimizers are prepared before the first step.
    Checkpoints are Lightning's: they hold the state of techniques among the module's weights, and the policy in the
    callback's state. Call ``fp4graph.apply`` yourself for a policy that scales the loss.

    Args:
        policy: as for :func:`fp4graph.apply`; ``options`` are its further arguments.
        part: the attribute of the LightningModule that holds the model, whose call is compiled; by default its only
            child with parameters.
        same_policy: False lets training resume from a checkpoint of another policy.

    Raises:
        Mismatch: training resumes from a checkpoint of another policy or seed.
        Error: the LightningModule has no such part, or ``part`` is needed to choose one.
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
        self._resumed: dict[str, Any] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Apply the policy, once, before Lightning configures optimizers and loads a checkpoint."""
        model = self._part_of(pl_module)
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
        """Prepare the optimizers, and compare the policy with that of the checkpoint."""
        assert self._model is not None
        if self._resumed is not None and self.same_policy:
            check_policy("the checkpoint", self._resumed["written_under"], self._model)
        for optimizer in trainer.optimizers:
            prepare_optimizer(self._model, optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the origin of the training for a checkpoint."""
        return {} if self._model is None else {"written_under": written_under(self._model)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the origin that a checkpoint holds."""
        self._resumed = state_dict
