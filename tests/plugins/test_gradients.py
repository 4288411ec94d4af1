"""step_gradient, scale_gradient, smooth_max, tensor_scaling_gradient: the paper's Eq. 1, 3, 4, 5 against autograd.

The reference is the quantizer in float64, made of differentiable pieces: the derivative of each rounding is the
surrogate, written out by hand. The gradient factor is the diagonal of the Jacobian.
"""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fp4graph_plugins.scale_gradient import ScaleGradient

import fp4graph
from fp4graph.errors import PolicyWarning
from fp4graph.numerics.formats import E2M1 as ELEMENT
from fp4graph.numerics.hadamard import hadamard_matrix
from fp4graph.numerics.surrogates import spline, ties_even_knots
from fp4graph.ops.product import total
from fp4graph.technique.operands import Operand
from fp4graph.technique.registry import Registry
from tests.helpers.policies import one_rule, quantizer
from tests.helpers.techniques import Offers, technique
from tests.plugins.layer import DRAW, Layer, gaussian
from tests.recipes import arithmetic

SCALES = {name: arithmetic.SCALES[name] for name in ("e4m3", "e8m0")}
GRID, E4M3, E8M0 = arithmetic.ELEMENTS["e2m1"], *SCALES.values()


def nearest(x, values):
    """Round to nearest, ties to the even code; between powers of two ties go up, as everywhere in this project."""
    if values is GRID:
        return arithmetic.round_nearest(x, "e2m1")
    return arithmetic.round_scale(x, "e4m3" if values is E4M3 else "e8m0")


def interval(x, values):
    i = np.clip(np.searchsorted(values, x, side="right") - 1, 0, len(values) - 2)
    return values[i], values[i + 1]


def surrogate(kind, u, values, k=5.0):
    """Return the slope at ``u``, by the definition of the surrogate."""
    if kind in ("ste", "clip"):
        return np.where((kind == "ste") | (np.abs(u) <= values[-1]), 1.0, 0.0)
    low, high = interval(u, values)
    t = (u - low) / (high - low)
    if kind == "dge":
        with np.errstate(divide="ignore"):
            slope = np.minimum(1 / k * np.abs(2 * t - 1) ** (1 / k - 1), 3.0)
    elif kind == "sigmoid":
        z = 12 * (t - 0.5)
        slope = 12 / (1 + np.exp(-z)) * (1 - 1 / (1 + np.exp(-z)))
    elif values is GRID:
        edges = [0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, np.inf]
        slope = np.array([0, 2, 0, 2, 0, 2, 0, 2.0])[np.searchsorted(edges, np.abs(u), side="right") - 1]
    elif values is E8M0:
        slope = np.full_like(u, 4 / 3)
    else:
        code = np.searchsorted(values, nearest(u, values))
        slope = 2.0 * (code % 2)
    slope = np.where(np.abs(u) <= values[-1], slope, 0.0)
    return np.maximum(slope, 0.2) if kind == "spline" else slope


def rounding(kind, values, only_below=np.inf):
    """Return rounding to nearest, with the surrogate as its derivative, and 1 from ``only_below`` on."""

    def rounded(u):
        v = u.detach().numpy()
        clipped = np.clip(v, -values[-1] if values is GRID else values[0], values[-1])
        slope = np.where(v < only_below, surrogate(kind, v, values), 1.0)
        return torch.as_tensor(nearest(clipped, values)) + torch.as_tensor(slope) * (u - u.detach())

    return rounded


def maximum(x, kind, beta=40.0):
    """Return Z of Table 1, differentiable.

    ``hybrid`` adds a difference of zero, so that the maximum stays exact: the largest ratio is Qmax, where slopes end.
    """
    magnitude = torch.where(x >= 0, x, -x)
    if kind == "absmax":
        return magnitude.reshape(-1)[magnitude.reshape(-1).argmax()]
    smooth = torch.logsumexp(beta * magnitude.reshape(-1), 0) / beta
    return smooth if kind == "softmax" else magnitude.max().detach() + (smooth - smooth.detach())


def block_quantizer(x, *, scale="e4m3", convention="decode", step="ste", max_kind="ste", scale_kind="ste", low=np.inf):
    q, small = rounding(step, GRID), rounding(scale_kind, SCALES[scale], low)
    z = maximum(x, max_kind) if max_kind != "ste" else x.abs().max().detach()
    if convention == "decode":
        s = small(z / 6)
        return q(x / s) * s
    s = small(6 / z)
    return q(x * s) / s


def diagonal(function, x):
    return torch.autograd.functional.jacobian(function, x).reshape(x.numel(), x.numel()).diagonal().reshape(x.shape)


def by_blocks(function, x):
    """``function`` of each block of 8, in the shape of ``x``."""
    return torch.stack([function(block) for block in x.double().reshape(-1, 8)]).reshape(x.shape)


def values_of(x, **kwargs):
    return by_blocks(lambda block: block_quantizer(block, **kwargs), x)


def slopes_of(x, **kwargs):
    """The diagonal of each block's Jacobian."""
    return by_blocks(lambda block: diagonal(lambda t: block_quantizer(t, **kwargs), block), x)


def policy(techniques, scale="e4m3", convention="decode", block=8, operands=None, registry=None):
    quantize = quantizer(block, scale, "nearest_even")
    quantize["scale"]["convention"] = convention
    return fp4graph.load_policy(one_rule(*techniques, quantize=quantize, operands=operands), registry)


layer = Layer(policy, 16, 4)
program = layer.operand


def factor(techniques, x, *operand, **kwargs):
    return program(techniques, *operand, **kwargs).gradient_factor(x, DRAW, None)


@pytest.fixture
def x():
    return gaussian(3, 16, seed=2) * torch.tensor([[0.02], [1.0], [30.0]])


def close(actual, expected):
    # fp32 against float64: under these seeds no ratio is near a threshold, so only a few operations round differently.
    torch.testing.assert_close(actual.double(), expected, rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize("convention", ["decode", "encode"])
@pytest.mark.parametrize("scale", ["e4m3", "e8m0"])
@pytest.mark.parametrize("step", ["ste", "dge", "spline", "sigmoid", "clip"])
@pytest.mark.parametrize("max_kind", ["absmax", "softmax", "hybrid"])
@pytest.mark.parametrize("scale_kind", ["ste", "dge", "spline"])
def test_equation_1(x, convention, scale, step, max_kind, scale_kind):
    techniques = [{"smooth_max": {"kind": max_kind}}, {"step_gradient": {"kind": step}}]
    if scale_kind != "ste":
        techniques.append({"scale_gradient": {"kind": scale_kind}})
    with pytest.warns(PolicyWarning) if step == "ste" else contextlib.nullcontext():
        actual = factor(techniques, x, scale=scale, convention=convention)
    kinds = {"step": step, "max_kind": max_kind, "scale_kind": scale_kind}
    close(actual, slopes_of(x, scale=scale, convention=convention, **kinds))


def test_the_spline_between_powers_of_two_follows_their_ties(x):
    """With ``ties: even`` a threshold 1.5·2^k rounds to the power with the even code, k + 127 or k + 128."""
    exponents = np.arange(-20, 20)
    thresholds, rounded = 1.5 * 2.0**exponents, 2.0 ** (exponents + (exponents + 127) % 2)
    ideal = x.abs().reshape(-1)
    slopes = (np.diff(rounded) / np.diff(thresholds))[np.searchsorted(thresholds, ideal.numpy(), side="right") - 1]
    (part,) = ScaleGradient(lower=0).parts(layer.site)
    spec = fp4graph.QuantSpec(scale=fp4graph.ScaleSpec("e8m0", "nearest_even", ties="even"))
    close(part.scale_surrogate(ideal, SimpleNamespace(spec=spec)), torch.tensor(slopes))


def test_range_low_differentiates_only_subnormal_scales(x):
    x = x[1:] * 2.0**-6  # scales from 2^-9 up: both below and above the smallest normal
    techniques = [{"smooth_max": {"kind": "absmax"}}, {"scale_gradient": {"kind": "dge", "range": "low"}}]
    close(factor(techniques, x), slopes_of(x, max_kind="absmax", scale_kind="dge", low=2.0**-6))


@pytest.mark.filterwarnings("ignore:.*has no effect here:fp4graph.PolicyWarning")
@pytest.mark.parametrize("kind", ["absmax", "softmax", "hybrid", "ste"])
@pytest.mark.parametrize(("max_kind", "step"), [("ste", "ste"), ("ste", "dge"), ("absmax", "spline")])
@pytest.mark.parametrize("headroom", [None, 0.5])
@pytest.mark.parametrize("convention", ["decode", "encode"])
def test_equation_3(x, kind, max_kind, step, headroom, convention):
    """κ is 1344 for E4M3 with headroom 0.5, and 2688 without.

    If the block scale is differentiated, Eq. 3 as printed has the diagonal f' on the path through g too, unlike the
    Jacobian of h. The reference then takes f' and dg/dX from autograd and combines them by the equation.
    """
    x = x[1:2]
    # With the largest value 2688·2^-10, γ is a power of two and the largest ratio is exactly Qmax, where slopes end.
    x = torch.where(x.abs() == x.abs().max(), 2.625 * x.sign(), x)
    techniques = [
        {"tensor_scaling": {} if headroom is None else {"headroom": headroom}},
        {"tensor_scaling_gradient": {"kind": kind, **({"beta": 4.0} if kind in ("softmax", "hybrid") else {})}},
        *([{"smooth_max": {"kind": max_kind}}] if max_kind != "ste" else []),
        *([{"step_gradient": {"kind": step}}] if step != "ste" else []),
    ]
    kappa = 6 * 448 * (headroom or 1)
    kwargs = {"convention": convention, "step": step, "max_kind": max_kind}

    def quantize(t):
        # ste: dg/dX is 1 at every element. No function has this gradient; this g has it on the diagonal.
        g = t.abs().max().detach() + (t - t.detach()) if kind == "ste" else maximum(t, kind, 4.0)
        return values_of(t / (g / kappa), **kwargs) * (g / kappa)

    actual = factor(techniques, x, convention=convention).reshape(-1)
    flat = x.double().reshape(-1)
    if max_kind == "ste":
        close(actual, diagonal(quantize, flat))
        return
    leaf = flat.clone().requires_grad_()
    g = leaf.abs().max().detach() if kind == "ste" else maximum(leaf, kind, 4.0)
    dg = torch.ones_like(flat) if kind == "ste" else torch.autograd.grad(g, leaf)[0]
    u = flat / (g / kappa).detach()
    slope = slopes_of(u, **kwargs)
    close(actual, slope + dg / kappa * (values_of(u, **kwargs) - u * slope))


def test_f_of_equation_3_is_the_quantizer_with_macro_blocks(x):
    """Macro blocks are normalized after the tensor."""
    x = x[1:].double()
    techniques = [
        {"tensor_scaling": {"target": 16}}, {"tensor_scaling_gradient": {"kind": "ste"}},
        {"macro_block_scaling": {"block": 16}}, {"step_gradient": {"kind": "dge"}},
    ]  # fmt: skip
    actual = factor(techniques, x.float(), scale="e8m0")
    kappa = 6 * 16
    u = x / (x.abs().max() / kappa)
    mantissa = np.frexp(u.abs().amax(1, keepdim=True).numpy() / 6)[0] * 2
    macro = torch.from_numpy(np.ceil(mantissa * 8) / 8)  # three stored bits, rounded up
    assert len(set(macro.flatten().tolist())) == 2
    f, slope = (of(u / macro, scale="e8m0", step="dge") for of in (values_of, slopes_of))
    close(actual.reshape(x.shape), slope + (f * macro - u * slope) / kappa)


def test_macro_blocks_take_the_exact_maximum_beside_a_smooth_tensor_scale(x):
    """Under a small β the tensor's LogSumExp is several times its maximum; γ of a macro block is still a mantissa."""
    techniques = [
        {"tensor_scaling": {"target": 16}},
        {"tensor_scaling_gradient": {"kind": "softmax", "beta": 0.05}},
        {"macro_block_scaling": {"block": 16}},
    ]
    actual = total(program(techniques, scale="e8m0")(x))
    gamma = (torch.logsumexp(0.05 * x.double().abs().flatten(), 0) / 0.05 / (6 * 16)).float()
    u = (x / gamma).double()
    macro = torch.from_numpy(np.ceil(np.frexp(u.abs().amax(1, keepdim=True).numpy() / 6)[0] * 16) / 8)
    close(actual, values_of(u / macro, scale="e8m0") * macro * gamma)


@pytest.mark.parametrize("of", ["normalized", "original"])
@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_beta_beside_a_tensor_scale_is_in_units_of_the_normalized_tensor(x, of, size):
    """dZ/dU is softmax(β·abs(u))·sign(u) of U = X/g, or with ``of: original`` of X; never of X/γ = 2688·U."""
    x = x[1:2] * size
    actual = factor(["tensor_scaling", {"smooth_max": {"kind": "hybrid", "beta": 4.0, "of": of}}], x).reshape(-1)
    flat = x.double().reshape(-1).numpy()
    unit = np.abs(flat).max() if of == "normalized" else 1.0
    u = flat / (np.abs(flat).max() / 2688)
    expected = []
    for values, block in zip(u.reshape(-1, 8), flat.reshape(-1, 8), strict=True):
        ratio = values / nearest(np.abs(values).max() / 6, E4M3)
        weights = np.exp(4 * (np.abs(block) - np.abs(block).max()) / unit)
        gradient = weights / weights.sum() * np.sign(block)
        expected.append(1 + gradient / 6 * (nearest(ratio, GRID) - ratio))
    close(actual, torch.from_numpy(np.concatenate(expected)))


def test_the_soft_maximum_of_a_small_tensor():
    """h = g·f(X/g) with Z(U) = log Σ exp(β·abs(u))/β, in float64. With Z of X itself most elements become zero."""
    x = gaussian(16, 64, seed=1) * 1e-3
    blocks = x.double().numpy().reshape(-1, 16)
    u = blocks / np.abs(blocks).max()
    z = np.log(np.exp(40 * np.abs(u)).sum(1, keepdims=True)) / 40
    # κ = 2688: the block scale is Z(U)/6 times 2688/max Z, rounded to E4M3, and γ = g·max Z/2688.
    kappa = 2688 / z.max()
    scale = nearest(z.reshape(-1) / 6 * kappa, E4M3).reshape(-1, 1)
    codes = nearest(np.clip(u * kappa / scale, -6, 6).reshape(-1), GRID).reshape(u.shape)
    expected = codes * scale / kappa * np.abs(blocks).max()

    def quantized(**options):
        f = program(["tensor_scaling", {"smooth_max": {"kind": "softmax", **options}}], block=16)
        return total(f(x)).double().numpy().reshape(-1, 16)

    actual = quantized()
    assert (np.abs(actual - expected) > 1e-6 * np.abs(blocks).max()).mean() < 1e-3  # exp in fp32 may move a tie
    error = np.square(actual - blocks).sum() / np.square(blocks).sum()
    assert error < 0.02
    assert (quantized(of="original") == 0).mean() > 0.99


def test_the_soft_maximums_gradient_is_its_difference_quotient():
    """dZ/dX by differences of the statistic of the forward, in units of U; g, in another row, does not change."""
    x = gaussian(2, 16, seed=3) * 1e-3
    x[0, 3] = 5e-3  # g
    f = program(["tensor_scaling", {"smooth_max": {"kind": "softmax", "beta": 4.0}}])
    smooth = [(part, c) for part, c in f.acting(x, None, None) if part.name == "smooth_max"]
    (scale, context), (derivative, _) = smooth

    def statistic(t):
        values = context.blocking.split(t)
        return scale.block_statistic(values, values.abs().amax(context.axes, keepdim=True), context)

    gradient = context.blocking.join(derivative.statistic_gradient(context.blocking.split(x), statistic(x), context))
    for column in range(16):
        step = torch.zeros_like(x)
        step[1, column] = 1e-5
        quotient = ((statistic(x + step) - statistic(x - step)).double().sum() / 2e-5).item()
        assert quotient == pytest.approx(gradient[1, column].item(), abs=5e-3)


def test_absmax_ties_go_to_the_first_and_zero_blocks_are_straight_through():
    x = torch.tensor([[3.0, -1, 3, -3, 1, *[0] * 11]])
    actual = factor([{"smooth_max": {"kind": "absmax"}}], x, scale="e8m0")
    # S = nearest(3/6) = 0.5, u = x/S: only element 0 has a second summand, sign/Qmax·(Q(u) - u) = 0 for it.
    assert torch.equal(actual, torch.ones_like(x))
    x[0, 0] = x[0, 2] = 3.2
    actual = factor([{"smooth_max": {"kind": "absmax"}}], x, scale="e8m0")
    assert actual[0, 0] == pytest.approx(1 + (6 - 6.4) / 6, rel=1e-6)
    assert actual[0, 2] == 1


def test_the_softmax_statistic_excludes_padding_and_a_relative_beta_scales_with_the_data():
    x = torch.randn(2, 12)
    z = program([{"smooth_max": {"kind": "softmax", "beta": 2.0}}]).quantize(x).z
    expected = [torch.logsumexp(2 * block.abs(), 1) / 2 for block in (x[:, :8], x[:, 8:])]
    torch.testing.assert_close(z.reshape(2, 2), torch.stack(expected, 1))
    f = program([{"smooth_max": {"kind": "softmax", "beta": 8.0, "relative": True}}])
    torch.testing.assert_close(f.quantize(x * 1e-3).z, f.quantize(x).z * 1e-3, rtol=1e-5, atol=0)


@pytest.mark.parametrize("operand", [Operand.FPROP_INPUT, Operand.DGRAD_GRAD_OUTPUT, Operand.WGRAD_INPUT])
@pytest.mark.parametrize("size", [1e-3, 1.0, 50.0])
def test_the_soft_tensor_scale_of_every_operand(size, operand):
    """g = log Σ exp(β·abs(x))/β over the tensor, β relative to its largest magnitude; γ = g/2688."""
    x = gaussian(2, 16, seed=4) * size
    options = {"kind": "softmax", "beta": 8.0, "relative": True}
    f = program(["tensor_scaling", {"tensor_scaling_gradient": options}], operand)
    quantization = f.quantize(x)
    beta = 8.0 / x.double().abs().max()
    g = torch.logsumexp(beta * x.double().abs().flatten(), 0) / beta
    torch.testing.assert_close(quantization.group_scale.double().reshape(()), g / 2688, rtol=1e-5, atol=0)
    assert f.quantize(torch.zeros(2, 16)).dequantized().eq(0).all()


DGE = {"step_gradient": {"kind": "dge"}}


def test_surrogates_leave_the_forward_and_other_operands_alone(x):
    plain = program([])(x)[0].values
    for techniques in ([DGE], [{"smooth_max": {"kind": "hybrid"}}, {"scale_gradient": {"kind": "dge"}}]):
        assert torch.equal(program(techniques)(x)[0].values, plain)
    of_weights = [{"step_gradient": {"kind": "dge", "operands": ["fprop.weight"]}}]
    assert factor(of_weights, x) is None
    assert factor(of_weights, x, Operand.FPROP_WEIGHT) is not None


#: Transforms of fprop, X·R and W·R⁻ᵀ, with R a rotation or a shear of each pair of channels.
TURN = torch.block_diag(*[hadamard_matrix(8)] * 2)
SHEAR = {"left": torch.block_diag(*[torch.tensor([[1.0, 1.0], [0.0, 1.0]])] * 8)}
SHEAR["right"] = SHEAR["left"].inverse().mT
SHEARING = technique(
    "shear",
    mixes="expert",
    transform=lambda self, x, side, shared: x @ SHEAR[side],
    inverse=lambda self, x, side, shared: x @ SHEAR[side].inverse(),
)
TURNING = {"hadamard": {"kind": "deterministic", "block": 8, "scope": ["fprop"]}}


@pytest.mark.parametrize("convention", ["decode", "encode"])
@pytest.mark.parametrize(
    ("around", "sides"), [(TURNING, (TURN, TURN)), ("shear", SHEAR.values())], ids=["rotation", "shear"]
)
def test_the_factor_multiplies_the_gradient_of_the_product(around, sides, convention):
    """dX = (dY·f(W)) ⊙ f'(X) and dW = (dYᵀ·f(X)) ⊙ f'(W), in the basis of the transform."""
    x, w, dy = torch.randn(5, 16), torch.randn(4, 16), torch.randn(5, 4)
    exact = {"backward": "keep", "dgrad.weight": "fprop", "wgrad.input": "fprop"}
    registry = Registry([("toys", Offers(SHEARING))])
    _, dx, dw = layer.products(x, w, dy, [DGE, around], convention=convention, operands=exact, registry=registry)
    left, right = (side.double() for side in sides)
    turned = [x.double() @ left, w.double() @ right]
    f, slope = ([of(t, convention=convention, step="dge") for t in turned] for of in (values_of, slopes_of))
    close(dx, ((dy.double() @ f[1]) * slope[0]) @ left.T)
    close(dw, ((dy.double().T @ f[0]) * slope[1]) @ right.T)


@pytest.mark.inductor
@pytest.mark.compiler
def test_gradients_compile(x):
    """The factor agrees to a few ulps, because last bits of pow and exp may differ; the forward agrees to the bit."""
    f = program([{"smooth_max": {"kind": "absmax"}}, DGE, {"scale_gradient": {}}])
    eager = f.gradient_factor(x, None, None)
    compiled = torch.compile(lambda t: f.gradient_factor(t, None, None))(x)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.compile(lambda t: f(t)[0].values)(x), f(x)[0].values)


TENSOR_GRADIENT = [{"tensor_scaling": {"headroom": 0.5}}, {"tensor_scaling_gradient": {"kind": "absmax"}}]


@pytest.mark.parametrize(
    ("techniques", "scale", "convention", "acts"),
    [
        (TENSOR_GRADIENT, "e4m3", "decode", False),  # S = 224, code 6: the largest element is exact
        (TENSOR_GRADIENT, "e4m3", "encode", True),  # s = 2/448 becomes 2^-8
        (["tensor_scaling", TENSOR_GRADIENT[1]], "e4m3", "decode", False),
        (["tensor_scaling", TENSOR_GRADIENT[1]], "e8m0", "decode", True),  # 1/6 becomes 1/8, and 8 is clipped
        ([*TENSOR_GRADIENT, DGE], "e4m3", "decode", True),
        ([*TENSOR_GRADIENT, {"smooth_max": {"kind": "hybrid"}}], "e4m3", "decode", False),
        ([*TENSOR_GRADIENT, "stochastic_scale_rounding"], "e4m3", "decode", False),
    ],
)
def test_a_gradient_of_the_tensor_scale_without_effect_is_warned_about(x, techniques, scale, convention, acts):
    """It has no effect if the factor is the same with and without it."""
    without = [t for t in techniques if t is not TENSOR_GRADIENT[1]]
    x = x[1:]
    plain = factor(without, x, scale=scale, convention=convention)
    stochastic = "stochastic_scale_rounding" in techniques  # 224 is a value of E4M3, but no rounding is promised
    warned = pytest.warns(PolicyWarning, match=r"absmax.*the term f\(U\) - U·f'\(U\) is 0; remove it")
    with contextlib.nullcontext() if acts or stochastic else warned:
        actual = factor(techniques, x, scale=scale, convention=convention)
    expected = torch.ones_like(x) if plain is None else plain
    assert torch.allclose(actual, expected, rtol=0, atol=1e-5) == (not acts)


def test_a_gradient_without_effect_has_no_complexity():
    with pytest.warns(PolicyWarning, match="no effect"):
        assert policy(["tensor_scaling", "tensor_scaling_gradient"]).complexity == 0.5


def test_the_spline_is_the_line_through_its_knots():
    """The slopes are finite differences of the piecewise linear function through the knots."""
    knots = ties_even_knots(ELEMENT)
    points = torch.linspace(-6.5, 6.5, 521, dtype=torch.float64) + 1e-4
    xs, ys = np.array(knots).T
    line = lambda v: np.sign(v) * np.interp(np.abs(v), xs, ys, right=ys[-1])  # noqa: E731
    slopes = (line(points.numpy() + 1e-6) - line(points.numpy() - 1e-6)) / 2e-6
    np.testing.assert_allclose(spline(points.float(), knots).numpy(), slopes, atol=1e-3)
    assert [t for t, _ in itertools.islice(knots, 1, 8)] == [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
