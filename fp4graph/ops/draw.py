"""The salts under which the parts of a site draw their random bits.

A quantizer's own rounding draws from its operand's key, as :func:`fp4graph.fake_quantize` does from the key it is
given; transforms, techniques and further calls of the quantizer draw under salts of their own. The salts are stable:
changing one changes every seeded run.
"""

from __future__ import annotations

from fp4graph.numerics.draw import Draw
from fp4graph.technique.operands import Operand

_TRANSFORM = 2  # the i-th pair transform of a GEMM draws under salt 2 + i of the GEMM's left operand
_TECHNIQUE = 16  # the i-th technique of an operand draws under salt 16 + i
_APART = 15  # channels that are multiplied apart draw under salt 15 of the site
_CALL = 256  # the i-th further call of the quantizer, under a technique that wraps it, draws under salt 256 + i
_SALTS = {operand: 1 + index for index, operand in enumerate(Operand)}  # an operand draws under its number


def operand_draw(draw: Draw | None, operand: Operand) -> Draw | None:
    """Return what one of a site's six operands draws from."""
    return None if draw is None else draw.salted(_SALTS[operand])


def transform_draw(draw: Draw | None, index: int) -> Draw | None:
    """Return what the ``index``-th pair transform of a GEMM draws from."""
    return None if draw is None else draw.salted(_TRANSFORM + index)


def technique_draw(draw: Draw | None, index: int) -> Draw | None:
    """Return what the ``index``-th technique of an operand draws from."""
    return None if draw is None else draw.salted(_TECHNIQUE + index)


def call_draw(draw: Draw | None, index: int) -> Draw | None:
    """Return what the ``index``-th call of an operand's quantizer draws from; the first is number 0."""
    return draw if draw is None or index == 0 else draw.salted(_CALL + index)


def apart_draw(draw: Draw | None) -> Draw | None:
    """Return what the channels of a site that are multiplied apart draw from."""
    return None if draw is None else draw.salted(_APART)
