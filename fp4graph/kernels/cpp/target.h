// The outputs of a quantizer, and tests for whether they have to be rounded.

#pragma once

#include "blockwise.h"
#include "packing.h"

namespace {

template <class F, class T>
struct Target {
    T* values;
    Strides strides;
    u8* codes;  // may be null; [batch, R, ceil(C / BLOCK), BLOCK] packed
    typename F::Stored* scales;
};

// True if each factor may be multiplied into its block's scale, because no product is rounded: factors are powers of
// two, and the exponents of factors and of F's values are far from the ends of fp32.
template <class F>
inline bool merges(const float* factor, i64 count) {
    constexpr int far = 40;
    if (F::ENCODE || !exact_in_bf16<F>() || F::S_TOP > far ||
        F::MIN_EXPONENT - F::MANTISSA + F::S_MIN_EXPONENT - F::S_MANTISSA < -far)
        return false;
    i32 wrong = 0;
    for (i64 i = 0; i < count; ++i) {
        const i32 bits = as<i32>(factor[i]), exponent = (bits >> 23) - 127;
        wrong |= (bits & 0x7FFFFF) | (exponent > far) | (exponent < -far);
    }
    return !wrong;
}

// True if F divides by reciprocals, because the numbers of its scale format are powers of two, and a scale is none.
template <class F>
inline bool divides_inexactly(const float* scale, i64 count) {
    i32 wrong = 0;
    for (i64 i = 0; i < count; ++i) wrong |= as<i32>(scale[i]) & 0x7FFFFF;
    return F::S_MANTISSA == 0 && wrong;
}

// True if the scales are numbers of F's scale format or of a coarser format, so that exact_in_bf16 holds for them.
template <class F>
inline bool fits(const float* scale, i64 count) {
    if (!exact_in_bf16<F>()) return false;
    constexpr i32 below = (1 << (23 - F::S_MANTISSA)) - 1, lowest = F::S_MIN_EXPONENT - F::S_MANTISSA + 127;
    i32 wrong = 0;
    for (i64 i = 0; i < count; ++i) {
        const i32 bits = as<i32>(scale[i]) & ~SIGN;
        const i32 exponent = bits >> 23;
        wrong |= (bits & below) | (bits != 0 && exponent < max(lowest, 1)) | (exponent > F::S_TOP + 127);
    }
    return !wrong;
}

}  // namespace
