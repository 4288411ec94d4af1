"""Directions as flat parameters of operators. Tests of the operators cover the directions that are built from these."""

from __future__ import annotations

import pytest
import torch

from fp4graph.kernels.direction import DIRECTION, Blocks, Direction
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.hadamard import BlockRotation
from fp4graph.numerics.spec import QuantSpec, ScaleSpec

SPEC = QuantSpec("e2m1", 32, ScaleSpec("e8m0", "ceil"), "stochastic")
DRAW = Draw(torch.tensor([1, 2], dtype=torch.int32), torch.arange(5, dtype=torch.int32), (3, 4))


def test_a_direction_that_rounds_to_nearest_passes_no_draw():
    flat = Direction(QuantSpec("e2m1", 32), DRAW, Blocks()).flat()
    assert flat[1:] == (None, None, ())
    assert DIRECTION.build(*flat).draw is None


def test_given_numbers_and_rotations_that_an_operator_does_not_take_are_refused():
    given, rotated = Blocks(divisor=torch.tensor([2.0])), BlockRotation(2, torch.tensor([1.0, -1.0]))
    for direction, takes in (
        (Direction(SPEC, DRAW, given), "rotation"),
        (Direction(SPEC, DRAW, rotation=rotated), "given"),
    ):
        with pytest.raises(ValueError, match="does not take"):
            direction.flat(**{takes: True})
