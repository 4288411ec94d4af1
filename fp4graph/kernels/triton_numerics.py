"""The plain quantizer in Triton: the numerics on a tile in registers, and the kernel that moves tiles.

Every ``F`` is a :class:`fp4graph.kernels.constants.Constants`. Statistics and spacings are held as the bits of their
fp32, int32: they are never negative, so integers order them as floats do. The sections are named after the modules
whose arithmetic they repeat.
"""

import triton
import triton.language as tl

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
    """Return the key (a, b) mixed with a word, uint32: the hash of its counters 2·word and 2·word + 1, spread apart."""
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
    """Return the bits of the distance between neighbouring values around u."""
    return tl.maximum(_bits(u) & 0x7F800000, (MIN_EXPONENT + 127) << 23) - (MANTISSA << 23)


@triton.jit
def _inverse(step):
    """Return the bits of the reciprocal of a power of two."""
    return (254 << 23) - step


@triton.jit
def _round_even(u, step):
    """Round 0 <= u < 2^22·step to a multiple of step (given as bits), ties to even: fp32 around 2^23·step are such."""
    shift = _float(step + (23 << 23))
    return (u + shift) - shift


@triton.jit
def _unbounded(bits):
    return tl.where(bits > 0x7FFFFF, bits, _bits(bits.to(tl.float32)) - (149 << 23))


# ---------------------------------------------------------------------------------------------- numerics/scaling.py


@triton.jit
def _from_exponent(exponent, F: tl.constexpr):
    """Return the bits of 2^exponent, brought into the range of the scale format."""
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
    """Return what to add to bits so that cutting the DROPPED low ones off rounds by the rule."""
    BELOW: tl.constexpr = (1 << DROPPED) - 1
    if F.s_rounding == "toward_positive":
        carry = tl.full(bits.shape, BELOW, tl.int32)
    elif F.s_rounding == "stochastic":
        carry = BELOW - ((noise >> 8) >> (24 - DROPPED)).to(tl.int32)
    elif DROPPED == 23:
        carry = tl.full(bits.shape, 1 << 22, tl.int32)
    else:
        carry = (BELOW >> 1) + ((bits >> DROPPED) & 1)
    return carry


@triton.jit
def _to_format(ideal, noise, F: tl.constexpr):
    """Return the bits of the ideal scale (given as bits, not negative) rounded to the scale format."""
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
        ideal = tl.div_rn(qmax, _float(finite)) if F.encode else tl.div_rn(_float(finite), qmax)
        scale = _to_format(_bits(ideal), noise, F)
    return _float(tl.where(z < 0x7F800000, scale, 0x7FC00000))


@triton.jit
def _reciprocal(scale, F: tl.constexpr):
    """Return 1 / scale where scales are powers of two, from 2^-127 to 2^127, or NaN; else scale."""
    if F.s_mantissa == 0:
        bits = _bits(scale)
        inverse = tl.where(bits == 1 << 22, 254 << 23, (254 << 23) - bits)
        inverse = tl.where(bits == 254 << 23, 1 << 22, inverse)
        scale = tl.where(scale == scale, _float(inverse), scale)
    return scale


@triton.jit
def _divided(x, scale, reciprocal, F: tl.constexpr):
    """Return x / scale. Powers of two have exact reciprocals, other scales do not."""
    return x * reciprocal if F.s_mantissa == 0 else tl.div_rn(x, tl.broadcast_to(scale, x.shape))


# ---------------------------------------------------------------------------------------------- numerics/rounding.py


@triton.jit
def _round_element(u, noise, F: tl.constexpr):
    """Return u rounded to the element format. Magnitudes are rounded, and the sign is put back."""
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
            up = fraction >= _float((126 << 23) - (_bits(u) >> 31))  # below zero: > 0.5, which is >= the next number
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
def _quantized(x, a, b, index, block_index, AXIS: tl.constexpr, F: tl.constexpr):
    """Return element values, scales and the dequantized x, fp32, of blocks along AXIS of x.

    (a, b) is the operand's key; index and block_index are those of numerics/blocking.py, uint32. Where a block is not
    finite its scale is NaN, and so is all that it multiplies or divides.
    """
    z = tl.max(_bits(x) & 0x7FFFFFFF, AXIS, keep_dims=True)
    scale_noise = block_index
    if F.s_draws:
        block_a, block_b = _salted(a, b, 1 << 16)
        scale_noise = _hash_bits(block_a, block_b, block_index)
    scale = _block_scale(z, scale_noise, F)
    reciprocal = _reciprocal(scale, F)
    noise = index
    if F.draws:
        element_a, element_b = _salted(a, b, 0)
        noise = _hash_bits(element_a, element_b, index)
    u = x * scale if F.encode else _divided(x, scale, reciprocal, F)
    q = _round_element(u, noise, F)
    return q, scale, _divided(q, scale, reciprocal, F) if F.encode else q * scale


# ---------------------------------------------------------------------------------------------- numerics/packing.py


@triton.jit
def _place(value, MIN_EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Return a value's place among those of its format from zero up: its code. Binades are 2^MANTISSA codes apart."""
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
    """Return what is stored of scales: codes, or the scales themselves."""
    if F.s_storage == "code":
        code = _place(scale, F.s_min_exponent, F.s_mantissa) if F.s_has_zero else _bits(scale) >> 23
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
def _store_bytes(q, scale, codes_to, scales_to, line, inside, first, length, F: tl.constexpr):
    """Write the bytes of q [lines, n] and scale [lines, n / block]: part of lines of ``length``, from ``first`` on."""
    LINES: tl.constexpr = q.shape[0]
    ACROSS: tl.constexpr = q.shape[1] // F.block
    PER_BYTE: tl.constexpr = 2 if F.code_bits == 4 else 1
    blocks = tl.cdiv(length, F.block)
    width = blocks * (F.block // PER_BYTE)
    poisoned = tl.broadcast_to(tl.reshape(scale != scale, [LINES, ACROSS, 1]), [LINES, ACROSS, F.block])
    codes = tl.where(tl.reshape(poisoned, q.shape), F.nan_code, _element_code(q, F))
    byte = first // PER_BYTE + tl.arange(0, q.shape[1] // PER_BYTE)
    here = inside[:, None] & (byte < width)[None, :]
    tl.store(codes_to + line[:, None] * width + byte[None, :], _packed(codes, F), here)
    block = first // F.block + tl.arange(0, ACROSS)
    here = inside[:, None] & (block < blocks)[None, :]
    stored = _scale_code(scale, F).to(scales_to.dtype.element_ty)
    tl.store(scales_to + line[:, None] * blocks + block[None, :], stored, here)


# ---------------------------------------------------------------------------------------------- the kernel


@triton.jit
def _key(key, step, salts, F: tl.constexpr):
    """Return ``Draw.varying`` of numerics/draw.py: the site's key, with this forward's step, then the salts.

    The key of a spec that draws nothing is 0, 0.
    """
    a, b = tl.full([], 0, tl.uint32), tl.full([], 0, tl.uint32)
    if F.draws or F.s_draws:
        a, b = tl.load(key).to(tl.uint32, bitcast=True), tl.load(key + 1).to(tl.uint32, bitcast=True)
        if step is not None:
            for i in tl.static_range(2):
                a, b = _absorb(a, b, tl.load(step + i).to(tl.uint32, bitcast=True))
        for i in tl.static_range(len(salts)):
            a, b = _absorb(a, b, tl.full([], 0, tl.uint32) + salts[i])
    return a, b


@triton.jit
def quantize_kernel(
    x,
    row_values,
    row_codes,
    row_scales,
    column_values,
    column_codes,
    column_scales,
    key,
    step,
    row_salts,
    column_salts,
    M,
    K,
    R: tl.constexpr,
    C: tl.constexpr,
    PACK: tl.constexpr,
    CHAINED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantize one tile of ``x [batch, M, K]``, contiguous, along its rows by R and along its columns by C.

    Args:
        row_values, column_values: of the shape and dtype of x, written unless PACK.
        row_codes, row_scales: ``[batch, M, blocks]`` of them, written if PACK; of columns ``[batch, K, blocks]``.
        key: int32 ``[2]``; step: int32 ``[5]`` or None; salts: tuples of int. Read by specs that draw.
        CHAINED: whether columns quantize what rows gave.
    """
    across = tl.cdiv(K, TILE)
    tiles = tl.cdiv(M, TILE) * across
    batch = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    first_m, first_k = tile // across * TILE, tile % across * TILE
    m, k = first_m + tl.arange(0, TILE), first_k + tl.arange(0, TILE)
    row, column = batch * M + m, batch * K + k
    inside = (m < M)[:, None] & (k < K)[None, :]
    at = row.to(tl.int64)[:, None] * K + k[None, :]
    values = tl.load(x + at, inside, other=0.0).to(tl.float32)

    ACROSS: tl.constexpr = TILE // R.block
    a, b = _key(key, step, row_salts, R)
    index = tl.reshape(row.to(tl.uint32)[:, None] * K + k.to(tl.uint32)[None, :], [TILE, ACROSS, R.block])
    block = first_k // R.block + tl.arange(0, ACROSS)
    block_index = row.to(tl.uint32)[:, None] * tl.cdiv(K, R.block) + block.to(tl.uint32)[None, :]
    block_index = tl.reshape(block_index, [TILE, ACROSS, 1])
    q, scale, y = _quantized(tl.reshape(values, [TILE, ACROSS, R.block]), a, b, index, block_index, 2, R)
    y = tl.reshape(y, [TILE, TILE]).to(x.dtype.element_ty)
    if PACK:
        q, scale = tl.reshape(q, [TILE, TILE]), tl.reshape(scale, [TILE, ACROSS])
        _store_bytes(q, scale, row_codes, row_scales, row.to(tl.int64), m < M, first_k, K, R)
    else:
        tl.store(row_values + at, y, inside)
    if CHAINED:
        values = y.to(tl.float32)

    DOWN: tl.constexpr = TILE // C.block
    a, b = _key(key, step, column_salts, C)
    index = tl.reshape(column.to(tl.uint32)[None, :] * M + m.to(tl.uint32)[:, None], [DOWN, C.block, TILE])
    block = first_m // C.block + tl.arange(0, DOWN)
    block_index = column.to(tl.uint32)[None, :] * tl.cdiv(M, C.block) + block.to(tl.uint32)[:, None]
    block_index = tl.reshape(block_index, [DOWN, 1, TILE])
    q, scale, y = _quantized(tl.reshape(values, [DOWN, C.block, TILE]), a, b, index, block_index, 1, C)
    if PACK:
        q, scale = tl.trans(tl.reshape(q, [TILE, TILE])), tl.trans(tl.reshape(scale, [DOWN, TILE]))
        _store_bytes(q, scale, column_codes, column_scales, column.to(tl.int64), k < K, first_m, M, C)
    else:
        tl.store(column_values + at, tl.reshape(y, [TILE, TILE]).to(x.dtype.element_ty), inside)
