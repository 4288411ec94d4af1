"""Evaluation mode for a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` in evaluation mode in this context; afterwards each module has its own mode again.

    ``model.train()`` would also train modules that the user has in evaluation mode, such as a frozen BatchNorm.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
