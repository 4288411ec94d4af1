// Statistics of blocks and of whole tensors.

#pragma once

#include <vector>

#include "call.h"

// Returns a number that is ordered as x is among floats; NaN is above Inf.
inline u32 ordered(float x) {
    const u32 bits = as<u32>(x + 0.0f);  // -0 becomes 0
    return x == x ? bits ^ (static_cast<u32>(as<i32>(bits) >> 31) | 1u << 31) : ~0u;
}
inline float of_ordered(u32 place) { return as<float>(place >> 31 ? place & ~(1u << 31) : ~place); }

// Returns the bin of the element at `place`, and subtracts the number of elements in earlier bins from `place`.
inline u32 bin_of(const u32* bins, i64& place) {
    u32 bin = 0;
    for (; place >= bins[bin]; ++bin) place -= bins[bin];
    return bin;
}

// Returns how many elements have each number(x) < `bins`, among elements with counts(x). Threads count parts of x.
template <class T, class Counts, class Number>
std::vector<u32> histogram(const T* x, i64 count, int threads, i64 bins, Counts counts, Number number) {
    const i64 parts = max(i64{1}, min(i64{threads}, count / (4 * bins)));  // a part has to zero and add its bins
    std::vector<u32> found(parts * bins, 0);
#pragma omp parallel for num_threads(threads) if (parts > 1)
    for (i64 part = 0; part < parts; ++part) {
        u32* own = &found[part * bins];
        for (i64 i = count * part / parts; i < count * (part + 1) / parts; ++i) {
            const u32 place = ordered(widen(x[i]));
            if (counts(place)) ++own[number(place)];
        }
    }
    for (i64 part = 1; part < parts; ++part) {
        for (i64 i = 0; i < bins; ++i) found[i] += found[part * bins + i];
    }
    return found;
}

// Finds the elements at `place` and at count - 1 - place of the ascending order: first the upper half of their bits,
// then the lower half, among elements of the same upper half. bf16 has no lower half.
template <class T>
void order_statistics(const T* x, i64 count, i64 place, float* found, int threads) {
    constexpr i64 HALF = 1 << 16;
    i64 places[2] = {place, count - 1 - place};
    u32 bin[2];
    const auto upper = histogram(x, count, threads, HALF, [](u32) { return true; }, [](u32 n) { return n >> 16; });
    for (int side = 0; side < 2; ++side) bin[side] = bin_of(upper.data(), places[side]);
    if constexpr (sizeof(T) == 2) {
        for (int side = 0; side < 2; ++side) found[side] = of_ordered(bin[side] << 16 | (bin[side] >> 15 ? 0 : 0xFFFF));
        return;
    }
    const auto lower = histogram(
        x, count, threads, 2 * HALF, [&](u32 n) { return n >> 16 == bin[0] || n >> 16 == bin[1]; },
        [&](u32 n) { return (n >> 16 == bin[0] ? 0 : HALF) + (n & 0xFFFF); });
    for (int side = 0; side < 2; ++side) {
        const u32* bins = lower.data() + (bin[side] == bin[0] ? 0 : HALF);
        found[side] = of_ordered(bin[side] << 16 | bin_of(bins, places[side]));
    }
}

// Returns ordered() of the element at `place` of the ascending order. Finds 11 bits of it at a time. Sets `equals` to
// the number of elements that equal it, and `place` to its place among these.
inline u32 selected(const float* x, i64 count, i64& place, i64& equals, int threads) {
    u32 found = 0;
    for (const int below : {21, 10, 0}) {
        const int bits = below > 0 ? 11 : 10;
        const auto bins = histogram(
            x, count, threads, 1 << bits, [=](u32 n) { return n >> below >> bits == found >> below >> bits; },
            [=](u32 n) { return n >> below & ((1 << bits) - 1); });
        const u32 bin = bin_of(bins.data(), place);
        found |= bin << below;
        equals = bins[bin];
    }
    return found;
}

// Writes whether each of `count` scores is among the `wanted` >= 1 largest. The first of equal scores are chosen.
inline void largest(const float* score, i64 count, i64 wanted, bool* chosen, int threads) {
    i64 place = count - wanted, equals = 0;
    const u32 least = selected(score, count, place, equals, threads);
#pragma omp parallel for simd num_threads(threads) if (parallel : count > SERIAL)
    for (i64 i = 0; i < count; ++i) chosen[i] = ordered(score[i]) > least;
    for (i64 i = 0, left = equals - place; left > 0; ++i) {
        if (ordered(score[i]) == least) chosen[i] = true, --left;
    }
}

// Raises each m to the magnitude, as bits, of the number in `from`.
template <class T>
inline void raise(i32* m, const T* from, i64 n) {
#pragma omp simd
    for (i64 i = 0; i < n; ++i) m[i] = max(m[i], as<i32>(widen(from[i])) & ~SIGN);
}

// Writes mean of numerics/exact.py over the rows of x [rows, columns], contiguous, into y [columns]. Threads may add
// rows in any order, because no sum is rounded.
template <class T>
void means(const T* x, i64 rows, i64 columns, float* y, int threads) {
    constexpr double units = 1 << 29, whole = 1.5 * (1ll << 52);  // adding and taking off `whole` rounds
    const i64 parts = max(i64{1}, min(i64{threads}, min(rows / 16, rows * columns / SERIAL)));
    std::vector<i32> largest(parts * columns, 0);
    std::vector<double> sums(parts * columns, 0.0), above(columns), factor(columns);
#pragma omp parallel for num_threads(threads) if (parts > 1)
    for (i64 part = 0; part < parts; ++part) {
        for (i64 row = rows * part / parts; row < rows * (part + 1) / parts; ++row) {
            raise(&largest[part * columns], x + row * columns, columns);
        }
    }
    for (i64 c = 0; c < columns; ++c) {
        for (i64 part = 1; part < parts; ++part) largest[c] = max(largest[c], largest[part * columns + c]);
        above[c] = 2.0 * as<float>(max(largest[c], 1 << 23) & INFINITE);
        factor[c] = 1 / above[c];
    }
#pragma omp parallel for num_threads(threads) if (parts > 1)
    for (i64 part = 0; part < parts; ++part) {
        double* sum = &sums[part * columns];
        for (i64 row = rows * part / parts; row < rows * (part + 1) / parts; ++row) {
            const T* values = x + row * columns;
#pragma omp simd
            for (i64 c = 0; c < columns; ++c) {
                sum[c] += (widen(values[c]) * factor[c] + 1) * (units / 2) + whole - whole;
            }
        }
    }
    for (i64 c = 0; c < columns; ++c) {
        for (i64 part = 1; part < parts; ++part) sums[c] += sums[part * columns + c];
        const double share = sums[c] * (1 / units) / static_cast<double>(rows);
        y[c] = largest[c] < INFINITE ? static_cast<float>((2 * share - 1) * above[c]) : NOT_A_NUMBER;
    }
}

// Writes mantissa of numerics/scaling.py: the mantissa of z / divisor, rounded up to `bits` stored bits.
inline void mantissas(const float* z, float* y, i64 count, float divisor, int bits, int threads) {
    const i32 one = 127 << 23, below = (1 << (23 - bits)) - 1;
#pragma omp parallel for simd num_threads(threads) if (parallel : count > SERIAL)
    for (i64 i = 0; i < count; ++i) {
        const i32 quotient = as<i32>(z[i] / divisor), exponent = quotient >> 23;
        const i32 rounded = (((quotient & 0x7FFFFF) + below) & ~below) + one;
        y[i] = as<float>(exponent > 0 && exponent < 255 ? rounded : one);
    }
}

// Writes to y [lines, blocks] the maximum of each element's group of `length` neighbours in a line of z >= 0 (or NaN).
inline void group_maxima(const float* z, float* y, i64 lines, i64 blocks, i64 length, int threads) {
#pragma omp parallel for num_threads(threads) if (lines * blocks > SERIAL)
    for (i64 line = 0; line < lines; ++line) {
        for (i64 first = line * blocks; first < (line + 1) * blocks; first += length) {
            const i64 end = min(first + length, (line + 1) * blocks);
            i32 m = 0;
            for (i64 i = first; i < end; ++i) m = max(m, as<i32>(z[i]) & ~SIGN);
            for (i64 i = first; i < end; ++i) y[i] = as<float>(m);
        }
    }
}

// Writes the largest magnitude of each block of `lines` rows by `length` columns of x, which has the call's shape, into
// y, fp32 [batches, ceil(rows / lines), ceil(columns / length)], contiguous. NaN is above Inf. Both sides are <= 1024.
template <class T>
void maxima(const Call& call, i64 lines, i64 length) {
    const Shape shape = call.shape;
    const Strides from = call.x.strides;
    const T* x = static_cast<const T*>(call.x.data);
    float* z = static_cast<float*>(call.y.data);
    const int threads = call.threads;
    const i64 R = shape.rows, C = shape.columns, blocks = (C + length - 1) / length, groups = (R + lines - 1) / lines;
    if (from.column == 1 && lines == 1) {
#pragma omp parallel for num_threads(threads) if (shape.batches * R * C > SERIAL)
        for (i64 line = 0; line < shape.batches * R; ++line) {
            const T* row = x + line / R * from.batch + line % R * from.row;
            for (i64 b = 0; b < blocks; ++b) {
                const i64 end = min(b * length + length, C);
                i64 j = b * length;
                i32 m = 0;
                for (; j + CHUNK <= end; j += CHUNK) {
                    alignas(64) float values[CHUNK];
                    widen<CHUNK>(row + j, values);
#pragma omp simd reduction(max : m)
                    for (int i = 0; i < CHUNK; ++i) m = max(m, as<i32>(values[i]) & ~SIGN);
                }
                for (; j < end; ++j) m = max(m, as<i32>(widen(row[j])) & ~SIGN);
                z[line * blocks + b] = as<float>(m);
            }
        }
        return;
    }
    // A tile is one block deep. It is as wide along the contiguous axis, which has n numbers, as m allows, so that
    // memory is read in order. The loop takes the maxima over the tile's lines, then over the side of each block.
    const bool rows_contiguous = from.column != 1;
    const i64 side = rows_contiguous ? lines : length, n = rows_contiguous ? R : C;
    constexpr i64 most = 1024;
    const i64 width = most / side * side, tiles_across = (n + width - 1) / width;
    const i64 deep = rows_contiguous ? blocks : groups, depth = rows_contiguous ? length : lines;
    const i64 all = rows_contiguous ? C : R, step = rows_contiguous ? from.column : from.row;
#pragma omp parallel for num_threads(threads) if (shape.batches * R * C > SERIAL)
    for (i64 t = 0; t < shape.batches * deep * tiles_across; ++t) {
        const i64 batch = t / (deep * tiles_across), d = t / tiles_across % deep, first = t % tiles_across * width;
        const i64 own = min(width, n - first), end = min((d + 1) * depth, all);
        alignas(64) i32 m[most];
        for (i64 i = 0; i < own; ++i) m[i] = 0;
        const T* at = x + batch * from.batch + first;
        for (i64 line = d * depth; line < end; ++line) raise(m, at + line * step, own);
        const i64 across = first / side, apart = rows_contiguous ? blocks : 1;
        float* to = z + batch * groups * blocks + (rows_contiguous ? across * blocks + d : d * blocks + across);
        for (i64 i = 0; i < own; i += side, to += apart) {
            i32 largest = 0;
            for (i64 j = i; j < min(i + side, own); ++j) largest = max(largest, m[j]);
            *to = as<float>(largest);
        }
    }
}
