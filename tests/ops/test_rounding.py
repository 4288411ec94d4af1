"""Products of tensor-scaled operands are rounded once: γ_a·γ_b and the addend meet the accumulator of the GEMM.

Expected values are float64 products of the multiplied operands, which :func:`observed` shows.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import fp4graph
from fp4graph.graph.functions import site_function
from fp4graph.kernels import product
from fp4graph.numerics import noise
from fp4graph.ops.observe import observed
from fp4graph.technique.operands import Operand
from tests.helpers.operators import check_declaration
from tests.helpers.policies import NVFP4, loaded
from tests.helpers.sites import program_of
from tests.helpers.training import assert_equal

KEY, STEP = noise.make_key("site", "fc"), noise.make_step(0, 0, 0)
UE5M3 = {**NVFP4, "scale": {"format": "ue5m3", "rounding": "nearest_even"}}
#: Significant bits of each dtype: half a unit in the last place of x is at most 2^-bits·abs(x).
BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
CLAMP = {"outlier_clamp": {"quantile": 0.99, "operands": ["fprop.input"]}}
LOW_RANK = {"low_rank_residual": {"rank": 4, "operands": ["fprop.weight"]}}
FALLBACK = {"outlier_fallback": {"operands": ["fprop.input"]}}

policy = partial(loaded, "tensor_scaling", quantize=NVFP4)


def function(policy, op="linear", alpha=1.0, beta=1.0):
    return site_function(program_of(policy, op, 512, 256), op, alpha, beta)


def data(*shapes, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in shapes]


def multiplied(terms):
    return sum(t.values.double() * (1.0 if t.multiplier is None else t.multiplier.double()) for t in terms)


def run(f, a, b, addend, dy):
    """Return ``(result, left, right)`` of each GEMM, by the name of its left operand."""
    seen = {}
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    with observed(lambda left, right: seen.setdefault(left.operand, (multiplied(left.terms), multiplied(right.terms)))):
        y = f(a, b, addend, KEY, STEP, 0)
        y.backward(dy.to(y.dtype))
    results = {Operand.FPROP_INPUT: y.detach(), Operand.DGRAD_GRAD_OUTPUT: a.grad, Operand.WGRAD_GRAD_OUTPUT: b.grad}
    return {operand: (result, *seen[operand]) for operand, result in results.items()}


def assert_rounded_once(result, left, right, addend=0.0, alpha=1.0):
    """Check that ``result`` is within half a unit in the last place of the exact value, apart from the fp32 sums."""
    exact = alpha * (left @ right.mT) + addend
    exponent = torch.frexp(exact).exponent - 1
    half = torch.ldexp(torch.ones_like(exact), exponent - BITS[result.dtype])
    terms = left.shape[-1] + 4  # roundings: of a sum of K products, of alpha, of its product, of the addend's
    accumulation = 2.0**-24 * terms * (abs(alpha) * (left.abs() @ right.abs().mT) + abs(addend))
    assert result.shape == exact.shape
    excess = ((result.double() - exact).abs() - accumulation) / half
    assert excess.max() <= 1, f"{excess.max():.2f} half units in the last place"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["nvfp4-te", "fp4-all-the-way"])
def test_all_three_products_of_shipped_policies(name, dtype):
    x, w, bias, dy = data((256, 512), (256, 512), (256,), (256, 256), dtype=dtype)
    for operand, parts in run(function(name), x, w, bias, dy).items():
        assert_rounded_once(*parts, addend=bias.double() if operand is Operand.FPROP_INPUT else 0.0)


@pytest.mark.parametrize("techniques", [[CLAMP], [LOW_RANK], [CLAMP, LOW_RANK], [FALLBACK]], ids=str)
@pytest.mark.parametrize("addend", [False, True])
def test_terms_are_summed_before_the_rounding(techniques, addend):
    x, w, bias, dy = data((64, 128), (96, 128), (96,), (64, 96))
    found = run(function(policy(after=techniques)), x, w, bias if addend else None, dy)
    assert_rounded_once(*found[Operand.FPROP_INPUT], addend=bias.double() if addend else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [NVFP4, UE5M3], ids=["e4m3", "ue5m3"])
@pytest.mark.parametrize("scale", [2.0**-55, 1.0, 2.0**40])
def test_tensors_of_any_magnitude(quantize, scale):
    """For the smallest, γ_a·γ_b would be subnormal in fp32."""
    x, w, dy = data((64, 128), (96, 128), (64, 96), scale=scale)
    for parts in run(function(policy(quantize=quantize)), x, w, None, dy).values():
        assert_rounded_once(*parts)


@pytest.mark.parametrize("quantize", [NVFP4, UE5M3], ids=["e4m3", "ue5m3"])
def test_the_largest_numbers_of_fp16_do_not_overflow(quantize):
    x = torch.full((8, 64), 65504.0, dtype=torch.float16)
    w = torch.eye(8, 64, dtype=torch.float16) * 0.5
    y = function(policy(quantize=quantize))(x, w, None, KEY, STEP, 0)
    torch.testing.assert_close(y, torch.full((8, 8), 32752.0, dtype=torch.float16), rtol=2**-10, atol=0)


def test_operands_from_the_master_weights_under_autocast():
    x, w, bias, dy = data((64, 128), (96, 128), (96,), (64, 96), dtype=torch.float32)
    f = function(policy(quantize={**NVFP4, "from_master": True}))
    with torch.autocast("cpu", torch.bfloat16):
        y, left, right = run(f, x, w, bias, dy)[Operand.FPROP_INPUT]
    assert y.dtype is torch.bfloat16
    assert_rounded_once(y, left, right, addend=bias.bfloat16().double())


@pytest.mark.parametrize("batch", [(6,), (2, 3), ()])
@pytest.mark.parametrize("kernel", [(48, 64, 40), (3, 16, 2)])
def test_products_of_attention(batch, kernel):
    m, k, n = kernel
    a, b, dy = data((*batch, m, k), (*batch, k, n), (*batch, m, n))
    for operand, (result, left, right) in run(function(policy(op="matmul"), "matmul"), a, b, None, dy).items():
        result = result.mT if operand is Operand.WGRAD_GRAD_OUTPUT else result  # B is stored [K, N]
        assert_rounded_once(result, left, right)


@pytest.mark.parametrize("shape", [(48, 40), (1, 40), (48, 1), (40,), (), (6, 48, 40), (6, 1, 40)])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.3, -1.7), (2.0, 0.0), (0.0, 0.0)])
def test_addmm_and_baddbmm(shape, alpha, beta):
    batch = shape[:-2]
    a, b, addend, dy = data((*batch, 48, 64), (*batch, 64, 40), shape, (*batch, 48, 40))
    f = function(policy(op="matmul"), "matmul", alpha, beta)
    addend.requires_grad_()
    y, left, right = run(f, a, b, addend, dy)[Operand.FPROP_INPUT]
    assert_rounded_once(y, left, right, addend=beta * addend.detach().double(), alpha=alpha)
    exact = (beta * dy.double()).sum_to_size(shape)
    torch.testing.assert_close(addend.grad.double(), exact, rtol=2**-7, atol=2**-7 * exact.abs().max().item())


def test_an_addend_times_zero_is_not_read():
    a, b, addend, dy = data((6, 48, 64), (6, 64, 40), (48, 40), (6, 48, 40))
    f = function(policy(op="matmul"), "matmul", 1.0, 0.0)
    assert_rounded_once(*run(f, a, b, addend * torch.nan, dy)[Operand.FPROP_INPUT])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_or_inf_poisons_its_row_of_the_product(poison):
    x, w = data((32, 64), (48, 64))
    x[3, 5] = poison
    assert function(policy())(x, w, None, KEY, STEP, 0)[3].isnan().all()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 32)

    def forward(self, x):
        h = self.first(x).relu()
        return self.second(h) + torch.baddbmm(x[..., :32], x, h[:, :, :64].mT @ x[..., :32], alpha=0.5)


@pytest.mark.long
@pytest.mark.inductor
def test_backends_agree_and_sizes_may_be_symbolic():
    def results(backend):
        torch._dynamo.reset()
        model = fp4graph.apply(Net().bfloat16(), policy(op=["linear", "matmul"]), backend=backend, dynamic=True)
        for tokens in (16, 24, 40):
            (x,) = data((2, tokens, 64))
            y = model(x)
            y.backward(torch.ones_like(y))
            # The gradient of a bias is a sum of dY, whose order is the compiler's.
            yield from (y.detach(), model.first.weight.grad.clone(), model.second.weight.grad.clone())

    expected = list(results("eager"))
    for backend in ("aot_eager", "inductor"):
        assert_equal(results(backend), expected)


def test_a_product_without_tensor_scales_is_that_of_torch():
    x, w, bias, dy = data((64, 128), (96, 128), (96,), (64, 96))
    y, left, right = run(function("microscaling"), x, w, bias, dy)[Operand.FPROP_INPUT]
    assert torch.equal(y, torch.addmm(bias, left.bfloat16(), right.bfloat16().T))


A, B, SCALE = torch.randn(2, 3, 20, 32).bfloat16(), torch.randn(2, 3, 24, 32).bfloat16(), torch.tensor(1.37)


@pytest.mark.parametrize(
    ("left", "right", "addend"),
    [
        (A[0, 0], B[0, 0], None),
        (A[0, 0].mT, B[0, 0, :20].mT, torch.randn(32).bfloat16()),
        (A[0], B[0], torch.randn(20, 24).bfloat16()),
        (A, B, torch.randn(2, 1, 20, 24).bfloat16()),
        (A[:, :0], B[:, :0], None),
        (A[..., :0], B[..., :0], None),
    ],
)
def test_the_operator_is_as_declared(left, right, addend):
    check_declaration("scaled_product", (left, right, SCALE, addend, 1.0))


@pytest.mark.parametrize("batch", [(), (6,), (2, 3)])
def test_on_cuda_the_gemm_returns_its_accumulator(batch):
    """In the trace no operand is fp32, and the result is bf16 only after γ and the addend have met the accumulator."""
    with torch._subclasses.FakeTensorMode():
        a = torch.empty(*batch, 32, 64, dtype=torch.bfloat16, device="cuda")
        b = torch.empty(*batch, 48, 64, dtype=torch.bfloat16, device="cuda")
        bias = torch.empty(48, dtype=torch.bfloat16, device="cuda")
        scale = torch.empty((), device="cuda")
        graph = make_fx(lambda *args: product.scaled_product(*args, 1.0))(a, b, scale, bias).graph
    made = {node.target: node.meta["val"].dtype for node in graph.nodes if node.op == "call_function"}
    gemm = torch.ops.aten.bmm.dtype if batch else torch.ops.aten.mm.dtype
    assert made[gemm] is torch.float32
    (output,) = graph.find_nodes(op="output")
    assert output.args[0].meta["val"].dtype is torch.bfloat16
    casts = [node for node in graph.nodes if node.target is torch.ops.aten._to_copy.default]
    assert [(cast.args[0].meta["val"].dtype, cast.meta["val"].dtype) for cast in casts] == [
        (torch.bfloat16, torch.float32),  # the addend
        (torch.float32, torch.bfloat16),
    ]


def test_flops_are_those_of_torchs_linear():
    x, w, dy = data((64, 128), (96, 128), (64, 96))
    f = function(policy())
    with FlopCounterMode(display=False) as counted:
        f(x.requires_grad_(), w.requires_grad_(), None, KEY, STEP, 0).backward(dy)
    with FlopCounterMode(display=False) as expected:
        F.linear(x, w).backward(dy)
    assert counted.get_total_flops() == expected.get_total_flops()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_scalar_multiplies_the_accumulator_in_every_layout(dtype):
    """The sums of these whole numbers are exact in fp32, so their order does not matter."""
    generator, scale = torch.Generator().manual_seed(0), torch.tensor(1.37)
    a, b = (torch.randint(-6, 7, (rows, 96), generator=generator).to(dtype) for rows in (64, 128))
    expected = ((a.double() @ b.double().mT).float() * scale).to(dtype)
    layouts = [(x, x.mT.contiguous().mT) for x in (a, b)]
    for left, right in itertools.product(*layouts):
        assert torch.equal(product.scaled_product(left, right, scale, None, 1.0), expected)
        batches = product.scaled_product(left.expand(2, -1, -1), right.expand(2, -1, -1), scale, None, 1.0)
        assert torch.equal(batches, expected.expand(2, -1, -1))
