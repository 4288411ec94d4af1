"""fp32 GEMMs whose operands are bf16 numbers multiply as bf16 on CUDA: every product is then exact in fp32."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

import fp4graph
from fp4graph.graph.functions import site_function
from fp4graph.kernels import gpu, operators
from fp4graph.numerics import noise
from fp4graph.numerics.exact import in_bfloat16
from fp4graph.numerics.formats import ELEMENTS, SCALES
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.numerics.target import traced_for
from tests.helpers.policies import one_rule, with_technique
from tests.helpers.sites import program_of

aten = torch.ops.aten
KEY, STEP = noise.make_key("site", "fc"), noise.make_step(0, 0, 0)
#: Scale formats whose values are few enough to try them all.
LISTED = [name for name, scale in SCALES.items() if scale.mantissa_bits <= 7]


def spec_of(element, scale, convention="decode"):
    return QuantSpec(element, 32, ScaleSpec(scale, "nearest_even", convention))


def is_bfloat16(value: Fraction) -> bool:
    """Return whether ``value`` is a bf16 number, or beyond fp32's range: by the definition, in rational numbers."""
    if value == 0 or value >= 2**128:
        return True
    exponent = math.frexp(float(value))[1] - 1  # the fractions here are float64 numbers
    unit = Fraction(2) ** max(exponent - 7, -133)
    return (value / unit).denominator == 1


def values_of(element: str, scale: str, convention: str) -> Iterator[Fraction]:
    elements = [Fraction(e) for e in ELEMENTS[element].magnitudes()]
    scales = [Fraction(s) for s in SCALES[scale].values() if s]
    for e, s in itertools.product(elements, scales):
        yield e * s if convention == "decode" else e / s


EXACT = [each for each in itertools.product(ELEMENTS, LISTED, ("decode", "encode")) if in_bfloat16(spec_of(*each))]


@pytest.mark.parametrize(("element", "scale", "convention"), EXACT)
def test_every_value_is_a_bf16_number_if_in_bfloat16_is_true(element, scale, convention):
    assert all(map(is_bfloat16, values_of(element, scale, convention)))


@pytest.mark.parametrize(
    ("element", "scale", "convention", "scaled", "expected"),
    [
        ("e2m1", "e8m0", "decode", False, True), ("e2m1", "e8m0", "encode", False, True),
        ("e2m1", "e4m3", "decode", False, True), ("e2m1", "e4m3", "decode", True, True),
        ("e2m1", "ue5m3", "decode", True, True), ("e2m1", "e8m3", "decode", False, True),
        ("int4", "e4m3", "decode", False, True), ("int8", "e8m0", "decode", False, True),
        ("e2m1", "e8m0", "decode", True, False),  # 2^-127 times a tensor scale
        ("e2m1", "e4m3", "encode", False, False),  # 1 / 1.125
        ("int8", "e4m3", "decode", False, False),  # 11 bits
        ("e2m1", "fp32", "decode", False, False),
        ("e2m1", "bf16", "decode", False, False),  # 3 · (1 + 2^-7)
        ("e4m3", "e8m0", "decode", False, False),  # 2^-9 · 2^-127
    ],
)  # fmt: skip
def test_in_bfloat16(element, scale, convention, scaled, expected):
    """Where it is False, bf16 lacks a value; fp32 has too many scales to try."""
    assert in_bfloat16(spec_of(element, scale, convention), scaled=scaled) is expected
    if not (expected or scaled or scale == "fp32"):
        assert not all(map(is_bfloat16, values_of(element, scale, convention)))


@pytest.mark.parametrize(("element", "scale"), [("e2m1", "e8m0"), ("e2m1", "e4m3"), ("int4", "e4m3")])
def test_products_of_all_codes_and_scales_are_exact_in_fp32(element, scale):
    """Products of bf16 factors, where fp32 has them as normal numbers. Scales of E8M0 differ in their exponents alone:
    some in the middle and at both ends are tried."""
    codes = torch.tensor(ELEMENTS[element].values(), dtype=torch.float32)
    scales = torch.tensor(SCALES[scale].values(), dtype=torch.float32)
    if scale == "e8m0":
        scales = scales[[0, 1, 2, 3, 63, 126, 127, 128, 190, 252, 253, 254]]
    values = (codes[:, None] * scales).flatten()
    values = values[values.isfinite()]
    factors = values.to(torch.bfloat16).to(torch.float32)
    assert torch.equal(factors, values)
    for factor in factors:
        exact = factor.double() * values.double()
        inside = (exact.abs() >= 2.0**-126) & (exact.abs() < 2.0**128)
        assert torch.equal((factor * factors).double()[inside], exact[inside])


# ------------------------------------------------------------------ the program


class Emulated(Interpreter):
    """Runs a graph on a CPU. A CPU refuses GEMMs with an ``out_dtype``: their factors are cast to it."""

    def call_function(self, target, args, kwargs):
        if target is aten.mm.dtype:
            left, right, dtype = args
            return super().call_function(aten.mm.default, (left.to(dtype), right.to(dtype)), kwargs)
        return super().call_function(target, args, kwargs)


def step_of(policy: str, dtype: torch.dtype = torch.float32, bias: bool = False):
    """Return a training step of one linear under ``policy`` as a function of tensors, and its arguments."""
    program = program_of(policy)
    function = site_function(program, "linear", 1.0, 1.0)

    def step(x, w, b, dy, key, step, *state):
        leaves = [t.detach().requires_grad_() for t in (x, w, b)]
        y = function(leaves[0], leaves[1], leaves[2] if bias else None, key, step, 0, *state)
        y.backward(dy)
        return y.detach(), leaves[0].grad, leaves[1].grad

    tensors = [torch.randn(shape, dtype=dtype) for shape in ((64, 64), (96, 64), (96,), (64, 96))]
    return step, [*tensors, KEY, STEP, *(torch.randn(96, 64) for _ in program.state)]


def for_cuda(step, arguments):
    """Return the graph of ``step`` for CUDA, and its GEMMs: (operation, dtype of the factors, dtype of the result)."""
    with traced_for("cuda"):
        graph = make_fx(step, tracing_mode="fake")(*arguments)
    places = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1}
    gemms = []
    for node in graph.graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if packet in places:
            gemms.append((str(packet), node.args[places[packet]].meta["val"].dtype, node.meta["val"].dtype))
    return graph, gemms


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["tetrajet", "tetrajet-qema", "microscaling", "nvfp4-te"])
def test_gemms_of_an_fp32_linear_multiply_bf16_and_return_fp32(policy):
    """Their results have the bits of the program that multiplies in fp32, where both sum in one order."""
    torch.manual_seed(0)
    step, arguments = step_of(policy)
    graph, gemms = for_cuda(step, arguments)
    assert [gemm for gemm in gemms if gemm[0] == "aten.mm"] == [
        ("aten.mm", BF16, FP32)
    ] * 3  # the others rotate operands
    with operators.tensor_code():
        expected = step(*arguments)
    for result, due in zip(Emulated(graph).run(*arguments), expected, strict=True):
        if policy == "nvfp4-te":  # a CPU's product takes alpha, and sums in another order
            torch.testing.assert_close(result, due, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(result, due)


@pytest.mark.slow
def test_a_bias_is_added_to_the_fp32_output():
    step, arguments = step_of("microscaling", bias=True)
    graph, gemms = for_cuda(step, arguments)
    assert gemms == [("aten.mm", BF16, FP32)] * 3
    torch.testing.assert_close(Emulated(graph).run(*arguments)[0], step(*arguments)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_gemms_on_a_cpu_and_of_a_bf16_model_keep_the_models_dtype():
    step, arguments = step_of("microscaling")
    graph = make_fx(step, tracing_mode="fake")(*arguments)
    dtypes = {n.args[0].meta["val"].dtype for n in graph.graph.nodes if n.target is aten.mm.default}
    assert dtypes == {FP32}
    assert for_cuda(*step_of("microscaling", BF16))[1] == [("aten.mm", BF16, BF16)] * 3


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "exact"),
    [
        ("nvfp4", 0),  # elements divided by encode scales
        ("wang-dge", 0),  # a scale in fp32
        ("mxfp4-rl", 0),  # residuals around the quantizer
        ("mxfp4-rht-sr", 0),  # a tensor scale before E8M0, whose range is as wide as bf16's
        ("quartet", 1),
        ("tetrajet-no-wq", 2),
        ("tetrajet-q1", 0),  # the other operand is in high precision
    ],
)
def test_where_an_operand_is_not_exact_the_gemm_stays_in_fp32(policy, exact):
    dtypes = [factors for _, factors, result in for_cuda(*step_of(policy))[1] if result is FP32]
    assert dtypes.count(BF16) == exact
    assert dtypes.count(FP32) >= 3 - exact


@pytest.mark.slow
def test_a_residual_multiplies_in_fp32_beside_the_quantized_part():
    policy = with_technique("outlier_clamp", {"operands": ["fprop.input"], "quantile": 0.99})
    factors = [factors for _, factors, _ in for_cuda(*step_of(policy))[1]]
    assert (factors.count(BF16), factors.count(FP32)) == (3, 1)


@pytest.mark.parametrize(("capability", "narrow"), [((7, 5), False), ((8, 0), True), ((9, 0), True), (None, True)])
def test_cards_without_bf16_multiply_in_fp32(capability, narrow, monkeypatch):
    def answer(device=None):
        if capability is None:
            raise AssertionError("Torch not compiled with CUDA enabled")
        return capability

    monkeypatch.setattr(torch.cuda, "get_device_capability", answer)
    with traced_for("cuda"):
        assert gpu.multiplies_bfloat16(torch.device("cpu")) is narrow
        with gpu.products_in_fp32():
            assert gpu.multiplies_bfloat16(torch.device("cpu")) is False
    assert gpu.multiplies_bfloat16(torch.device("cpu")) is False


def test_a_tensor_scale_keeps_operands_in_the_range_of_bf16():
    """In a tensor this small, codes times block scales times γ's power of two would fall below bf16's subnormals."""
    program = program_of("nvfp4-te").fprop.left
    x = torch.randn(64, 64) * torch.exp2(torch.randint(-12, 1, (64, 1)).to(torch.float32)) * 2.0**-118
    with traced_for("cuda"):
        (term,) = program(x)
    assert torch.equal(term.values.to(BF16).to(FP32), term.values)
    assert term.values.ne(0).any()
    assert program.is_exact_in_bfloat16(multiplied=True)
    (elsewhere,) = program(x)
    assert torch.equal(term.product(), elsewhere.product())


@pytest.mark.slow
def test_explain_counts_gemms_that_are_exact_in_bf16():
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    report = fp4graph.explain(model, one_rule(quantize={"element": "e2m1", "block": 32}), (torch.ones(4, 64),))
    assert "on a GPU: 6 of 6 quantized GEMMs have operands that are exact in bf16" in str(report)
    data = report.to_json()
    assert (data["quantized"], data["sites"][0]["exact"]) == (2, ["fprop", "dgrad", "wgrad"])
    rows = {"element": "e2m1", "block": "row", "scale": {"format": "fp32"}}
    report = fp4graph.explain(model, one_rule(quantize=rows), (torch.ones(4, 64),))
    assert "on a GPU: 0 of 6 quantized GEMMs" in str(report)
    assert "no kernel knows blocks of row, so tensor code quantizes Q1 Q2 Q3 Q4 Q5 Q6 (12 operands)" in str(report)
