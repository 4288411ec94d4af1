"""The lines that fp4graph adds to the user's own training loop."""

from fp4graph.training.optimizer import prepare_optimizer
from fp4graph.training.scaler import grad_scaler

__all__ = ["grad_scaler", "prepare_optimizer"]
