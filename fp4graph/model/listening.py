"""Tells the caller of a function to which models the function applies a policy and which optimizers it prepares.

:func:`fp4graph.compare` runs a user's training function and learns in this way which model to observe. A listener hears
only of calls in its own thread while the context lasts. This module keeps no model alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import nn


class Listener(Protocol):
    """Hears of completed calls of ``fp4graph.apply`` and ``fp4graph.prepare_optimizer``."""

    def applied(self, model: nn.Module) -> None:
        """``model`` has just been applied."""

    def prepared(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` has just been prepared for ``model``."""


class Silent:
    """A listener that ignores everything."""

    def applied(self, model: nn.Module) -> None: ...

    def prepared(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None: ...


_LISTENER: ContextVar[Listener] = ContextVar("fp4graph_listener", default=Silent())  # noqa: B039  # it has no state


def listener() -> Listener:
    """Return the listener of this context."""
    return _LISTENER.get()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let ``listener`` hear what is applied and prepared in this context, in place of any outer listener."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
