// Rounding to elements: numerics/rounding.py.

#pragma once

#include "scaling.h"

namespace {

template <class F>
inline float round_element(float u, u32 bits, i32& place) {
    const i32 sign = as<i32>(u) & SIGN;
    float a = as<float>(as<i32>(u) & ~SIGN);
    a = a > F::QMAX ? F::QMAX : a;
    const Spacing s = spacing(a, F::MIN_EXPONENT, F::MANTISSA);
    float q;
    if (F::DRAWS || (F::TIES_EVEN && F::MANTISSA == 0)) {
        const float v = a * s.inverse, lower = std::floor(v);
        const i32 odd = (binade(s, F::MIN_EXPONENT, 0) + static_cast<i32>(lower)) & 1;
        const bool up = F::DRAWS ? v - lower > uniform<F::RANDOM_BITS>(bits)
                                 : (v - lower > 0.5f) | ((v - lower == 0.5f) & odd);
        q = (lower + (up ? 1.0f : 0.0f)) * s.step;
    } else {
        // fp32 numbers as large as `large` are the multiples of the step, so the sum is rounded to a multiple, ties to
        // even. The first code of a binade is even.
        const float large = as<float>((as<i32>(s.step) + (23 << 23)) | 1 << 22);
        const float half = as<float>(as<i32>(s.step) - (1 << 23));
        const float w = F::TIES_UP ? as<float>(as<i32>(a) | sign) : a;
        q = (w + large) - large;
        if (!F::TIES_EVEN) q = w - q == half ? q + s.step : q;  // the difference is exact
    }
    q = as<float>(as<i32>(q) & ~SIGN);
    place = (binade(s, F::MIN_EXPONENT, F::MANTISSA) << F::MANTISSA) + static_cast<i32>(q * s.inverse);
    q = as<float>(as<i32>(q) | sign);
    return F::INTEGER && q == 0 ? 0.0f : q;
}

}  // namespace
