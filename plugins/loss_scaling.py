"""Dynamic loss scaling: lifts small gradients into the range of a low precision, and skips steps that overflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from fp4graph import Overhead, Technique, hookimpl
from fp4graph.technique import Positive, Share


class LossScaling(Technique):
    """Multiplies the loss by a scale before the backward, and divides the gradients by this scale before the step.

    s is the scale, L the loss and g the gradient of s·L. If g is finite, the optimizer steps with g/s, and s is
    multiplied by ``growth_factor`` after ``growth_interval`` such steps in a row. Otherwise the step and the
    techniques' hooks are skipped, and s is multiplied by ``backoff_factor``. The scaler is ``torch.amp.GradScaler``.
    ``fp4graph.grad_scaler(model)`` makes a scaler with these options, or a disabled scaler under a policy without this
    technique, so that one training script serves both policies. If only a later phase has this technique, the loss is
    scaled from the beginning. Save ``scaler.state_dict()`` in the checkpoint.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", sec. 3.2; used by "Elucidating the Design Space of
    FP4 Training". The defaults are torch's.

    Stage: loss.

    Cost: one pass over all gradients, which also finds non-finite values. The complexity weight is 0.5.

    Use it if gradients pass through fp16, or through FP4 operands with E4M3 scales and no tensor scale. Scales with the
    exponents of fp32 (E8M0) represent small gradients as well as large ones.
    """

    name: ClassVar[str] = "loss_scaling"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=False)
    complexity: ClassVar[float] = 0.5
    per_model: ClassVar[bool] = True

    init_scale: Positive = Field(65536.0, description="The initial s.")
    growth_factor: float = Field(2.0, gt=1, description="Factor by which s grows.")
    backoff_factor: Share = Field(0.5, description="Factor by which s shrinks after a skipped step.")
    growth_interval: int = Field(2000, ge=1, description="Steps in a row, none skipped, after which s grows.")

    @property
    def loss_scaler(self) -> Mapping[str, float]:
        """The options, which have torch's names."""
        return self.model_dump()


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [LossScaling]
