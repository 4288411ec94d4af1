"""Surrogates of numerics/surrogates.py beside their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from fp4graph.numerics import surrogates
from tests.helpers.floats import around


@pytest.mark.parametrize("limit", [6.0, 448.0, 7.0, 0.5])
def test_inside_compares(limit: float) -> None:
    u = torch.tensor([*around([limit, 0.0, 1e-40, 1.0]), math.inf, -math.inf, math.nan, -math.nan])
    found = surrogates.inside(u, limit)
    assert found.dtype is torch.float32
    assert found.tolist() == [1.0 if abs(value) <= limit else 0.0 for value in u.tolist()]
