"""Primitives of block-scaled quantization in NumPy float64, written from tables of values.

The module shares no code with the package: a value is rounded to one of its two neighbours in a sorted table, without
arithmetic on bits. Inputs must be float32-representable. Every comparison that decides a rounding (of an element or an
ideal scale with a midpoint) then has the result of exact arithmetic, because rounding to float64 cannot turn a quotient
of a float32 value and a format's few-bit value into a midpoint.

Short names: OCP = OCP Microscaling Formats v1.0; EL = "Elucidating the design space of FP4 training"; TJ =
"Oscillation-reduced MXFP4 training for vision transformers".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np

Block = int | tuple[int, int] | Literal["row", "tensor"]
Result = tuple[np.ndarray, np.ndarray, np.ndarray]


class Draw(Protocol):
    """The random numbers of one call of a linear, which the test supplies."""

    def uniform(self, operand: str, shape: tuple[int, ...], bits: int = 24) -> np.ndarray:
        """Returns the numbers in [0, 1) of an operand such as "dgrad.grad_output", in the layout of x, w or dy."""

    def signs(self, gemm: str, n: int) -> np.ndarray:
        """Returns n signs, +-1, of a random Hadamard transform of both operands of "fprop", "dgrad" or "wgrad"."""

    def normal(self, operand: str, n: int) -> np.ndarray:
        """Returns n standard normals."""

    def block_uniform(self, operand: str, lines: int, blocks: int) -> np.ndarray:
        """Returns numbers in [0, 1) for the blocks of an operand's lines along its contraction axis."""


#: (x, w, dy, draw) -> (y, dx, dw), with x [T, K], w [N, K], dy [T, N].
Reference = Callable[[np.ndarray, np.ndarray, np.ndarray, Draw], Result]


def _signed(magnitudes: list[float]) -> np.ndarray:
    """Returns the sorted table of both signs of the magnitudes, with one zero: [2k + 1] from [k + 1]."""
    positive = np.array(magnitudes, dtype=np.float64)
    return np.concatenate([-positive[:0:-1], positive])


def _scale_table(exponent_bits: int, mantissa_bits: int, bias: int, top: float) -> np.ndarray:
    """Returns all values of an unsigned float format from 0 to `top`: m*2^(1-bias-M), then (1 + m/2^M)*2^(e-bias)."""
    steps = 2**mantissa_bits
    values = [np.ldexp(m, 1 - bias - mantissa_bits) for m in range(steps)]
    for e in range(1, 2**exponent_bits):
        values += [np.ldexp(1 + m / steps, e - bias) for m in range(steps)]
    return np.array([v for v in values if v <= top], dtype=np.float64)


# Element formats (OCP 5.3.3 for E2M1, TJ Table 7 for E3M0, TJ Table 2 for INT4; E1M2 with bias 1). An index into the
# non-negative half is the value's code, so "even" means an even index.
ELEMENTS: dict[str, np.ndarray] = {
    "e2m1": _signed([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "e3m0": _signed([0, 0.25, 0.5, 1, 2, 4, 8, 16]),
    "int4": _signed([0, 1, 2, 3, 4, 5, 6, 7]),
    "e1m2": _signed([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]),
}

# Emax, the exponent of the largest value of an element format (OCP 6.3: scale = 2^(floor(log2 amax) - Emax)).
EMAX: dict[str, int] = {"e2m1": 2, "e3m0": 4, "int4": 2, "e4m3": 8}

# Scale formats. All but E8M0 contain zero. "fp32" has no table: its scales are rounded to float32. E8M3 has float32's
# exponents, and therefore float32's subnormals and reserved top exponent (no source prints either).
SCALES: dict[str, np.ndarray] = {
    "e8m0": np.ldexp(1.0, np.arange(-127, 128)),
    "e4m3": _scale_table(4, 3, 7, 448.0),
    "ue5m3": _scale_table(5, 3, 15, 114688.0),
    "ue5m3_61440": _scale_table(5, 3, 15, 61440.0),
    "e8m3": _scale_table(8, 3, 127, 1.875 * 2.0**127),
}
# E4M3 elements have the scale format's magnitudes (OCP 5.3.1).
ELEMENTS["e4m3"] = _signed(SCALES["e4m3"].tolist())


def element_max(element: str) -> float:
    """Returns Qmax, the largest value of an element format."""
    return float(ELEMENTS[element][-1])


def scale_max(fmt: str) -> float:
    """Returns the largest value of a scale format; float32's for "fp32"."""
    return float(np.finfo(np.float32).max) if fmt == "fp32" else float(SCALES[fmt][-1])


def _neighbours(u: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of the largest entry <= u and of the smallest entry >= u, for u inside the table's range."""
    return np.searchsorted(table, u, side="right") - 1, np.searchsorted(table, u, side="left")


def round_nearest(u: np.ndarray, element: str, ties: str = "even") -> np.ndarray:
    """Returns u (any shape) clipped to +-Qmax and rounded to the nearest value of an element format.

    A midpoint goes to the neighbour with the even code ("even", OCP), toward +inf ("up", TJ 3.2: q1 where
    |u - q1| < |u - q2|, else q2) or away from zero ("away").
    """
    table = ELEMENTS[element]
    zero = len(table) // 2
    u = np.clip(np.asarray(u, dtype=np.float64), table[0], table[-1])
    low, high = _neighbours(u, table)
    middle = (table[low] + table[high]) / 2
    upper = {"even": np.abs(high - zero) % 2 == 0, "up": np.ones(u.shape, bool), "away": u > 0}[ties]
    return np.where((u > middle) | ((u == middle) & upper), table[high], table[low])


def round_stochastic(u: np.ndarray, element: str, uniform: np.ndarray) -> np.ndarray:
    """Returns u (any shape) clipped to +-Qmax and rounded stochastically, with `uniform` in [0, 1) of u's shape.

    With neighbours a <= |u| <= b in the non-negative table the magnitude becomes b where (|u| - a)/(b - a) > uniform,
    else a: P(b) is the fraction, so E[SR(u)] = u (TJ 3.2; the same law as TJ's additive noise).
    """
    table = ELEMENTS[element]
    table = table[table >= 0]
    magnitude = np.minimum(np.abs(np.asarray(u, dtype=np.float64)), table[-1])
    low, high = _neighbours(magnitude, table)
    gap = np.where(high > low, table[high] - table[low], 1.0)
    fraction = (magnitude - table[low]) / gap
    return np.sign(u) * np.where(fraction > uniform, table[high], table[low])


def round_scale(ideal: np.ndarray, fmt: str, rule: str = "nearest_even", zero: str = "nearest_subnormal") -> np.ndarray:
    """Returns non-negative ideal scales (any shape) rounded to a scale format.

    `rule` is "nearest_even" or "toward_positive". Ties of the former go to the even mantissa; E8M0, which has no
    mantissa, goes up from 1.5*2^k, as in ml_dtypes. Overflow saturates. A scale that rounds to zero becomes the
    smallest subnormal ("nearest_subnormal", EL 3.1) or 1 ("to_one", Chmiel et al.). E8M0 has no zero to round to: a
    scale underflows if the power of two that it rounds to is below 2^-127.
    """
    ideal = np.asarray(ideal, dtype=np.float64)
    if fmt == "fp32":
        with np.errstate(over="ignore"):
            rounded = np.minimum(ideal.astype(np.float32).astype(np.float64), scale_max(fmt))
        smallest = 2.0**-149
    else:
        table = SCALES[fmt]
        smallest = float(table[table > 0][0])
        if fmt == "e8m0":
            table = np.ldexp(1.0, np.arange(-1022, 128))  # with float64's exponents; the range is applied afterwards
        inside = np.clip(ideal, table[0], table[-1])
        low, high = _neighbours(inside, table)
        if rule == "toward_positive":
            rounded = table[high]
        elif rule == "nearest_even":
            middle = (table[low] + table[high]) / 2
            # The codes alternate between even and odd mantissas, so the parity of the index is the mantissa's.
            upper = np.ones(ideal.shape, bool) if fmt == "e8m0" else high % 2 == 0
            rounded = np.where((inside > middle) | ((inside == middle) & upper), table[high], table[low])
        else:
            raise ValueError(f"unknown scale rounding {rule!r}")
        rounded = np.where((ideal == 0) | (rounded < smallest), 0.0, rounded)
    replacement = {"nearest_subnormal": smallest, "to_one": 1.0}[zero]
    return np.where(rounded == 0, replacement, rounded)


def floor_log2(z: np.ndarray) -> np.ndarray:
    """Returns floor(log2 z) of positive values, exactly, from the float's exponent (z = m * 2^e with 0.5 <= m < 1)."""
    return np.frexp(np.asarray(z, dtype=np.float64))[1] - 1


def block_scales(
    z: np.ndarray,
    *,
    element: str = "e2m1",
    fmt: str,
    rule: str,
    convention: str = "decode",
    zero: str = "nearest_subnormal",
) -> np.ndarray:
    """Returns the rounded scale of each block from its absolute maximum z (any shape).

    decode: S = q(z/Qmax), to be multiplied after rounding (OCP). encode: s = q(Qmax/z), to be multiplied before
    rounding (EL sec. 2). Two rules give E8M0 decode scales directly: `floor` 2^(floor(log2 z) - Emax) (OCP 6.3; TJ
    Eq. 2) and `ceil` 2^ceil(log2(2z/(Qp - Qn))), the smallest power of two with z/S <= Qmax (TJ 3.2). The values of a
    zero block are zeros with any scale; its encode scale saturates at the largest of the format.
    """
    z = np.asarray(z, dtype=np.float64)
    qmax = element_max(element)
    if rule in ("floor", "ceil"):
        if convention != "decode" or fmt != "e8m0":
            raise ValueError(f"rule {rule!r} gives E8M0 decode scales, not {fmt!r} {convention!r}")
        safe = np.where(z > 0, z, 1.0)
        if rule == "floor":
            exponent = floor_log2(safe) - EMAX[element]
        else:
            exponent = floor_log2(safe) - int(floor_log2(np.float64(qmax)))
            exponent = exponent + (safe > np.ldexp(qmax, exponent))
        scale = np.ldexp(1.0, np.minimum(exponent, 127))
        return round_scale(np.where(z > 0, scale, 0.0), fmt, "nearest_even", zero)
    if convention == "decode":
        return round_scale(z / qmax, fmt, rule, zero)
    if convention != "encode":
        raise ValueError(f"unknown convention {convention!r}")
    with np.errstate(divide="ignore"):
        ideal = np.divide(qmax, z)
    return round_scale(np.minimum(ideal, scale_max(fmt)), fmt, rule, zero)


def block_ids(shape: tuple[int, int], axis: int, block: Block) -> np.ndarray:
    """Returns the number of the block that each element of a 2-D array belongs to, an integer array of that shape.

    An int l makes 1 x l blocks along `axis`, a tuple (r, c) makes r x c tiles with either axis, "row" makes one block
    per line along `axis`, "tensor" one block. A ragged end is a smaller block, equivalent to a block padded with zeros.
    """
    row, column = np.indices(shape)
    if block == "tensor":
        return np.zeros(shape, dtype=np.int64)
    if isinstance(block, tuple):
        return (row // block[0]) * shape[1] + column // block[1]
    length = shape[axis] if block == "row" else int(block)
    along, across = (column, row) if axis % 2 == 1 else (row, column)
    return across * shape[axis] + along // length


def block_amax(x: np.ndarray, axis: int, block: Block) -> np.ndarray:
    """Returns Z, the absolute maximum of each element's block, in the shape of x; NaN where the block is not finite."""
    x = np.asarray(x, dtype=np.float64)
    ids = block_ids(x.shape, axis, block)
    amax = np.zeros(int(ids.max()) + 1 if ids.size else 0)
    np.maximum.at(amax, ids, np.abs(x))  # np.maximum propagates NaN
    return np.where(np.isinf(amax), np.nan, amax)[ids]


def quantize(
    x: np.ndarray,
    axis: int,
    *,
    element: str = "e2m1",
    block: Block,
    fmt: str,
    rule: str,
    convention: str = "decode",
    zero: str = "nearest_subnormal",
    ties: str = "even",
    uniform: np.ndarray | None = None,
    tensor_scale: float | None = None,
) -> np.ndarray:
    """Returns the dequantized value of every element of a 2-D array, in the shape of x.

    With U = X/gamma (gamma = `tensor_scale`, 1 if None), Z the absolute maximum of an element's block of U:
        decode: gamma * S * Q(U/S), S = q(Z/Qmax)   (OCP 6.3; TJ Eq. 1)
        encode: gamma * Q(U*s)/s,  s = q(Qmax/Z)    (EL sec. 2 and Eq. 2)
    `axis` is the contraction axis. Q rounds to nearest with `ties`, or stochastically if `uniform` (shape of x) is
    given; values beyond +-Qmax are clipped first. A block that holds NaN or Inf becomes NaN.
    """
    gamma = 1.0 if tensor_scale is None else float(tensor_scale)
    u = np.asarray(x, dtype=np.float64) / gamma
    z = block_amax(u, axis, block)
    poisoned = np.isnan(z)
    u, z = np.where(poisoned, 0.0, u), np.where(poisoned, 0.0, z)
    scale = block_scales(z, element=element, fmt=fmt, rule=rule, convention=convention, zero=zero)
    scaled = u / scale if convention == "decode" else u * scale
    nearest = uniform is None
    rounded = round_nearest(scaled, element, ties) if nearest else round_stochastic(scaled, element, uniform)
    result = rounded * scale if convention == "decode" else rounded / scale
    return np.where(poisoned, np.nan, gamma * result)


def hadamard(n: int) -> np.ndarray:
    """Returns the orthonormal Sylvester-Hadamard matrix [n, n]: H_1 = 1, H_2m = [[H_m, H_m], [H_m, -H_m]]/sqrt 2."""
    if n < 1 or n & (n - 1):
        raise ValueError(f"a Sylvester matrix needs a power of two, not {n}")
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(n)


def padded_length(length: int, block: int) -> int:
    """Returns the length of an axis after zero-padding to a multiple of the block."""
    return -(-length // block) * block


def rotate(x: np.ndarray, axis: int, block: int, signs: np.ndarray | None = None) -> np.ndarray:
    """Returns H S x per block along an axis of a 2-D array: signs first, then the Hadamard matrix (EL sec. 6: Q(HSX)).

    A ragged end is padded with zeros first, so the axis has `padded_length` elements in the result, and `signs` has
    as many (None: all +1). H S is orthogonal: the rotations of both operands of a GEMM cancel in the product.
    """
    lines = np.moveaxis(np.asarray(x, dtype=np.float64), axis, -1)
    n = padded_length(lines.shape[-1], block)
    lines = np.pad(lines, [(0, 0), (0, n - lines.shape[-1])])
    if signs is not None:
        lines = lines * np.asarray(signs, dtype=np.float64)
    blocks = lines.reshape(lines.shape[0], n // block, block) @ hadamard(block).T
    return np.moveaxis(blocks.reshape(lines.shape[0], n), -1, axis)
