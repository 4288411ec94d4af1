// Numbers as bits, and the shapes and strides of the tensors that kernels read and write.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

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
inline i64 max(i64 a, i64 b) { return a > b ? a : b; }

constexpr i64 SERIAL = 1 << 14;  // up to this number of elements threads cost more time than they save

struct Strides {
    i64 batch, row, column;
    i64 at(i64 b, i64 r, i64 c) const { return b * batch + r * row + c * column; }
};

// A batch of matrices. A kernel processes the matrices from number `first` on.
struct Shape {
    i64 batches, rows, columns, first;
};

}  // namespace
