// The quantizer for blocks along the contiguous axis. Its tiles are strips of blocks.

#pragma once

#include "rotation.h"
#include "rounding.h"
#include "target.h"

namespace {

constexpr i64 STRIP = 64;  // the number of blocks in a tile

// `count` neighbouring blocks of one line, the first of which is block number `first` of the strip.
struct Run {
    i64 batch, row, column, first, count;
};

// Calls visit(Run) once for each line of a strip. The strip has `count` blocks from number `block` on.
template <class Visit>
inline void by_line(i64 block, i64 count, i64 rows, i64 blocks, i64 length, Visit visit) {
    i64 line = block / blocks, b = block % blocks;
    for (i64 i = 0; i < count; ++line, b = 0) {
        const i64 n = min(count - i, blocks - b);
        visit(Run{line / rows, line % rows, b * length, i, n});
        i += n;
    }
}

// Quantizes blocks along C where C is contiguous.
template <class F, class S, class T, bool PACKS>
void along(const Dense<S>& source, const Target<F, T>& to, const BlockwiseParts& given, const BlockRotation& rotation,
           Key key, Shape shape, int threads) {
    constexpr int B = F::BLOCK;
    const i64 read = rotation ? rotation.columns : shape.columns;
    const i64 R = shape.rows, C = shape.columns, blocks = (C + B - 1) / B;
    const i64 before = shape.first * R * blocks, all = shape.batches * R * blocks;
    const i64 strips = (all - before + STRIP - 1) / STRIP;
    const Key block_key = key.absorb(BLOCK_SALT), element_key = key.absorb(0);
#pragma omp parallel for num_threads(threads) if ((shape.batches - shape.first) * R * C > SERIAL)
    for (i64 strip = 0; strip < strips; ++strip) {
        const i64 first = before + strip * STRIP, count = all - first < STRIP ? all - first : STRIP;
        alignas(64) float tile[STRIP * B], scale[STRIP], reciprocal[STRIP], divisor[STRIP], factor[STRIP];
        alignas(64) i32 z[STRIP], codes[PACKS ? STRIP * B : 1];
        if (given.divisor) given.divisor.read(divisor, first, count, R, blocks);
        if (given.factor) given.factor.read(factor, first, count, R, blocks);
        const bool reduces = !(given.statistic || given.scale);
        by_line(first, count, R, blocks, B, [&](const Run& run) {
            const S* from = source.data + source.strides.at(run.batch, run.row, run.column);
            const i64 n = read - run.column;
            for (i64 g = 0; g < run.count; ++g) {
                float* block = tile + (run.first + g) * B;
                if ((g + 1) * B <= n) {
                    widen<B>(from + g * B, block);
                } else {
#pragma omp simd
                    for (int j = 0; j < B; ++j) block[j] = 0;
                    for (i64 j = 0; j < n - g * B; ++j) block[j] = widen(from[g * B + j]);
                }
            }
        });
        if (rotation) rotate_strip(tile, count * B, rotation);
        for (i64 g = 0; g < count; ++g) {
            float* block = tile + g * B;
            if (given.divisor) {
                const float by = divisor[g];
                for (int j = 0; j < B; ++j) block[j] = block[j] / by;
            }
            if (!reduces) continue;
            i32 m = 0;
#pragma omp simd reduction(max : m)
            for (int j = 0; j < B; ++j) m = max(m, as<i32>(block[j]) & ~SIGN);
            z[g] = m;
        }
        if (given.statistic) {
            given.statistic.read(scale, first, count, R, blocks);
            for (i64 g = 0; g < count; ++g) z[g] = as<i32>(scale[g]);
        }
        if (given.scale) {
            given.scale.read(scale, first, count, R, blocks);
        } else {
            for (i64 g = 0; g < STRIP; ++g)
                scale[g] = block_scale<F>(z[g], F::S_DRAWS ? block_key.bits(static_cast<u32>(first + g)) : 0);
        }
        for (i64 g = 0; g < STRIP; ++g) reciprocal[g] = 1.0f / scale[g];
        alignas(64) float stored[STRIP];
        if (given.stored) given.stored.read(stored, first, count, R, blocks);
        const float* multiplied = given.stored ? stored : scale;
        const bool chosen = given.scale || given.stored, rounds = chosen && !fits<F>(multiplied, count);
        const bool apart = chosen && (divides_inexactly<F>(scale, count) || divides_inexactly<F>(multiplied, count));
        for (i64 g = 0; apart && g < count; ++g) {  // divide here, and multiply by 1 below
            reciprocal[g] = 1;
            for (i64 j = g * B; !F::ENCODE && j < (g + 1) * B; ++j) tile[j] = tile[j] / scale[g];
        }
        const bool merged = given.factor && !rounds && merges<F>(factor, count), multiplies = given.factor && !merged;
        by_line(first, count, R, blocks, B, [&](const Run& run) {
            const S* from = source.data + source.strides.at(run.batch, run.row, run.column);
            T* out = to.values + to.strides.at(run.batch, run.row, run.column);
            const i64 n = C - run.column;
            const u32 start = static_cast<u32>((run.batch * R + run.row) * C + run.column);
            for (i64 g = 0; g < run.count; ++g) {
                // Fetch the next strip, which follows this strip if lines lie side by side.
                fetch<false>(from + STRIP * B + g * B, B * sizeof(S));
                fetch<true>(out + STRIP * B + g * B, B * sizeof(T));
                const i64 own = run.first + g;
                const u32 index = start + static_cast<u32>(g * B);
                const float s = scale[own], inverse = reciprocal[own], by = multiplied[own];
                const float back = merged ? by * factor[own] : by;
                const float undone = given.stored && !apart ? 1.0f / by : inverse;
                float* block = tile + own * B;
                i32* code = codes + (PACKS ? own * B : 0);
                const i32 kept = s == s ? -1 : 0, instead = s == s ? 0 : F::NAN_CODE;
#pragma omp simd
                for (int j = 0; j < B; ++j) {
                    i32 place;
                    const float q = round_element<F>(ratio<F>(block[j], s, inverse), element_key.bits(index + j), place);
                    if (PACKS) code[j] = (encode<F>(q, place) & kept) | instead;
                    block[j] = dequantized<F>(q, back, undone);
                }
                if (F::ENCODE && apart)
                    for (int j = 0; j < B; ++j) block[j] = block[j] / by;
                if (multiplies) {
                    const float times = factor[own];
                    for (int j = 0; j < B; ++j) block[j] *= times;
                }
                if ((g + 1) * B > n) {
                    for (i64 j = 0; j < n - g * B; ++j) narrow(block[j], out + g * B + j);
                } else if (multiplies || rounds) {
                    narrow<B>(block, out + g * B);
                } else {
                    store<F, B>(block, out + g * B);
                }
            }
        });
        if (PACKS) {
            pack<F>(codes, to.codes + first * packed_bytes<F>(), count * B);
            for (i64 g = 0; g < count; ++g) store_scale<F>(scale[g], to.scales + first + g);
        }
    }
}

}  // namespace
