// Matrices in memory, from which tiles are read.

#pragma once

#include "elements.h"

namespace {

constexpr i64 LANES = 64;  // lines of a tile, for blocks across the contiguous axis

// Prefetches `bytes` bytes that will soon be read, or written if WRITTEN. Tiles are read in bursts, between which the
// memory would otherwise be idle.
template <bool WRITTEN>
inline void fetch(const void* from, i64 bytes) {
    const char* byte = static_cast<const char*>(from);
    for (i64 i = 0; i < bytes; i += 64) __builtin_prefetch(byte + i, WRITTEN);
}

// The source of each column: the column of the same number, or of the number in `from`; `none` stands for zeros.
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

// A batch of matrices [R, C] in memory. `places` may list columns only if R is contiguous.
template <class T>
struct Dense {
    const T* data;
    Strides strides;
    Places places;

    // Prefetches n elements of a column.
    void fetch_line(i64 batch, i64 row, i64 column, i64 n) const {
        if (places.empty(column)) return;
        fetch<false>(data + strides.at(batch, row, places[column]), n * sizeof(T));
    }

    // Reads `lines` contiguous lines of `n` elements from (row, column) on, into lines `width` apart in the tile.
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

}  // namespace
