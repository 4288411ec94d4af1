"""Reference GEMMs of the TetraJet, EL and NAT recipes at a linear site, in NumPy float64.

Every reference has the signature ``(x, w, dy, draw) -> (y, dx, dw)`` with x [T, K], w [N, K], dy [T, N] and
    y = x w^T [T, N],   dx = dy w [T, K],   dw = dy^T x [N, K].
Blocks run along the contraction axis of the GEMM: K in fprop, N in dgrad, T in wgrad. `REFERENCES` maps the names of
the policies to the references.

Sources: DEF = the project's own definitions (docs/techniques.md, docs/reference); EL = "Elucidating the design space
of FP4 training"; EL-A = its appendix; TJ = "Oscillation-reduced MXFP4 training for vision transformers"; NAT =
"Pretraining LLMs with MXFP4 on native FP4 hardware"; OCP = OCP Microscaling Formats v1.0. Where they are silent a
comment says "Decision:".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tests.recipes.arithmetic import (
    ELEMENTS,
    Block,
    Draw,
    Reference,
    Result,
    block_amax,
    block_scales,
    element_max,
    padded_length,
    quantize,
    rotate,
    scale_max,
)


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """One quantizer: the arguments of `arithmetic.quantize` except the array, its axis and its random numbers.

    `headroom` (None: no tensor scaling) chooses gamma = amax(X)/(Qmax * scale_max * headroom) in float32.
    """

    fmt: str
    rule: str
    block: Block
    element: str = "e2m1"
    convention: str = "decode"
    zero: str = "nearest_subnormal"
    ties: str = "even"
    stochastic: bool = False
    headroom: float | None = None

    def __call__(self, x: np.ndarray, axis: int, operand: str, draw: Draw) -> np.ndarray:
        """Returns the dequantized x, with random numbers of `operand` if the quantizer is stochastic."""
        gamma = None
        if self.headroom is not None:
            gamma = tensor_scale(x, self.element, self.fmt, self.headroom)
        return quantize(
            x,
            axis,
            element=self.element,
            block=self.block,
            fmt=self.fmt,
            rule=self.rule,
            convention=self.convention,
            zero=self.zero,
            ties=self.ties,
            uniform=draw.uniform(operand, x.shape) if self.stochastic else None,
            tensor_scale=gamma,
        )


# The six operands (DEF): name, array, contraction axis in the layout of that array.
OPERANDS: dict[str, tuple[str, int]] = {
    "fprop.input": ("x", 1),
    "fprop.weight": ("w", 1),
    "dgrad.grad_output": ("dy", 1),
    "dgrad.weight": ("w", 0),
    "wgrad.grad_output": ("dy", 0),
    "wgrad.input": ("x", 0),
}
FPROP = ("fprop.input", "fprop.weight")
GRADIENTS = ("dgrad.grad_output", "wgrad.grad_output")
STOCHASTIC_BACKWARD = ("dgrad.grad_output", "wgrad.grad_output", "wgrad.input")  # EL, Chmiel et al.: "IntelFP4"


def tensor_scale(x: np.ndarray, element: str, fmt: str, headroom: float) -> float:
    """Returns gamma = amax(X)/(Qmax * scale_max * headroom), in float32; 1 for a tensor of zeros.

    X [any shape]. The decode scale of the largest block of U = X/gamma is then amax/(gamma*Qmax) = scale_max*headroom
    and its encode scale the inverse (DEF; EL Eq. 2 with sec. 3.1).
    Decision: amax/kappa is computed in float64 and rounded to float32 once. The gamma of a zero tensor is 1 and gamma
    is at least 2^-126 (silent in the papers; from docs/reference/techniques/tensor_scaling.md).
    """
    amax = float(np.max(np.abs(np.asarray(x, dtype=np.float64)), initial=0.0))
    if amax == 0:
        return 1.0
    return float(max(np.float32(amax / (element_max(element) * scale_max(fmt) * headroom)), np.float32(2.0**-126)))


def originals(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw, quantizers: Mapping[str, Quantizer]) -> Result:
    """Returns (y, dx, dw) with every operand quantized from its original array (TJ Eq. 6-7: Rouhani et al.'s flow).

        y = Q1(X) Q2(W)^T,  dx = Q3(dY) Q4(W),  dw = Q5(dY)^T Q6(X),
    each Q along the contraction axis of its GEMM; an operand without a quantizer enters unrounded.
    """
    arrays = {"x": x, "w": w, "dy": dy}
    q = {}
    for name, (array, axis) in OPERANDS.items():
        value = np.asarray(arrays[array], dtype=np.float64)
        q[name] = quantizers[name](value, axis, name, draw) if name in quantizers else value
    return (
        q["fprop.input"] @ q["fprop.weight"].T,
        q["dgrad.grad_output"] @ q["dgrad.weight"],
        q["wgrad.grad_output"].T @ q["wgrad.input"],
    )


def rotated(
    x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw, quantizer: Quantizer, block: int, random: bool
) -> Result:
    """Returns (y, dx, dw) of originals whose operands are rotated along each GEMM's contraction axis, then quantized.

        A B^T ~ Q(A (HS)^T) Q(B (HS)^T)^T,
    A and B with the same H S per block: (HS)^T (HS) = I, so the rotation cancels and nothing is rotated back. S are
    the signs of the GEMM (`random`, EL sec. 6, Q(HSX)) or all +1 (deterministic, NAT). Shapes: operands [I, C] and
    [J, C] with C zero-padded to a multiple of `block`, result [I, J].
    """

    def product(gemm: str, a: tuple[str, np.ndarray], b: tuple[str, np.ndarray]) -> np.ndarray:
        """Returns Q(a) Q(b)^T for two (role, operand [lines, C]) pairs with the contraction axis last."""
        signs = draw.signs(gemm, padded_length(a[1].shape[1], block)) if random else None
        left, right = (quantizer(rotate(lines, 1, block, signs), 1, f"{gemm}.{role}", draw) for role, lines in (a, b))
        return left @ right.T

    if quantizer.stochastic:
        raise ValueError("no recipe here rounds rotated operands stochastically")
    return (
        product("fprop", ("input", x), ("weight", w)),
        product("dgrad", ("grad_output", dy), ("weight", w.T)),
        product("wgrad", ("grad_output", dy.T), ("input", x.T)),
    )


# --- TetraJet -------------------------------------------------------------------------------------------------------

# TJ 3.2: ceil scales ("truncation-free"), ties up, stochastic rounding of the four backward operands. TJ replaces an
# amax of 0 by 1e-8, which changes nothing: the block's values are zeros.
TETRAJET = Quantizer(fmt="e8m0", rule="ceil", block=32, ties="up")


def tetrajet(
    x: np.ndarray,
    w: np.ndarray,
    dy: np.ndarray,
    draw: Draw,
    *,
    enabled: tuple[int, ...] = (1, 2, 3, 4, 5, 6),
    element: str = "e2m1",
    gradient_element: str = "e2m1",
    weight: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Result:
    """Returns (y, dx, dw) of TetraJet (TJ Eq. 3-5), with S the stochastic and D the nearest quantizers.

        y  = QD1(X) QD2(W)^T
        dx = QS3(dY) QS4(QD2(W))
        dw = QS5(dY)^T QS6(QD1(X))
    Q1 and Q2 in blocks along K, Q3 and Q4 along N, Q5 and Q6 along T. A quantizer that is not `enabled` is the
    identity: without Q2, Q4 quantizes W itself, and with Q2 alone dgrad reads Q2(W), the straight-through gradient of
    the forward pass (TJ 3.4, Eq. 8-9). `element` is the format of X and W in all GEMMs, `gradient_element` that of dY
    (TJ Table 7: "A&W" and "Grad"). `weight` replaces Q2 (Q-EMA).
    """
    forward = replace(TETRAJET, element=element)
    backward = replace(forward, stochastic=True)
    gradient = replace(backward, element=gradient_element)
    x, w, dy = (np.asarray(array, dtype=np.float64) for array in (x, w, dy))

    def apply(number: int, value: np.ndarray, quantizer: Quantizer) -> np.ndarray:
        """Returns the value after quantizer Q1 ... Q6, or as it is if that quantizer is off."""
        name = list(OPERANDS)[number - 1]
        return quantizer(value, OPERANDS[name][1], name, draw) if number in enabled else value

    x1 = apply(1, x, forward)
    w2 = weight(w) if weight is not None else apply(2, w, forward)
    y = x1 @ w2.T
    dx = apply(3, dy, gradient) @ apply(4, w2, backward)
    dw = apply(5, dy, gradient).T @ apply(6, x1, backward)
    return y, dx, dw


def q_ema_weight(w: np.ndarray, ema: np.ndarray) -> np.ndarray:
    """Returns Q-EMA's dequantized weight [N, K] (TJ Alg. 1): per element S*q1 if |e/S - q1| < |e/S - q2|, else S*q2.

    S is the ceil scale of W's own block along K and q1 <= w/S <= q2 are the values of E2M1 around w/S; e is the EMA
    [N, K]. Decision: where w/S is itself a value both candidates are that value. Alg. 1 says "two nearest values",
    which for a w/S on the grid would be that value and one of its neighbours; DEF's "candidates bracket
    w/S" and TJ 3.2's q1 <= Xi/S <= q2 leave it open which. At e = w all readings agree.
    """
    w = np.asarray(w, dtype=np.float64)
    table = ELEMENTS["e2m1"]
    scale = block_scales(block_amax(w, 1, 32), fmt="e8m0", rule="ceil")
    latent = w / scale
    low = np.array([[max(v for v in table if v <= u) for u in line] for line in latent])
    high = np.array([[min(v for v in table if v >= u) for u in line] for line in latent])
    e = np.asarray(ema, dtype=np.float64) / scale
    return scale * np.where(np.abs(e - low) < np.abs(e - high), low, high)


def tetrajet_qema(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw, *, ema: np.ndarray | None = None) -> Result:
    """Returns (y, dx, dw) of TetraJet with Q-EMA in place of Q2; Q4 reads Q-EMA's output (TJ sec. 5, Alg. 1).

    `ema` [N, K] is the EMA of W, W itself (e0 = w0) if None. At e = w the rule is round-to-nearest with ties up,
    TJ 3.2's roundD, so the first step is TetraJet's.
    """
    e = w if ema is None else ema
    return tetrajet(x, w, dy, draw, weight=partial(q_ema_weight, ema=e))


# --- Microscaling, INT4 and NAT -------------------------------------------------------------------------------------

# OCP's scales: floor, ties to even. TJ's roundD would break ties upward, but TJ ascribes only the floor scale and
# nearest rounding to Rouhani et al., whose library and OCP round to even. Decision: even.
OCP = Quantizer(fmt="e8m0", rule="floor", block=32)

# TJ Table 2's "INT4 per-tensor": one unrounded float32 scale amax/7 (DEF).
INT4 = Quantizer(fmt="fp32", rule="nearest_even", block="tensor", element="int4")


# MXFP8 of Mishra et al. 2025, "Recipes for Pre-training LLMs with MXFP8", and Transformer Engine: E4M3 elements, E8M0
# scales rounded up. DeepSeek-V3 (sec. 3.3.2): E4M3 under an unrounded float32 scale amax/448 for each 1x128 tile of
# activations and gradients and each 128x128 block of weights. Decision: X of wgrad is quantized from the original.
MXFP8 = Quantizer(fmt="e8m0", rule="ceil", block=32, element="e4m3")
FP8_TILE = Quantizer(fmt="fp32", rule="nearest_even", block=128, element="e4m3")
FP8_BLOCK = {
    name: replace(FP8_TILE, block=(128, 128)) if array == "w" else FP8_TILE for name, (array, _) in OPERANDS.items()
}


def everywhere(quantizer: Quantizer, stochastic: tuple[str, ...] = (), gemms: str = "fprop dgrad wgrad") -> Reference:
    """Returns a reference with one quantizer on all operands of the GEMMs, `stochastic` ones rounded stochastically."""
    quantizers = {
        name: replace(quantizer, stochastic=name in stochastic)
        for name in OPERANDS
        if name.split(".")[0] in gemms.split()
    }
    return partial(originals, quantizers=quantizers)


# --- W4A16 ----------------------------------------------------------------------------------------------------------

# NVFP4 as ModelOpt writes and vLLM reads it: gamma = amax/(6*448), scales E4M3(amax_b/(6*gamma)), elements to even.
NVFP4_SERVED = Quantizer(fmt="e4m3", rule="nearest_even", block=16, headroom=1.0)


def w4a16(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw) -> Result:
    """Returns y = x Q(w)^T, dx = dy Q(w) and dw = dy^T x: the straight-through estimator of Jacob et al. 2018."""
    served = NVFP4_SERVED(w, 1, "fprop.weight", draw)
    return x @ served.T, dy @ served, dy.T @ x


# --- EL -------------------------------------------------------------------------------------------------------------

# EL sec. 2: f(X) = Q(s_q X)/s_q with s_q = q(FP4max/Z(X)), q to nearest ("TiesToEven"): the encode convention.
# E8M0 has no mantissa that could be even; ties go up (Decision, as ml_dtypes and torch cast). A tie is Z = 2^k:
# 6/Z = 1.5 * 2^(2-k) becomes 2^(3-k), and the block's maximum is scaled to 8 and clipped to 6.
EL_MXFP4 = Quantizer(fmt="e8m0", rule="nearest_even", block=32, convention="encode")
EL_NVFP4 = Quantizer(fmt="e4m3", rule="nearest_even", block=16, convention="encode")
EL_UE5M3 = Quantizer(fmt="ue5m3", rule="nearest_even", block=32, convention="encode")  # Decision: max 114688
EL_E8M3 = Quantizer(fmt="e8m3", rule="nearest_even", block=16, convention="encode")


def nvfp4_best(x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw, *, convention: str = "encode") -> Result:
    """Returns (y, dx, dw) of EL's NVFP4 + SR backward + tensor scaling with headroom 0.5 (EL-A Table 4, 350M).

    Derivation of the tensor scale. EL sec. 3 normalizes U = X/g with g = max_p Z_p, so the ideal encode scale of
    block p is s'_p = 6g/Z_p, at least 6. Sec. 3.1 divides it: s~_p = s'_p/(6 * 448 * 0.5) = 2g/(448 Z_p), which is
    2/448 for the largest block and grows to (2/448) g/Z_p: the printed range [2/448, 2/448 * g], with g counted in
    units of the smallest Z. Substituting into Eq. 2, s~_p = 6 gamma/Z_p is the encode scale of U = X/gamma with
        gamma = g/kappa,  kappa = 6 * 448 * 0.5 = 1344,
    so h(X) = gamma/q(s~) * Q(q(s~) * X/gamma): Eq. 2 with gamma for g. The same gamma puts the *decode* scale of the
    largest block at Z_p/(6 gamma) = 224 = 0.5 * 448, the definition of headroom in DEF.

    Consequence for encode scales. s~ runs from 1/224 upwards. 1/224 = 2.29 * 2^-9 is an E4M3 subnormal and rounds to
    2 * 2^-9, which scales the tensor's maximum to 6 * 224/256 = 5.25. No ideal scale is below 1/224, so none
    underflows and the zero rule never acts (save in an all-zero block, where nothing depends on it, and its scale
    saturates instead). Blocks with Z < 6 gamma/448 = g/(224 * 448) saturate at s = 448, so their elements are
    below 6 and lose resolution. `convention="decode"` is what NVFP4 hardware computes: S = q(Z/6 * 1344/g).
    """
    quantizer = replace(EL_NVFP4, headroom=0.5, convention=convention)
    return everywhere(quantizer, STOCHASTIC_BACKWARD)(x, w, dy, draw)


def ue5m3_best(
    x: np.ndarray, w: np.ndarray, dy: np.ndarray, draw: Draw, *, convention: str = "encode", fmt: str = "ue5m3"
) -> Result:
    """Returns (y, dx, dw) of EL's UE5M3, block 32, + SR backward + tensor scaling, zero scales to one (EL-A A.5).

    As `nvfp4_best`, whose factor of 0.5 EL 3.1 extends "to any scale format beyond E4M3": gamma = g/(6 * 114688 * 0.5),
    and the encode scale of the largest block is 2/114688 = 2.29 * 2^-17, which rounds to the subnormal 2^-16. So no
    scale underflows, and "to_one" acts on no block that is not zero.
    """
    quantizer = replace(EL_UE5M3, fmt=fmt, headroom=0.5, zero="to_one", convention=convention)
    return everywhere(quantizer, STOCHASTIC_BACKWARD)(x, w, dy, draw)


REFERENCES: dict[str, Reference] = {
    "microscaling": everywhere(OCP),
    "int4-per-tensor": everywhere(INT4),
    "tetrajet": tetrajet,
    # TJ Table 6. Sec. 7.3 calls the weight quantizer Q(1); DEF reads Q(2).
    "tetrajet-no-wq": partial(tetrajet, enabled=(1, 3, 4, 5, 6)),
    "tetrajet-no-wq-aq": partial(tetrajet, enabled=(3, 4, 5, 6)),
    # TJ Table 7.
    "tetrajet-e3m0": partial(tetrajet, element="e3m0", gradient_element="e3m0"),
    "tetrajet-e3m0-weights": partial(tetrajet, element="e3m0"),
    "tetrajet-e3m0-gradients": partial(tetrajet, gradient_element="e3m0"),
    # TJ Table 1.
    **{f"tetrajet-q{number}": partial(tetrajet, enabled=(number,)) for number in range(1, 7)},
    # At the first step these differ from TetraJet in the loss (dampen) or the optimizer only.
    "tetrajet-qema": tetrajet_qema,
    "tetrajet-qramping": tetrajet,
    "tetrajet-dampen": tetrajet,
    "tetrajet-freeze": tetrajet,
    # EL's pure FP4, EL-A Tables 3-5, A.4, A.5.
    "mxfp4": everywhere(EL_MXFP4),
    "nvfp4": everywhere(EL_NVFP4),
    "ue5m3": everywhere(EL_UE5M3),
    "e8m3": everywhere(EL_E8M3),
    "mxfp8": everywhere(MXFP8),
    "nvfp4-w4a16": w4a16,
    "fp8-block": partial(originals, quantizers=FP8_BLOCK),
    # Mishra et al. as EL 3.1 cites them; a decode rule (DEF).
    "mxfp4-round-up": everywhere(replace(EL_MXFP4, rule="toward_positive", convention="decode")),
    "mxfp4-best": partial(rotated, quantizer=EL_MXFP4, block=32, random=True),
    "nvfp4-best": nvfp4_best,
    "ue5m3-best": ue5m3_best,
    # Table 6, at a product whose input is not a SwiGLU; tests/recipes/test_smooth_swiglu.py has the product of one. No
    # encode scale underflows under the tensor scale, so that "to_one" acts on zero blocks alone.
    "nvfp4-smooth-swiglu": nvfp4_best,
    # NAT's ablation.
    "mxfp4-fprop": everywhere(OCP, gemms="fprop"),
    "mxfp4-fprop-dgrad": everywhere(OCP, gemms="fprop dgrad"),
    "mxfp4-full": everywhere(OCP),
    "mxfp4-full-hadamard": partial(rotated, quantizer=OCP, block=32, random=False),
    "mxfp4-full-rht": partial(rotated, quantizer=OCP, block=32, random=True),
    "mxfp4-full-sr": everywhere(OCP, STOCHASTIC_BACKWARD),
}
