"""The salts under which the parts of a site draw their random bits.

The rounding of a spec draws from its operand's source, as :func:`fp4graph.fake_quantize` does from its key. Transforms,
techniques and further calls of a quantizer draw under further salts. The salts are stable: changing one changes every
seeded run.
"""

from __future__ import annotations

from fp4graph.numerics.draw import Draw
from fp4graph.technique.operands import Operand

_APART = 15  # channels that are multiplied apart draw under salt 15 of the site
_CALL = 256  # the i-th further call of the quantizer, under a technique that wraps it, draws under salt 256 + i
_KEYS = 1 << 30  # a part of a technique draws under a hash of its key, at least 2^30
_SALTS = {operand: 1 + index for index, operand in enumerate(Operand)}  # an operand draws under its number


def operand_draw(draw: Draw | None, operand: Operand) -> Draw | None:
    """Return the source of random bits of one of a site's six operands."""
    return None if draw is None else draw.salted(_SALTS[operand])


def part_draw(draw: Draw | None, key: str) -> Draw | None:
    """Return the source of the part with this :attr:`~fp4graph.technique.Part.key`, made from its operand's source.

    For a pair transform, that is the source of the left operand.
    """
    return None if draw is None else draw.salted(_salt(key))


def call_draw(draw: Draw | None, index: int) -> Draw | None:
    """Return the source of the ``index``-th call of a quantizer, counted from 0, made from its operand's source."""
    return draw if draw is None or index == 0 else draw.salted(_CALL + index)


def apart_draw(draw: Draw | None) -> Draw | None:
    """Return the source of the channels of a site that are multiplied apart."""
    return None if draw is None else draw.salted(_APART)


def _salt(key: str) -> int:
    """Return the 32-bit FNV-1a hash of ``key`` without its top bit, above all other salts."""
    value = 0x811C9DC5
    for byte in key.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value & 0x7FFFFFFF | _KEYS
