// Numbers that techniques give for blocks.

#pragma once

#include "memory.h"

namespace {

// Numbers [B, G, r, ceil(C / BLOCK)] that techniques give, for groups of r neighbouring lines. A step of 0 broadcasts
// along an axis. If data is null there are no numbers.
struct Blockwise {
    const float* data;
    i64 batch, group, line, block, lines;  // steps, and r
    explicit operator bool() const { return data != nullptr; }

    // Reads the numbers of `count` blocks from number `first` on. Matrices have R lines of `blocks` blocks.
    void read(float* to, i64 first, i64 count, i64 R, i64 blocks) const {
        i64 line_number = first / blocks, b = first % blocks;
        for (i64 i = 0; i < count; ++line_number, b = 0) {
            const i64 row = line_number % R, n = min(count - i, blocks - b);
            const float* from = data + line_number / R * batch + row / lines * group + row % lines * line + b * block;
            for (i64 j = 0; j < n; ++j) to[i + j] = from[j * block];
            i += n;
        }
    }

    // Reads the numbers of block `b` of n neighbouring lines from `row` on, and fills up to LANES with 1.
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
    Blockwise divisor;    // divides the values, before anything else
    Blockwise statistic;  // replaces the largest magnitude of the values
    Blockwise scale;      // replaces the scale that the statistic gives
    Blockwise factor;     // multiplies the result
    Blockwise stored;     // multiplies the elements instead of the scale under which they were rounded
};

}  // namespace
