"""Sets back what a call of a model has changed, if the call must run again from its beginning."""

from __future__ import annotations

import torch
from torch import nn


class Before:
    """The buffers of a model and the random number generators of torch before a call.

    If Dynamo breaks a call into several graphs, some of them have run when a later one is refused. They have counted
    batches (BatchNorm), written state of techniques, and drawn dropout.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
        self._generator = torch.get_rng_state()
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._of_gpu = torch.cuda.get_rng_state() if in_use else None  # of the current device

    @torch.no_grad()
    def restore(self) -> None:
        """Set the buffers and the generators back."""
        for buffer, value in self._buffers:
            if not torch.equal(buffer, value):  # an unchanged buffer may be expanded, which cannot be written
                buffer.copy_(value)
        torch.set_rng_state(self._generator)
        if self._of_gpu is not None:
            torch.cuda.set_rng_state(self._of_gpu)
