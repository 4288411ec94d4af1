"""Division by scales of few bits, correctly rounded, in fewer instructions than an IEEE division takes."""

import triton
import triton.language as tl

#: Multiplies both numbers of a quotient, so that the remainder is not subnormal.
_LARGE = tl.constexpr(2.0**40)


@triton.jit
def _inverse_of(divisor):
    """Return the arguments of :func:`_quotient` for a divisor d: 2^40·d, and the rounded reciprocal of 2^40·d."""
    large = divisor * _LARGE
    return large, tl.div_rn(tl.full(large.shape, 1.0, tl.float32), large)


@triton.jit
def _quotient(x, large, inverse):
    """Return x / d, correctly rounded, without the 18 instructions of an IEEE division.

    d = k·2^e is positive, k is an integer below 2^8, and 2^-40 <= d < 2^41. ``large`` and ``inverse`` are the results
    of :func:`_inverse_of`. NaN gives NaN. Two sorts of quotients may differ from IEEE's, but rounding to a format of
    elements or scales hides both. Quotients of |x| >= 2^87 may be infinite: they are above 2^46, and saturate.
    Quotients below 2^-126 may be off by 2^-149. Only whether they are zero decides how they round, and that is exact.

    q = x·(1/d) is at most two ulps off, so the remainder r = x - q·d is exact: it is less than 2^24 times ulp(q)·2^e/2,
    and a multiple of it. Then q + r·(1/d) differs from x/d by at most 2^-23 ulp. Rounding it gives the same as rounding
    x/d, because x/d is never nearer than ulp/(2k) to a midpoint m of two floats: x/d = m + (x - d·m)/d, and x and d·m
    are multiples of ulp·2^e/2 that differ, as d·m has more than the 24 bits of x.
    """
    x = x * _LARGE
    q = x * inverse
    r = tl.fma(-q, large, x)
    # If r is zero, q is exact, and a zero q has the sign of x. If r is NaN, q is not finite.
    return tl.where(tl.abs(r) > 0, tl.fma(r, inverse, q), q)


@triton.jit
def _is_narrow(F: tl.constexpr):
    """Return whether :func:`_quotient` can divide by the scales of F's scale format."""
    return F.s_mantissa <= 7 and F.s_min_exponent - F.s_mantissa >= -40 and F.s_top <= 40
