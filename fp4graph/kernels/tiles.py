"""The tiles in which a GPU's kernel reads a tensor."""

from __future__ import annotations

import math

from torch import Tensor, float32

#: Rows and columns of a tile, which holds whole blocks in both directions.
TILE = 64


def empty_sums(x: Tensor, wanted: bool) -> Tensor:
    """Return the tensor for the sums of ``x [..., M, K]`` over the rows of each tile, fp32, empty unless ``wanted``."""
    *leading, m, k = x.shape
    tiles = math.prod(leading) * ((m + TILE - 1) // TILE)
    return x.new_empty((tiles if wanted else 0, k), dtype=float32)
