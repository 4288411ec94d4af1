// Hadamard rotations of blocks, alone and before a quantizer: numerics/hadamard.py.

#pragma once

#include "memory.h"

namespace {

using vec8 = float __attribute__((vector_size(32)));

// The step of a distance below 8, within 8 neighbours.
template <int H>
inline vec8 butterflies_within(vec8 v) {
    constexpr auto sign = [](int i) { return i & H ? -1.0f : 1.0f; };
    constexpr vec8 signs = {sign(0), sign(1), sign(2), sign(3), sign(4), sign(5), sign(6), sign(7)};
#ifdef __clang__
    const vec8 other = __builtin_shufflevector(v, v, 0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H, 4 ^ H, 5 ^ H, 6 ^ H, 7 ^ H);
#else
    using places = i32 __attribute__((vector_size(32)));
    const vec8 other = __builtin_shuffle(v, places{0 ^ H, 1 ^ H, 2 ^ H, 3 ^ H, 4 ^ H, 5 ^ H, 6 ^ H, 7 ^ H});
#endif
    return other + signs * v;
}

// The steps of distances `from`, 2·from, ... among `count` elements: (a, b) becomes (a + b, a - b).
inline void butterflies(float* t, i64 count, i64 from) {
    for (i64 h = from; h < count; h *= 2)
        for (i64 i = 0; i < count; i += 2 * h)
#pragma omp simd
            for (i64 j = i; j < i + h; ++j) {
                const float a = t[j], b = t[j + h];
                t[j] = a + b;
                t[j + h] = a - b;
            }
}

inline vec8 eight(const float* from) {
    vec8 v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
inline vec8 eight(const bf16* from) {
    alignas(32) float values[8];
    for (int i = 0; i < 8; ++i) values[i] = widen(from[i]);
    return eight(values);
}

// One block of G neighbours times `before`, H and `after`, in registers; the first and the last may be null.
template <int G, class T>
inline void rotate_block(const T* from, const float* before, const float* after, float unit, float* to) {
    constexpr int count = G / 8;
    vec8 v[count];
#pragma GCC unroll 16
    for (int i = 0; i < count; ++i) {
        v[i] = eight(from + 8 * i);
        if (before) v[i] *= eight(before + 8 * i);
        v[i] = butterflies_within<4>(butterflies_within<2>(butterflies_within<1>(v[i])));
    }
#pragma GCC unroll 4
    for (int h = 1; h < count; h *= 2)
#pragma GCC unroll 16
        for (int i = 0; i < count; ++i) {
            if (i & h) continue;
            const vec8 a = v[i], b = v[i + h];
            v[i] = a + b;
            v[i + h] = a - b;
        }
#pragma GCC unroll 16
    for (int i = 0; i < count; ++i) {
        v[i] *= unit;
        if (after) v[i] *= eight(after + 8 * i);
        std::memcpy(to + 8 * i, &v[i], sizeof v[i]);
    }
}

// A rotation of the blocks of g columns of what is about to be quantized in blocks that g divides: times S, H and a unit.
struct Turn {
    const float* signs;  // the diagonal of S; null for the identity
    i64 g, columns;  // `columns` are those of the source; zeros stand behind them
    float unit;
    explicit operator bool() const { return g != 0; }
};

// Rotates `count` neighbours, whole blocks.
inline void turn_blocks(float* t, i64 count, const Turn& turn) {
    if (turn.g == 16) {
        for (i64 i = 0; i < count; i += 16) rotate_block<16>(t + i, turn.signs, nullptr, turn.unit, t + i);
    } else if (turn.g == 32) {
        for (i64 i = 0; i < count; i += 32) rotate_block<32>(t + i, turn.signs, nullptr, turn.unit, t + i);
    } else {
        for (i64 i = 0; i < count; i += turn.g, t += turn.g) {
            if (turn.signs)
                for (i64 j = 0; j < turn.g; ++j) t[j] *= turn.signs[j];
            butterflies(t, turn.g, 1);
            for (i64 j = 0; j < turn.g; ++j) t[j] *= turn.unit;
        }
    }
}

// Rotates B neighbouring lines of LANES numbers across.
template <int B>
inline void turn_across(float* tile, const Turn& turn) {
    for (i64 i = 0; i < B; i += turn.g) {
        float* t = tile + i * LANES;
        if (turn.signs)
            for (i64 j = 0; j < turn.g; ++j)
#pragma omp simd
                for (i64 lane = 0; lane < LANES; ++lane) t[j * LANES + lane] *= turn.signs[j];
        butterflies(t, turn.g * LANES, LANES);
#pragma omp simd
        for (i64 j = 0; j < turn.g * LANES; ++j) t[j] *= turn.unit;
    }
}

}  // namespace

constexpr i64 ROTATED = 1 << 14;  // elements of a tile

// A rotation of blocks of g columns of x [B, R, C], zeros behind C: times S and H, or with `back` times H and S. Into y
// [B, R, length], fp32. Both are contiguous along C, or both along R.
template <class T>
struct Rotated {
    const T* x;
    Strides from;
    const float *before, *after;  // the signs of S; null where they are 1
    float* y;
    Strides to;
    Shape shape;
    i64 g, length;
    float unit;
};

// Where C is contiguous. G is g, or 0 for any.
template <int G, class T>
void rotate_along(const Rotated<T>& r, int threads) {
    const i64 g = G ? G : r.g, C = r.shape.columns, blocks = (r.length + g - 1) / g;
    const i64 lines = r.shape.batches * r.shape.rows;
#pragma omp parallel for num_threads(threads) if (lines * C > SERIAL)
    for (i64 line = 0; line < lines; ++line) {
        const T* source = r.x + r.from.at(line / r.shape.rows, line % r.shape.rows, 0);
        float* target = r.y + r.to.at(line / r.shape.rows, line % r.shape.rows, 0);
        for (i64 column = 0; column < blocks * g; column += g) {
            const i64 given = min(C - column, g), wanted = min(r.length - column, g);
            if constexpr (G) {
                if (given == g && wanted == g) {
                    rotate_block<G>(source + column, r.before, r.after, r.unit, target + column);
                    continue;
                }
            }
            alignas(64) float tile[ROTATED];
            for (i64 j = 0; j < g; ++j) tile[j] = j < given ? widen(source[column + j]) : 0;
            if (r.before)
                for (i64 j = 0; j < g; ++j) tile[j] *= r.before[j];
            butterflies(tile, g, 1);
            for (i64 j = 0; j < g; ++j) tile[j] *= r.unit;
            if (r.after)
                for (i64 j = 0; j < g; ++j) tile[j] *= r.after[j];
            std::memcpy(target + column, tile, static_cast<size_t>(wanted) * sizeof(float));
        }
    }
}

// Where R is contiguous: neighbouring lines at once.
template <class T>
void rotate_across(const Rotated<T>& r, int threads) {
    const i64 R = r.shape.rows, C = r.shape.columns, g = r.g, blocks = (r.length + g - 1) / g;
    const i64 lanes = min(LANES, ROTATED / g), groups = (R + lanes - 1) / lanes;
#pragma omp parallel for num_threads(threads) if (r.shape.batches * R * C > SERIAL)
    for (i64 t = 0; t < r.shape.batches * groups * blocks; ++t) {
        const i64 batch = t / (groups * blocks), column = t / groups % blocks * g, row = t % groups * lanes;
        const i64 n = min(R - row, lanes), given = min(C - column, g), wanted = min(r.length - column, g);
        alignas(64) float tile[ROTATED];
        for (i64 j = 0; j < g; ++j) {
            float* line = tile + j * lanes;
            const float sign = r.before ? r.before[j] : 1.0f;
            const i64 own = j < given ? n : 0;
            for (i64 i = own; i < lanes; ++i) line[i] = 0.0f * sign;
            const T* source = r.x + r.from.at(batch, row, column + j);
            for (i64 i = 0; i < own; ++i) line[i] = widen(source[i]) * sign;
        }
        butterflies(tile, g * lanes, lanes);
        for (i64 j = 0; j < wanted; ++j) {
            float* target = r.y + r.to.at(batch, row, column + j);
            const float sign = r.after ? r.after[j] : 1.0f;
            for (i64 i = 0; i < n; ++i) target[i] = tile[j * lanes + i] * r.unit * sign;
        }
    }
}

template <class T>
void rotate(const T* x, Strides from, const float* signs, float* y, Strides to, Shape shape, i64 g, i64 length,
            bool back, float unit, int threads) {
    const Rotated<T> r{x, from, back ? nullptr : signs, back ? signs : nullptr, y, to, shape, g, length, unit};
    if (from.column != 1) return rotate_across(r, threads);
    switch (g) {
        case 16: return rotate_along<16>(r, threads);
        case 32: return rotate_along<32>(r, threads);
        case 64: return rotate_along<64>(r, threads);
        case 128: return rotate_along<128>(r, threads);
        default: return rotate_along<0>(r, threads);
    }
}
