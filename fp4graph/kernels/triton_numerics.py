"""The arithmetic of the plain quantizer on a tile in registers. The kernels that call it are in triton_kernels.py.

Every ``F`` is a :class:`fp4graph.kernels.constants.Constants`. Statistics and spacings are held as int32, the bits of
fp32 numbers. They are never negative, so the integers have the order of the floats. Each section is named after the
module whose arithmetic it repeats.
"""

import triton
import triton.language as tl

from fp4graph.kernels.triton_division import _inverse_of, _is_narrow, _quotient

# ---------------------------------------------------------------------------------------------- numerics/noise.py


@triton.jit
def _lowbias32(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _hash_bits(a, b, index):
    return _lowbias32(_lowbias32(index + a) ^ b)


@triton.jit
def _absorb(a, b, word):
    """Return the key (a, b) mixed with a uint32 word: the hashes, under the key, of counters made of the word."""
    first = word * 0x3C6EF373  # 2·golden + 1 modulo 2^32
    return _hash_bits(a, b, first), _hash_bits(a, b, first + 0x9E3779B9)


@triton.jit
def _salted(a, b, SALT: tl.constexpr):
    return _absorb(a, b, tl.full([], SALT, tl.uint32))


@triton.jit
def _uniform(bits, BITS: tl.constexpr):
    k = (bits >> (32 - BITS)).to(tl.int32).to(tl.float32) * 2.0**-BITS
    if BITS < 24:
        k = k + 2.0 ** -(BITS + 1)
    return k


# ---------------------------------------------------------------------------------------------- floats as integers


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _step(u, MIN_EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Return the bits of the distance between neighbouring values of a format around u."""
    return tl.maximum(_bits(u) & 0x7F800000, (MIN_EXPONENT + 127) << 23) - (MANTISSA << 23)


@triton.jit
def _inverse(step):
    """Return the bits of the reciprocal of a power of two."""
    return (254 << 23) - step


@triton.jit
def _round_even(u, step):
    """Round 0 <= u < 2^22·step to multiples of step (bits), ties to even: fp32 numbers around 2^23·step are such."""
    shift = _float(step + (23 << 23))
    return (u + shift) - shift


@triton.jit
def _unbounded(bits):
    return tl.where(bits > 0x7FFFFF, bits, _bits(bits.to(tl.float32)) - (149 << 23))


# ---------------------------------------------------------------------------------------------- numerics/scaling.py


@triton.jit
def _from_exponent(exponent, F: tl.constexpr):
    """Return the bits of 2^exponent, limited to the range of the scale format."""
    LOWEST: tl.constexpr = F.s_min_exponent - F.s_mantissa
    within = tl.minimum(tl.maximum(exponent, LOWEST), F.s_top)
    scale = (within + 127) << 23
    if LOWEST < -126:
        subnormal = tl.full(within.shape, 1, tl.int32) << tl.minimum(tl.maximum(within + 149, 0), 22)
        scale = tl.where(within < -126, subnormal, scale)
    if F.s_max_bits != (F.s_top + 127) << 23:
        scale = tl.where(exponent > F.s_top, F.s_max_bits, scale)
    if F.to_one:
        scale = tl.where(exponent < LOWEST, 127 << 23, scale)
    return scale


@triton.jit
def _carry(bits, noise, DROPPED: tl.constexpr, F: tl.constexpr):
    """Return the number to add to bits so that cutting off DROPPED low bits rounds by the rule."""
    BELOW: tl.constexpr = (1 << DROPPED) - 1
    if F.s_rounding == "toward_positive":
        carry = tl.full(bits.shape, BELOW, tl.int32)
    elif F.s_rounding == "stochastic":
        carry = BELOW - ((noise >> 8) >> (24 - DROPPED)).to(tl.int32)
    elif DROPPED == 23 and F.s_ties_even:
        carry = (BELOW >> 1) + (((bits >> 23) - (127 + F.s_min_exponent)) & 1)
    elif DROPPED == 23:
        carry = tl.full(bits.shape, 1 << 22, tl.int32)
    else:
        carry = (BELOW >> 1) + ((bits >> DROPPED) & 1)
    return carry


@triton.jit
def _to_format(ideal, noise, F: tl.constexpr):
    """Return the ideal scale rounded to the scale format. Argument and result are bits of numbers >= 0."""
    ideal = tl.minimum(ideal, F.s_max_bits)
    if not F.s_has_zero:
        bits = _unbounded(ideal)
        scale = _from_exponent(((bits + _carry(bits, noise, 23, F)) >> 23) - 127, F)
    else:
        if F.s_min_exponent == -126:
            DROPPED: tl.constexpr = 23 - F.s_mantissa
            scale = ideal
            if DROPPED > 0:
                scale = (ideal + _carry(ideal, noise, DROPPED, F)) & -(1 << DROPPED)
        else:
            step = _step(_float(ideal), F.s_min_exponent, F.s_mantissa)
            v = _float(ideal) * _float(_inverse(step))
            if F.s_rounding == "toward_positive":
                rounded = tl.ceil(v) * _float(step)
            elif F.s_rounding == "stochastic":
                lower = tl.floor(v)
                rounded = (lower + tl.where(v - lower > _uniform(noise, 24), 1.0, 0.0)) * _float(step)
            else:
                rounded = _round_even(_float(ideal), step)
            scale = _bits(rounded)
        scale = tl.where(scale == 0, 127 << 23, scale) if F.to_one else tl.maximum(scale, F.s_min_bits)
    return scale


@triton.jit
def _block_scale(z, noise, F: tl.constexpr):
    """Return the scale, fp32, of blocks whose statistic has the bits z; NaN where the statistic is not finite."""
    finite = tl.minimum(z, 0x7F800000)  # sums of a NaN's bits would overflow
    if F.shift >= 0:
        scale = _from_exponent(((_unbounded(finite) + F.shift) >> 23) - (127 + F.emax), F)
    else:
        qmax = tl.full(z.shape, F.qmax, tl.float32)
        if F.encode:
            ideal = tl.div_rn(qmax, _float(finite))
        elif _is_narrow(F) and F.mantissa <= 7:
            large, inverse = _inverse_of(qmax)
            ideal = _quotient(_float(finite), large, inverse)
        else:
            ideal = tl.div_rn(_float(finite), qmax)
        scale = _to_format(_bits(ideal), noise, F)
    return _float(tl.where(z < 0x7F800000, scale, 0x7FC00000))


@triton.jit
def _divisor(scale, F: tl.constexpr):
    """Return the arguments ``large`` and ``inverse`` of :func:`_divided` for each scale."""
    large, inverse = scale, scale
    if F.s_mantissa == 0:  # powers of two from 2^-127 to 2^127, or NaN
        bits = _bits(scale)
        inverse = tl.where(bits == 1 << 22, 254 << 23, (254 << 23) - bits)
        inverse = tl.where(bits == 254 << 23, 1 << 22, inverse)
        inverse = tl.where(scale == scale, _float(inverse), scale)
    elif _is_narrow(F):
        large, inverse = _inverse_of(scale)
    return large, inverse


@triton.jit
def _divided(x, large, inverse, F: tl.constexpr):
    """Return x divided by the scale of :func:`_divisor`. x is an element, or the result will be rounded to one."""
    if F.s_mantissa == 0:
        y = x * inverse
    elif _is_narrow(F):
        y = _quotient(x, large, inverse)
    else:
        y = tl.div_rn(x, tl.broadcast_to(large, x.shape))
    return y


# ---------------------------------------------------------------------------------------------- numerics/rounding.py


@triton.jit
def _round_element(u, noise, F: tl.constexpr):
    """Return u rounded to the element format: its magnitude is rounded, and its sign is restored."""
    size = tl.minimum(tl.abs(u), F.qmax)
    step = _step(size, F.min_exponent, F.mantissa)
    if F.draws or F.ties != "even" or F.mantissa == 0:
        v = size * _float(_inverse(step))
        lower = tl.floor(v)
        fraction = v - lower
        if F.draws:
            up = fraction > _uniform(noise, F.random_bits)
        elif F.ties == "away":
            up = fraction >= 0.5
        elif F.ties == "up":
            up = fraction >= _float((126 << 23) - (_bits(u) >> 31))  # u < 0: >= the float above 0.5, i.e. > 0.5
        else:
            # Without mantissa bits every binade holds one value, and codes count binades.
            binade = (step >> 23) - (F.min_exponent + 127)
            up = (fraction > 0.5) | ((fraction == 0.5) & (((binade + lower.to(tl.int32)) & 1) == 1))
        rounded = (lower + tl.where(up, 1.0, 0.0)) * _float(step)
    else:
        rounded = _round_even(size, step)
    q = _float(_bits(rounded) | (_bits(u) & -2147483648))
    if F.integer:
        q = tl.where(q == 0.0, 0.0, q)
    return q


@triton.jit
def _quantized(
    x, a, b, index, block_index, divisor, statistic, given_scale, factor, AXIS: tl.constexpr, F: tl.constexpr
):
    """Return the elements, the scales and the dequantized values, fp32, of blocks along AXIS of x.

    (a, b) is the operand's key; index and block_index are those of numerics/blocking.py, uint32. If a block is not
    finite, its scale is NaN, and so is every value of the block. ``divisor``, ``statistic``, ``given_scale`` and
    ``factor`` are those of :class:`fp4graph.kernels.direction.Blocks`: None, or a number for each block.
    """
    if divisor is not None:
        x = tl.div_rn(x, tl.broadcast_to(divisor, x.shape))
    if given_scale is not None:
        scale = given_scale
        u = x * scale if F.encode else tl.div_rn(x, tl.broadcast_to(scale, x.shape))
        noise = index
        if F.draws:
            element_a, element_b = _salted(a, b, 0)
            noise = _hash_bits(element_a, element_b, index)
        q = tl.where(u == u, _round_element(u, noise, F), u)
        y = tl.div_rn(q, tl.broadcast_to(scale, q.shape)) if F.encode else q * scale
    else:
        q, scale, y = _quantized_by_rule(x, a, b, index, block_index, statistic, AXIS, F)
    if factor is not None:
        y = y * factor
    return q, scale, y


@triton.jit
def _quantized_by_rule(x, a, b, index, block_index, statistic, AXIS: tl.constexpr, F: tl.constexpr):
    """Return :func:`_quantized` with scales that the spec's rule computes."""
    z = tl.max(_bits(x) & 0x7FFFFFFF, AXIS, keep_dims=True)
    if statistic is not None:
        z = _bits(statistic) & 0x7FFFFFFF
    scale_noise = block_index
    if F.s_draws:
        block_a, block_b = _salted(a, b, 1 << 16)
        scale_noise = _hash_bits(block_a, block_b, block_index)
    scale = _block_scale(z, scale_noise, F)
    large, inverse = _divisor(scale, F)
    noise = index
    if F.draws:
        element_a, element_b = _salted(a, b, 0)
        noise = _hash_bits(element_a, element_b, index)
    u = x * scale if F.encode else _divided(x, large, inverse, F)
    q = _round_element(u, noise, F)
    if statistic is not None:  # the statistic may be finite although the block is not
        q = tl.where(u == u, q, u)
    return q, scale, _divided(q, large, inverse, F) if F.encode else q * scale


# ---------------------------------------------------------------------------------------------- numerics/packing.py


@triton.jit
def _place(value, MIN_EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Return the number of a value among its format's magnitudes: its code. A binade has 2^MANTISSA codes."""
    step = _step(value, MIN_EXPONENT, MANTISSA)
    binade = (step >> 23) - (MIN_EXPONENT + 127 - MANTISSA)
    return (binade << MANTISSA) + (tl.abs(value) * _float(_inverse(step))).to(tl.int32)


@triton.jit
def _element_code(q, F: tl.constexpr):
    code = _place(q, F.min_exponent, F.mantissa)
    if F.integer:
        code = tl.where(q < 0, -code, code) & ((1 << F.code_bits) - 1)
    else:
        code = code | ((_bits(q) >> 31) & (1 << (F.code_bits - 1)))
    return code


@triton.jit
def _scale_code(scale, F: tl.constexpr):
    """Return the stored form of scales: codes, or the scales themselves."""
    if F.s_storage == "code":
        if F.s_has_zero:
            code = _place(scale, F.s_min_exponent, F.s_mantissa)
        else:  # the code counts exponents from the lowest
            code = (_bits(scale) >> 23) - (F.s_min_exponent + 127)
        scale = tl.where(scale == scale, code, F.s_nan_code)
    return scale


@triton.jit
def _packed(codes, F: tl.constexpr):
    """Return the bytes, uint8, of codes [lines, n]: two 4-bit codes to a byte, the first in the low nibble."""
    if F.code_bits == 4:
        low, high = tl.split(tl.reshape(codes, [codes.shape[0], codes.shape[1] // 2, 2]))
        codes = low | (high << 4)
    return codes.to(tl.uint8)


@triton.jit
def _value(code, MIN_EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Return the value, fp32, of a code: the inverse of _place."""
    binade = code >> MANTISSA
    significand = tl.where(binade > 0, (code & ((1 << MANTISSA) - 1)) | (1 << MANTISSA), code)
    # The unit may be below the normal numbers of fp32 (2^-133 for BF16's subnormals), so it is made of two factors.
    exponent = tl.maximum(binade, 1) - 1 + (MIN_EXPONENT - MANTISSA)
    first = tl.maximum(exponent, -126)
    return significand.to(tl.float32) * _float((first + 127) << 23) * _float((exponent - first + 127) << 23)


@triton.jit
def _element_value(code, F: tl.constexpr):
    """Return the element, fp32, of a code, int32."""
    SIGN: tl.constexpr = 1 << (F.code_bits - 1)
    negative = (code & SIGN) != 0
    if F.integer:
        size = tl.where(negative, (1 << F.code_bits) - code, code)
        q = _value(size, F.min_exponent, F.mantissa)
        q = tl.where(negative, -q, q)
    else:
        q = _value(code & (SIGN - 1), F.min_exponent, F.mantissa)
        q = _float(_bits(q) | tl.where(negative, -2147483648, 0))
    return q


@triton.jit
def _scale_value(stored, F: tl.constexpr):
    """Return the scale, fp32, of its stored form: the inverse of _scale_code."""
    if F.s_storage == "code":
        code = stored.to(tl.int32)
        if F.s_has_zero:
            scale = _value(code, F.s_min_exponent, F.s_mantissa)
        else:
            field = code + (F.s_min_exponent + 127)
            scale = _float(tl.where(field == 0, 1 << 22, field << 23))
        scale = tl.where(code == F.s_nan_code, _float(tl.full(code.shape, 0x7FC00000, tl.int32)), scale)
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit
def _dequantized(q, scale, F: tl.constexpr):
    """Return elements times decode scales, or elements divided by encode scales."""
    y = q * scale
    if F.encode:
        large, inverse = _divisor(scale, F)
        y = _divided(q, large, inverse, F)
    return y


@triton.jit
def _nibbles(packed, F: tl.constexpr):
    """Return the codes, int32 [lines, n], in bytes: the inverse of _packed."""
    codes = packed.to(tl.int32)
    if F.code_bits == 4:
        joined = tl.join(codes & 15, codes >> 4)
        codes = tl.reshape(joined, [codes.shape[0], codes.shape[1] * 2])
    return codes
