"""Sets back what a call of a model has changed, if the call must run again from its beginning."""

from __future__ import annotations

import torch
from torch import nn

from fp4graph import torch_internals
from fp4graph.errors import CaptureError

_COUNTED = (
    "a graph break parts products of this call from their layers, so the call must begin again, and the checkpoint "
    "around it would also count what the first beginning has saved: its backward would fail. Call the model once "
    "without the checkpoint, on a batch with gradients; later calls may be checkpointed"
)


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
        self._regions = torch_internals.checkpointed_regions() if torch.is_grad_enabled() else []
        self._recorded = self._of_regions()

    def _of_regions(self) -> tuple[int, int]:
        """Return how much the checkpoints around the call have recorded: tensors, and operations if one of them is
        selective, which counts each."""
        counts = bool(self._regions) and torch_internals.has_dispatch_mode()
        return torch_internals.saved_in(self._regions), torch_internals.next_sequence_number() if counts else 0

    @torch.no_grad()
    def restore(self) -> None:
        """Set the buffers and the generators back; raise a CaptureError in a checkpointed region that has recorded
        something of the call."""
        for buffer, value in self._buffers:
            if not torch.equal(buffer, value):  # an unchanged buffer may be expanded, which cannot be written
                buffer.copy_(value)
        torch.set_rng_state(self._generator)
        if self._of_gpu is not None:
            torch.cuda.set_rng_state(self._of_gpu)
        if self._of_regions() != self._recorded:
            raise CaptureError(_COUNTED)
