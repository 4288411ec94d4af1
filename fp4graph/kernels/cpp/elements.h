// Conversions between values in memory and fp32, of one value or of many.

#pragma once

#include "basics.h"

namespace {

struct bf16 {
    u16 bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return as<float>(static_cast<u32>(x.bits) << 16); }
inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, bf16* to) {
    u32 bits = as<u32>(x), rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    to->bits = static_cast<u16>((bits & ~static_cast<u32>(SIGN)) > INFINITE ? 0x7FC0 : rounded);
}

// True if every product of an element and a scale of F is a bfloat16 number, so that storing it rounds nothing.
template <class F>
constexpr bool exact_in_bf16() {
    return !F::ENCODE && F::MANTISSA + F::S_MANTISSA + 2 <= 8 &&
           F::MIN_EXPONENT - F::MANTISSA + F::S_MIN_EXPONENT - F::S_MANTISSA >= -133;
}

// Stores a dequantized value.
template <class F>
inline void store(float x, float* to) { *to = x; }
template <class F>
inline void store(float x, bf16* to) {
    if (exact_in_bf16<F>()) to->bits = static_cast<u16>(as<u32>(x) >> 16);
    else narrow(x, to);
}

// Conversions of N neighbours, in explicit vectors of 16. In a plain loop compilers derive the number of lanes from the
// narrowest type; a block of 16 does not fill the widest registers with it, and the loop is not vectorized.
constexpr int CHUNK = 16;
using chunk_of_16 = u16 __attribute__((vector_size(2 * CHUNK)));
using chunk_of_32 = u32 __attribute__((vector_size(4 * CHUNK)));

template <int N>
inline void widen(const float* from, float* to) {
    std::memcpy(to, from, N * sizeof(float));
}
template <int N>
inline void widen(const bf16* from, float* to) {
    int i = 0;
    for (; i + CHUNK <= N; i += CHUNK) {
        chunk_of_16 bits;
        std::memcpy(&bits, from + i, sizeof bits);
        const chunk_of_32 wide = __builtin_convertvector(bits, chunk_of_32) << 16;
        std::memcpy(to + i, &wide, sizeof wide);
    }
    for (; i < N; ++i) to[i] = widen(from[i]);
}

template <int N>
inline void narrow(const float* from, float* to) {
    std::memcpy(to, from, N * sizeof(float));
}
template <int N>
inline void narrow(const float* from, bf16* to) {
    int i = 0;
    for (; i + CHUNK <= N; i += CHUNK) {
        chunk_of_32 bits;
        std::memcpy(&bits, from + i, sizeof bits);
        const chunk_of_32 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        const chunk_of_32 nan = (chunk_of_32)((bits & ~static_cast<u32>(SIGN)) > static_cast<u32>(INFINITE));
        const chunk_of_16 result = __builtin_convertvector((nan & 0x7FC0) | (~nan & rounded), chunk_of_16);
        std::memcpy(to + i, &result, sizeof result);
    }
    for (; i < N; ++i) narrow(from[i], to + i);
}

// Stores N numbers that are exact in the type of `to`.
template <int N>
inline void cut(const float* from, float* to) {
    std::memcpy(to, from, N * sizeof(float));
}
template <int N>
inline void cut(const float* from, bf16* to) {
    int i = 0;
    for (; i + CHUNK <= N; i += CHUNK) {
        chunk_of_32 bits;
        std::memcpy(&bits, from + i, sizeof bits);
        const chunk_of_16 result = __builtin_convertvector(bits >> 16, chunk_of_16);
        std::memcpy(to + i, &result, sizeof result);
    }
    for (; i < N; ++i) to[i].bits = static_cast<u16>(as<u32>(from[i]) >> 16);
}

template <class F, int N>
inline void store(const float* from, float* to) {
    narrow<N>(from, to);
}
template <class F, int N>
inline void store(const float* from, bf16* to) {
    if (!exact_in_bf16<F>()) return narrow<N>(from, to);
    cut<N>(from, to);
}

}  // namespace
