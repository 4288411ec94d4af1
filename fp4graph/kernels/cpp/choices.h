// Choices of each block between two element formats or two scales.

#pragma once

#include "measures.h"

// The sums of Errors, computed in fp32 and without units. They take a fraction of the work, and suffice to compare
// errors that differ by more than the inaccuracy of fp32.
template <int M>
struct RoughErrors {
    float relative, absolute;

    // `relative` bounds the error of a sum in fp32: each of `count` summands is rounded at most three times, each
    // addition once, and `equal` of choose comes on top. `absolute` bounds that of an exact sum, whose summands are
    // rounded to multiples of 1 / units.
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
    // Returns whether the smaller of a and b is certainly the smaller exact error, by more than the share `equal`.
    // False for NaN, and for units whose squares may overflow or underflow fp32.
    bool tell(float a, float b, float unit) const {
        const float above = M == MSE ? 4 * unit * unit : 2 * unit;
        return (unit > pow2(-30)) & (unit < pow2(30)) &
               (std::fabs(a - b) > relative * (a + b) + absolute * above);
    }
    // Like tell, for values that may lie far above `unit` because a technique chose the statistic. Exact sums limit
    // each error to 2 · unit and fp32 sums do not, so fp32 sums are valid only below the limit.
    bool tell_limited(float a, float b, float unit) const {
        const float limit = M == MSE ? 3.9f * unit * unit : 1.9f * unit;
        return tell(a, b, unit) && (M == AMAX || (a < limit && b < limit));
    }
};

// The most elements of a line in the tiles of choose_across, and of a block that choose holds in a tile.
constexpr i64 LONGEST = 64;
constexpr i64 HELD = 256;

// Rounds the ratios u of each block to elements of F or of G, and dequantizes them. Elements of G are stretched to the
// maximum of F. A block takes G if its error under RTN is smaller by more than the share `equal`. Without `scale` the
// values are the ratios, and the result is the elements. `key` is read if F draws.
template <class T, class F, class G, int M, int PIECE>
void choose(const T* values, const float* divisor, const float* scale, const i32* key, float* result, BlockGrid grid,
            double equal, double units, int threads) {
    const Operand<T> operand(values, divisor);
    const Key bits = F::DRAWS ? Key{static_cast<u32>(key[0]), static_cast<u32>(key[1])}.absorb(0) : Key{};
    using Rough = RoughErrors<M>;
    const Rough rough(grid.lines * grid.length, units);
    const bool holds = grid.lines * grid.length <= HELD;
    constexpr i64 SIZE = PIECE > HELD ? PIECE : HELD;
#pragma omp parallel for num_threads(threads) if (grid.parallel())
    for (i64 k = 0; k < grid.count(); ++k) {
        const float s = scale ? scale[k] : 1.0f, inverse = 1.0f / s;
        alignas(64) float ratios[SIZE], firsts[SIZE], seconds[SIZE];
        // Calls visit(i, n, at) for each piece of a block. The ratios of the piece begin at `at` of the tile.
        const auto each = [&](bool known, auto visit) {
            i64 at = 0;
            grid.visit<PIECE>(k, [&](i64 i, i64 n) {
                if (!known) {
                    operand.template read<PIECE>(i, n, ratios + at);
                    divide_all<F>(ratios + at, ratios + at, n, s);
                }
                visit(i, n, at);
                at += holds ? n : 0;
            });
        };
        i32 m = 0;
        each(false, [&](i64, i64 n, i64 at) {
            alignas(64) i32 magnitudes[PIECE];
            std::memcpy(magnitudes, ratios + at, static_cast<size_t>(n) * sizeof(i32));
#pragma omp simd
            for (i64 j = 0; j < n; ++j) magnitudes[j] &= ~SIGN;
            m = max(m, fold<PIECE>(magnitudes, n, [](i32 a, i32 b) { return a > b ? a : b; }));
        });
        const float unit = as<float>(max(m & INFINITE, 1 << 23));
        float first = 0, second = 0;
        each(holds, [&](i64, i64 n, i64 at) {
            round_all<F, Nearest<F>>(ratios + at, firsts + at, n);
            round_all<F, Nearest<G>>(ratios + at, seconds + at, n);
            first = Rough::join(first, Rough::template of<PIECE>(ratios + at, firsts + at, n));
            second = Rough::join(second, Rough::template of<PIECE>(ratios + at, seconds + at, n));
        });
        bool other = second < first;
        if (!rough.tell(first, second, unit)) {
            Errors<M> exact_first(units, unit), exact_second(units, unit);
            each(holds, [&](i64, i64 n, i64 at) {
                if (!holds) {
                    round_all<F, Nearest<F>>(ratios + at, firsts + at, n);
                    round_all<F, Nearest<G>>(ratios + at, seconds + at, n);
                }
                exact_first.template add<PIECE>(ratios + at, firsts + at, n);
                exact_second.template add<PIECE>(ratios + at, seconds + at, n);
            });
            other = exact_second.total() < exact_first.total() * (1 - equal);
        }
        const i32 chosen = -static_cast<i32>(other);  // a branch would often be mispredicted
        each(holds, [&](i64 i, i64 n, i64 at) {
            float *p = firsts + at, *q = seconds + at;
            if (F::DRAWS || !holds) {
                round_all<F, F>(ratios + at, p, n, bits, grid.number(k, i));
                round_all<F, G>(ratios + at, q, n, bits, grid.number(k, i));
            }
#pragma omp simd
            for (i64 j = 0; j < n; ++j)
                p[j] = dequantized<F>(as<float>((as<i32>(q[j]) & chosen) | (as<i32>(p[j]) & ~chosen)), s, inverse);
            std::memcpy(result + i, p, static_cast<size_t>(n) * sizeof(float));
        });
    }
}

// Like choose, for blocks of one line each that are strided in memory. It takes LANES blocks at once, whose first
// elements are contiguous. It reads them into a tile, because lines whose distance is a power of two evict each other
// from the cache.
template <class T, class F, class G, int M>
void choose_across(const T* values, const float* divisor, const float* scale, const i32* key, float* result,
                   BlockGrid grid, double equal, double units, int threads) {
    const Operand<T> operand(values, divisor);
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
        alignas(64) float s[LANES], inverse[LANES], first[LANES] = {}, second[LANES] = {};
        alignas(64) i32 largest[LANES] = {}, chosen[LANES] = {};
        if (n < LANES) std::memset(u, 0, sizeof u);
        for (i64 i = 0; i < LANES; ++i) {
            s[i] = scale && i < n ? scale[(row + i) * grid.middle + m] : 1.0f;
            inverse[i] = 1.0f / s[i];
        }
        for (i64 j = 0; j < grid.length; ++j) {
            float *x = u + j * LANES, *p = a + j * LANES, *q = b + j * LANES;
            operand.template read<LANES>(at + j * grid.steps[3], n, x);
#pragma omp simd
            for (i64 i = 0; i < LANES; ++i) x[i] = ratio<F>(x[i], s[i], inverse[i]);
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
                p[i] = dequantized<F>(as<float>((as<i32>(q[i]) & chosen[i]) | (as<i32>(p[i]) & ~chosen[i])), s[i],
                                      inverse[i]);
            std::memcpy(result + at + j * grid.steps[3], p, static_cast<size_t>(n) * sizeof(float));
        }
    }
}

// Writes into `result` whether each block, rounded to nearest, has a smaller error under the second of two scales.
template <class T, class F, int M, int PIECE>
void errs_less(const T* values, const float* divisor, const float* scale, const float* other, const float* unit,
               bool* result, BlockGrid grid, double units, int threads) {
    const Operand<T> operand(values, divisor);
    using Rough = RoughErrors<M>;
    const Rough rough(grid.lines * grid.length, units);
#pragma omp parallel for num_threads(threads) if (grid.parallel())
    for (i64 k = 0; k < grid.count(); ++k) {
        const float scales[] = {scale[k], other[k]};
        // Calls visit(x, rounded, n, c) for each piece of the block, rounded under scale number c.
        const auto each = [&](auto visit) {
            grid.visit<PIECE>(k, [&](i64 i, i64 n) {
                alignas(64) float x[PIECE], u[PIECE], q[PIECE];
                operand.template read<PIECE>(i, n, x);
                for (int c = 0; c < 2; ++c) {
                    const float s = scales[c], inverse = 1.0f / s;
                    divide_all<F>(x, u, n, s);
                    round_all<F, F>(u, q, n);
#pragma omp simd
                    for (i64 j = 0; j < n; ++j) q[j] = dequantized<F>(q[j], s, inverse);
                    visit(x, q, n, c);
                }
            });
        };
        float errors[2] = {};
        each([&](const float* x, const float* q, i64 n, int c) {
            errors[c] = Rough::join(errors[c], Rough::template of<PIECE>(x, q, n));
        });
        result[k] = errors[1] < errors[0];
        if (rough.tell_limited(errors[0], errors[1], unit[k])) continue;
        Errors<M> exact[] = {{units, unit[k]}, {units, unit[k]}};
        each([&](const float* x, const float* q, i64 n, int c) { exact[c].template add<PIECE>(x, q, n); });
        result[k] = exact[1].total() < exact[0].total();
    }
}

// The lanes, for by_lanes, of errs_less on blocks of one line each that are strided in memory.
template <class T, class F, int M>
struct LanesOfTwoErrors {
    Operand<T> operand;
    BlockGrid grid;
    const float *scale, *other, *unit;
    bool* result;
    double units;
    RoughErrors<M> rough;
    float s[2][LANES], inverse[2][LANES], errors[2][LANES];
    LanesOfTwoErrors(const Operand<T>& operand, const BlockGrid& grid, const float* scale, const float* other,
                     const float* unit, bool* result, double units)
        : operand(operand), grid(grid), scale(scale), other(other), unit(unit), result(result), units(units),
          rough(grid.length, units) {
        for (int c = 0; c < 2; ++c)
            for (int i = 0; i < LANES; ++i) s[c][i] = inverse[c][i] = 1, errors[c][i] = 0;
    }
    void begin(i64 i, i64 k) {
        s[0][i] = scale[k], s[1][i] = other[k];
        for (int c = 0; c < 2; ++c) inverse[c][i] = 1.0f / s[c][i];
    }
    float rounded(float x, int c, i64 i) const {
        i32 place;
        return dequantized<F>(round_element<F>(ratio<F>(x, s[c][i], inverse[c][i]), 0, place), s[c][i], inverse[c][i]);
    }
    void add(const float* x) {
        for (int c = 0; c < 2; ++c)
#pragma omp simd
            for (int i = 0; i < LANES; ++i)
                errors[c][i] = RoughErrors<M>::join(errors[c][i], RoughErrors<M>::of(x[i], rounded(x[i], c, i)));
    }
    void end(i64 i, i64 k) const {
        result[k] = errors[1][i] < errors[0][i];
        if (rough.tell_limited(errors[0][i], errors[1][i], unit[k])) return;
        Errors<M> exact[] = {{units, unit[k]}, {units, unit[k]}};
        for (i64 j = 0; j < grid.length; ++j) {
            float x;
            operand.template read<1>(grid.start(k) + j * grid.steps[3], 1, &x);
            for (int c = 0; c < 2; ++c) {
                const float q = rounded(x, c, i);
                exact[c].template add<1>(&x, &q, 1);
            }
        }
        result[k] = exact[1].total() < exact[0].total();
    }
};

template <class T, class F, int M>
void errs_less_across(const T* values, const float* divisor, const float* scale, const float* other, const float* unit,
                      bool* result, BlockGrid grid, double units, int threads) {
    const Operand<T> operand(values, divisor);
    by_lanes(operand, grid, threads, LanesOfTwoErrors<T, F, M>(operand, grid, scale, other, unit, result, units));
}
