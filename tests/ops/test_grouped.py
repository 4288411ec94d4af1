"""Grouped products against a loop over experts with the ordinary linear, and against their definition."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from fp4graph_plugins import ms_eden

import fp4graph
from fp4graph.errors import CaptureError
from fp4graph.graph.functions import site_function
from fp4graph.numerics import noise, scaling
from fp4graph.numerics.blocking import Blocking, Groups
from fp4graph.numerics.segments import Segments
from fp4graph.ops.gemm import GemmProgram, MatmulProgram
from fp4graph.ops.grouped import Experts
from fp4graph.ops.operand import OperandProgram
from tests.helpers.models import grouped_mm
from tests.helpers.operators import check_declaration
from tests.helpers.policies import MXFP4, NVFP4, one_rule, quantizer
from tests.helpers.sites import program_of
from tests.helpers.training import assert_equal

pytestmark = pytest.mark.usefixtures("operation_by_operation")

KEY, STEP = noise.make_key("site", "experts"), noise.make_step(0, 0, 0)
N, K = 96, 64
#: Experts without tokens, with one, with numbers that no block divides; five tokens belong to no expert.
SIZES = (0, 1, 33, 64, 7, 0)
DROPPED = 5

program = partial(program_of, op="grouped", inputs=K, outputs=N, producer="swiglu")


def to_nearest(planned: MatmulProgram) -> MatmulProgram:
    """Round everything to nearest: a linear of one expert would draw other noise."""

    def operand(former: OperandProgram) -> OperandProgram:
        return former if former.spec is None else replace(former, spec=replace(former.spec, rounding="nearest"))

    def gemm(former: GemmProgram) -> GemmProgram:
        return replace(former, left=operand(former.left), right=operand(former.right))

    return replace(planned, **{name: gemm(getattr(planned, name)) for name in ("fprop", "dgrad", "wgrad")})


def data(sizes=SIZES, dropped=DROPPED, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    tokens = sum(sizes) + dropped
    shapes = (tokens, K), (len(sizes), N, K), (tokens, N)
    x, w, dy = (torch.randn(shape, generator=generator) for shape in shapes)
    # Experts have tokens and weights of different magnitudes, so that a statistic of the wrong expert shows.
    x = x * torch.logspace(-2, 2, tokens)[:, None]
    w = w * torch.logspace(1, -1, len(sizes))[:, None, None]
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return x.to(dtype), w.to(dtype), dy.to(dtype), ends


def grouped(planned, x, w, dy, ends, state=()):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    function = site_function(planned, "grouped", 1.0, 1.0)
    y = function(x, w.mT, None, KEY, STEP, 0, *(entry.mT for entry in state), ends=ends)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


def looped(planned, x, w, dy, ends, state=()):
    """Return y, dX and dW of a loop over experts with the ordinary linear; 0 for dropped tokens and idle experts."""
    y, dx, dw = torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(w)
    function, start = site_function(planned, "linear", 1.0, 1.0), 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            tokens, weight = x[start:end].clone().requires_grad_(), w[expert].clone().requires_grad_()
            result = function(tokens, weight, None, KEY, STEP, 0, *(entry[expert] for entry in state))
            result.backward(dy[start:end])
            y[start:end], dx[start:end], dw[expert] = result.detach(), tokens.grad, weight.grad
        start = end
    return y, dx, dw


#: Cases whose techniques are also tried one by one, in quicker cases.
WITH_RELATIVES = ("averis", "quartet-ii", "nvfp4-smooth-swiglu", "smooth, with a surrogate")
#: Cases with one γ per token.
BY_ROW = ("tensor_scaling by row", "nvfp4-mxfp8-experts")
TWO_D = {"fprop.input": {"block": [8, 32]}, "gradients": {"block": [16, 32]}, "weights": {"block": [32, 32]}}
REQUANTIZED = {"wgrad.input": {"source": "fprop"}, "dgrad.weight": {"source": "fprop"}}
BY_32 = {"wgrad": {"block": 32}, "dgrad": {"block": 32}}
TECHNIQUES = {
    "tensor_scaling": ["tensor_scaling"],
    "tensor_scaling by row": [{"tensor_scaling": {"granularity": "row"}}],
    "tensor_scaling by 64": [{"tensor_scaling": {"granularity": 64}}],
    "four_over_six": ["tensor_scaling", "four_over_six"],
    "two group scales": ["tensor_scaling", {"macro_block_scaling": {"block": 48}}],
    "hadamard of 64": [{"hadamard": {"block": 64, "kind": "random", "resample": "never"}}],
    "guarded": ["tensor_scaling", {"stochastic_rounding": {"range_guard": 0.75}}],
    "surrogate": ["tensor_scaling", "step_gradient"],
    "fallback": ["tensor_scaling", {"outlier_fallback": {"fraction": 0.3, "operands": ["fprop", "dgrad"]}}],
    "fallback by threshold": ["tensor_scaling", {"outlier_fallback": {"threshold": 0.1}}],
    "fallback by row": ["tensor_scaling", {"outlier_fallback": {"granularity": "row", "operands": ["fprop", "dgrad"]}}],
    "mean split": ["tensor_scaling", "mean_split"],
    "eden": [{"hadamard": {"scope": "backward", "block": 64}}, {"ms_eden": {"block": 64}}],
    "smooth": ["tensor_scaling", "smooth_swiglu"],
    "smooth, with a surrogate": [{"smooth_swiglu": {"power_of_two": True}}, "step_gradient"],
    "clamped": ["tensor_scaling", {"outlier_clamp": {"quantile": 0.9, "operands": ["fprop", "dgrad.grad_output"]}}],
}
NAMES = (
    *("microscaling", "tetrajet", "nvfp4-te", "mxfp4-best", "quartet", "ue5m3-best", "int4-per-tensor", "wang-dge"),
    *("mxfp4-rl", "averis", "quartet-ii", "nvfp4-smooth-swiglu", "if4", "nvfp4-mxfp8-experts"),
)
POLICIES = {
    **{name: name for name in NAMES},
    **{name: one_rule(*parts, op="grouped", quantize=NVFP4) for name, parts in TECHNIQUES.items()},
    "rows": one_rule(op="grouped", quantize=quantizer("row"), operands=BY_32),
    "a scale for each line": one_rule(op="grouped", quantize=quantizer("row")),
    "a scale for each tensor": one_rule(op="grouped", quantize=quantizer("tensor")),
    "a scale for each rotated tensor": one_rule("hadamard", op="grouped", quantize=quantizer("tensor")),
    "2-D": one_rule(op="grouped", operands=TWO_D),
    "2-D requantized": one_rule(op="grouped", operands={"fprop.input": {"block": [8, 32]}, **REQUANTIZED}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in WITH_RELATIVES else name for name in POLICIES]
)
def test_is_a_loop_over_experts(name, dtype, monkeypatch):
    """Equal to the last bit: on a CPU the products of an expert are those of a linear, in the same order.

    One expert has one token. A linear rotates one row by a matrix-vector product, which sums in another order, and
    takes the γ of its only row for the tensor's γ, which multiplies the accumulator: there y and dX agree within the
    rounding of a sum of 96 products.
    """
    # MS-EDEN's corrected scales draw by the number of a block, which in the loop starts again with every expert.
    monkeypatch.setattr(scaling, "uniform", lambda bits: torch.full_like(bits, 0.5, dtype=torch.float32))
    monkeypatch.setattr(ms_eden, "_FILL_DIVISOR", float("inf"))  # a linear does not know that its tokens are few
    planned = to_nearest(program(POLICIES[name]))
    x, w, dy, ends = data(dtype=dtype)
    state = tuple(w.float() + 0.1 for _ in planned.state)
    results, expected = (run(planned, x, w, dy, ends, state) for run in (grouped, looped))
    if name in ("quartet", "quartet-ii", "mxfp4-best", "hadamard of 64", *BY_ROW):
        tolerance = 96 * torch.finfo(dtype).eps
        for result, due in zip(results[:2], expected[:2], strict=True):
            torch.testing.assert_close(result[0], due[0], rtol=tolerance, atol=tolerance * float(due[0].abs().max()))
            result[0] = due[0]
    assert_equal(results, expected)


def test_each_expert_has_its_part_of_a_weights_state():
    planned = program(one_rule("q_ema", op="grouped"))
    x, w, dy, ends = data()
    state = (w + torch.randn(w.shape, generator=torch.Generator().manual_seed(1)) * w.abs().amax((1, 2), True) / 6,)
    results = grouped(planned, x, w, dy, ends, state)
    assert_equal(results, looped(planned, x, w, dy, ends, state))
    assert not torch.equal(results[0], grouped(planned, x, w, dy, ends, (w,))[0])


@pytest.mark.parametrize("policy", ["tetrajet", "nvfp4-te", "mxfp4-best"])
def test_one_expert_is_the_ordinary_linear(policy):
    """Noise included, because blocks divide the number of tokens: tokens then have the same index as in a linear."""
    x, w, dy, ends = data((64,), 0)
    planned = program(policy)
    assert_equal(grouped(planned, x, w, dy, ends), looped(planned, x, w, dy, ends))


def test_noise_of_tokens_does_not_depend_on_their_experts():
    """fprop and dgrad draw by the token's index. Experts of equal weights therefore give a token the same results."""
    planned = program("tetrajet")
    x, w, dy, ends = data((40, 24), 0)
    same = w[:1].expand(2, -1, -1).contiguous()
    right = planned.dgrad.right  # its noise has the index of the weight's element, which differs between experts
    right = replace(right, spec=replace(right.spec, rounding="nearest"))
    planned = replace(planned, dgrad=replace(planned.dgrad, right=right))
    one, two = grouped(planned, x, same[:1], dy, torch.tensor([64])), grouped(planned, x, same, dy, ends)
    # A GEMM may sum in another order for another number of rows: within fp32's rounding of sums of 96 products.
    torch.testing.assert_close(one[0], two[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(one[1], two[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_operator_is_as_declared(transposed):
    x, w, _, ends = data()
    w, sizes = w.mT.contiguous().mT if transposed else w, torch.tensor(SIZES)
    check_declaration("grouped_product", (x, w, ends.long() - sizes, sizes, torch.rand(len(SIZES))))


def test_without_any_tokens():
    planned = program("nvfp4-te")
    x, w, dy, ends = data((0, 0), 0)
    y, dx, dw = grouped(planned, x, w, dy, ends)
    assert (y.shape, dx.shape) == ((0, N), (0, K))
    assert torch.equal(dw, torch.zeros_like(w))


def test_dropped_tokens_change_no_result():
    """Expert parallelism leaves the rows behind the last offset unwritten: they may hold anything."""
    for policy in ("nvfp4-te", one_rule({"tensor_scaling": {"granularity": "all"}}, op="grouped", quantize=NVFP4)):
        planned = to_nearest(program(policy))
        x, w, dy, ends = data()
        clean = grouped(planned, x, w, dy, ends)
        x[-DROPPED:], dy[-DROPPED:] = torch.nan, torch.inf
        assert_equal(grouped(planned, x, w, dy, ends), clean)
        assert not clean[0][-DROPPED:].any()


def test_one_tensor_scale_for_all_experts():
    """γ of ``granularity: all`` is the largest element of all experts over 6·448 (their scales are E4M3)."""
    technique = {"tensor_scaling": {"granularity": "all"}}
    planned = program(one_rule(technique, op="grouped", quantize=NVFP4)).fprop
    x, w, _, ends = data()
    layout = Experts(ends, x.shape[0], w.shape[0]).layout(1)
    for side, values, largest in (("left", x, x[:-DROPPED].abs().max()), ("right", w, w.abs().max())):
        (scale,) = getattr(planned, side).quantize(values, segments=layout.segments(planned.gemm, side)).group_scales
        assert torch.equal(scale.scale.unique(), (largest / (6 * 448)).reshape(1))


def test_groups_reduce_each_segment():
    """Compared with slices, for blocks across the tokens and along them."""
    x, _, _, ends = data((32, 64, 0, 96), 0)
    layout = Experts(ends, x.shape[0], 4).layout(32)
    by_hand = [part.abs() for part in x.split([32, 64, 96])]
    rows = Blocking(tuple(x.shape), 32, segments=Segments(0, 4, layout.ids[: x.shape[0]]))
    z = rows.split(x).abs().amax(rows.axes, keepdim=True)
    expected = torch.cat([part.max().expand(len(part)) for part in by_hand])
    assert torch.equal(Groups(rows, "tensor").reduce(z, "amax").flatten(), expected)
    columns = Blocking((K, x.shape[0]), 32, segments=Segments(1, 4, layout.ids[: x.shape[0]]))
    z = columns.split(x.mT).abs().amax(columns.axes, keepdim=True)
    per_line = torch.cat([part.amax(0)[:, None].expand(-1, len(part) // 32) for part in by_hand], 1)
    assert torch.equal(Groups(columns, "row").reduce(z, "amax").squeeze(-1), per_line)


@pytest.mark.parametrize("granule", [1, 16, 32, 96])
def test_no_granule_of_a_layout_has_tokens_of_two_experts(granule):
    x, _, _, ends = data()
    layout = Experts(ends, x.shape[0], len(SIZES)).layout(granule)
    laid_out = layout.lay_out(x)
    assert len(laid_out) <= (len(x) + len(SIZES) * (granule - 1))
    for blocks in laid_out.split(granule) if granule > 1 else ():
        places = [(x == row).all(1).nonzero()[0, 0] for row in blocks if row.any()]
        assert len({int(torch.searchsorted(ends, place, right=True)) for place in places}) <= 1
    assert torch.equal(layout.take_back(laid_out)[:-DROPPED], x[:-DROPPED])


MIXES = "technique {} does not tell the tokens and weights of experts apart"
BETWEEN = "technique {} cannot act on wgrad.input of experts"  # it would count zeros between experts
#: A block that is an expert's whole tensor is computed as short blocks that share their scale.
PARTS = "{} cannot act on .* of experts where a whole tensor has one scale"
OF_A_TENSOR = quantizer("tensor", "e4m3", "nearest_even")
EDEN = {"hadamard": {"scope": "backward", "block": 16}}, {"ms_eden": {"block": 16}}
CHOSEN = {**NVFP4, "element": ["e2m1", "int4"]}
ABSMAX = {"tensor_scaling_gradient": {"kind": "absmax"}}


@pytest.mark.filterwarnings("ignore::fp4graph.errors.PolicyWarning")
@pytest.mark.parametrize(
    ("techniques", "message", "quantize"),
    [
        (["low_rank_residual"], MIXES.format("low_rank_residual"), MXFP4),
        (["tensor_scaling", ABSMAX], MIXES.format("tensor_scaling_gradient"), MXFP4),
        ([{"outlier_clamp": {"operands": ["wgrad.input"]}}], BETWEEN.format("outlier_clamp"), MXFP4),
        ([{"outlier_fallback": {"operands": ["wgrad.input"]}}], BETWEEN.format("outlier_fallback"), MXFP4),
        (["smooth_max"], PARTS.format("smooth_max"), OF_A_TENSOR),
        (["four_over_six"], PARTS.format("four_over_six"), OF_A_TENSOR),
        ([*EDEN], "ms_eden: it needs a single element format, and the blocks of dgrad.grad_output choose", CHOSEN),
        (["stochastic_scale_rounding"], PARTS.format("stochastic rounding of scales"), OF_A_TENSOR),
    ],
    ids=str,
)
def test_techniques_that_cannot_act_on_experts_are_refused(techniques, message, quantize):
    with pytest.raises(CaptureError, match=message):
        program(one_rule(*techniques, op=["linear", "grouped"], quantize=quantize))


class OfExperts(torch.nn.Module):
    """act(gate)·up and the product after it, of three experts."""

    def __init__(self, act):
        super().__init__()
        self.act = act
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"gate": (3, 96, 32), "up": (3, 96, 32), "down": (3, 32, 96)}.items():
            setattr(self, name, torch.nn.Parameter(torch.randn(shape, generator=generator) / 6))

    def forward(self, x, ends):
        gate, up = (grouped_mm(x, w.mT, offs=ends) for w in (self.gate, self.up))
        return grouped_mm(self.act(gate) * up, self.down.mT, offs=ends)


COMPILED = {
    "mean_split": one_rule("tensor_scaling", "mean_split", op="grouped", quantize=NVFP4),
    "ms_eden": one_rule(*EDEN, op="grouped", quantize=NVFP4),
    "smooth_swiglu": one_rule("smooth_swiglu", op="grouped"),
    "chosen elements": one_rule("tensor_scaling", op="grouped", quantize=CHOSEN),
}


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_is_eager_for_any_sizes(name):
    """Two assignments of tokens, one of which has an expert without tokens and tokens of no expert.

    Equal to the last bit if the activation is exact. smooth_swiglu acts behind a silu, whose exponential may differ in
    the last bit: a few elements are then rounded to their other neighbour, a relative error of 2⁻² each.
    """
    exact = name != "smooth_swiglu"
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
    results = []
    for backend in ("eager", "inductor"):
        torch._dynamo.reset()
        act = torch.nn.functional.relu if exact else torch.nn.functional.silu
        model = fp4graph.apply(OfExperts(act), COMPILED[name], backend=backend, seed=0)
        for ends in ([7, 7, 43], [20, 30, 50]):
            leaf = x.clone().requires_grad_()
            y = model(leaf, torch.tensor(ends, dtype=torch.int32))
            y.square().sum().backward()
            results += [y.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())]
            model.zero_grad()
    for eager, compiled in zip(results[:10], results[10:], strict=True):
        assert torch.equal(eager, compiled) if exact else (eager - compiled).norm() <= 2e-2 * eager.norm()
