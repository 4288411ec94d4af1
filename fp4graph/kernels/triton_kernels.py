"""The Triton kernels: a quantizer, whose arithmetic on a tile is in triton_numerics.py, and a product that multiplies
its accumulator by a scalar.

A tile of the quantizer is TILE x TILE elements of a matrix ``[batch, M, K]`` that is contiguous along K. The kernel
reads a tile as values, or as bytes that were packed along K, and quantizes it along its rows, along its columns, or
both. It writes each result as values, as bytes, or as both.
"""

import triton
import triton.language as tl

from fp4graph.kernels.triton_numerics import (
    _absorb,
    _dequantized,
    _element_code,
    _element_value,
    _nibbles,
    _packed,
    _quantized,
    _scale_code,
    _scale_value,
)


@triton.jit
def _key(key, step, salts, F: tl.constexpr):
    """Return ``Draw.varying`` of numerics/draw.py: the key, mixed with the step tensor if there is one, then the salts.

    If F needs no random bits, return 0, 0.
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
def _store_bytes(q, scale, codes_to, scales_to, line, inside, first, length, F: tl.constexpr):
    """Write the bytes of q [lines, n] and scale [lines, n / block] to lines of ``length``, from ``first`` on."""
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


@triton.jit
def _load_bytes(codes_from, scales_from, line, inside, first, length, TILE: tl.constexpr, F: tl.constexpr):
    """Return the values, fp32 [lines, TILE], of bytes that :func:`_store_bytes` wrote; 0 beyond the ends of lines."""
    LINES: tl.constexpr = line.shape[0]
    ACROSS: tl.constexpr = TILE // F.block
    PER_BYTE: tl.constexpr = 2 if F.code_bits == 4 else 1
    blocks = tl.cdiv(length, F.block)
    width = blocks * (F.block // PER_BYTE)
    byte = first // PER_BYTE + tl.arange(0, TILE // PER_BYTE)
    here = inside[:, None] & (byte < width)[None, :]
    codes = _nibbles(tl.load(codes_from + line[:, None] * width + byte[None, :], here, other=0), F)
    block = first // F.block + tl.arange(0, ACROSS)
    here = inside[:, None] & (block < blocks)[None, :]
    scale = _scale_value(tl.load(scales_from + line[:, None] * blocks + block[None, :], here, other=0), F)
    q = tl.reshape(_element_value(codes, F), [LINES, ACROSS, F.block])
    y = _dequantized(q, tl.reshape(scale, [LINES, ACROSS, 1]), F)
    within = inside[:, None] & (first + tl.arange(0, TILE) < length)[None, :]
    return tl.where(within, tl.reshape(y, [LINES, TILE]), 0.0)


@triton.jit
def _part(part, block_index, within, EACH: tl.constexpr):
    """Return the numbers that techniques give for blocks, one for each block; 1 for blocks outside of the tensor."""
    return tl.load(part + (block_index.to(tl.int64) if EACH else block_index.to(tl.int64) * 0), within, other=1.0)


@triton.jit
def _along(
    blocks, key, step, salts, index, block_index, within, given, EACH: tl.constexpr, AXIS: tl.constexpr, F: tl.constexpr
):
    """Return :func:`_quantized` of blocks along AXIS. ``given`` are the numbers that techniques give for blocks."""
    a, b = _key(key, step, salts, F)
    divisor = None
    if given[0] is not None:
        divisor = _part(given[0], block_index, within, EACH[0])
    statistic = None
    if given[1] is not None:
        statistic = _part(given[1], block_index, within, EACH[1])
    scale = None
    if given[2] is not None:
        scale = _part(given[2], block_index, within, EACH[2])
    factor = None
    if given[3] is not None:
        factor = _part(given[3], block_index, within, EACH[3])
    return _quantized(blocks, a, b, index, block_index, divisor, statistic, scale, factor, AXIS, F)


# Four warps, with 16 bytes for each thread, read PASS rows of a tile at once, so a thread holds one row of each pass.
# Rows are read interleaved, so that a thread holds neighbouring rows. These lie in one block along columns, whose scale
# the thread computes once. If rows were read in order, each row of a thread would lie in another block. Kernels that
# write no values along columns, or that read several parts, read rows in order (PASS is TILE): ptxas would spill
# registers of some.


@triton.jit
def _interleaved(PASS: tl.constexpr, TILE: tl.constexpr):
    """Return the rows of a tile in the order in which they are read."""
    place = tl.arange(0, TILE)
    return place if PASS == TILE else place % PASS * (TILE // PASS) + place // PASS


@triton.jit
def _in_order(x, PASS: tl.constexpr):
    """Return x [TILE, TILE], whose rows are interleaved, with its rows in order."""
    TILE: tl.constexpr = x.shape[0]
    return tl.reshape(tl.permute(tl.reshape(x, [TILE // PASS, PASS, TILE]), [1, 0, 2]), [TILE, TILE])


@triton.jit
def _as_read(x, PASS: tl.constexpr):
    """Return x [TILE, TILE], whose rows are in order, with its rows interleaved."""
    TILE: tl.constexpr = x.shape[0]
    return tl.reshape(tl.permute(tl.reshape(x, [PASS, TILE // PASS, TILE]), [1, 0, 2]), [TILE, TILE])


@triton.jit
def quantize_kernel(
    parts,
    codes,
    scales,
    source_factor,
    row_values,
    row_codes,
    row_scales,
    column_values,
    column_codes,
    column_scales,
    column_sums,
    rows_divisor,
    rows_statistic,
    rows_scale,
    rows_factor,
    columns_divisor,
    columns_statistic,
    columns_scale,
    columns_factor,
    key,
    step,
    row_salts,
    column_salts,
    M,
    K,
    width,
    P: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    EACH_R: tl.constexpr,
    EACH_C: tl.constexpr,
    THROUGH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantize one tile of a matrix ``[batch, M, K]`` along its rows by R and along its columns by C.

    A tensor that is None is not read or not written. If R or C is None, the tile is not quantized in that direction.

    Args:
        parts: values ``[batch, M, width]`` of columns side by side; () if P is not None.
        codes, scales: ``[batch, M, blocks]``, the bytes to read instead of ``parts``, which the spec P packed along K.
        row_values, column_values: ``[batch, M, K]``; without R the row values are those that were read.
        row_codes, row_scales: ``[batch, M, blocks]``; column_codes, column_scales: ``[batch, K, blocks]``.
        column_sums: fp32 ``[batch · tiles along M, K]``, the sums of the values read over the rows of each tile.
        source_factor: multiplies the values read, fp32 ``[1]``.
        rows_divisor, ...: fp32 numbers that techniques give for the blocks of a direction, or one for all blocks.
        key: int32 ``[2]``; step: int32 ``[5]`` or None; salts: tuples of int. Only specs that draw read them.
        EACH_R, EACH_C: for each of a direction's four ``rows_...`` or ``columns_...`` tensors, whether it has a number
            for each block.
        THROUGH: the dtype to which values are rounded before they are quantized.
    """
    across = tl.cdiv(K, TILE)
    tiles = tl.cdiv(M, TILE) * across
    batch = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    first_m, first_k = tile // across * TILE, tile % across * TILE
    if column_values is None:
        PASS: tl.constexpr = TILE
    elif P is not None:
        PASS: tl.constexpr = 16
    elif len(parts) > 1:
        PASS: tl.constexpr = TILE
    else:
        PASS: tl.constexpr = 256 // parts[0].dtype.element_ty.primitive_bitwidth
    m, k = first_m + _interleaved(PASS, TILE), first_k + tl.arange(0, TILE)
    row, column = batch * M + m, batch * K + k
    inside = (m < M)[:, None] & (k < K)[None, :]
    at = row.to(tl.int64)[:, None] * K + k[None, :]
    if P is not None:
        values = _load_bytes(codes, scales, row.to(tl.int64), m < M, first_k, K, TILE, P)
    elif len(parts) == 1:
        values = tl.load(parts[0] + at, inside, other=0.0)
    else:
        values = tl.full([TILE, TILE], 0.0, parts[0].dtype.element_ty)
        for i in tl.static_range(len(parts)):
            own = k - i * width
            here = inside & ((own >= 0) & (own < width))[None, :]
            values = tl.load(parts[i] + row.to(tl.int64)[:, None] * width + own[None, :], here, other=values)
    if source_factor is not None:
        values = values * tl.load(source_factor)
    values = values.to(THROUGH).to(tl.float32)

    if column_sums is not None:
        tl.store(column_sums + (batch * tl.cdiv(M, TILE) + tile // across) * K + k, tl.sum(values, 0), k < K)

    if R is not None:
        ACROSS: tl.constexpr = TILE // R.block
        index = tl.reshape(row.to(tl.uint32)[:, None] * K + k.to(tl.uint32)[None, :], [TILE, ACROSS, R.block])
        block = first_k // R.block + tl.arange(0, ACROSS)
        block_index = row.to(tl.uint32)[:, None] * tl.cdiv(K, R.block) + block.to(tl.uint32)[None, :]
        block_index = tl.reshape(block_index, [TILE, ACROSS, 1])
        within = tl.reshape((m < M)[:, None] & (block < tl.cdiv(K, R.block))[None, :], [TILE, ACROSS, 1])
        given = rows_divisor, rows_statistic, rows_scale, rows_factor
        blocks = tl.reshape(values, [TILE, ACROSS, R.block])
        q, scale, y = _along(blocks, key, step, row_salts, index, block_index, within, given, EACH_R, 2, R)
        y = tl.reshape(y, [TILE, TILE])
        if row_codes is not None:
            q, scale = tl.reshape(q, [TILE, TILE]), tl.reshape(scale, [TILE, ACROSS])
            _store_bytes(q, scale, row_codes, row_scales, row.to(tl.int64), m < M, first_k, K, R)
        if row_values is not None:
            tl.store(row_values + at, y.to(row_values.dtype.element_ty), inside)
    elif row_values is not None:
        tl.store(row_values + at, values.to(row_values.dtype.element_ty), inside)

    if C is not None:
        DOWN: tl.constexpr = TILE // C.block
        lines = first_m + tl.arange(0, TILE)
        index = tl.reshape(column.to(tl.uint32)[None, :] * M + lines.to(tl.uint32)[:, None], [DOWN, C.block, TILE])
        block = first_m // C.block + tl.arange(0, DOWN)
        block_index = column.to(tl.uint32)[None, :] * tl.cdiv(M, C.block) + block.to(tl.uint32)[:, None]
        block_index = tl.reshape(block_index, [DOWN, 1, TILE])
        within = tl.reshape((k < K)[None, :] & (block < tl.cdiv(M, C.block))[:, None], [DOWN, 1, TILE])
        given = columns_divisor, columns_statistic, columns_scale, columns_factor
        blocks = tl.reshape(_in_order(values, PASS), [DOWN, C.block, TILE])
        q, scale, y = _along(blocks, key, step, column_salts, index, block_index, within, given, EACH_C, 1, C)
        if column_codes is not None:
            q, scale = tl.trans(tl.reshape(q, [TILE, TILE])), tl.trans(tl.reshape(scale, [DOWN, TILE]))
            _store_bytes(q, scale, column_codes, column_scales, column.to(tl.int64), k < K, first_m, M, C)
        if column_values is not None:
            y = _as_read(tl.reshape(y, [TILE, TILE]), PASS)
            tl.store(column_values + at, y.to(column_values.dtype.element_ty), inside)


@triton.jit
def product_kernel(
    left,
    right,
    scale,
    addend,
    result,
    M,
    N,
    K,
    left_batch,
    left_m,
    left_k,
    right_batch,
    right_n,
    right_k,
    BETA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write one tile of ``result [B, M, N] = scale · left [B, M, K] @ right [B, N, K]ᵀ + BETA · addend [N]``.

    GROUP rows of tiles are processed together, so that programs that run at the same time read the same operands.
    """
    down, across = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    batch = (tl.program_id(0) // (down * across)).to(tl.int64)
    tile = tl.program_id(0) % (down * across)
    first = tile // (GROUP * across) * GROUP
    size = tl.minimum(down - first, GROUP)
    m = (first + tile % (GROUP * across) % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % (GROUP * across) // size * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Beyond the edge the first rows are read again. Their results are not written.
    a = left + batch * left_batch + (m % M).to(tl.int64)[:, None] * left_m + k.to(tl.int64)[None, :] * left_k
    b = right + batch * right_batch + (n % N).to(tl.int64)[None, :] * right_n + k.to(tl.int64)[:, None] * right_k
    accumulator = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for done in range(0, K, BLOCK_K):
        inside = k < K - done
        accumulator = tl.dot(
            tl.load(a, inside[None, :], other=0.0), tl.load(b, inside[:, None], other=0.0), accumulator
        )
        a += BLOCK_K * left_k
        b += BLOCK_K * right_k
    y = accumulator * tl.load(scale)
    if addend is not None:
        y = y + BETA * tl.load(addend + n, n < N, other=0.0).to(tl.float32)[None, :]
    at = (batch * M + m.to(tl.int64)[:, None]) * N + n[None, :]
    tl.store(result + at, y.to(result.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])
