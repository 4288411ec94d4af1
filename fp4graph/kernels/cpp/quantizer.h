// The plain quantizer of one operand on a CPU, in one pass over the tensor: fp4graph.numerics in C++, bit for bit.
//
// fp4graph/kernels/abi.py compiles this file and its includes as one text, once per quantizer, and adds the numbers of
// the quantizer as a struct of constants F. The library serves every site and shape. A tensor is a batch of matrices
// [R, C] with blocks along C. Work is done in tiles that stay in the cache: read, find the maximum of each block,
// compute the scales, round, write. If C is contiguous, a tile is a strip of successive blocks. If R is contiguous, a
// tile has one block of each of many neighbouring lines. Every step is a loop over independent elements without
// branches, which compilers turn into vector instructions.

#pragma once

#include "across.h"
#include "along.h"
#include "call.h"

template <class F, class S, class T>
void quantize(const Call& call) {
    const Dense<S> source{static_cast<const S*>(call.x.data), call.x.strides, call.places};
    auto* scales = static_cast<typename F::Stored*>(call.scales);
    const Target<F, T> target{static_cast<T*>(call.y.data), call.y.strides, call.codes, scales};
    const auto run = source.strides.column != 1 || source.places.from ? across<F, T, Dense<S>>
                     : call.codes                                     ? along<F, S, T, true>
                                                                      : along<F, S, T, false>;
    run(source, target, call.given, call.rotation, call.draw.varying(), call.shape, call.threads);
}

// Quantizes by F the transpose of an operand that was packed in format P.
template <class P, class F, class T>
void requantize(const Call& call) {
    static_assert(LANES % P::BLOCK == 0);
    const auto* scales = static_cast<const typename P::Stored*>(call.scales);
    const i64 columns = call.places.from ? call.places.none : call.shape.columns;
    const PackedTranspose<P, T> source{call.codes, scales, call.shape.rows, columns, call.places};
    const Target<F, T> target{static_cast<T*>(call.y.data), call.y.strides, nullptr, nullptr};
    across<F, T>(source, target, BlockwiseParts{}, BlockRotation{}, call.draw.varying(), call.shape, call.threads);
}

// Dequantizes an operand that was packed in format P along its columns into y [batches, rows, columns], contiguous.
template <class P, class T>
void unpack(const Call& call) {
    const u8* codes = call.codes;
    const auto* scales = static_cast<const typename P::Stored*>(call.scales);
    T* y = static_cast<T*>(call.y.data);
    const Shape shape = call.shape;
    const int threads = call.threads;
    constexpr int several = P::BLOCK < LANES ? LANES / P::BLOCK : 1;  // the blocks that fill the registers
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
