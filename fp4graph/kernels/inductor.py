"""Options of Inductor under which the Triton code that it writes for a GPU gives the bits of eager mode."""

from __future__ import annotations

#: Options of ``torch.compile`` (``config_patches`` of ``compile_fx``) under which quantizers are bit-exact on CUDA.
#:
#: ``eager_numerics.division_rounding``: by default Triton divides by ``div.full.f32``, which is up to two ulps off, and
#: a ratio or scale next to a tie then rounds the other way. With it, ``div.rn.f32``, as in eager mode.
#:
#: ``eager_numerics.disable_ftz``: by default the functions of libdevice, here floor and ceil, flush subnormals to zero
#: (``cvt.rpi.ftz``), and stochastic rounding of what is tiny beside its block's scale loses its upper neighbour.
#:
#: ``emulate_precision_casts``: by default a cast to bf16 or fp16 that is followed by a cast back to fp32 in one kernel
#: is dropped, and what is quantized again is not what the GEMM was fed; and products may be contracted with sums
#: (``fma.rn.f32``), which rounds once where eager mode rounds twice. With it, neither.
EXACT: dict[str, bool] = {
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    "emulate_precision_casts": True,
}
