"""Counts the forwards of a training from what Trainers know about its length."""

from __future__ import annotations

import math


def forwards(steps: int, batches: float, accumulation: int) -> int:
    """Return how many forwards ``steps`` of an optimizer take, in epochs of ``batches`` or of unknown length (inf).

    Trainers do not accumulate over the end of an epoch: its last step takes the batches that are left.
    """
    if not 0 < batches < math.inf:
        return steps * accumulation
    epochs, left = divmod(steps, math.ceil(batches / accumulation))
    return epochs * int(batches) + left * accumulation
