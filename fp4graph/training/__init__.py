"""The lines that fp4graph adds to the user's own training loop."""

from fp4graph.training.optimizer import grad_scaler, prepare_optimizer

__all__ = ["grad_scaler", "prepare_optimizer"]
