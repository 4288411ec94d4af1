// The plain quantizer of one operand on a CPU, in one pass over the tensor: fp4graph.numerics in C++, bit for bit.
//
// fp4graph/kernels/cpu.py compiles this file and what it includes as one text, once per quantizer, whose numbers it adds
// as a struct of constants F. The library is called for every site and shape. A tensor is a batch of matrices [R, C] with blocks along C. The work is done in
// tiles that stay in the cache: read, find each block's maximum, make the scales, round, write. Where C is contiguous a
// tile is a strip of blocks one after another; where R is, it is one block each of many neighbouring lines. Every step
// is a loop over independent elements without branches, which compilers turn into vector instructions.

#include "across.h"
#include "along.h"
#include "statistics.h"

template <class F, class S, class T>
void quantize(const S* x, Strides from, Places places, T* y, Strides to, u8* codes, typename F::Stored* scales,
              BlockwiseParts given, Turn turn, KeyParts draw, Shape shape, int threads) {
    const Key key = derived(draw.key, draw.step, draw.salts, draw.count);
    const Dense<S> source{x, from, places};
    const Target<F, T> target{y, to, codes, scales};
    const auto run = from.column != 1 || places.from ? across<F, T, Dense<S>>
                     : codes                         ? along<F, S, T, true>
                                                     : along<F, S, T, false>;
    run(source, target, given, turn, key, shape, threads);
}

// F of the transpose of what was packed in format P.
template <class P, class F, class T>
void requantize(const u8* codes, const typename P::Stored* scales, Places places, T* y, Strides to, KeyParts draw,
                Shape shape, int threads) {
    static_assert(LANES % P::BLOCK == 0);
    const Key key = derived(draw.key, draw.step, draw.salts, draw.count);
    const PackedTranspose<P, T> source{codes, scales, shape.rows, places.from ? places.none : shape.columns, places};
    across<F, T>(source, Target<F, T>{y, to, nullptr, nullptr}, BlockwiseParts{}, Turn{}, key, shape, threads);
}
