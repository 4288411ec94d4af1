"""The tiles in which the kernel of a GPU reads a tensor."""

from __future__ import annotations

import math

from torch import Tensor, float32

#: Rows and columns of a tile, which holds whole blocks in both directions.
TILE = 64


def empty_sums(x: Tensor, wanted: bool) -> Tensor:
    """Return an empty fp32 tensor for the sums of ``x [..., M, K]`` over each tile's rows; 0 rows unless ``wanted``."""
    *leading, m, k = x.shape
    tiles = math.prod(leading) * ((m + TILE - 1) // TILE)
    return x.new_empty((tiles if wanted else 0, k), dtype=float32)
