// The library of the functions that depend on no quantizer. fp4graph/kernels/abi.py lists their parameters.

#include "noise.h"
#include "rotated.h"
#include "statistics.h"

extern "C" {

void maxima_float(const Call& call, i64 lines, i64 length) { maxima<float>(call, lines, length); }
void maxima_bf16(const Call& call, i64 lines, i64 length) { maxima<bf16>(call, lines, length); }
void rotate_float(const Call& call, int back) { rotate<float>(call, back); }
void rotate_bf16(const Call& call, int back) { rotate<bf16>(call, back); }
void groups(const float* z, float* y, i64 lines, i64 blocks, i64 length, int threads) {
    group_maxima(z, y, lines, blocks, length, threads);
}
void fractions(const float* z, float* y, i64 count, float divisor, int bits, int threads) {
    mantissas(z, y, count, divisor, bits, threads);
}
void selected_float(const float* x, i64 count, i64 place, float* found, int threads) {
    order_statistics(x, count, place, found, threads);
}
void selected_bf16(const bf16* x, i64 count, i64 place, float* found, int threads) {
    order_statistics(x, count, place, found, threads);
}
void chosen(const float* score, i64 count, i64 wanted, bool* chosen, int threads) {
    largest(score, count, wanted, chosen, threads);
}
void means_float(const float* x, i64 rows, i64 columns, float* y, int threads) { means(x, rows, columns, y, threads); }
void means_bf16(const bf16* x, i64 rows, i64 columns, float* y, int threads) { means(x, rows, columns, y, threads); }
void normal(float* z, i64 count, KeyParts draw, int threads) { gaussian(z, count, draw, threads); }

}  // extern "C"
