// Random bits: numerics/noise.py and numerics/draw.py.

#pragma once

#include "basics.h"

namespace {

inline u32 lowbias32(u32 x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

struct Key {
    u32 a = 0, b = 0;
    u32 bits(u32 index) const { return lowbias32(lowbias32(index + a) ^ b); }
    Key absorb(u32 word) const {
        constexpr u32 golden = 0x9E3779B9u;
        return {bits(2 * word * golden + word), bits((2 * word + 1) * golden + word)};
    }
};

constexpr u32 BLOCK_SALT = 1u << 16;

template <int BITS>
inline float uniform(u32 bits) {
    float k = static_cast<float>(static_cast<i32>(bits >> (32 - BITS))) * pow2(-BITS);
    return BITS == 24 ? k : k + pow2(-BITS - 1);
}

// A Draw of numerics/draw.py: the site's key, the step tensor and `count` salts. A null key means no draw.
struct KeyParts {
    const i32 *key, *step, *salts;
    i64 count;

    Key varying() const {
        if (key == nullptr) return {};
        Key k{static_cast<u32>(key[0]), static_cast<u32>(key[1])};
        if (step != nullptr) k = k.absorb(static_cast<u32>(step[0])).absorb(static_cast<u32>(step[1]));
        for (i64 i = 0; i < count; ++i) k = k.absorb(static_cast<u32>(salts[i]));
        return k;
    }
};

}  // namespace

// gaussian of numerics/noise.py: one normal variate for each index below count, under the draw's key.
inline void gaussian(float* z, i64 count, KeyParts draw, int threads) {
    const Key key = draw.varying();
    Key keys[6];
    for (u32 salt = 0; salt < 6; ++salt) keys[salt] = key.absorb(salt);
#pragma omp parallel for simd num_threads(threads) if (parallel : count > SERIAL)
    for (i64 i = 0; i < count; ++i) {
        i32 total = -6 * 0xFFFF;
        for (int salt = 0; salt < 6; ++salt) {
            const u32 bits = keys[salt].bits(static_cast<u32>(i));
            total += static_cast<i32>((bits & 0xFFFF) + (bits >> 16));
        }
        z[i] = static_cast<float>(total) * pow2(-16);
    }
}
