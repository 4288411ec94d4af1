"""Directions and packed operands as the parameters of operators, and back."""

from __future__ import annotations

import pytest
import torch

from fp4graph.kernels.direction import DIRECTION, GIVEN, PACKED, ROTATED, WHOLE, Blocks, Direction, PackedOperand
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.hadamard import BlockRotation
from fp4graph.numerics.spec import QuantSpec, ScaleSpec

SPEC = QuantSpec("e2m1", 32, ScaleSpec("e8m0", "ceil"), "stochastic")
KEY, STEP = torch.tensor([1, 2], dtype=torch.int32), torch.arange(5, dtype=torch.int32)
DRAW = Draw(KEY, STEP, (3, 4))
DIVISOR, FACTOR, SIGNS = torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([1.0, -1.0])
BLOCKS, ROTATION = Blocks(divisor=DIVISOR, factor=FACTOR), BlockRotation(2, SIGNS)


@pytest.mark.parametrize(
    ("structure", "options", "extra"),
    [
        (DIRECTION, {}, ()),
        (GIVEN, {"given": True}, (DIVISOR, None, None, FACTOR, None)),
        (ROTATED, {"rotation": True}, (SIGNS, 2)),
        (WHOLE, {"given": True, "rotation": True}, (DIVISOR, None, None, FACTOR, None, SIGNS, 2)),
    ],
    ids=["plain", "given", "rotated", "whole"],
)
def test_flatten_and_build_are_inverse(structure, options, extra):
    blocks, rotation = BLOCKS if "given" in options else Blocks(), ROTATION if "rotation" in options else None
    flat = Direction(SPEC, DRAW, blocks, rotation).flat(**options)
    assert flat == (SPEC.to_text(), KEY, STEP, (3, 4), *extra)
    assert len(flat) == len(structure.parameters)
    back = structure.build(*flat)
    assert back.spec == SPEC
    assert back.draw is not None
    assert (back.draw.key, back.draw.step, back.draw.salts) == (KEY, STEP, (3, 4))
    assert (back.given, back.rotation) == (blocks, rotation)


def test_nothing_is_drawn_where_the_spec_rounds_to_nearest():
    flat = Direction(QuantSpec("e2m1", 32), DRAW).flat()
    assert flat[1:] == (None, None, ())
    assert DIRECTION.build(*flat).draw is None


def test_what_an_operator_does_not_take_is_refused():
    for direction, takes in (
        (Direction(SPEC, DRAW, BLOCKS), "rotation"),
        (Direction(SPEC, DRAW, rotation=ROTATION), "given"),
    ):
        with pytest.raises(ValueError, match="does not take"):
            direction.flat(**{takes: True})


def test_packed_operands_flatten_and_build():
    codes, scales = torch.zeros(3, 16, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.uint8)
    flat = PackedOperand(codes, scales, SPEC, 30, torch.bfloat16).flat()
    assert flat == (codes, scales, SPEC.to_text(), 30, torch.bfloat16)
    back = PACKED.build(*flat)
    assert (back.codes, back.scales, back.spec, back.length, back.dtype) == (codes, scales, SPEC, 30, torch.bfloat16)
