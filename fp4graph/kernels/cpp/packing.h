// Codes and scales as bytes, and back: numerics/packing.py.

#pragma once

#include "memory.h"
#include "scaling.h"

namespace {

// The number of a value among the magnitudes of its format, from zero up: its code. Each binade has 2^mantissa codes.
inline i32 magnitude(float value, int min_exponent, int mantissa) {
    Spacing s = spacing(value, min_exponent, mantissa);
    float steps = as<float>(as<i32>(value * s.inverse) & ~SIGN);
    return (binade(s, min_exponent, mantissa) << mantissa) + static_cast<i32>(steps);
}

template <class F>
inline i32 encode(float q, i32 place) {
    constexpr i32 half = 1 << (F::CODE_BITS - 1);
    if (F::INTEGER) return (q < 0 ? -place : place) & (2 * half - 1);
    return place | ((as<i32>(q) >> 31) & half);
}

inline float decode_magnitude(i32 code, int min_exponent, int mantissa) {
    float subnormal = static_cast<float>(code) * pow2(min_exponent - mantissa);
    float normal = as<float>((code + ((min_exponent - 1 + 127) << mantissa)) << (23 - mantissa));
    return code < (1 << mantissa) ? subnormal : normal;
}

template <class F>
inline float decode(i32 code) {
    constexpr i32 half = 1 << (F::CODE_BITS - 1);
    if (F::INTEGER) return static_cast<float>((code ^ half) - half) * pow2(F::MIN_EXPONENT - F::MANTISSA);
    float value = decode_magnitude(code & (half - 1), F::MIN_EXPONENT, F::MANTISSA);
    return as<float>(as<i32>(value) | (code & half) << (32 - F::CODE_BITS));
}

// Stores a scale as a code, as bfloat16, or as fp32.
template <class F>
inline void store_scale(float scale, u8* to) {
    bool finite = scale < INFINITY;
    if (!F::S_HAS_ZERO) {
        *to = static_cast<u8>(finite ? (as<i32>(scale) >> 23) - (F::S_MIN_EXPONENT + 127) : F::S_NAN_CODE);
    } else {
        i32 code = magnitude(scale, F::S_MIN_EXPONENT, F::S_MANTISSA);
        *to = static_cast<u8>(finite ? code : F::S_NAN_CODE);
    }
}
template <class F>
inline void store_scale(float scale, u16* to) { *to = static_cast<u16>(as<u32>(scale) >> 16); }
template <class F>
inline void store_scale(float scale, float* to) { *to = scale; }

template <class F>
inline float load_scale(u8 code) {
    const i32 field = code + (F::S_MIN_EXPONENT + 127);
    float value = F::S_HAS_ZERO ? decode_magnitude(code, F::S_MIN_EXPONENT, F::S_MANTISSA)
                                : as<float>(field ? field << 23 : 1 << 22);
    return code == F::S_NAN_CODE ? NOT_A_NUMBER : value;
}
template <class F>
inline float load_scale(u16 stored) { return as<float>(static_cast<u32>(stored) << 16); }
template <class F>
inline float load_scale(float stored) { return stored; }

// Two neighbouring codes as one number, so that compilers pack and unpack pairs in vectors.
using pair [[gnu::may_alias]] = uint64_t;
using code_pair [[gnu::may_alias]] = u16;

template <class F>
inline void pack(const i32* codes, u8* to, i64 count) {
    if (F::CODE_BITS == 4) {
        const pair* pairs = reinterpret_cast<const pair*>(codes);
        for (i64 j = 0; j < count / 2; ++j) to[j] = static_cast<u8>(pairs[j] | pairs[j] >> 28);
    } else {
        for (i64 j = 0; j < count; ++j) to[j] = static_cast<u8>(codes[j]);
    }
}

template <class F>
constexpr i64 packed_bytes() {
    return F::CODE_BITS == 4 ? F::BLOCK / 2 : F::BLOCK;
}

using chunk_of_floats = float __attribute__((vector_size(4 * CHUNK)));

// The values of the sixteen 4-bit codes of a format.
template <class F>
struct Decoded {
    alignas(64) float values[16];
    Decoded() {
        for (int code = 0; code < 16; ++code) values[code] = decode<F>(code);
    }
};

// Dequantizes N successive packed blocks. Values are rounded to T and widened to fp32.
template <class F, class T, int N>
inline void unpack_blocks(const u8* codes, const typename F::Stored* scales, float* values) {
    constexpr int all = N * F::BLOCK;
    alignas(64) u8 each[all];
    if (F::CODE_BITS == 4) {
        code_pair* pairs = reinterpret_cast<code_pair*>(each);
        for (int j = 0; j < all / 2; ++j) pairs[j] = static_cast<u16>((codes[j] & 0x0F) | (codes[j] & 0xF0) << 4);
    } else {
        std::memcpy(each, codes, all);
    }
#ifndef __clang__
    if constexpr (F::CODE_BITS == 4 && all % CHUNK == 0) {
        using chunk_of_places = i32 __attribute__((vector_size(4 * CHUNK)));
        static const Decoded<F> decoded;
        chunk_of_floats table;
        std::memcpy(&table, decoded.values, sizeof table);
        alignas(64) i32 places[all];
        for (int j = 0; j < all; ++j) places[j] = each[j];
        for (int j = 0; j < all; j += CHUNK) {
            chunk_of_places place;
            std::memcpy(&place, places + j, sizeof place);
            const chunk_of_floats found = __builtin_shuffle(table, place);
            std::memcpy(values + j, &found, sizeof found);
        }
    } else
#endif
        for (int j = 0; j < all; ++j) values[j] = decode<F>(each[j]);
    for (int b = 0; b < N; ++b) {
        const float scale = load_scale<F>(scales[b]), reciprocal = 1.0f / scale;
        for (int j = b * F::BLOCK; j < (b + 1) * F::BLOCK; ++j) {
            const float value = dequantized<F>(values[j], scale, reciprocal);
            T stored;
            store<F>(value, &stored);
            values[j] = exact_in_bf16<F>() ? value : widen(stored);
        }
    }
}

// The transpose [R, C] of an operand [C, R] of type T that was packed in format F with blocks along R.
template <class F, class T>
struct PackedTranspose {
    const u8* codes;
    const typename F::Stored* scales;
    i64 rows, columns;  // R and C before `places` selects columns
    Places places;

    void fetch_line(i64 batch, i64 row, i64 column, i64 n) const {
        if (places.empty(column)) return;
        const i64 blocks = (rows + F::BLOCK - 1) / F::BLOCK;
        const i64 block = (batch * columns + places[column]) * blocks + row / F::BLOCK;
        fetch<false>(codes + block * packed_bytes<F>(), n / F::BLOCK * packed_bytes<F>());
        fetch<false>(scales + block, 1);
    }

    void read(float* tile, i64 batch, i64 row, i64 column, bool, i64 lines, i64 n, i64 width) const {
        const i64 blocks = (rows + F::BLOCK - 1) / F::BLOCK;
        for (i64 line = 0; line < lines; ++line) {
            if (places.empty(column + line)) {
                for (i64 i = 0; i < n; ++i) tile[line * width + i] = 0;
                continue;
            }
            const i64 block = (batch * columns + places[column + line]) * blocks + row / F::BLOCK;
            float* to = tile + line * width;
            if (n == LANES) {
                unpack_blocks<F, T, LANES / F::BLOCK>(codes + block * packed_bytes<F>(), scales + block, to);
                continue;
            }
            for (i64 i = 0; i < n; i += F::BLOCK) {
                const i64 own = block + i / F::BLOCK;
                alignas(64) float values[F::BLOCK];
                unpack_blocks<F, T, 1>(codes + own * packed_bytes<F>(), scales + own, values);
                const i64 used = min(n - i, static_cast<i64>(F::BLOCK));
                std::memcpy(to + i, values, static_cast<size_t>(used) * sizeof(float));
            }
        }
    }
};

}  // namespace
