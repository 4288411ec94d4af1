// What rounding does to each block: its errors, the sums that make up for them, and choices between elements.
//
// Sums of shares are exact, as those of numerics/exact.py are: multiples of a unit whose sum a double holds.

#pragma once

#include "memory.h"
#include "rounding.h"

// Blocks of `lines` by `length` elements: values [outer, lines, middle, length], one number of each [outer, middle].
struct BlockGrid {
    i64 outer, lines, middle, length;
    i64 count() const { return outer * middle; }
    bool parallel() const { return count() * lines * length > SERIAL; }

    // Calls visit(i, n) for the elements i to i + n of block number k, at most PIECE at once; PIECE divides the length
    // of every line, or is LANES.
    template <int PIECE, class Visit>
    void visit(i64 k, Visit visit) const {
        const i64 first = (k / middle * lines * middle + k % middle) * length;
        for (i64 line = 0; line < lines; ++line) {
            const i64 start = first + line * middle * length;
            if (PIECE == LANES)
                for (i64 i = 0; i < length; i += PIECE) visit(start + i, min(length - i, static_cast<i64>(PIECE)));
            else
                visit(start, static_cast<i64>(PIECE));
        }
    }
};

// Loops of their own, without which compilers thread jumps through the rounding and vectorize nothing.
template <class F>
inline void divide_all(const float* x, float* u, i64 n, float scale) {
    const float inverse = 1.0f / scale;
#pragma omp simd
    for (i64 j = 0; j < n; ++j) u[j] = ratio<F>(x[j], scale, inverse);
}

// Elements of G, in the range of F.
template <class F, class G>
inline void round_all(const float* u, float* q, i64 n) {
    constexpr bool stretches = F::QMAX != G::QMAX;
#pragma omp simd
    for (i64 j = 0; j < n; ++j) {
        i32 place;
        const float rounded = round_element<G>(stretches ? u[j] * G::QMAX / F::QMAX : u[j], 0, place);
        q[j] = stretches ? rounded * F::QMAX / G::QMAX : rounded;
    }
}

// A number of units, at most so many.
inline double whole(double x, double units) { return std::nearbyint(x > units ? units : x); }

enum Measure { MSE, MAE, AMAX };

// The error of a block by a measure of numerics/spec.py.
template <int M>
struct Errors {
    double units, above, sum = 0;
    i64 most = 0;  // of bits, whose order is that of numbers >= 0, and NaN above them

    // Errors are in units of 2 · `unit`, a power of two.
    Errors(double units, float unit) : units(units), above(1 / (2 * static_cast<double>(unit))) {}

    void add(const float* x, const float* rounded, i64 n) {
        if (M == AMAX) {
            i64 m = 0;
#pragma omp simd reduction(max : m)
            for (i64 j = 0; j < n; ++j) {
                const i64 bits = as<i64>(error(x[j], rounded[j]));
                m = m > bits ? m : bits;
            }
            most = most > m ? most : m;
        } else {
            double s = 0;
#pragma omp simd reduction(+ : s)
            for (i64 j = 0; j < n; ++j) {
                const double e = error(x[j], rounded[j]);
                s += whole((M == MSE ? e * e : e) * units, units);
            }
            sum += s;
        }
    }
    double error(float x, float rounded) const {
        return std::fabs(static_cast<double>(rounded) - static_cast<double>(x)) * above;
    }
    double total() const { return M == AMAX ? as<double>(most) : sum * (1 / units); }
};

// The error of each block, rounded under `scale`.
template <class F, int M, int PIECE>
void block_errors(const float* values, const float* scale, const float* unit, double* error, BlockGrid grid,
                  double units, int threads) {
#pragma omp parallel for num_threads(threads) if (grid.parallel())
    for (i64 k = 0; k < grid.count(); ++k) {
        const float s = scale[k], inverse = 1.0f / s;
        Errors<M> errors(units, unit[k]);
        grid.visit<PIECE>(k, [&](i64 i, i64 n) {
            alignas(64) float u[PIECE], q[PIECE];
            divide_all<F>(values + i, u, n, s);
            round_all<F, F>(u, q, n);
#pragma omp simd
            for (i64 j = 0; j < n; ++j) q[j] = dequantized<F>(q[j], s, inverse);
            errors.add(values + i, q, n);
        });
        error[k] = errors.total();
    }
}

// Of the ratios u of each block and the elements q that they are rounded to: Σ u² and Σ u·q, over `largest`, a power of
// two.
template <class F, int PIECE>
void block_moments(const float* values, const float* scale, double* squares, double* products, BlockGrid grid,
                   double largest, double units, int threads) {
    const double per = units / largest;
#pragma omp parallel for num_threads(threads) if (grid.parallel())
    for (i64 k = 0; k < grid.count(); ++k) {
        double first = 0, second = 0;
        grid.visit<PIECE>(k, [&](i64 i, i64 n) {
            alignas(64) float u[PIECE], q[PIECE];
            divide_all<F>(values + i, u, n, scale[k]);
            round_all<F, F>(u, q, n);
            double a = 0, b = 0;
#pragma omp simd reduction(+ : a, b)
            for (i64 j = 0; j < n; ++j) {
                const double wide = u[j];
                a += whole(wide * wide * per, units);
                b += whole(wide * static_cast<double>(q[j]) * per, units);
            }
            first += a, second += b;
        });
        squares[k] = first * (1 / units), products[k] = second * (1 / units);
    }
}

// Ratios u of each block rounded to elements of F or of G, whose values are stretched to the maximum of F: to those of
// G where their error is smaller by more than a share of `equal`.
template <class F, class G, int M, int PIECE>
void choose_elements(const float* ratios, float* elements, BlockGrid grid, double equal, double units, int threads) {
#pragma omp parallel for num_threads(threads) if (grid.parallel())
    for (i64 k = 0; k < grid.count(); ++k) {
        i32 m = 0;
        grid.visit<PIECE>(k, [&](i64 i, i64 n) {
            i32 largest = 0;
#pragma omp simd reduction(max : largest)
            for (i64 j = 0; j < n; ++j) largest = max(largest, as<i32>(ratios[i + j]) & ~SIGN);
            m = max(m, largest);
        });
        const float unit = as<float>(max(m & INFINITE, 1 << 23));
        Errors<M> first(units, unit), second(units, unit);
        grid.visit<PIECE>(k, [&](i64 i, i64 n) {
            alignas(64) float q[PIECE];
            round_all<F, G>(ratios + i, q, n);
            second.add(ratios + i, q, n);
            round_all<F, F>(ratios + i, elements + i, n);
            first.add(ratios + i, elements + i, n);
        });
        if (second.total() < first.total() * (1 - equal))
            grid.visit<PIECE>(k, [&](i64 i, i64 n) { round_all<F, G>(ratios + i, elements + i, n); });
    }
}
