// Scales of blocks: numerics/scaling.py.

#pragma once

#include "noise.h"

namespace {

struct Spacing {
    float step, inverse;
};

inline Spacing spacing(float u, int min_exponent, int mantissa) {
    i32 step = max(as<i32>(u) & INFINITE, (min_exponent + 127) << 23) - (mantissa << 23);
    return {as<float>(step), as<float>((254 << 23) - step)};
}

// The number of the binade that `s` spaces, counted from the lowest of the format.
inline i32 binade(Spacing s, int min_exponent, int mantissa) {
    return (as<i32>(s.step) >> 23) - (min_exponent + 127 - mantissa);
}

// The bits of z >= 0 with an unbounded exponent: a subnormal z is normalised, and its exponent field is below 1.
inline i32 unbounded(float z) {
    i32 bits = as<i32>(z);
    i32 normalised = as<i32>(static_cast<float>(bits)) - (149 << 23);
    return bits > 0x7FFFFF ? bits : normalised;
}

template <class F>
inline float from_exponent(i32 exponent) {
    constexpr i32 lowest = F::S_MIN_EXPONENT - F::S_MANTISSA;
    i32 clamped = min(max(exponent, lowest), F::S_TOP);
    float normal = as<float>((clamped + 127) << 23), subnormal = as<float>(1 << min(max(clamped + 149, 0), 22));
    float scale = clamped < -126 ? subnormal : normal;
    if (F::S_MAX != pow2(F::S_TOP)) scale = exponent > F::S_TOP ? F::S_MAX : scale;
    return F::TO_ONE && exponent < lowest ? 1.0f : scale;
}

// The number to add to bits so that cutting off `dropped` low bits rounds by the rule.
template <class F>
inline i32 carry(i32 bits, int dropped, u32 noise) {
    const i32 below = static_cast<i32>((1u << dropped) - 1);
    if (F::S_TOWARD_POSITIVE) return below;
    if (F::S_DRAWS) return below - static_cast<i32>((noise >> 8) >> (24 - dropped));
    if (dropped == 23 && !F::S_TIES_EVEN) return 1 << 22;
    return (below >> 1) + (((bits >> dropped) - (dropped == 23 ? 127 + F::S_MIN_EXPONENT : 0)) & 1);
}

template <class F>
inline float to_format(float ideal, u32 noise) {
    ideal = ideal > F::S_MAX ? F::S_MAX : ideal;
    if (!F::S_HAS_ZERO) {
        i32 bits = unbounded(ideal);
        return from_exponent<F>(((bits + carry<F>(bits, 23, noise)) >> 23) - 127);
    }
    float scale;
    if (F::S_MIN_EXPONENT == -126) {
        constexpr int dropped = 23 - F::S_MANTISSA;
        i32 bits = as<i32>(ideal);
        scale = dropped == 0 ? ideal : as<float>((bits + carry<F>(bits, dropped, noise)) & -(1 << dropped));
    } else {
        Spacing s = spacing(ideal, F::S_MIN_EXPONENT, F::S_MANTISSA);
        float v = ideal * s.inverse, lower = std::floor(v);
        scale = s.step * (F::S_TOWARD_POSITIVE ? std::ceil(v)
                          : F::S_DRAWS ? lower + std::ceil(v - lower - uniform<24>(noise))
                                                              : std::nearbyint(v));
    }
    return F::TO_ONE ? (scale == 0 ? 1.0f : scale) : (scale < F::S_MIN ? F::S_MIN : scale);
}

// The stored scale of a block whose statistic has these bits; NaN where the statistic is not finite.
template <class F>
inline float block_scale(i32 z, u32 noise) {
    z &= ~SIGN;  // a technique may give a negative NaN: on x86 Inf/Inf is one
    float statistic = as<float>(min(z, INFINITE));  // NaN becomes Inf: additions to its bits would overflow
    float scale = F::SHIFT >= 0 ? from_exponent<F>(((unbounded(statistic) + F::SHIFT) >> 23) - (127 + F::EMAX))
                                : to_format<F>(F::ENCODE ? F::QMAX / statistic : statistic / F::QMAX, noise);
    return z < INFINITE ? scale : NOT_A_NUMBER;
}

// x / scale. A power of two has an exact fp32 reciprocal, so multiplying by it is the same; other scales need `/`.
template <class F>
inline float divide(float x, float scale, float reciprocal) {
    return F::S_MANTISSA == 0 ? x * reciprocal : x / scale;
}

template <class F>
inline float ratio(float x, float scale, float reciprocal) {
    return F::ENCODE ? x * scale : divide<F>(x, scale, reciprocal);
}

template <class F>
inline float dequantized(float q, float scale, float reciprocal) {
    return F::ENCODE ? divide<F>(q, scale, reciprocal) : q * scale;
}

}  // namespace

// Writes the scale of each statistic in z, by a rule without random bits.
template <class F>
void block_scales(const float* z, float* scale, i64 count, int threads) {
#pragma omp parallel for simd num_threads(threads) if (parallel : count > SERIAL)
    for (i64 i = 0; i < count; ++i) scale[i] = block_scale<F>(as<i32>(z[i]), 0);
}
