// Numbers of blocks that techniques supply.

#pragma once

#include "memory.h"

namespace {

// Numbers [B, G, r, ceil(C / BLOCK)] that techniques supply, r neighbouring lines in a group. A step of 0 broadcasts
// along an axis; null data changes nothing.
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
    Blockwise stored;     // multiplies elements, which were rounded under the scale
};

}  // namespace
