// A rotation without quantization.

#pragma once

#include "call.h"

constexpr i64 ROTATED = 1 << 14;  // the most elements of a tile

// The rotation of x [B, R, C], padded with zeros, into y [B, R, length], fp32: blocks of g columns times `before`, H,
// `unit` and `after`. Both are contiguous along C, or both along R.
template <class T>
struct Rotated {
    const T* x;
    Strides from;
    const float *before, *after;  // the diagonal of S on this side of H, or null for 1
    float* y;
    Strides to;
    Shape shape;
    i64 g, length;
    float unit;
};

// Rotates where C is contiguous. G is g, or 0 for any g.
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

// Rotates where R is contiguous: a tile has neighbouring lines.
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

// Rotates x by call.rotation into y, which has the shape of the call; with `back` applies the inverse rotation.
template <class T>
void rotate(const Call& call, bool back) {
    const BlockRotation& rotation = call.rotation;
    const Shape shape{call.shape.batches, call.shape.rows, rotation.columns, 0};
    const Rotated<T> r{static_cast<const T*>(call.x.data), call.x.strides, back ? nullptr : rotation.signs,
                       back ? rotation.signs : nullptr, static_cast<float*>(call.y.data), call.y.strides, shape,
                       rotation.g, call.shape.columns, rotation.unit};
    if (r.from.column != 1) return rotate_across(r, call.threads);
    switch (r.g) {
        case 16: return rotate_along<16>(r, call.threads);
        case 32: return rotate_along<32>(r, call.threads);
        case 64: return rotate_along<64>(r, call.threads);
        case 128: return rotate_along<128>(r, call.threads);
        default: return rotate_along<0>(r, call.threads);
    }
}
