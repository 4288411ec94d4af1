// The quantizer for blocks across the contiguous axis. Its tiles are neighbouring lines.

#pragma once

#include "rotation.h"
#include "rounding.h"
#include "target.h"

namespace {

// Quantizes blocks along C where R is contiguous. The blocks of a packed source must fill the lanes of a tile exactly.
template <class F, class T, class Source>
void across(const Source& source, const Target<F, T>& to, const BlockwiseParts& given, const BlockRotation& rotation,
            Key key, Shape shape, int threads) {
    constexpr int B = F::BLOCK;
    const i64 columns = rotation ? rotation.columns : shape.columns;
    const i64 R = shape.rows, C = shape.columns, blocks = (C + B - 1) / B, groups = (R + LANES - 1) / LANES;
    const i64 tiles = shape.batches * blocks * groups;
    const Key block_key = key.absorb(BLOCK_SALT), element_key = key.absorb(0);
#pragma omp parallel for num_threads(threads) if ((shape.batches - shape.first) * R * C > SERIAL)
    for (i64 t = shape.first * blocks * groups; t < tiles; ++t) {
        const i64 batch = t / (blocks * groups), column = t / groups % blocks * B, row = t % groups * LANES;
        const i64 depth = C - column < B ? C - column : B, n = R - row < LANES ? R - row : LANES;
        const i64 given_depth = columns - column < B ? columns - column : B;
        alignas(64) float tile[B * LANES], scale[LANES], reciprocal[LANES];
        alignas(64) i32 z[LANES];
        if (!rotation && source.places.empty(column, depth)) {  // zeros are quantized to zeros with any noise
            for (i64 j = 0; j < depth; ++j)
                std::memset(to.values + (column + j) * to.strides.column + row, 0, static_cast<size_t>(n) * sizeof(T));
            continue;
        }
        if (n < LANES || (rotation && given_depth < B))
            for (i64 i = 0; i < B * LANES; ++i) tile[i] = 0;
        source.read(tile, batch, row, column, false, given_depth, n == LANES ? LANES : n, LANES);
        if (rotation) rotate_tile<B>(tile, rotation);
        const i64 b = column / B;
        if (given.divisor) {
            alignas(64) float divisor[LANES];
            given.divisor.read_across(divisor, batch, row, n, b);
            for (i64 j = 0; j < depth; ++j)
                for (int i = 0; i < LANES; ++i) tile[j * LANES + i] = tile[j * LANES + i] / divisor[i];
        }
#pragma omp simd
        for (int i = 0; i < LANES; ++i) z[i] = 0;
        for (i64 j = 0; j < depth; ++j)
#pragma omp simd
            for (int i = 0; i < LANES; ++i) z[i] = max(z[i], as<i32>(tile[j * LANES + i]) & ~SIGN);
        if (given.statistic) {
            given.statistic.read_across(scale, batch, row, n, b);
            for (i64 i = 0; i < n; ++i) z[i] = as<i32>(scale[i]);
        }
        // The number of the first line's block; the numbers of neighbouring lines' blocks differ by `blocks`.
        const i64 block = (batch * R + row) * blocks + b;
#pragma omp simd
        for (int i = 0; i < LANES; ++i)
            scale[i] = block_scale<F>(z[i], F::S_DRAWS ? block_key.bits(static_cast<u32>(block + i * blocks)) : 0);
        if (given.scale) given.scale.read_across(scale, batch, row, n, b);
        for (int i = 0; i < LANES; ++i) reciprocal[i] = 1.0f / scale[i];
        alignas(64) float stored[LANES], factor[LANES], undone[LANES];
        if (given.stored) given.stored.read_across(stored, batch, row, n, b);
        const float* multiplied = given.stored ? stored : scale;
        for (int i = 0; i < LANES; ++i) undone[i] = given.stored ? 1.0f / stored[i] : reciprocal[i];
        const bool chosen = given.scale || given.stored, rounds = chosen && !fits<F>(multiplied, n);
        const bool apart = chosen && (divides_inexactly<F>(scale, n) || divides_inexactly<F>(multiplied, n));
        for (int i = 0; apart && i < LANES; ++i) {  // divide here, and multiply by 1 below
            reciprocal[i] = undone[i] = 1;
            for (i64 j = i; !F::ENCODE && j < depth * LANES; j += LANES) tile[j] = tile[j] / scale[i];
        }
        if (given.factor) given.factor.read_across(factor, batch, row, n, b);
        const u32 stride = static_cast<u32>(C);
        for (i64 j = 0; j < depth; ++j) {
            const u32 index = static_cast<u32>((batch * R + row) * C + column + j);
            float* line = tile + j * LANES;
            if (row + 2 * LANES <= R && j < given_depth) {  // fetch the next tile
                source.fetch_line(batch, row + LANES, column + j, LANES);
                fetch<true>(to.values + to.strides.at(batch, row + LANES, column + j), LANES * sizeof(T));
            }
#pragma omp simd
            for (int i = 0; i < LANES; ++i) {
                const float u = ratio<F>(line[i], scale[i], reciprocal[i]);
                i32 place;
                const float q = round_element<F>(u, element_key.bits(index + static_cast<u32>(i) * stride), place);
                line[i] = dequantized<F>(q, multiplied[i], undone[i]);
            }
            if (F::ENCODE && apart)
                for (int i = 0; i < LANES; ++i) line[i] = line[i] / multiplied[i];
            T* out = to.values + to.strides.at(batch, row, column + j);
            if (given.factor) {
                for (i64 i = 0; i < n; ++i) narrow(line[i] * factor[i], out + i);
            } else if (rounds) {
                for (i64 i = 0; i < n; ++i) narrow(line[i], out + i);
            } else if (n == LANES) {
#pragma omp simd
                for (int i = 0; i < LANES; ++i) store<F>(line[i], out + i);
            } else {
                for (i64 i = 0; i < n; ++i) store<F>(line[i], out + i);
            }
        }
    }
}

}  // namespace
