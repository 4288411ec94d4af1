"""Independent references, in NumPy float64, of the FP4 training recipes that are not TetraJet's or EL's own.

Each function of `REFERENCES` has the signature (x, w, dy, draw) -> (y, dx, dw) with x [T, K], w [N, K], dy [T, N],
y = x w^T [T, N], dx = dy w [T, K] and dw = dy^T x [N, K]. The six operands have blocks along the contraction axis of
their GEMM: fprop.input and fprop.weight along K, dgrad.grad_output and dgrad.weight along N, wgrad.grad_output and
wgrad.input along T. Arithmetic is exact up to float64; results are not rounded to any training dtype. `VARIANTS` holds
another reading of a recipe, under the policy's name, "@" and the reading. Inputs are finite.

Sources, by the short names used below. Code was read. Of the papers of Chmiel, Wang, Tseng and Quartet only the
abstracts were at hand; the rest of what "the paper" says is as DEF and the docs pages report it.
    Chmiel       Chmiel et al. 2025, "FP4 All the Way", arXiv 2505.19115; its code as copied in public repositories
    NVIDIA, TE   NVIDIA 2025, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149; NVIDIA/TransformerEngine
                 at d0067d0d: docs/features/low_precision_training/nvfp4/nvfp4.rst and
                 transformer_engine/pytorch/custom_recipes/reference_nvfp4.py
    Graphcore    MrHuff/ue5m3-fp4: docs/numerics.md, recipes/proposed_b16_d50.yaml, src/ue5m3_fp4/{formats,nn/linear}.py
    Wang, MS-AMP Wang et al. 2025, "Optimizing LLM Training Using FP4 Quantization", arXiv 2501.17116; Azure/MS-AMP at
                 9746ea85: msamp/operators/fp4_quantize/{fp4_quantize.py,quantize.cu}, msamp/megatron/layers.py
    Tseng        Tseng, Yu, Park 2025, "Training LLMs with MXFP4", arXiv 2502.20586; amazon-science/mxfp4-llm at
                 0cc57fec: patch_override_scripts/{microxcaling,Megatron-LM}.patch
    Quartet      Castro et al. 2025, "Quartet", arXiv 2505.14669; IST-DASLab/Quartet at 00ccd38e:
                 src/models/quantization/{backward.py,quantizers/mxfp4.py,quantizers/mxfp4_triton.py,__init__.py}
    DEC          "Decomposing MXFP4 quantization error for LLM RL" (abstract and review)
    DEF          the project's own definitions (docs/techniques.md, docs/combining.md, docs/reference, headers of
                 the policies)

Decisions, per policy, where sources are silent or disagree:
    all          Gradients pass straight through every quantizer unless a line below says otherwise. Random signs are
                 one vector of g per GEMM, the same in every block and in both operands (TE, Tseng's code, Quartet's
                 code): `draw.signs(gemm, g)` is asked for g signs and tiled. A contraction axis that g does not divide
                 is padded with zeros. A rotated operand asks for uniforms of the padded, rotated array's shape. The
                 tensor scale of a tensor of zeros is 1 (Graphcore).
    fp4-all-the-way
                 Decode scales (DEF: decode by default). Chmiel's code, as public copies have it, rounds the
                 ENCODE scale 6/amax to E4M3 and replaces 0 and Inf by 1. A block scale that underflows becomes 1 in
                 units of the tensor scale (the order of Chmiel's and Graphcore's code).
    fp4-all-the-way-qaf@phase
                 The backward reads what fprop multiplied with (docs page of the policy; DEF says "backward
                 BF16").
    nvfp4-te     The tensor amax of a wgrad operand is that of the rotated tensor (TE: global_amax_col is computed from
                 the transformed transpose). Block scales that underflow become the smallest subnormal. TE stores the
                 scale 0, with which the block decodes to zeros; DEF has no such rule. A scale underflows if the amax of
                 its block is 4.6e5 times smaller than that of the tensor. W has one set of 16x16 blocks for fprop and
                 dgrad.
    ue5m3-d50    The magnitude goes up where fraction > uniform. Graphcore's rule, fraction + (2r + 1)/512 >= 1, is the
                 same law, except where the fraction equals a midpoint exactly. dY has one held tensor amax for both
                 backward GEMMs; without a rotation it is the amax of dY in both. The target of 2048 that Graphcore's
                 yaml gives some layers of one model is left out.
    wang-dge     Quantiles are order statistics of all T*K elements, the places floor((1-a)n) and floor(a n) of the
                 ascending order (MS-AMP's tensor-wise branch; DEF names a quantile and no interpolation).
                 MS-AMP's shipped layer takes quantiles per token, and its weight scale along dim 0 of an [out, in]
                 weight, which is one scale per input channel; the docs page of the policy says per output channel.
                 The residual multiplies the quantized weight, because MS-AMP adds it to the quantized activation before
                 the GEMM (MS-AMP's shipped layers leave it out). Ties go to even (DEF, default); MS-AMP's kernel sends
                 them up. abs(u) is limited to 6, its value in exact arithmetic.
    mxfp4-rht-sr No decision: code and DEF agree. Each operand is divided by 3/4, which gives the paper's factor 16/9.
    quartet      Forward scales are OCP's, rounded down (docs page of the policy; no paper text at hand). The paper's
                 scales, as the page says, minimize the squared error of Gaussian data (QuEST). The code's scales are
                 2^floor(log2(2.92247856/6 * std)): VARIANTS["quartet@quest"]. Their floor defeats the purpose: over all
                 sigma the squared error is 2.24% of the signal's with the code's scales, 1.34% with OCP's floor, 1.34%
                 with QuEST's exponent rounded to nearest, 1.24% with QuEST's scale unrounded. W and X of the backward
                 are rotated back before they are requantized (DEF); the code leaves them in the rotated basis of K. An
                 element is masked where it lies outside +-6 (DEF); the code also masks abs(u) = 6. Ties go to even (the
                 code sends them toward zero). Signs come before H (DEF calls the code's order a defect).
    mxfp4-rl     All definitions are the project's (docs/reference/techniques): the paper prints none. Scales are OCP's
                 decode floor. Fallback wraps the whole quantizer with its macro-block factor, and the second pass has
                 macro-block factors of its own; noise is added once, to the sum (docs/combining.md, "Order"). Blocks
                 are counted and compared in row-major order, and ceil(n/10) of them are chosen even where they lose
                 nothing. The noise is that of stage 0, with sigma_start.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from tests.recipes.arithmetic import (
    ELEMENTS,
    Block,
    Draw,
    Reference,
    Result,
    block_amax,
    block_ids,
    block_scales,
    padded_length,
    quantize,
    rotate,
    round_nearest,
    round_stochastic,
)

QMAX = 6.0


def _signs(draw: Draw, gemm: str, length: int, g: int) -> np.ndarray:
    """Returns the diagonal of S [padded length]: g signs, the same in every block (TE, Tseng, Quartet)."""
    return np.tile(draw.signs(gemm, g), padded_length(length, g) // g)


def rotate_pair(a: np.ndarray, b: np.ndarray, gemm: str, g: int, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
    """Returns both operands of a backward GEMM, rotated by HS along axis 0 of b and the same axis of a.

    dgrad: a = dY [T, N], b = W [N, K], the axis is N. wgrad: a = dY [T, N], b = X [T, K], the axis is T. S and H are
    orthonormal, so (a S H)(H S b) = a b (Tseng's Megatron-LM.patch, TE nvfp4.rst: H = S_d H_d / sqrt d, signs first).
    """
    signs = _signs(draw, gemm, b.shape[0], g)
    return rotate(a, 1 if gemm == "dgrad" else 0, g, signs), rotate(b, 0, g, signs)


def rotated_backward(
    q: Callable[[np.ndarray, int, str], np.ndarray], x: np.ndarray, w: np.ndarray, dy: np.ndarray, g: int, draw: Draw
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (dx, dw) of operands rotated in blocks of g, then quantized by q(operand, contraction axis, its name).

    dx = q(dY S H) q(H S W), dw = q(H S dY)^T q(H S X), each GEMM with its own S.
    """
    dy_n, w_n = rotate_pair(dy, w, "dgrad", g, draw)
    dy_t, x_t = rotate_pair(dy, x, "wgrad", g, draw)
    dx = q(dy_n, 1, "dgrad.grad_output") @ q(w_n, 0, "dgrad.weight")
    return dx, q(dy_t, 0, "wgrad.grad_output").T @ q(x_t, 0, "wgrad.input")


def stochastically(q: Callable[..., np.ndarray], draw: Draw) -> Callable[[np.ndarray, int, str], np.ndarray]:
    """Returns the quantizer of `rotated_backward` that gives q(operand, axis, uniform) the uniforms of the operand."""
    return lambda a, axis, name: q(a, axis, draw.uniform(name, a.shape))


# NVFP4 and UE5M3 with a tensor scale -----------------------------------------------------------------------------


def gamma_of(a: np.ndarray, target: float) -> float:
    """Returns gamma = amax/(6 * target), under which the largest block scale is the target (TE nvfp4.rst: s_global)."""
    amax = float(np.max(np.abs(a)))
    return amax / (QMAX * target) if amax > 0 else 1.0


def _fp4_all_the_way_quantize(a: np.ndarray, axis: int, uniform: np.ndarray | None = None) -> np.ndarray:
    """Returns NVFP4 with gamma = amax/(6 * 448 * 0.5), blocks of 16, E4M3 scales to nearest even, zero to one.

    Source: EL 3.1 (the 0.5 and the zero rule, both credited to Chmiel); DEF (gamma = amax/1344).
    """
    gamma = gamma_of(a, 448 * 0.5)
    options = {"block": 16, "fmt": "e4m3", "rule": "nearest_even", "zero": "to_one"}
    return quantize(a, axis, uniform=uniform, tensor_scale=gamma, **options)


def fp4_all_the_way(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of Chmiel: NVFP4 in three GEMMs, stochastic dY in both backward GEMMs and X in wgrad.

    y = Q(X) Q(W)^T, dx = SR(dY) Q(W), dw = SR(dY)^T SR(X), each operand quantized from the original along the
    contraction axis of its GEMM. Source: Chmiel's abstract (stochastic in the backward and update passes, nearest in
    the forward); DEF (`backward` = dY in dgrad and wgrad, X in wgrad; W in dgrad to nearest).
    """

    def q(name: str, a: np.ndarray, axis: int, stochastic: bool = False) -> np.ndarray:
        return _fp4_all_the_way_quantize(a, axis, draw.uniform(name, a.shape) if stochastic else None)

    y = q("fprop.input", x, 1) @ q("fprop.weight", w, 1).T
    dx = q("dgrad.grad_output", dy, 1, True) @ q("dgrad.weight", w, 0)
    dw = q("wgrad.grad_output", dy, 0, True).T @ q("wgrad.input", x, 0, True)
    return y, dx, dw


def fp4_all_the_way_qaf_phase(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of Chmiel's last phase (QAF): the same forward, an exact backward.

    y = Q(X) Q(W)^T, dx = dY Q(W), dw = dY^T Q(X). Source: DEF (forward FP4, backward BF16); only
    docs/reference/policies/fp4-all-the-way-qaf.md says that the backward reads the operands that fprop multiplied.
    """
    xq, wq = _fp4_all_the_way_quantize(x, 1), _fp4_all_the_way_quantize(w, 1)
    return xq @ wq.T, dy @ wq, dy.T @ xq


def with_square_weights(
    q: Callable[..., np.ndarray], x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw
) -> Result:
    """Returns (y, dx, dw) of a quantizer q(a, axis, block, uniform) in the scheme of NVIDIA's recipe.

    W in one set of 16x16 blocks for fprop and dgrad, X and dY in blocks of 1x16, dY stochastic, both operands of wgrad
    rotated along T in blocks of 16.
    """
    wq = q(w, 1, (16, 16))
    y = q(x, 1, 16) @ wq.T
    dx = q(dy, 1, 16, draw.uniform("dgrad.grad_output", dy.shape)) @ wq
    rotated_dy, rotated_x = rotate_pair(dy, x, "wgrad", 16, draw)
    dw = q(rotated_dy, 0, 16, draw.uniform("wgrad.grad_output", rotated_dy.shape)).T @ q(rotated_x, 0, 16)
    return y, dx, dw


def nvfp4_te(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of NVIDIA's recipe.

    value = code * S_b / S_enc with S_enc = 448 * 6/amax(tensor) and S_b = E4M3(amax_b/6 * S_enc). X and dY in blocks
    of 1x16, W in one set of 16x16 blocks for fprop and dgrad; dY stochastic; both operands of wgrad rotated along T in
    blocks of 16 (signs, then H). A rotated operand has the tensor amax of the rotated tensor. Source: TE (nvfp4.rst;
    NVFP4QuantizerRef._quantize: global_amax_col = max abs of the rotated transpose; nvfp4_ref_rht_2d_factory: weights
    are not rotated); DEF.
    """

    def q(a: np.ndarray, axis: int, block: Block, uniform: np.ndarray | None = None) -> np.ndarray:
        options = {"block": block, "fmt": "e4m3", "rule": "nearest_even", "zero": "nearest_subnormal"}
        return quantize(a, axis, uniform=uniform, tensor_scale=gamma_of(a, 448), **options)

    return with_square_weights(q, x, w, dy, draw)


def ue5m3_d50(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of Graphcore's recipe at a step that refreshes the held tensor scales, such as the first.

    As `nvfp4_te` with UE5M3 scales that end at 61440 and a tensor scale that puts the largest at 448, zero to one, no
    rotation, and dY stochastic with 8 bits in dgrad and wgrad. Source: Graphcore (numerics.md, recipe yaml,
    _UE5M3LinearFunction: one weight reference and 16x16 blocks in fprop and dgrad, X of wgrad from the saved original
    along T); DEF.
    """

    def q(a: np.ndarray, axis: int, block: Block, uniform: np.ndarray | None = None) -> np.ndarray:
        options = {"block": block, "fmt": "ue5m3_61440", "rule": "nearest_even", "zero": "to_one"}
        return quantize(a, axis, uniform=uniform, tensor_scale=gamma_of(a, 448), **options)

    wq = q(w, 1, (16, 16))
    y = q(x, 1, 16) @ wq.T
    dx = q(dy, 1, 16, draw.uniform("dgrad.grad_output", dy.shape, bits=8)) @ wq
    dw = q(dy, 0, 16, draw.uniform("wgrad.grad_output", dy.shape, bits=8)).T @ q(x, 0, 16)
    return y, dx, dw


# Wang et al. -----------------------------------------------------------------------------------------------------


def dge_slope(u: np.ndarray, k: float = 5.0, cap: float = 3.0) -> np.ndarray:
    """Returns Wang's differentiable gradient estimator at u = w/scale (any shape), for E2M1.

    min((1/k) * |2(u - lo)/delta - 1|^(1/k - 1), cap), lo and lo + delta being the element values around u. Source:
    DEF (`step_gradient`, `dge`), MS-AMP quantize.cu (power_derivative, power_clamp_max). At an element value
    both intervals give 1/k.
    """
    table = ELEMENTS["e2m1"]
    u = np.clip(u, table[0], table[-1])
    index = np.clip(np.searchsorted(table, u, side="right") - 1, 0, len(table) - 2)
    low, delta = table[index], table[index + 1] - table[index]
    distance = np.abs(2 * (u - low) / delta - 1)
    with np.errstate(divide="ignore"):
        return np.minimum(distance ** (1 / k - 1) / k, cap)


def outlier_thresholds(x: np.ndarray, percent: int = 99) -> tuple[float, float]:
    """Returns the elements of x at places floor((1 - a)n) and floor(a n) of the ascending order, a = percent/100.

    Source: MS-AMP _apply_quantile_clipping, its tensor-wise branch. (The docs page of outlier_clamp takes the place
    n - 1 - floor((1 - a)n) at the upper end. The two places differ only where 100 divides n.)
    """
    ordered = np.sort(x, axis=None)
    n = ordered.size
    return float(ordered[(100 - percent) * n // 100]), float(ordered[min(percent * n // 100, n - 1)])


def wang_dge(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of Wang.

    X_c = clamp(X, x_low, x_high), dX = X - X_c, y = (Q(X_c) + dX) Q(W)^T with one scale amax/6 in FP32 per token of X
    and per output channel of W; dx = dY Q(W); dw = (dY^T (Q(X_c) + dX)) * DGE(w/scale). The residual multiplies the
    quantized weight, as in MS-AMP (residual_compensation adds it to the quantized activation). Source: DEF, MS-AMP.
    """
    options = {"block": "row", "fmt": "fp32", "rule": "nearest_even"}
    low, high = outlier_thresholds(x)
    clamped = np.clip(x, low, high)
    xq = quantize(clamped, 1, **options) + (x - clamped)
    wq = quantize(w, 1, **options)
    scale = block_scales(block_amax(w, 1, "row"), fmt="fp32", rule="nearest_even")
    return xq @ wq.T, dy @ wq, (dy.T @ xq) * dge_slope(w / scale)


# MXFP4 with a rotated, stochastic backward -----------------------------------------------------------------------


def guarded_stochastic(a: np.ndarray, axis: int, uniform: np.ndarray, guard: float = 0.75) -> np.ndarray:
    """Returns (S/guard) SR(guard * a/S) in blocks of 32, S = 2^(floor(log2 amax) - 2) being the scale of a itself.

    Ratios a/S lie below 8, so guard * a/S lies below 6 and nothing is clipped: the expectation is a. A product of two
    such operands carries the paper's factor (4/3)^2 = 16/9. Source: Tseng (microxcaling.patch, `dither_scale`);
    Quartet (mxfp4_triton.py: the same with quest=False); DEF (`range_guard`).
    """
    scale = block_scales(block_amax(a, axis, 32), fmt="e8m0", rule="floor")
    return scale / guard * round_stochastic(guard * a / scale, "e2m1", uniform)


def mxfp4_rht_sr(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of Tseng: an exact forward, both backward GEMMs rotated in blocks of 64 and stochastic.

    y = X W^T, dx = G(dY S H) G(H S W), dw = G(H S dY)^T G(H S X) with G `guarded_stochastic` and the signs of each GEMM
    its own. Source: Tseng (Megatron-LM.patch, mode 3: RHT + scaled SR, a new sign vector per GEMM, originals).
    """
    return x @ w.T, *rotated_backward(stochastically(guarded_stochastic, draw), x, w, dy, 64, draw)


def quest_scales(a: np.ndarray) -> np.ndarray:
    """Returns QuEST's E8M0 scale of each element's group of 32 along axis 1 of a [I, 32 m], in the shape of a.

    S = 2^floor(log2(2.92247856/6 * std + 1e-8)), std the group's standard deviation about its mean (divided by 32).
    Source: Quartet (quantizers/mxfp4.py, QuestMXFP4QuantizerFn; mxfp4_triton.py, quest=True).
    """
    groups = a.reshape(a.shape[0], -1, 32)
    ideal = 2.92247856 / 6.0 * groups.std(axis=-1) + 1e-8
    scale = np.ldexp(1.0, np.clip(np.frexp(ideal)[1] - 1, -127, 127))
    return np.repeat(scale, 32, axis=1)


def _quartet_forward(a: np.ndarray, scales: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns a [I, K], rotated by H of 32 along K and quantized to nearest, and its clip mask: two of [I, padded K].

    The mask is 1 where abs(rotated a) <= 6 S. `scales` is "quest" or "floor" (OCP's, of the rotated block's amax).
    """
    rotated = rotate(a, 1, 32)
    if scales == "quest":
        scale = quest_scales(rotated)
    else:
        scale = block_scales(block_amax(rotated, 1, 32), fmt="e8m0", rule="floor")
    ratio = rotated / scale
    return scale * round_nearest(ratio, "e2m1"), np.abs(ratio) <= QMAX


def quartet(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw, *, scales: str = "floor") -> Result:
    """Returns (y, dx, dw) of Quartet.

    Forward: (X_h, M_x) = Q(X H), (W_h, M_w) = Q(W H) along K, y = X_h W_h^T. Backward: dY and W rotated along N by
    signs and H of 32, dY and X along T likewise, all four through `guarded_stochastic`, G:
        dx = ((G(dY S H) G(H S W') H) * M_x) H^-1,  W' = W_h H^-1
        dw = ((G(H S dY)^T G(H S X') H) * M_w) H^-1,  X' = X_h H^-1
    (DEF: multiply by f' in the rotated basis, rotate back; rotate Q2 back before requantizing it). H is symmetric and
    orthonormal, so a second rotation undoes the first. `scales`: see `_quartet_forward`.
    """
    k = x.shape[1]
    x_h, mask_x = _quartet_forward(x, scales)
    w_h, mask_w = _quartet_forward(w, scales)
    x_read, w_read = rotate(x_h, 1, 32)[:, :k], rotate(w_h, 1, 32)[:, :k]
    dx, dw = rotated_backward(stochastically(guarded_stochastic, draw), x_read, w_read, dy, 32, draw)
    dx, dw = rotate(dx, 1, 32) * mask_x, rotate(dw, 1, 32) * mask_w
    return x_h @ w_h.T, rotate(dx, 1, 32)[:, :k], rotate(dw, 1, 32)[:, :k]


# MXFP4 for reinforcement learning --------------------------------------------------------------------------------


def macro_block_factor(a: np.ndarray, axis: int, mantissa_bits: int = 3) -> np.ndarray:
    """Returns gamma of each element's macro block of 128 along an axis, in the shape of a.

    gamma is the mantissa of g/6, g the macro block's absolute maximum, rounded up to `mantissa_bits` stored bits:
    the smallest n/2^m in [1, 2] with g <= 6 * 2^k * n/2^m, where 6 * 2^k <= g < 6 * 2^(k+1); 1 for zeros. Source:
    docs/reference/techniques/macro_block_scaling.md (DEC prints no formula). All comparisons are exact in float64.
    """
    g = block_amax(a, axis, 128)
    safe = np.where(g > 0, g, QMAX)
    exponent = np.frexp(safe / QMAX)[1] - 1
    exponent = exponent - (safe < np.ldexp(QMAX, exponent))  # the quotient may have been rounded up to a power of two
    steps = 2**mantissa_bits
    gamma = np.full(a.shape, 2.0)
    for n in range(2 * steps - 1, steps - 1, -1):
        gamma = np.where(safe * steps <= np.ldexp(QMAX * n, exponent), n / steps, gamma)
    return np.where(g > 0, gamma, 1.0)


def _macro_quantize(a: np.ndarray, axis: int) -> np.ndarray:
    """Returns gamma * Q(a/gamma), Q being MXFP4 in blocks of 32 with OCP's scales, to nearest even."""
    gamma = macro_block_factor(a, axis)
    return gamma * quantize(a / gamma, axis, block=32, fmt="e8m0", rule="floor")


def fallback_blocks(a: np.ndarray, quantized: np.ndarray, axis: int) -> np.ndarray:
    """Returns which elements lie in chosen blocks: the ceil(n/10) of n blocks of 32 that lose most to zero.

    v_p = max |a_i| over the elements of block p with Q(a_i) = 0; of equal blocks the earlier one in row-major order is
    chosen. Source: docs/reference/techniques/outlier_fallback.md, fraction 0.1.
    """
    ids = block_ids(a.shape, axis, 32)
    numbers, position = np.unique(ids, return_inverse=True)
    position = position.reshape(a.shape)
    lost = np.zeros(numbers.size)
    np.maximum.at(lost, position, np.where(quantized == 0, np.abs(a), 0.0))
    chosen = np.zeros(numbers.size, dtype=bool)
    chosen[np.argsort(-lost, kind="stable")[: -(-numbers.size // 10)]] = True
    return chosen[position]


def mxfp4_rl(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of MXFP4 with macro-block scaling, outlier fallback on X and W of fprop, and noise on W.

    h(a) = Q(a) + m Q(a - Q(a)) with m = `fallback_blocks` and Q = `_macro_quantize`; y = h(X) (h(W) + 1 z^T)^T with
    z = 1e-2 * draw.normal("fprop.weight", K), one value per input channel; dx = Q(dY) Q(W), dw = Q(dY)^T Q(X), from
    the originals. Source: docs/reference/techniques (macro_block_scaling, outlier_fallback,
    adaptive_quantization_noise: additive, stage 0) and docs/combining.md, "Order"; DEF.
    """

    def with_fallback(a: np.ndarray) -> np.ndarray:
        first = _macro_quantize(a, 1)
        return first + np.where(fallback_blocks(a, first, 1), _macro_quantize(a - first, 1), 0.0)

    noise = 1e-2 * draw.normal("fprop.weight", w.shape[1])
    y = with_fallback(x) @ (with_fallback(w) + noise).T
    return y, _macro_quantize(dy, 1) @ _macro_quantize(w, 0), _macro_quantize(dy, 0).T @ _macro_quantize(x, 0)


REFERENCES: dict[str, Reference] = {
    "fp4-all-the-way": fp4_all_the_way,
    "fp4-all-the-way-qaf": fp4_all_the_way,
    "fp4-all-the-way-qaf@phase": fp4_all_the_way_qaf_phase,
    "nvfp4-te": nvfp4_te,
    "ue5m3-d50": ue5m3_d50,
    "wang-dge": wang_dge,
    "mxfp4-rht-sr": mxfp4_rht_sr,
    "quartet": quartet,
    "mxfp4-rl": mxfp4_rl,
}

# Another reading of a source; the module's docstring says which.
VARIANTS: dict[str, Reference] = {"quartet@quest": partial(quartet, scales="quest")}
