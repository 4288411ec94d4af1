// Choices of blocks between two element formats.

#pragma once

#include "measures.h"

// The same errors in fp32, unscaled: a fraction of the work, and enough to tell errors apart that differ by more than
// fp32 may be wrong.
template <int M>
struct RoughErrors {
    float relative, absolute;

    // Each of `count` fp32 summands has at most three roundings, and each addition one; `equal` is one more share. The
    // exact sums round each summand to a multiple of 1 / units.
    RoughErrors(i64 count, double units)
        : relative(static_cast<float>(2 * count + 32) * pow2(-23)),
          absolute(2 * static_cast<float>(static_cast<double>(count) / units)) {}

    static float of(float x, float rounded) {
        const float e = std::fabs(rounded - x);
        return M == MSE ? e * e : e;
    }
    static float join(float a, float b) { return M == AMAX ? as<float>(max(as<i32>(a), as<i32>(b))) : a + b; }

    template <int N>
    static float of(const float* x, const float* rounded, i64 n) {
        alignas(64) float e[N];
#pragma omp simd
        for (i64 j = 0; j < n; ++j) e[j] = of(x[j], rounded[j]);
        return fold<N>(e, n, join);
    }
    // Whether the smaller number is certain to be the smaller error, by more than a share of `equal`; NaN never is.
    // Squares of units out of this range may leave that of fp32.
    bool tell(float a, float b, float unit) const {
        const float above = M == MSE ? 4 * unit * unit : 2 * unit;
        return (unit > pow2(-30)) & (unit < pow2(30)) &
               (std::fabs(a - b) > relative * (a + b) + absolute * above);
    }
};

// Ratios u of each block rounded to elements of F or of G, whose values are stretched to the maximum of F: to those of
// G where their error, rounded to nearest, is smaller by more than a share of `equal`. `key` is read where F draws.
template <class F, class G, int M, int PIECE>
void choose_elements(const float* ratios, const i32* key, float* elements, BlockGrid grid, double equal, double units,
                     int threads) {
    const Key bits = F::DRAWS ? Key{static_cast<u32>(key[0]), static_cast<u32>(key[1])}.absorb(0) : Key{};
    using Rough = RoughErrors<M>;
    const Rough rough(grid.lines * grid.length, units);
#pragma omp parallel for num_threads(threads) if (grid.parallel())
    for (i64 k = 0; k < grid.count(); ++k) {
        i32 m = 0;
        grid.visit<PIECE>(k, [&](i64 i, i64 n) {
            alignas(64) i32 magnitudes[PIECE];
            std::memcpy(magnitudes, ratios + i, static_cast<size_t>(n) * sizeof(i32));
#pragma omp simd
            for (i64 j = 0; j < n; ++j) magnitudes[j] &= ~SIGN;
            m = max(m, fold<PIECE>(magnitudes, n, [](i32 a, i32 b) { return a > b ? a : b; }));
        });
        const float unit = as<float>(max(m & INFINITE, 1 << 23));
        float first = 0, second = 0;
        alignas(64) float q[PIECE];
        grid.visit<PIECE>(k, [&](i64 i, i64 n) {
            round_all<F, Nearest<G>>(ratios + i, q, n);
            second = Rough::join(second, Rough::template of<PIECE>(ratios + i, q, n));
            round_all<F, Nearest<F>>(ratios + i, elements + i, n);
            first = Rough::join(first, Rough::template of<PIECE>(ratios + i, elements + i, n));
        });
        bool chosen = second < first;
        if (!rough.tell(first, second, unit)) {
            Errors<M> exact_first(units, unit), exact_second(units, unit);
            grid.visit<PIECE>(k, [&](i64 i, i64 n) {
                round_all<F, Nearest<G>>(ratios + i, q, n);
                exact_second.template add<PIECE>(ratios + i, q, n);
                exact_first.template add<PIECE>(ratios + i, elements + i, n);
            });
            chosen = exact_second.total() < exact_first.total() * (1 - equal);
        }
        if (grid.lines == 1 && grid.length <= PIECE) {  // q holds the block; a branch would be guessed wrongly
            grid.visit<PIECE>(k, [&](i64 i, i64 n) {
                if (F::DRAWS) {
                    round_all<F, G>(ratios + i, q, n, bits, grid.number(k, i));
                    round_all<F, F>(ratios + i, elements + i, n, bits, grid.number(k, i));
                }
                const i32 other = -static_cast<i32>(chosen);
#pragma omp simd
                for (i64 j = 0; j < n; ++j)
                    elements[i + j] = as<float>((as<i32>(q[j]) & other) | (as<i32>(elements[i + j]) & ~other));
            });
        } else if (chosen || F::DRAWS) {
            grid.visit<PIECE>(k, [&](i64 i, i64 n) {
                if (chosen) round_all<F, G>(ratios + i, elements + i, n, bits, grid.number(k, i));
                else round_all<F, F>(ratios + i, elements + i, n, bits, grid.number(k, i));
            });
        }
    }
}

// The same for blocks of one line each, strided in memory: LANES of them at once, whose first elements are contiguous.
// They are read into a tile, because lines that lie a power of two apart evict each other from the cache.
constexpr i64 LONGEST = 64;

template <class F, class G, int M>
void choose_elements_across(const float* ratios, const i32* key, float* elements, BlockGrid grid, double equal,
                            double units, int threads) {
    const Key bits = F::DRAWS ? Key{static_cast<u32>(key[0]), static_cast<u32>(key[1])}.absorb(0) : Key{};
    using Rough = RoughErrors<M>;
    const Rough rough(grid.length, units);
    const i64 tiles = (grid.outer + LANES - 1) / LANES;
#pragma omp parallel for num_threads(threads) if (grid.parallel())
    for (i64 t = 0; t < tiles * grid.middle; ++t) {
        const i64 row = t / grid.middle * LANES, m = t % grid.middle, n = min(grid.outer - row, LANES);
        const i64 at = row + m * grid.steps[2];
        const u32 number = grid.number(row * grid.middle + m, at), step = static_cast<u32>(grid.columns);
        alignas(64) float u[LONGEST * LANES], a[LONGEST * LANES], b[LONGEST * LANES];
        alignas(64) float first[LANES] = {}, second[LANES] = {};
        alignas(64) i32 largest[LANES] = {}, chosen[LANES] = {};
        if (n < LANES) std::memset(u, 0, sizeof u);
        for (i64 j = 0; j < grid.length; ++j) {
            float *x = u + j * LANES, *p = a + j * LANES, *q = b + j * LANES;
            const size_t length = static_cast<size_t>(n == LANES ? LANES : n) * sizeof(float);
            std::memcpy(x, ratios + at + j * grid.steps[3], length);
            round_all<F, Nearest<F>>(x, p, LANES);
            round_all<F, Nearest<G>>(x, q, LANES);
#pragma omp simd
            for (i64 i = 0; i < LANES; ++i) {
                first[i] = Rough::join(first[i], Rough::of(x[i], p[i]));
                second[i] = Rough::join(second[i], Rough::of(x[i], q[i]));
                largest[i] = max(largest[i], as<i32>(x[i]) & ~SIGN);
            }
        }
        for (i64 i = 0; i < n; ++i) {
            const float unit = as<float>(max(largest[i] & INFINITE, 1 << 23));
            bool other = second[i] < first[i];
            if (!rough.tell(first[i], second[i], unit)) {
                Errors<M> exact_first(units, unit), exact_second(units, unit);
                for (i64 k = i; k < grid.length * LANES; k += LANES) {
                    exact_first.template add<1>(u + k, a + k, 1);
                    exact_second.template add<1>(u + k, b + k, 1);
                }
                other = exact_second.total() < exact_first.total() * (1 - equal);
            }
            chosen[i] = -static_cast<i32>(other);
        }
        for (i64 j = 0; j < grid.length; ++j) {
            float *x = u + j * LANES, *p = a + j * LANES, *q = b + j * LANES;
            if (F::DRAWS) {
                round_all<F, F>(x, p, LANES, bits, number + static_cast<u32>(j), step);
                round_all<F, G>(x, q, LANES, bits, number + static_cast<u32>(j), step);
            }
#pragma omp simd
            for (i64 i = 0; i < LANES; ++i)
                p[i] = as<float>((as<i32>(q[i]) & chosen[i]) | (as<i32>(p[i]) & ~chosen[i]));
            std::memcpy(elements + at + j * grid.steps[3], p, static_cast<size_t>(n) * sizeof(float));
        }
    }
}
