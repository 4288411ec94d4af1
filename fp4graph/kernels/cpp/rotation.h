// Hadamard rotations of blocks: numerics/hadamard.py.

#pragma once

#include "memory.h"

namespace {

using vec8 = float __attribute__((vector_size(32)));

// One butterfly step of distance H < 8 within 8 neighbours.
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

// Butterfly steps of distances `from`, 2·from, ... among `count` elements: (a, b) becomes (a + b, a - b).
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

// Multiplies one block of G neighbours by `before`, H, `unit` and `after`, in registers. `before`, `after` may be null.
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

// A rotation before quantization: blocks of g columns, where g divides the quantizer's block, times S, H and `unit`.
struct BlockRotation {
    const float* signs;  // the diagonal of S; null for the identity
    i64 g, columns;  // `columns` of the source, which is padded with zeros
    float unit;
    explicit operator bool() const { return g != 0; }
};

// Rotates `count` contiguous elements, which are whole blocks.
inline void rotate_strip(float* t, i64 count, const BlockRotation& rotation) {
    if (rotation.g == 16) {
        for (i64 i = 0; i < count; i += 16) rotate_block<16>(t + i, rotation.signs, nullptr, rotation.unit, t + i);
    } else if (rotation.g == 32) {
        for (i64 i = 0; i < count; i += 32) rotate_block<32>(t + i, rotation.signs, nullptr, rotation.unit, t + i);
    } else {
        for (i64 i = 0; i < count; i += rotation.g, t += rotation.g) {
            if (rotation.signs)
                for (i64 j = 0; j < rotation.g; ++j) t[j] *= rotation.signs[j];
            butterflies(t, rotation.g, 1);
            for (i64 j = 0; j < rotation.g; ++j) t[j] *= rotation.unit;
        }
    }
}

// Rotates a tile of B lines of LANES elements across the lines.
template <int B>
inline void rotate_tile(float* tile, const BlockRotation& rotation) {
    for (i64 i = 0; i < B; i += rotation.g) {
        float* t = tile + i * LANES;
        if (rotation.signs)
            for (i64 j = 0; j < rotation.g; ++j)
#pragma omp simd
                for (i64 lane = 0; lane < LANES; ++lane) t[j * LANES + lane] *= rotation.signs[j];
        butterflies(t, rotation.g * LANES, LANES);
#pragma omp simd
        for (i64 j = 0; j < rotation.g * LANES; ++j) t[j] *= rotation.unit;
    }
}

}  // namespace
