"""Independent references, in NumPy float64, of recipes whose equations are in their authors' repositories.

Each function of `REFERENCES` has the signature (x, w, dy, draw) -> (y, dx, dw) of `tests.recipes.other_references`,
whose decisions about random signs, padding and zero tensors hold here too.

Sources, by the short names used below. Facts were read there; no code was copied.
    TE           NVIDIA/TransformerEngine at d0067d0d: transformer_engine/common/recipe/__init__.py (NVFP4BlockScaling),
                 transformer_engine/pytorch/quantization.py (NVFP4BlockScalingRecipeState.make_quantizers),
                 transformer_engine/pytorch/custom_recipes/reference_nvfp4.py (_quantize_blockwise_4over6_reference);
                 transformer_engine/pytorch/module/linear.py (backward_override);
                 transformer_engine/pytorch/custom_recipes/{quantizer_factory_zoo,quantizer_factories}.py and
                 transformer_engine/pytorch/tensor/hybrid_tensor.py (HybridQuantizer)
    ModelOpt     NVIDIA/Model-Optimizer at a2fbac7b: modelopt/torch/kernels/quantization/gemm/tensor_quant_mx.{cu,h}
                 (compute_scale_e8m0_NV, round_to_even), examples/gpt-oss/convert_oai_mxfp4_weight_only.py; for LSQ
                 modelopt_recipes/general/qad/nvfp4_lsq-mse_init-fp8_kv.yaml, modelopt/torch/quantization/calib/mse.py
                 (NVFP4MSECalibrator), nn/modules/tensor_quantizer.py (StaticBlockScaleQuantizer)
    4/6          Cook et al. 2025, "Four Over Six", arXiv 2512.02010; mit-han-lab/fouroversix at dadfad69:
                 src/fouroversix/quantize/pytorch/reference.py (select_fouroversix, select_intfloat); for nvint4 and
                 if4 src/fouroversix/model/modules/linear.py, scripts/train/configs/transformer_340M_{nvint4,if4}.json
    Quartet II   Panferov et al. 2026, "Quartet II", arXiv 2601.22813; IST-DASLab/Quartet-II at 8776a907:
                 src/models/quantization/schemes/quartet_2.py (Quartet_II_fn, eden_1x16s_fp4_kernel),
                 src/models/quantization/quantizers/{eden,nvfp4_triton}.py
    TetraJet-v2  Chen et al. 2025, "TetraJet-v2", arXiv 2510.27527; thu-ml/TetraJet-v2-NVFP4Training at ca5953f6:
                 kernels/csrc/quant_fp4.cu (nvfp4_double_quant), olmo2-training/olmo/quantization_real/linear.py;
                 for OutControl linear_mix.py and calibrate.py beside the latter, kernels/csrc/quant_fp8.cu
    Averis       Cao et al. 2026, "The Curse and Blessing of Mean Bias in FP4-Quantized LLM Training", arXiv 2603.10444,
                 its abstract, and the module averis of MindSpeed-LLM's features manager, which reproduces sec. 5
    UFP4         Zhao et al. 2026, "Rethinking Shrinkage Bias in LLM FP4 Pretraining", arXiv 2606.20381, its abstract,
                 and three summaries of its text, which agree on Table 1 (the recipe) and on sec. 2 (scales, rotations)

Decisions, per policy, where sources are silent or disagree:
    nvfp4-te-4over6
                 As TE, where X and W choose by MAE; in 4/6 gradients choose too, all by MSE. Neither source replaces a
                 block scale of zero; here it becomes the smallest subnormal, as in nvfp4-te.
    nvfp4-rl     The policy shares a tensor scale between weights that servers fuse; the reference has one weight. Block
                 scales of zero are replaced as in nvfp4-te-4over6.
    mxfp8-nvfp4  Signs of the rotation are drawn once, as in nvfp4-te. A dequantized operand is float32, as in TE with
                 float32 parameters.
    mxfp4-w4a16-experts
                 Ties go to even, as in the kernel of the training (the conversion for servers rounds them down).
    quartet-ii   Quartet II's released layer, which has four over six in the forward (its sweep script turns that off).
                 Each backward GEMM has signs of its own; the code draws one diagonal per backward and accumulates them.
                 A block scale times its factor is clipped at 448, which the code never reaches.
    tetrajet-v2  A block scale that rounds to zero is the smallest subnormal (the code then gives zeros); ties go to
                 even, as in the hardware's conversion. Until channels are chosen, the layer has no OutControl (the
                 authors' TJv2-base). The number of chosen channels is the nearest to a tenth, as in the paper; the code
                 takes a multiple of 128. Channels are gathered by falling norm, as in the code.
    averis       Quantizers are NVFP4 under a tensor scale, to nearest even. The weight gradient's operands are both
                 split and quantized along T (the reproduction has an exact X there, and quantizes dW).
    if4          A block of dY chooses by rounding to nearest, so that its stochastic rounding has the right mean; the
                 code compares drawn values.
    ufp4         Signs of a GEMM are drawn at every step; each operand is quantized from the original.
    nvfp4-qad-lsq
                 The first step. γ is that of the present maximum; a zero block's scale is the smallest subnormal.
    nvfp4-te-last-blocks, -bf16, -bf16-fprop
                 The quantizers are those of nvfp4-te.
"""

from __future__ import annotations

import numpy as np

from tests.recipes.arithmetic import (
    SCALES,
    Block,
    Draw,
    Reference,
    Result,
    block_amax,
    block_ids,
    quantize,
    rotate,
    round_nearest,
    round_scale,
    round_stochastic,
)
from tests.recipes.mx_references import OPERANDS
from tests.recipes.other_references import (
    QMAX,
    gamma_of,
    nvfp4_te,
    rotate_pair,
    rotated_backward,
    stochastically,
    with_square_weights,
)


def gammas_of_rows(a: np.ndarray, target: float) -> np.ndarray:
    """Returns the tensor scale of each row, [rows, 1]. Source: TE, row_scaled_nvfp4."""
    return np.array([[gamma_of(row, target)] for row in a])


def sums_by_block(values: np.ndarray, axis: int, block: Block) -> np.ndarray:
    """Returns the sum over each element's block, in the shape of values."""
    ids = block_ids(values.shape, axis, block)
    return np.bincount(ids.ravel(), values.ravel())[ids]


def less(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns where the sum of errors `left` is below `right` in exact arithmetic.

    Sums of absolute errors are often equal (an element rounded up cancels an element rounded down, whatever their
    values). In float64 equal sums of 256 errors differ by less than 1e-13 of the sum; other sums differ by far more.
    """
    return left < right * (1 - 1e-11)


def four_over_six(
    a: np.ndarray,
    axis: int,
    *,
    block: Block = 16,
    power: int,
    zero: str = "nearest_subnormal",
    ties: str = "even",
    rows: bool = False,
) -> np.ndarray:
    """Returns NVFP4 with the scale of each block for 6 or for 4, whichever has the smaller sum of abs(error)^power.

    With gamma = amax/(6 * 256), amax that of the array or of each of its `rows`: S6 = E4M3(Z/(6 gamma)),
    S4 = E4M3(1.5 * Z/(6 gamma)); both candidates are dequantized and compared with a; equal errors take S6. Source: TE
    (power 1), 4/6 (power 2).
    """
    gamma = gammas_of_rows(a, 256) if rows else gamma_of(a, 256)
    u = a / gamma
    z = block_amax(u, axis, block)
    candidates = []
    for stretch in (1.0, 1.5):
        scale = round_scale(stretch * z / QMAX, "e4m3", "nearest_even", zero)
        value = scale * round_nearest(u / scale, "e2m1", ties)
        candidates.append((sums_by_block(np.abs(value - u) ** power, axis, block), value))
    (error6, six), (error4, four) = candidates
    return gamma * np.where(less(error4, error6), four, six)


def nvfp4_te_4over6(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of TE's NVFP4BlockScaling(nvfp4_4over6="all", disable_rht=True).

    X in blocks of 1x16 and W in 16x16, both choosing by absolute errors under a tensor scale to 256; dY in blocks of
    1x16, stochastic, under a tensor scale to 448; nothing rotated. One quantized W serves fprop and dgrad.
    """

    def gradient(name: str, axis: int) -> np.ndarray:
        options = {"block": 16, "fmt": "e4m3", "rule": "nearest_even"}
        return quantize(dy, axis, uniform=draw.uniform(name, dy.shape), tensor_scale=gamma_of(dy, 448), **options)

    wq = four_over_six(w, 1, block=(16, 16), power=1)
    y = four_over_six(x, 1, power=1) @ wq.T
    dw = gradient("wgrad.grad_output", 0).T @ four_over_six(x, 0, power=1)
    return y, gradient("dgrad.grad_output", 1) @ wq, dw


def backward_of_forward(xq: np.ndarray, wq: np.ndarray, dy: np.ndarray) -> Result:
    """Returns (y, dx, dw) of dequantized operands and an exact dy. Source: TE, backward_override="dequantized"."""
    return xq @ wq.T, dy @ wq, dy.T @ xq


def nvfp4_rl(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of TE's NVFP4BlockScaling with row_scaled_activation, nvfp4_4over6="all" and
    backward_override="dequantized", nothing rotated, stochastic or 2-D.

    X has a tensor scale for each row (row_scaled_nvfp4: forward and not a weight), W one; both choose by absolute
    errors under scales to 256, the defaults of NVFP4BlockScaling.
    """
    return backward_of_forward(four_over_six(x, 1, power=1, rows=True), four_over_six(w, 1, power=1), dy)


def mxfp8_bf16(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of TE's mxfp8_fwd_high_precision_bwd_factory: MXFP8 X and W, also in an exact backward."""
    return backward_of_forward(mxfp8(x, 1), mxfp8(w, 1), dy)


def mxfp8_nvfp4(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of TE's mxfp8_fwd_nvfp4_bwd_factory.

    y = M(X) M(W)^T with M `mxfp8`; dX = SR(dY) N(M(W)), dW = SR(H S dY)^T N(H S X), N and SR NVFP4 in blocks of 16
    along N and T, gamma = amax/(6 * 448) of the operand as it is quantized. W is that of the forward and not rotated, X
    the original; dY is rotated in wgrad alone.
    """

    def q(a: np.ndarray, axis: int, uniform: np.ndarray | None = None) -> np.ndarray:
        # As in `double_block`: dequantized W is multiples of few-bit numbers, which meet midpoints of E4M3 and E2M1.
        gamma = float(np.float32(gamma_of(a, 448)))
        return gamma * quantize(fp32(a / gamma), axis, uniform=uniform, block=16, fmt="e4m3", rule="nearest_even")

    w_read = mxfp8(w, 1)
    dx = q(dy, 1, draw.uniform("dgrad.grad_output", dy.shape)) @ q(w_read, 0)
    dy_t, x_t = rotate_pair(dy, x, "wgrad", 16, draw)
    dw = q(dy_t, 0, draw.uniform("wgrad.grad_output", dy_t.shape)).T @ q(x_t, 0)
    return mxfp8(x, 1) @ w_read.T, dx, dw


def nvfp4_mxfp8_experts(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of an expert under TE's nvfp4_row_scaled_fwd_mxfp8_bwd_factory.

    y = N(X) N(W)^T, dX = M(dY) M(N(W)), dW = M(dY)^T M(N(X)): N NVFP4 along K, gamma = amax/(6 * 448) of each row of X
    and of W, M `mxfp8` along N and T.
    """

    def q(a: np.ndarray, gamma: np.ndarray | float) -> np.ndarray:
        return gamma * quantize(a / gamma, 1, block=16, fmt="e4m3", rule="nearest_even")

    x_read, w_read = fp32(q(x, gammas_of_rows(x, 448))), fp32(q(w, gamma_of(w, 448)))
    return x_read @ w_read.T, mxfp8(dy, 1) @ mxfp8(w_read, 0), mxfp8(dy, 0).T @ mxfp8(x_read, 0)


def linear_beside_experts(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of a linear under the same factory: MXFP8, six operands of the originals."""
    return mxfp8(x, 1) @ mxfp8(w, 1).T, mxfp8(dy, 1) @ mxfp8(w, 0), mxfp8(dy, 0).T @ mxfp8(x, 0)


def mxfp4_w4a16(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns y = x Q(w)^T, dx = dy Q(w) and dw = dy^T x of an expert: E2M1 in blocks of 32 along K, to nearest even,
    scales 2^ceil(log2(amax/6)). Source: ModelOpt."""
    return backward_of_forward(x, quantize(w, 1, block=32, fmt="e8m0", rule="ceil"), dy)


def nvfp4_qad_lsq(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of ModelOpt's LSQ before its first step, whose mask of dW comes after the backward.

    Each block of W has the one of the 126 positive E4M3 scales with the least squared error. X is in NVFP4. The
    backward is straight-through: dX = dY Q(W), dW = dY^T Q(X).
    """
    u = w / gamma_of(w, 448)
    value, least = np.zeros_like(u), np.full_like(u, np.inf)
    for scale in SCALES["e4m3"][1:]:
        trial = scale * round_nearest(u / scale, "e2m1")
        error = sums_by_block((trial - u) ** 2, 1, 16)
        better = less(error, least)
        value, least = np.where(better, trial, value), np.where(better, error, least)
    wq = gamma_of(w, 448) * value
    xq = quantize(x, 1, block=16, fmt="e4m3", rule="nearest_even", tensor_scale=gamma_of(x, 448))
    return backward_of_forward(xq, wq, dy)


def ms_eden(a: np.ndarray, axis: int, uniform: np.ndarray, group: int = 128) -> np.ndarray:
    """Returns MS-EDEN of an array that is rotated already, its axis a multiple of the group.

    With qmax = 6/(17/16 * 0.93) and gamma = amax/(255.99 * qmax): S = E4M3(Z/(qmax * gamma)), zero becoming one;
    u = a/(S gamma); q = nearest(u), ties away from zero; per group c = sum(u^2)/sum(u q), 1 where that sum is zero;
    S c is rounded to one of its neighbours in E4M3, to the upper one where its distance from the lower, in units of
    their gap, exceeds `uniform` [lines, blocks]. Returns gamma * S' * q. Source: Quartet II, eden_1x16s_fp4_kernel.
    """
    lines = np.moveaxis(a, axis, -1)
    shape, qmax = lines.shape, QMAX / ((17 / 16) * 0.93)
    amax = float(np.abs(lines).max())
    gamma = amax / 255.99 / qmax if amax > 0 else 1.0
    blocks = lines.reshape(shape[0], -1, 16)
    scale = round_scale(np.abs(blocks).max(-1) / qmax / gamma, "e4m3", "nearest_even", "to_one")
    u = blocks / (scale[..., None] * gamma)
    q = round_nearest(u, "e2m1", "away")
    squares, products = ((u * other).reshape(shape[0], -1, group).sum(-1) for other in (u, q))
    factor = np.where(products == 0, 1.0, squares / np.where(products == 0, 1.0, products))
    corrected = scale * np.repeat(factor, group // 16, axis=-1)
    table = SCALES["e4m3"]
    upper = np.clip(np.searchsorted(table, corrected, side="right"), 1, len(table) - 1)
    low, high = table[upper - 1], table[upper]
    stored = np.where((corrected - low) / (high - low) > uniform, high, low)
    return np.moveaxis((gamma * stored[..., None] * q).reshape(shape), -1, axis)


def quartet_ii(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of Quartet II.

    Forward: X and W in blocks of 16 along K, four over six by squared errors, zero scales one, ties away. Backward:
    dX = M(dY S H) M(H S W'), dW = M(H S dY)^T M(H S X') with W' and X' the forward's dequantized operands, rotations of
    128 along N and T, and M = `ms_eden`.
    """

    def q(a: np.ndarray, axis: int, name: str) -> np.ndarray:
        return ms_eden(a, axis, draw.block_uniform(name, a.shape[1 - axis], a.shape[axis] // 16))

    x_read, w_read = (four_over_six(a, 1, power=2, zero="to_one", ties="away") for a in (x, w))
    return x_read @ w_read.T, *rotated_backward(q, x_read, w_read, dy, 128, draw)


def double_block(a: np.ndarray, axis: int, uniform: np.ndarray | None = None) -> np.ndarray:
    """Returns gamma * NVFP4(a/gamma) with gamma = amax/(448 * 6) of each run of 128 along the axis, 1 for zeros.

    Inside, blocks of 16 have E4M3 scales to nearest even. Source: TetraJet-v2, nvfp4_double_quant.
    """
    amax = block_amax(a, axis, 128)
    # Both divisions are rounded to fp32, there and in the engine: multiples of a quarter meet midpoints of E4M3 often.
    gamma = np.where(amax > 0, (amax / (448 * QMAX)).astype(np.float32).astype(np.float64), 1.0)
    u = fp32(a / gamma)
    return gamma * quantize(u, axis, uniform=uniform, block=16, fmt="e4m3", rule="nearest_even")


def tetrajet_v2(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of TetraJet-v2 without OutControl.

    y = D(X) D(W)^T; dX = R(dY S H) R(H S D(W)), dW = R(H S dY)^T R(H S D(X)), rotations of 16 along N and T, D
    `double_block` to nearest and R the same, stochastic. Source: TetraJet-v2, linear.py.
    """
    x_read, w_read = double_block(x, 1), double_block(w, 1)
    return x_read @ w_read.T, *rotated_backward(stochastically(double_block, draw), x_read, w_read, dy, 16, draw)


def mxfp8(a: np.ndarray, axis: int) -> np.ndarray:
    """Returns E4M3 in blocks of 32 under E8M0 scales, amax/448 rounded up. Source: TetraJet-v2, quant_fp8.cu."""
    return quantize(a, axis, element="e4m3", block=32, fmt="e8m0", rule="ceil")


def chosen_channels(norms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tenth of the channels with the largest norms, and the others, both by falling norm."""
    order = np.argsort(-norms, kind="stable")
    count = round(0.1 * len(norms))
    return order[:count], order[count:]


def tetrajet_v2_split(
    x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw, norms: np.ndarray | None = None
) -> Result:
    """Returns (y, dx, dw) of TetraJet-v2 with OutControl, once channels C are chosen by their norms; R are the others.

    y = D(X_R) D(W_R)^T + M(X_C) M(W_C)^T; W' and X' are the quantized operands of y, in the layer's order of channels;
    dX = R(dY S H) R(H S W'), dW_R = R(H S dY)^T R(H S X'_R), dW_C = M(dY)^T M(X'_C), M `mxfp8` along T there.
    Norms of zero, the default, choose the first channels. Source: TetraJet-v2, linear_mix.py.
    """
    chosen, rest = chosen_channels(np.zeros(x.shape[1]) if norms is None else norms)
    x_rest, w_rest = double_block(x[:, rest], 1), double_block(w[:, rest], 1)
    x_chosen, w_chosen = mxfp8(x[:, chosen], 1), mxfp8(w[:, chosen], 1)
    y = x_rest @ w_rest.T + x_chosen @ w_chosen.T
    w_read = np.empty_like(w)
    w_read[:, rest], w_read[:, chosen] = w_rest, w_chosen
    dw = np.empty_like(w)
    dx, dw[:, rest] = rotated_backward(stochastically(double_block, draw), x_rest, w_read, dy, 16, draw)
    dw[:, chosen] = mxfp8(dy, 0).T @ mxfp8(x_chosen, 0)
    return y, dx, dw


def fp32(a: np.ndarray) -> np.ndarray:
    """Returns an array rounded to float32."""
    return a.astype(np.float32).astype(np.float64)


def averis(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of mean-residual splitting.

    With mu the mean over tokens of X: M = 1 mu^T, R = X - M, S(X) = Q(R) + Q(M), and likewise for dY;
    y = S(X) Q(W)^T, dX = S(dY) Q(W), dW = S(dY)^T S(X), each Q along the contraction axis of its GEMM under a tensor
    scale of its own argument. Source: Averis, where the parts of the split are float32 tensors, as here.
    """

    def q(a: np.ndarray, axis: int) -> np.ndarray:
        gamma = float(np.float32(gamma_of(a, 448)))
        return gamma * quantize(fp32(a / gamma), axis, block=16, fmt="e4m3", rule="nearest_even")

    def split(a: np.ndarray, axis: int) -> np.ndarray:
        mean = fp32(np.broadcast_to(a.mean(0, keepdims=True), a.shape))
        return q(fp32(a - mean), axis) + q(mean, axis)

    return split(x, 1) @ q(w, 1).T, split(dy, 1) @ q(w, 0), split(dy, 0).T @ split(x, 0)


def nvint4(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of NVINT4 training: as `nvfp4_te` with Qmax = 7 and integers.

    gamma = g amax/(7 * 448), S = E4M3(g Z/(7 gamma)) with g = 17/16 for stochastic operands (the code multiplies Qmax
    by 16/17) and 1 for others; the value is gamma * S * round(a/(gamma S)). Source: 4/6, quantize_to_nvint4,
    RoundStyle.adjustment_factor, FourOverSixLinearFunction.backward.
    """

    def q(a: np.ndarray, axis: int, block: Block, uniform: np.ndarray | None = None) -> np.ndarray:
        guard = 1.0 if uniform is None else 17 / 16
        gamma = guard * float(np.abs(a).max()) / (7 * 448)
        u = a / gamma
        scale = round_scale(guard * block_amax(u, axis, block) / 7, "e4m3")
        if uniform is None:
            return gamma * scale * round_nearest(u / scale, "int4")
        return gamma * scale * round_stochastic(u / scale, "int4", uniform)

    return with_square_weights(q, x, w, dy, draw)


def if4(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of IF4 training: as `nvint4`, each block in E2M1 or in integers times 6/7.

    gamma = g amax/(6 * 448), S = E4M3(g Z/(6 gamma)), u = a/(gamma S); the candidates are round_e2m1(u) and
    6/7 round_int4(7/6 u), and a block takes the latter where it has the smaller sum of squared errors to nearest.
    Source: 4/6, intfloat_block_scaled_quantization, select_intfloat, IF4_INT_EXPANSION_FACTOR.
    """

    def q(a: np.ndarray, axis: int, block: Block, uniform: np.ndarray | None = None) -> np.ndarray:
        guard = 1.0 if uniform is None else 17 / 16
        gamma = guard * float(np.abs(a).max()) / (6 * 448)
        scaled = a / gamma
        scale = round_scale(guard * block_amax(scaled, axis, block) / 6, "e4m3")
        u = scaled / scale
        candidates, errors = [], []
        for element, largest in (("e2m1", 6), ("int4", 7)):
            ratio = u * largest / 6
            near = round_nearest(ratio, element) * 6 / largest
            errors.append(sums_by_block((near - u) ** 2, axis, block))
            drawn = near if uniform is None else round_stochastic(ratio, element, uniform) * 6 / largest
            candidates.append(drawn)
        return gamma * scale * np.where(less(errors[1], errors[0]), candidates[1], candidates[0])

    return with_square_weights(q, x, w, dy, draw)


def ufp4(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of UFP4: A B^T ~ Q(A (HS)^T) Q(B (HS)^T)^T in all three GEMMs, in blocks of 16.

    Q is E1M2, the paper's element, with s = amax/1.75 for each 1x16 and the values s * round(a/s), of dY stochastic, of
    all else to nearest even. Quotients are float32 in any implementation: half a maximum is a tie. Source: UFP4.
    """
    arrays, quantized = {"x": x, "w": w, "dy": dy}, []
    for operand, (name, axis) in OPERANDS.items():
        a = arrays[name]
        a = rotate(a, axis, 16, draw.signs(operand.split(".")[0], a.shape[axis]))
        s = round_scale(block_amax(a, axis, 16) / 1.75, "fp32")
        u = fp32(a / s)
        if name == "dy":
            quantized.append(s * round_stochastic(u, "e1m2", draw.uniform(operand, a.shape)))
        else:
            quantized.append(s * round_nearest(u, "e1m2"))
    x_k, w_k, dy_n, w_n, dy_t, x_t = quantized
    return x_k @ w_k.T, dy_n @ w_n, dy_t.T @ x_t


def exact(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of unrounded operands."""
    return backward_of_forward(x, w, dy)


def exact_forward(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns (y, dx, dw) of nvfp4-te with an unrounded fprop."""
    return x @ w.T, *nvfp4_te(x, w, dy, draw)[1:]


REFERENCES: dict[str, Reference] = {
    "nvfp4-te-4over6": nvfp4_te_4over6,
    "nvfp4-rl": nvfp4_rl,
    "mxfp8-bf16": mxfp8_bf16,
    "mxfp8-nvfp4": mxfp8_nvfp4,
    "nvfp4-mxfp8-experts": nvfp4_mxfp8_experts,
    "nvfp4-mxfp8-experts@linear": linear_beside_experts,
    "mxfp4-w4a16-experts": mxfp4_w4a16,
    "mxfp4-w4a16-experts@linear": exact,
    "averis": averis,
    "nvint4": nvint4,
    "if4": if4,
    "ufp4": ufp4,
    "nvfp4-qad-lsq": nvfp4_qad_lsq,
    "quartet-ii": quartet_ii,
    "tetrajet-v2": tetrajet_v2,
    "tetrajet-v2@phase": tetrajet_v2,
    "tetrajet-v2@phase2": tetrajet_v2_split,
    "nvfp4-te-last-blocks": nvfp4_te,
    "nvfp4-te-bf16": nvfp4_te,
    "nvfp4-te-bf16@phase": exact,
    "nvfp4-te-bf16-fprop": nvfp4_te,
    "nvfp4-te-bf16-fprop@phase": exact_forward,
}
