"""Dynamic loss scaling: torch's own scaler, on when the policy asks for it (Micikevicius et al. 2018)."""

from __future__ import annotations

import torch
from torch import nn

from fp4graph.model.runtime import require_runtime


def grad_scaler(model: nn.Module) -> torch.amp.GradScaler:
    """Return a ``torch.amp.GradScaler`` for an applied model, disabled (a no-op) unless a technique scales the loss."""
    runtime = require_runtime(model, "grad_scaler")
    asked = [technique.loss_scaler for technique in runtime.plan.techniques() if technique.loss_scaler is not None]
    options = asked[0] if asked else {}
    return torch.amp.GradScaler(runtime.device.type, enabled=bool(asked), **options)  # type: ignore[arg-type]
