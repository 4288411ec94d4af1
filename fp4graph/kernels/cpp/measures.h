// Errors of rounded blocks, and sums of ratios and elements by which techniques correct scales.
//
// Sums are exact, as in numerics/exact.py: each summand is rounded to a multiple of a unit, and a double holds the sum.

#pragma once

#include "memory.h"
#include "rounding.h"

// Values [outer, lines, middle, length]: one block of `lines` by `length` elements for each outer and middle index.
// Neighbours along an axis lie `steps` elements apart. Without padding the matrices have `rows` by `columns` elements.
// Each `together` neighbouring blocks along `middle` share one sum.
struct BlockGrid {
    i64 outer, lines, middle, length, steps[4], rows, columns, together;
    i64 count() const { return outer * middle; }
    bool parallel() const { return count() * lines * length > SERIAL; }

    i64 start(i64 k) const { return k / middle * steps[0] + k % middle * steps[2]; }

    // The number, in the tensor without padding, of the element at offset i, which belongs to block k.
    u32 number(i64 k, i64 i) const {
        const i64 o = k / middle, all = (rows + lines - 1) / lines, within = i - start(k);
        const i64 line = lines == 1 ? 0 : within / steps[1], column = k % middle * length + within - line * steps[1];
        return static_cast<u32>((lines == 1 ? o : o / all * rows + o % all * lines + line) * columns + column);
    }

    // Calls visit(i, n) for each piece of block k: n contiguous elements from offset i on, at most PIECE. PIECE is the
    // length of every line, or is LANES.
    template <int PIECE, class Visit>
    void visit(i64 k, Visit visit) const {
        const i64 first = start(k);
        for (i64 line = 0; line < lines; ++line) {
            const i64 start = first + line * steps[1];
            if (PIECE == LANES)
                for (i64 i = 0; i < length; i += PIECE) visit(start + i, min(length - i, static_cast<i64>(PIECE)));
            else
                visit(start, static_cast<i64>(PIECE));
        }
    }
};

// An operand in memory. `read` widens and divides n <= N contiguous values. `divisor` is one number for all values, or
// null.
template <class T>
struct Operand {
    const T* data;
    float by;
    Operand(const T* data, const float* divisor) : data(data), by(divisor ? *divisor : 1.0f) {}

    template <int N>
    void read(i64 i, i64 n, float* x) const {
        if (n == N) widen<N>(data + i, x);
        else
            for (i64 j = 0; j < n; ++j) x[j] = widen(data[i + j]);
        if (by == 1) return;
#pragma omp simd
        for (i64 j = 0; j < n; ++j) x[j] /= by;
    }
};

// The format F with scales that may be any numbers, because techniques choose them: it divides without reciprocals.
template <class F>
struct AnyScale : F {
    static constexpr int S_MANTISSA = 23;
};

// divide_all and round_all are separate loops, because compilers vectorize no loop that divides and rounds.
template <class F>
inline void divide_all(const float* x, float* u, i64 n, float scale) {
    const float inverse = 1.0f / scale;
#pragma omp simd
    for (i64 j = 0; j < n; ++j) u[j] = ratio<F>(x[j], scale, inverse);
}

// The format F with elements rounded to nearest.
template <class F>
struct Nearest : F {
    static constexpr bool DRAWS = false;
};

// Rounds u to elements of G, stretched to the range of F. If G draws, element j has the random bits of the number
// index + j · step.
template <class F, class G>
inline void round_all(const float* u, float* q, i64 n, Key key = {}, u32 index = 0, u32 step = 1) {
    constexpr bool stretches = F::QMAX != G::QMAX;
#pragma omp simd
    for (i64 j = 0; j < n; ++j) {
        i32 place;
        const float stretched = stretches ? u[j] * G::QMAX / F::QMAX : u[j];
        const u32 bits = G::DRAWS ? key.bits(index + static_cast<u32>(j) * step) : 0;
        const float rounded = round_element<G>(stretched, bits, place);
        q[j] = stretches ? rounded * F::QMAX / G::QMAX : rounded;
    }
}

// Returns x[0] op x[1] op ... x[n - 1], in any order, for n <= N, and overwrites x. It folds halves onto each other,
// because compilers reduce a short loop one lane after another.
template <int N, class X, class Op>
inline X fold(X* x, i64 n, Op op) {
    if constexpr (N > 1 && N % 2 == 0) {
        if (n == N) {
#pragma omp simd
            for (int j = 0; j < N / 2; ++j) x[j] = op(x[j], x[j + N / 2]);
            return fold<N / 2>(x, N / 2, op);
        }
    }
    X all = x[0];
    for (i64 j = 1; j < n; ++j) all = op(all, x[j]);
    return all;
}

// Rounds x to a whole number, and limits it to `units`.
inline double whole(double x, double units) { return std::nearbyint(x > units ? units : x); }

enum Measure { MSE, MAE, AMAX };

// The error of a block by a measure of numerics/spec.py.
template <int M>
struct Errors {
    double units, above, sum = 0;
    i64 most = 0;  // the largest error's bits, which order numbers >= 0, with NaN above them

    // The unit of errors is 2 · `unit`, a power of two.
    Errors(double units, float unit) : units(units), above(1 / (2 * static_cast<double>(unit))) {}

    template <int N>
    void add(const float* x, const float* rounded, i64 n) {
        if (M == AMAX) {
            alignas(64) i64 bits[N];
#pragma omp simd
            for (i64 j = 0; j < n; ++j) bits[j] = as<i64>(error(x[j], rounded[j]));
            const i64 m = fold<N>(bits, n, [](i64 a, i64 b) { return a > b ? a : b; });
            most = most > m ? most : m;
        } else {
            alignas(64) double shares[N];
#pragma omp simd
            for (i64 j = 0; j < n; ++j) {
                const double e = error(x[j], rounded[j]);
                shares[j] = whole((M == MSE ? e * e : e) * units, units);
            }
            sum += fold<N>(shares, n, [](double a, double b) { return a + b; });
        }
    }
    double error(float x, float rounded) const {
        return std::fabs(static_cast<double>(rounded) - static_cast<double>(x)) * above;
    }
    double total() const { return M == AMAX ? as<double>(most) : sum * (1 / units); }
};

// Measures LANES blocks at once. Each block is one line, strided in memory. The first elements of neighbouring blocks
// are contiguous, as are the second elements, and so on. begin(lane, block number) starts a block; add takes the next
// element of all lanes; after all blocks that share a sum, end(lane, block number) stores the result of each.
template <class T, class Lanes>
void by_lanes(const Operand<T>& operand, const BlockGrid& grid, int threads, const Lanes& idle) {
    const i64 together = grid.together;
    const i64 tiles = (grid.outer + LANES - 1) / LANES, groups = (grid.middle + together - 1) / together;
#pragma omp parallel for num_threads(threads) if (grid.parallel())
    for (i64 t = 0; t < tiles * groups; ++t) {
        const i64 row = t / groups * LANES, first = t % groups * together, n = min(grid.outer - row, LANES);
        const i64 behind = min(first + together, grid.middle);
        Lanes lanes = idle;
        alignas(64) float line[LANES] = {};
        for (i64 m = first; m < behind; ++m) {
            for (i64 i = 0; i < n; ++i) lanes.begin(i, (row + i) * grid.middle + m);
            for (i64 j = 0; j < grid.length; ++j) {
                operand.template read<LANES>(row + m * grid.steps[2] + j * grid.steps[3], n, line);
                lanes.add(line);
            }
        }
        for (i64 m = first; m < behind; ++m)
            for (i64 i = 0; i < n; ++i) lanes.end(i, (row + i) * grid.middle + m);
    }
}

template <class F, int M>
struct LanesOfErrors {
    const float *scale, *unit;
    double* error;
    double units;
    float s[LANES], inverse[LANES];
    double above[LANES], sum[LANES];
    LanesOfErrors(const float* scale, const float* unit, double* error, double units)
        : scale(scale), unit(unit), error(error), units(units) {
        for (int i = 0; i < LANES; ++i) s[i] = inverse[i] = 1, above[i] = sum[i] = 0;
    }
    void begin(i64 i, i64 k) {
        s[i] = scale[k], inverse[i] = 1.0f / s[i], above[i] = 1 / (2 * static_cast<double>(unit[k]));
    }
    void add(const float* x) {
        alignas(64) float q[LANES];
#pragma omp simd
        for (int i = 0; i < LANES; ++i) {
            i32 place;
            q[i] = dequantized<F>(round_element<F>(ratio<F>(x[i], s[i], inverse[i]), 0, place), s[i], inverse[i]);
        }
#pragma omp simd
        for (int i = 0; i < LANES; ++i) {
            const double e = std::fabs(static_cast<double>(q[i]) - static_cast<double>(x[i])) * above[i];
            if (M == AMAX) {
                const i64 most = as<i64>(sum[i]), bits = as<i64>(e);  // the bits of NaN are above those of all numbers
                sum[i] = as<double>(most > bits ? most : bits);
            } else {
                sum[i] += whole((M == MSE ? e * e : e) * units, units);
            }
        }
    }
    void end(i64 i, i64 k) const { error[k] = M == AMAX ? sum[i] : sum[i] * (1 / units); }
};

// Writes the error of each block, rounded under `scale`.
template <class T, class F, int M>
void block_errors_across(const T* values, const float* divisor, const float* scale, const float* unit, double* error,
                         BlockGrid grid, double units, int threads) {
    by_lanes(Operand<T>(values, divisor), grid, threads, LanesOfErrors<F, M>(scale, unit, error, units));
}

template <class T, class F, int M, int PIECE>
void block_errors(const T* values, const float* divisor, const float* scale, const float* unit, double* error,
                  BlockGrid grid, double units, int threads) {
    const Operand<T> operand(values, divisor);
#pragma omp parallel for num_threads(threads) if (grid.parallel())
    for (i64 k = 0; k < grid.count(); ++k) {
        const float s = scale[k], inverse = 1.0f / s;
        Errors<M> errors(units, unit[k]);
        grid.visit<PIECE>(k, [&](i64 i, i64 n) {
            alignas(64) float x[PIECE], u[PIECE], q[PIECE];
            operand.template read<PIECE>(i, n, x);
            divide_all<F>(x, u, n, s);
            round_all<F, F>(u, q, n);
#pragma omp simd
            for (i64 j = 0; j < n; ++j) q[j] = dequantized<F>(q[j], s, inverse);
            errors.template add<PIECE>(x, q, n);
        });
        error[k] = errors.total();
    }
}

template <class F>
struct LanesOfMoments {
    const float* scale;
    double *squares, *products;
    double per, units;
    float s[LANES], inverse[LANES];
    double first[LANES], second[LANES];
    LanesOfMoments(const float* scale, double* squares, double* products, double largest, double units)
        : scale(scale), squares(squares), products(products), per(units / largest), units(units) {
        for (int i = 0; i < LANES; ++i) s[i] = inverse[i] = 1, first[i] = second[i] = 0;
    }
    void begin(i64 i, i64 k) { s[i] = scale[k], inverse[i] = 1.0f / s[i]; }
    void add(const float* x) {
        alignas(64) float u[LANES], q[LANES];
#pragma omp simd
        for (int i = 0; i < LANES; ++i) {
            i32 place;
            u[i] = ratio<F>(x[i], s[i], inverse[i]);
            q[i] = round_element<F>(u[i], 0, place);
        }
#pragma omp simd
        for (int i = 0; i < LANES; ++i) {
            const double wide = u[i];
            first[i] += whole(wide * wide * per, units);
            second[i] += whole(wide * static_cast<double>(q[i]) * per, units);
        }
    }
    void end(i64 i, i64 k) const { squares[k] = first[i] * (1 / units), products[k] = second[i] * (1 / units); }
};

// Writes Σ u² / largest and Σ u·q / largest over the group of each block. u are the ratios of its blocks, q the elements
// nearest to them, and `largest` a power of two.
template <class T, class F>
void group_moments_across(const T* values, const float* divisor, const float* scale, double* squares, double* products,
                          BlockGrid grid, double largest, double units, int threads) {
    const LanesOfMoments<F> lanes(scale, squares, products, largest, units);
    by_lanes(Operand<T>(values, divisor), grid, threads, lanes);
}

template <class T, class F, int PIECE>
void group_moments(const T* values, const float* divisor, const float* scale, double* squares, double* products,
                   BlockGrid grid, double largest, double units, int threads) {
    const Operand<T> operand(values, divisor);
    const double per = units / largest;
    const i64 together = grid.together, groups = (grid.middle + together - 1) / together;
#pragma omp parallel for num_threads(threads) if (grid.parallel())
    for (i64 g = 0; g < grid.outer * groups; ++g) {
        const i64 line = g / groups * grid.middle, begin = line + g % groups * together;
        const i64 end = min(begin + together, line + grid.middle);
        alignas(64) double first[PIECE] = {}, second[PIECE] = {};
        for (i64 k = begin; k < end; ++k)
            grid.visit<PIECE>(k, [&](i64 i, i64 n) {
                alignas(64) float u[PIECE], q[PIECE];
                operand.template read<PIECE>(i, n, u);
                divide_all<F>(u, u, n, scale[k]);
                round_all<F, F>(u, q, n);
#pragma omp simd
                for (i64 j = 0; j < n; ++j) {
                    const double wide = u[j];
                    first[j] += whole(wide * wide * per, units);
                    second[j] += whole(wide * static_cast<double>(q[j]) * per, units);
                }
            });
        const auto add = [](double x, double y) { return x + y; };
        const double u2 = fold<PIECE>(first, PIECE, add) * (1 / units), uq = fold<PIECE>(second, PIECE, add) * (1 / units);
        for (i64 k = begin; k < end; ++k) squares[k] = u2, products[k] = uq;
    }
}
