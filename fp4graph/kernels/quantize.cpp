// The plain quantizer of one operand on a CPU, in one pass over the tensor: fp4graph.numerics in C++, bit for bit.
//
// fp4graph/kernels/cpu.py compiles this file once per quantizer, whose numbers it adds as a struct of constants F,
// and calls it for every site and shape. A tensor is a batch of matrices [R, C] with blocks along C. The work is done in
// tiles that stay in the cache: read, find each block's maximum, make the scales, round, write. Where C is contiguous a
// tile is a strip of blocks one after another; where R is, it is one block each of many neighbouring lines. Every step
// is a loop over independent elements without branches, which compilers turn into vector instructions.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using i32 = int32_t;
using i64 = int64_t;
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;

template <class To, class From>
inline To as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

constexpr i32 SIGN = INT32_MIN;
constexpr i32 INFINITE = 0x7F800000;
const float NOT_A_NUMBER = as<float>(0x7FC00000);

inline float pow2(i32 exponent) { return as<float>((exponent + 127) << 23); }
inline i32 max(i32 a, i32 b) { return a > b ? a : b; }
inline i32 min(i32 a, i32 b) { return a < b ? a : b; }
inline i64 min(i64 a, i64 b) { return a < b ? a : b; }

// ---------------------------------------------------------------------------------------------- numerics/noise.py

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

// ---------------------------------------------------------------------------------------------- numerics/scaling.py

struct Spacing {
    float step, inverse;
};

inline Spacing spacing(float u, int min_exponent, int mantissa) {
    i32 step = max(as<i32>(u) & INFINITE, (min_exponent + 127) << 23) - (mantissa << 23);
    return {as<float>(step), as<float>((254 << 23) - step)};
}

// How many binades above the lowest.
inline i32 binade(Spacing s, int min_exponent, int mantissa) {
    return (as<i32>(s.step) >> 23) - (min_exponent + 127 - mantissa);
}

// The bits of z >= 0 as if its exponent were unbounded: those of subnormals normalised.
inline i32 unbounded(float z) {
    i32 bits = as<i32>(z);
    i32 normalised = as<i32>(static_cast<float>(bits)) - (149 << 23);
    return bits > 0x7FFFFF ? bits : normalised;
}

template <class F>
inline float from_exponent(i32 exponent) {
    constexpr i32 lowest = F::S_MIN_EXPONENT - F::S_MANTISSA;
    i32 within = min(max(exponent, lowest), F::S_TOP);
    float normal = as<float>((within + 127) << 23), subnormal = as<float>(1 << min(max(within + 149, 0), 22));
    float scale = within < -126 ? subnormal : normal;
    if (F::S_MAX != pow2(F::S_TOP)) scale = exponent > F::S_TOP ? F::S_MAX : scale;
    return F::TO_ONE && exponent < lowest ? 1.0f : scale;
}

// What to add to bits so that cutting `dropped` low ones off rounds by the rule.
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
    z &= ~SIGN;  // of a NaN that a technique gives: Inf/Inf has one on x86
    float statistic = as<float>(min(z, INFINITE));  // sums of a NaN's bits would overflow
    float scale = F::SHIFT >= 0 ? from_exponent<F>(((unbounded(statistic) + F::SHIFT) >> 23) - (127 + F::EMAX))
                                : to_format<F>(F::ENCODE ? F::QMAX / statistic : statistic / F::QMAX, noise);
    return z < INFINITE ? scale : NOT_A_NUMBER;
}

// Powers of two divide exactly by their reciprocals, all of which are fp32 numbers; other scales do not.
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

// ---------------------------------------------------------------------------------------------- numerics/rounding.py

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
        // Numbers this large are the multiples of the step, so that the sum is rounded to one, ties to even ones. A
        // binade starts at an even code.
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

// ---------------------------------------------------------------------------------------------- numerics/packing.py

// A value's place among those of its format from zero up: binades count in steps of 2^mantissa.
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

// How a scale is stored: as a code, as bfloat16, or as it is.
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

// ---------------------------------------------------------------------------------------------- elements in memory

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

// Whether bfloat16 holds everything that elements and scales of F stand for, so that nothing is left to round.
template <class F>
constexpr bool exact_in_bf16() {
    return !F::ENCODE && F::MANTISSA + F::S_MANTISSA + 2 <= 8 &&
           F::MIN_EXPONENT - F::MANTISSA + F::S_MIN_EXPONENT - F::S_MANTISSA >= -133;
}

// A dequantized value.
template <class F>
inline void store(float x, float* to) { *to = x; }
template <class F>
inline void store(float x, bf16* to) {
    if (exact_in_bf16<F>()) to->bits = static_cast<u16>(as<u32>(x) >> 16);
    else narrow(x, to);
}

// The same for N neighbours. Sixteen at a time are converted as vectors by name: compilers count a loop's lanes by its
// narrowest type, of which a block of 16 does not fill the widest registers, and then make no vectors at all.
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

// N numbers of which nothing is left to round.
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

constexpr i64 LANES = 64;  // lines of a tile whose blocks lie across the contiguous axis

struct Strides {
    i64 batch, row, column;
    i64 at(i64 b, i64 r, i64 c) const { return b * batch + r * row + c * column; }
};

// Asks for `bytes` bytes that will be read soon, or WRITTEN. Tiles are read in bursts, between which the memory would
// have nothing to do.
template <bool WRITTEN>
inline void fetch(const void* from, i64 bytes) {
    const char* byte = static_cast<const char*>(from);
    for (i64 i = 0; i < bytes; i += 64) __builtin_prefetch(byte + i, WRITTEN);
}

// Where the columns of a matrix come from: from those of the same number, or from others, of which `none` is zeros.
struct Places {
    const i64* from = nullptr;
    i64 none = 0;
    i64 operator[](i64 column) const { return from ? from[column] : column; }
    bool empty(i64 column) const { return from && from[column] == none; }
    bool empty(i64 column, i64 count) const {
        for (i64 i = 0; i < count; ++i)
            if (!empty(column + i)) return false;
        return true;
    }
};

// A matrix [R, C] of a batch in memory. Columns may come from other places only where R is contiguous.
template <class T>
struct Dense {
    const T* data;
    Strides strides;
    Places places;

    // Asks for n elements of a column.
    void fetch_line(i64 batch, i64 row, i64 column, i64 n) const {
        if (places.empty(column)) return;
        fetch<false>(data + strides.at(batch, row, places[column]), n * sizeof(T));
    }

    // Line by line of the contiguous axis: `lines` lines of `n` elements from (row, column), `width` apart in the tile.
    void read(float* tile, i64 batch, i64 row, i64 column, bool columns_contiguous, i64 lines, i64 n, i64 width) const {
        const T* start = data + batch * strides.batch + row * strides.row + (columns_contiguous ? column : 0);
        for (i64 line = 0; line < lines; ++line) {
            if (!columns_contiguous && places.empty(column + line)) {
                for (i64 i = 0; i < n; ++i) tile[line * width + i] = 0;
                continue;
            }
            const T* from = start + (columns_contiguous ? line * strides.row : places[column + line] * strides.column);
            for (i64 i = 0; i < n; ++i) tile[line * width + i] = widen(from[i]);
        }
    }
};

// Two codes side by side as one number, so that pairs are packed and unpacked in vectors.
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

// The values of a format's codes of four bits.
template <class F>
struct Decoded {
    alignas(64) float values[16];
    Decoded() {
        for (int code = 0; code < 16; ++code) values[code] = decode<F>(code);
    }
};

// N packed blocks, one after another, as values of type T, widened.
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

// The transpose of what was packed in format F from type T: the [R, C] of a [C, R] whose blocks ran along R.
template <class F, class T>
struct PackedTranspose {
    const u8* codes;
    const typename F::Stored* scales;
    i64 rows, columns;  // R and C, before columns are taken from other places
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

// ---------------------------------------------------------------------------------------------- numerics/hadamard.py

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

// ---------------------------------------------------------------------------------------------- the quantizer

constexpr i64 STRIP = 64;  // blocks of a tile whose blocks lie along the contiguous axis
constexpr i64 SERIAL = 1 << 14;  // elements below which threads cost more than they save

// Of a batch of matrices those from number `first` on.
struct Shape {
    i64 batches, rows, columns, first;
};

// What techniques have made of blocks: numbers [B, G, r, ceil(C / BLOCK)], r neighbouring lines in a group, that may be
// broadcast along any axis, with a step of 0; null where nothing changes.
struct Blockwise {
    const float* data;
    i64 batch, group, line, block, lines;  // steps, and r
    explicit operator bool() const { return data != nullptr; }

    // Of `count` blocks from number `first` on, counted line by line of R lines with so many blocks each.
    void read(float* to, i64 first, i64 count, i64 R, i64 blocks) const {
        i64 line_number = first / blocks, b = first % blocks;
        for (i64 i = 0; i < count; ++line_number, b = 0) {
            const i64 row = line_number % R, n = min(count - i, blocks - b);
            const float* from = data + line_number / R * batch + row / lines * group + row % lines * line + b * block;
            for (i64 j = 0; j < n; ++j) to[i + j] = from[j * block];
            i += n;
        }
    }

    // Of the blocks number `b` of n neighbouring lines from `row` on; 1 for all further ones up to LANES.
    void read_across(float* to, i64 of, i64 row, i64 n, i64 b) const {
        const float* from = data + of * batch + b * block;
        i64 own = row / lines * group, within = row % lines;
        for (i64 i = 0; i < n; ++i) {
            to[i] = from[own + within * line];
            if (++within == lines) {
                own += group;
                within = 0;
            }
        }
        for (i64 i = n; i < LANES; ++i) to[i] = 1;
    }
};

struct BlockwiseParts {
    Blockwise divisor;    // of the values, before anything else
    Blockwise statistic;  // instead of the maximum of the values' magnitudes
    Blockwise scale;      // instead of the one that the statistic gives
    Blockwise factor;     // of the result
};

template <class F, class T>
struct Target {
    T* values;
    Strides strides;
    u8* codes;  // may be null; [batch, R, ceil(C / BLOCK), BLOCK] packed
    typename F::Stored* scales;
};

// Neighbouring blocks of one line: `count` of them, the `first` of the strip and those behind it.
struct Run {
    i64 batch, row, column, first, count;
};

// Calls visit(Run) for the blocks of a strip line by line: `count` of them from number `block` on.
template <class Visit>
inline void by_line(i64 block, i64 count, i64 rows, i64 blocks, i64 length, Visit visit) {
    i64 line = block / blocks, b = block % blocks;
    for (i64 i = 0; i < count; ++line, b = 0) {
        const i64 n = min(count - i, blocks - b);
        visit(Run{line / rows, line % rows, b * length, i, n});
        i += n;
    }
}

// Factors that are powers of two, as far from the ends of fp32 as elements times scales of F are: such a factor may be
// part of the scale, for nothing is rounded with either.
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

// Whether given scales are numbers of F's scale format or coarser ones, so that exact_in_bf16 holds with them.
template <class F>
inline bool fits(const float* scale, i64 count) {
    if (!exact_in_bf16<F>()) return false;
    constexpr i32 below = (1 << (23 - F::S_MANTISSA)) - 1, lowest = F::S_MIN_EXPONENT - F::S_MANTISSA + 127;
    i32 wrong = 0;
    for (i64 i = 0; i < count; ++i) {
        const i32 bits = as<i32>(scale[i]) & ~SIGN;
        wrong |= (bits & below) | (bits != 0 && (bits >> 23) < max(lowest, 1));
    }
    return !wrong;
}

// Blocks along C, and C contiguous.
template <class F, class S, class T, bool PACKS>
void along(const Dense<S>& source, const Target<F, T>& to, const BlockwiseParts& given, const Turn& turn, Key key,
           Shape shape, int threads) {
    constexpr int B = F::BLOCK;
    const i64 read = turn ? turn.columns : shape.columns;
    const i64 R = shape.rows, C = shape.columns, blocks = (C + B - 1) / B;
    const i64 before = shape.first * R * blocks, all = shape.batches * R * blocks;
    const i64 strips = (all - before + STRIP - 1) / STRIP;
    const Key block_key = key.absorb(BLOCK_SALT), element_key = key.absorb(0);
#pragma omp parallel for num_threads(threads) if ((shape.batches - shape.first) * R * C > SERIAL)
    for (i64 strip = 0; strip < strips; ++strip) {
        const i64 first = before + strip * STRIP, count = all - first < STRIP ? all - first : STRIP;
        alignas(64) float tile[STRIP * B], scale[STRIP], reciprocal[STRIP], divisor[STRIP], factor[STRIP];
        alignas(64) i32 z[STRIP], codes[PACKS ? STRIP * B : 1];
        if (given.divisor) given.divisor.read(divisor, first, count, R, blocks);
        if (given.factor) given.factor.read(factor, first, count, R, blocks);
        const bool reduces = !(given.statistic || given.scale);
        by_line(first, count, R, blocks, B, [&](const Run& run) {
            const S* from = source.data + source.strides.at(run.batch, run.row, run.column);
            const i64 n = read - run.column;
            for (i64 g = 0; g < run.count; ++g) {
                float* block = tile + (run.first + g) * B;
                if ((g + 1) * B <= n) {
                    widen<B>(from + g * B, block);
                } else {
#pragma omp simd
                    for (int j = 0; j < B; ++j) block[j] = 0;
                    for (i64 j = 0; j < n - g * B; ++j) block[j] = widen(from[g * B + j]);
                }
            }
        });
        if (turn) turn_blocks(tile, count * B, turn);
        for (i64 g = 0; g < count; ++g) {
            float* block = tile + g * B;
            if (given.divisor) {
                const float by = divisor[g];
                for (int j = 0; j < B; ++j) block[j] = block[j] / by;
            }
            if (!reduces) continue;
            i32 m = 0;
#pragma omp simd reduction(max : m)
            for (int j = 0; j < B; ++j) m = max(m, as<i32>(block[j]) & ~SIGN);
            z[g] = m;
        }
        if (given.statistic) {
            given.statistic.read(scale, first, count, R, blocks);
            for (i64 g = 0; g < count; ++g) z[g] = as<i32>(scale[g]);
        }
        if (given.scale) {
            given.scale.read(scale, first, count, R, blocks);
        } else {
            for (i64 g = 0; g < STRIP; ++g)
                scale[g] = block_scale<F>(z[g], F::S_DRAWS ? block_key.bits(static_cast<u32>(first + g)) : 0);
        }
        for (i64 g = 0; g < STRIP; ++g) reciprocal[g] = 1.0f / scale[g];
        const bool rounds = given.scale && !fits<F>(scale, count);
        const bool merged = given.factor && !rounds && merges<F>(factor, count), multiplies = given.factor && !merged;
        by_line(first, count, R, blocks, B, [&](const Run& run) {
            const S* from = source.data + source.strides.at(run.batch, run.row, run.column);
            T* out = to.values + to.strides.at(run.batch, run.row, run.column);
            const i64 n = C - run.column;
            const u32 start = static_cast<u32>((run.batch * R + run.row) * C + run.column);
            for (i64 g = 0; g < run.count; ++g) {
                // Of the next strip, which follows this one where lines lie side by side.
                fetch<false>(from + STRIP * B + g * B, B * sizeof(S));
                fetch<true>(out + STRIP * B + g * B, B * sizeof(T));
                const i64 own = run.first + g;
                const u32 index = start + static_cast<u32>(g * B);
                const float s = scale[own], inverse = reciprocal[own], back = merged ? s * factor[own] : s;
                float* block = tile + own * B;
                i32* code = codes + (PACKS ? own * B : 0);
                const i32 kept = s == s ? -1 : 0, instead = s == s ? 0 : F::NAN_CODE;
#pragma omp simd
                for (int j = 0; j < B; ++j) {
                    i32 place;
                    const float q = round_element<F>(ratio<F>(block[j], s, inverse), element_key.bits(index + j), place);
                    if (PACKS) code[j] = (encode<F>(q, place) & kept) | instead;
                    block[j] = dequantized<F>(q, back, inverse);
                }
                if (multiplies) {
                    const float times = factor[own];
                    for (int j = 0; j < B; ++j) block[j] *= times;
                }
                if ((g + 1) * B > n) {
                    for (i64 j = 0; j < n - g * B; ++j) narrow(block[j], out + g * B + j);
                } else if (multiplies || rounds) {
                    narrow<B>(block, out + g * B);
                } else {
                    store<F, B>(block, out + g * B);
                }
            }
        });
        if (PACKS) {
            pack<F>(codes, to.codes + first * packed_bytes<F>(), count * B);
            for (i64 g = 0; g < count; ++g) store_scale<F>(scale[g], to.scales + first + g);
        }
    }
}

// Blocks along C, and R contiguous. A source that is packed needs its blocks to fill lanes.
template <class F, class T, class Source>
void across(const Source& source, const Target<F, T>& to, const BlockwiseParts& given, const Turn& turn, Key key,
            Shape shape, int threads) {
    constexpr int B = F::BLOCK;
    const i64 columns = turn ? turn.columns : shape.columns;
    const i64 R = shape.rows, C = shape.columns, blocks = (C + B - 1) / B, groups = (R + LANES - 1) / LANES;
    const i64 tiles = shape.batches * blocks * groups;
    const Key block_key = key.absorb(BLOCK_SALT), element_key = key.absorb(0);
#pragma omp parallel for num_threads(threads) if ((shape.batches - shape.first) * R * C > SERIAL)
    for (i64 t = shape.first * blocks * groups; t < tiles; ++t) {
        const i64 batch = t / (blocks * groups), column = t / groups % blocks * B, row = t % groups * LANES;
        const i64 depth = C - column < B ? C - column : B, n = R - row < LANES ? R - row : LANES;
        const i64 given_depth = columns - column < B ? columns - column : B;
        alignas(64) float tile[B * LANES], scale[LANES], reciprocal[LANES];
        alignas(64) i32 z[LANES];
        if (!turn && source.places.empty(column, depth)) {  // zeros are quantized to zeros, whatever the noise
            for (i64 j = 0; j < depth; ++j)
                std::memset(to.values + (column + j) * to.strides.column + row, 0, static_cast<size_t>(n) * sizeof(T));
            continue;
        }
        if (n < LANES || (turn && given_depth < B))
            for (i64 i = 0; i < B * LANES; ++i) tile[i] = 0;
        source.read(tile, batch, row, column, false, given_depth, n == LANES ? LANES : n, LANES);
        if (turn) turn_across<B>(tile, turn);
        const i64 b = column / B;
        if (given.divisor) {
            alignas(64) float divisor[LANES];
            given.divisor.read_across(divisor, batch, row, n, b);
            for (i64 j = 0; j < depth; ++j)
                for (int i = 0; i < LANES; ++i) tile[j * LANES + i] = tile[j * LANES + i] / divisor[i];
        }
#pragma omp simd
        for (int i = 0; i < LANES; ++i) z[i] = 0;
        for (i64 j = 0; j < depth; ++j)
#pragma omp simd
            for (int i = 0; i < LANES; ++i) z[i] = max(z[i], as<i32>(tile[j * LANES + i]) & ~SIGN);
        if (given.statistic) {
            given.statistic.read_across(scale, batch, row, n, b);
            for (i64 i = 0; i < n; ++i) z[i] = as<i32>(scale[i]);
        }
        // The number of the block of the i-th line: blocks of neighbouring lines are `blocks` apart.
        const i64 block = (batch * R + row) * blocks + b;
#pragma omp simd
        for (int i = 0; i < LANES; ++i)
            scale[i] = block_scale<F>(z[i], F::S_DRAWS ? block_key.bits(static_cast<u32>(block + i * blocks)) : 0);
        if (given.scale) given.scale.read_across(scale, batch, row, n, b);
        for (int i = 0; i < LANES; ++i) reciprocal[i] = 1.0f / scale[i];
        const bool rounds = given.scale && !fits<F>(scale, n);
        alignas(64) float factor[LANES];
        if (given.factor) given.factor.read_across(factor, batch, row, n, b);
        const u32 stride = static_cast<u32>(C);
        for (i64 j = 0; j < depth; ++j) {
            const u32 index = static_cast<u32>((batch * R + row) * C + column + j);
            float* line = tile + j * LANES;
            if (row + 2 * LANES <= R && j < given_depth) {  // of the next tile
                source.fetch_line(batch, row + LANES, column + j, LANES);
                fetch<true>(to.values + to.strides.at(batch, row + LANES, column + j), LANES * sizeof(T));
            }
#pragma omp simd
            for (int i = 0; i < LANES; ++i) {
                const float u = ratio<F>(line[i], scale[i], reciprocal[i]);
                i32 place;
                const float q = round_element<F>(u, element_key.bits(index + static_cast<u32>(i) * stride), place);
                line[i] = dequantized<F>(q, scale[i], reciprocal[i]);
            }
            T* out = to.values + to.strides.at(batch, row, column + j);
            if (given.factor) {
                for (i64 i = 0; i < n; ++i) narrow(line[i] * factor[i], out + i);
            } else if (rounds) {
                for (i64 i = 0; i < n; ++i) narrow(line[i], out + i);
            } else if (n == LANES) {
#pragma omp simd
                for (int i = 0; i < LANES; ++i) store<F>(line[i], out + i);
            } else {
                for (i64 i = 0; i < n; ++i) store<F>(line[i], out + i);
            }
        }
    }
}

// Draw.varying of numerics/draw.py: the site's key with this forward's, then the salts.
inline Key derived(const i32* key, const i32* step, const i32* salts, i64 count) {
    if (key == nullptr) return {};
    Key k{static_cast<u32>(key[0]), static_cast<u32>(key[1])};
    if (step != nullptr) k = k.absorb(static_cast<u32>(step[0])).absorb(static_cast<u32>(step[1]));
    for (i64 i = 0; i < count; ++i) k = k.absorb(static_cast<u32>(salts[i]));
    return k;
}

}  // namespace

struct KeyParts {
    const i32 *key, *step, *salts;
    i64 count;
};

template <class F, class S, class T>
void quantize(const S* x, Strides from, Places places, T* y, Strides to, u8* codes, typename F::Stored* scales,
              BlockwiseParts given, Turn turn, KeyParts draw, Shape shape, int threads) {
    const Key key = derived(draw.key, draw.step, draw.salts, draw.count);
    const Dense<S> source{x, from, places};
    const Target<F, T> target{y, to, codes, scales};
    const auto run = from.column != 1 || places.from ? across<F, T, Dense<S>>
                     : codes                         ? along<F, S, T, true>
                                                     : along<F, S, T, false>;
    run(source, target, given, turn, key, shape, threads);
}

// F of the transpose of what was packed in format P.
template <class P, class F, class T>
void requantize(const u8* codes, const typename P::Stored* scales, Places places, T* y, Strides to, KeyParts draw,
                Shape shape, int threads) {
    static_assert(LANES % P::BLOCK == 0);
    const Key key = derived(draw.key, draw.step, draw.salts, draw.count);
    const PackedTranspose<P, T> source{codes, scales, shape.rows, places.from ? places.none : shape.columns, places};
    across<F, T>(source, Target<F, T>{y, to, nullptr, nullptr}, BlockwiseParts{}, Turn{}, key, shape, threads);
}

// y [batches, rows, columns], contiguous, of what was packed in format P along its columns.
template <class P, class T>
void unpack(const u8* codes, const typename P::Stored* scales, T* y, Shape shape, int threads) {
    constexpr int several = P::BLOCK < LANES ? LANES / P::BLOCK : 1;  // blocks at once, which fill registers
    const i64 blocks = (shape.columns + P::BLOCK - 1) / P::BLOCK, lines = shape.batches * shape.rows;
#pragma omp parallel for num_threads(threads) if (lines * shape.columns > SERIAL)
    for (i64 line = 0; line < lines; ++line) {
        T* to = y + line * shape.columns;
        i64 b = 0;
        for (; (b + several) * P::BLOCK <= shape.columns; b += several) {
            const i64 block = line * blocks + b;
            alignas(64) float values[several * P::BLOCK];
            unpack_blocks<P, T, several>(codes + block * packed_bytes<P>(), scales + block, values);
            cut<several * P::BLOCK>(values, to + b * P::BLOCK);
        }
        for (; b < blocks; ++b) {
            const i64 block = line * blocks + b, column = b * P::BLOCK;
            float values[P::BLOCK];
            unpack_blocks<P, T, 1>(codes + block * packed_bytes<P>(), scales + block, values);
            const i64 n = min(shape.columns - column, static_cast<i64>(P::BLOCK));
            for (i64 j = 0; j < n; ++j) narrow(values[j], to + column + j);
        }
    }
}

template <class F>
void block_scales(const float* z, float* scale, i64 count, int threads) {
#pragma omp parallel for simd num_threads(threads) if (parallel : count > SERIAL)
    for (i64 i = 0; i < count; ++i) scale[i] = block_scale<F>(as<i32>(z[i]), 0);
}

// Numbers whose order is that of x, which is not NaN.
inline u32 ordered(float x) {
    const u32 bits = as<u32>(x + 0.0f);  // of the two zeros one
    return bits ^ (static_cast<u32>(as<i32>(bits) >> 31) | 1u << 31);
}
inline float of_ordered(u32 place) { return as<float>(place >> 31 ? place & ~(1u << 31) : ~place); }

// The first bin with more than `place` elements in it and before; takes those before from `place`.
inline u32 bin_of(const u32* bins, i64& place) {
    u32 bin = 0;
    for (; place >= bins[bin]; ++bin) place -= bins[bin];
    return bin;
}

// The elements at `place` and at count - 1 - place of the ascending order: by the upper halves of their bits, then
// among those of the same upper half by the lower ones.
template <class T>
void order_statistics(const T* x, i64 count, i64 place, float* found) {
    std::vector<u32> upper(1 << 16, 0);
    for (i64 i = 0; i < count; ++i) ++upper[ordered(widen(x[i])) >> 16];
    i64 places[2] = {place, count - 1 - place};
    for (int side = 0; side < 2; ++side) {
        const u32 bin = bin_of(upper.data(), places[side]);
        std::vector<u32> lower(1 << 16, 0);
        for (i64 i = 0; i < count; ++i) {
            const u32 number = ordered(widen(x[i]));
            if (number >> 16 == bin) ++lower[number & 0xFFFF];
        }
        found[side] = of_ordered(bin << 16 | bin_of(lower.data(), places[side]));
    }
}

// mantissa of numerics/scaling.py: of z / divisor, rounded up to so many stored bits.
inline void mantissas(const float* z, float* y, i64 count, float divisor, int bits, int threads) {
    const i32 one = 127 << 23, below = (1 << (23 - bits)) - 1;
#pragma omp parallel for simd num_threads(threads) if (parallel : count > SERIAL)
    for (i64 i = 0; i < count; ++i) {
        const i32 quotient = as<i32>(z[i] / divisor), exponent = quotient >> 23;
        const i32 rounded = (((quotient & 0x7FFFFF) + below) & ~below) + one;
        y[i] = as<float>(exponent > 0 && exponent < 255 ? rounded : one);
    }
}

// The largest of each group of `length` neighbours in a line, for each of them: z and y [lines, blocks], z >= 0 or NaN.
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

// gaussian of numerics/noise.py: one normal variate for each index below count, under the draw's key.
inline void gaussian(float* z, i64 count, KeyParts draw, int threads) {
    const Key key = derived(draw.key, draw.step, draw.salts, draw.count);
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

// Takes the maxima of n numbers' magnitudes, as bits, with m.
template <class T>
inline void raise(i32* m, const T* from, i64 n) {
#pragma omp simd
    for (i64 i = 0; i < n; ++i) m[i] = max(m[i], as<i32>(widen(from[i])) & ~SIGN);
}

// The largest magnitude of each block of `lines` rows by `length` columns, into z [batches, ceil(rows / lines),
// ceil(columns / length)]; NaN above Inf above all. Both sides are at most 1024.
template <class T>
void maxima(const T* x, Strides from, float* z, Shape shape, i64 lines, i64 length, int threads) {
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
    // A tile is one block deep and, along the contiguous axis of n numbers, as wide as m holds, so that memory is read
    // in order; its lines are compared first.
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

// ---------------------------------------------------------------------------------------------- rotations alone

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
