"""The numbers of a spec that kernels need. They are constants when a kernel is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from fp4graph.numerics.packing import scale_storage
from fp4graph.numerics.scaling import exponent_shift
from fp4graph.numerics.spec import QuantSpec


@dataclass(frozen=True)
class Constants:
    """The numbers of a spec. Names of fields about the scale format and its rounding begin with ``s_``."""

    block: int
    qmax: float
    mantissa: int
    min_exponent: int
    emax: int
    integer: bool
    code_bits: int
    nan_code: int
    draws: bool  # whether elements are rounded stochastically
    ties: str  # copied from the spec, like random_bits and s_rounding
    random_bits: int
    shift: int  # for rules that derive the scale's exponent from the statistic's; -1 for other rules
    encode: bool
    to_one: bool  # whether a scale that underflows becomes 1
    s_rounding: str
    s_draws: bool
    s_ties_even: bool  # whether ties between powers of two go to the even exponent; otherwise they go up
    s_mantissa: int
    s_min_exponent: int
    s_top: int  # the exponent of the highest binade
    s_max: float
    s_max_bits: int  # the bits of s_max in fp32
    s_min: float
    s_min_bits: int  # the bits of s_min in fp32, where it may be subnormal
    s_has_zero: bool
    s_nan_code: int
    s_storage: Literal["code", "float"]  # how bytes store a scale: its code, or a float


@cache
def constants(spec: QuantSpec) -> Constants:
    """Return the numbers of a spec whose blocks have a fixed length along the contraction axis."""
    element, scale_format = spec.element, spec.scale.format
    assert isinstance(spec.block, int)
    assert not spec.others
    shift = exponent_shift(spec.scale, element)
    return Constants(
        block=spec.block,
        qmax=element.max,
        mantissa=element.mantissa_bits,
        min_exponent=element.min_exponent,
        emax=element.emax,
        integer=element.integer,
        code_bits=element.code_bits,
        nan_code=element.nan_code or 0,
        draws=spec.rounding == "stochastic",
        ties=spec.ties,
        random_bits=spec.random_bits,
        shift=-1 if shift is None else shift,
        encode=spec.scale.convention == "encode",
        to_one=spec.scale.zero == "to_one",
        s_rounding=spec.scale.rounding,
        s_draws=spec.scale.rounding == "stochastic",
        s_ties_even=spec.scale.ties == "even",
        s_mantissa=scale_format.mantissa_bits,
        s_min_exponent=scale_format.min_exponent,
        s_top=scale_format.top_exponent,
        s_max=scale_format.max,
        s_max_bits=_bits_of(scale_format.max),
        s_min=scale_format.min,
        s_min_bits=_bits_of(scale_format.min),
        s_has_zero=scale_format.has_zero,
        s_nan_code=scale_format.nan_code or 0,
        s_storage="code" if scale_storage(scale_format) is torch.uint8 else "float",
    )


def _bits_of(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))
