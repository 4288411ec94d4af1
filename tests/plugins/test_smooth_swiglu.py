"""smooth_swiglu against Q(X/s)·Q(W·s)ᵀ written out, and the products of a model on which it acts."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4graph
from fp4graph.errors import PolicyError, PolicyWarning
from fp4graph.technique import gemms_at
from fp4graph.technique.operands import Gemm
from tests.helpers.models import SwiGlu, grouped_mm
from tests.helpers.policies import quantizer
from tests.helpers.training import applied, assert_equal
from tests.plugins.layer import Layer, gaussian, products_by

pytestmark = pytest.mark.usefixtures("operation_by_operation")

SPEC = fp4graph.QuantSpec(block=16, scale=fp4graph.ScaleSpec("e8m0", "ceil"))
QUANTIZE = quantizer(16)


def policy(options=None, operands=None, op="linear", rest=False):
    smooth = {
        "name": "down",
        "match": {"op": op, "producer": "swiglu"},
        "quantize": QUANTIZE,
        "techniques": [{"smooth_swiglu": options} if options else "smooth_swiglu"],
        **({"operands": operands} if operands else {}),
    }
    rules = [smooth, {"name": "rest", "match": {"op": op}, "quantize": QUANTIZE}]
    return fp4graph.load_policy({"version": 1, "name": "p", "rules": rules[: 1 + rest]})


layer = Layer(policy, 96, 32, producer="swiglu")
run, program = layer.products, layer.program


def quantize(t):
    return fp4graph.fake_quantize(t.contiguous(), SPEC)


def channel_scales(x, power_of_two=False):
    """Return s, channel by channel."""
    result = []
    for channel in x.mT.tolist():
        largest = max(map(abs, channel))
        if power_of_two and largest:
            mantissa, exponent = math.frexp(largest)  # largest = mantissa·2^exponent, mantissa in [1/2, 1)
            largest = 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
        result.append(largest or 1.0)
    return torch.tensor(result)


def by_hand(x, gate, up, down):
    """Return the output of a SwiGLU whose last product is smoothed."""
    hidden = F.silu(quantize(x) @ quantize(gate).mT) * (quantize(x) @ quantize(up).mT)
    s = channel_scales(hidden)
    return quantize(hidden / s) @ quantize(down * s).mT


@pytest.fixture
def data():
    x = F.silu(gaussian(50, 96)) * gaussian(50, 96, seed=1)
    x = x * torch.exp(2 * gaussian(96, seed=2))  # channels of very different size
    x[:, 5] = 0
    return x, gaussian(32, 96, seed=3), gaussian(50, 32, seed=4)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_fprop_quantizes_the_smoothed_operands(data, power_of_two):
    x, w, dy = data
    s = channel_scales(x, power_of_two)
    y, dx, dw = run(x, w, dy, {"power_of_two": power_of_two})
    assert torch.equal(y, quantize(x / s) @ quantize(w * s).mT)
    assert not torch.equal(y, quantize(x) @ quantize(w).mT)
    # The backward GEMMs quantize the originals without a transform.
    assert_equal((dx, dw), products_by(quantize, x, w, dy)[1:])


def test_the_backward_reads_the_fprop_operands_scaled_back(data):
    x, w, dy = data
    s = channel_scales(x)
    backward = {"dgrad.weight": "fprop", "wgrad.input": "fprop", "gradients": "keep"}
    _, dx, dw = run(x, w, dy, operands=backward)
    assert torch.equal(dx, dy @ (quantize(w * s) / s))
    assert torch.equal(dw, dy.mT @ (quantize(x / s) * s))


def test_scales_cancel_in_the_unquantized_product(data):
    """Up to the rounding of fp32, and exactly if s is a power of two and all sums are exact."""
    x, w, _ = data
    for options in (None, {"power_of_two": True}):
        rotation = program(options).fprop.rotate(x, w, None)
        product, exact = rotation.left.double() @ rotation.right.double().mT, x.double() @ w.double().mT
        torch.testing.assert_close(product, exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rotation.undo(rotation.left, "left"), x, rtol=1e-6, atol=0)
        torch.testing.assert_close(rotation.undo(rotation.right, "right"), w, rtol=1e-6, atol=0)
        assert rotation.left.abs().max() <= 1
    x, w = (x * 64).round().clamp(-500, 500) / 64, (w * 64).round() / 64  # so few bits that every sum is exact
    rotation = program({"power_of_two": True}).fprop.rotate(x, w, None)
    assert torch.equal(rotation.left @ rotation.right.mT, x @ w.mT)
    assert not torch.equal(rotation.left, x)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_zeros_poison_extreme_values_and_no_tokens(data, power_of_two):
    x, w, dy = data
    x[3, 7], x[4, 40], x[:, 20], x[:, 21] = math.nan, math.inf, 1e-42, 3e38
    options = {"power_of_two": power_of_two}
    rotation = program(options).fprop.rotate(x, w, None)
    (s,) = rotation.steps[0].shared
    assert torch.equal(s[0, [5, 7, 40]], torch.ones(3))  # zeros, NaN and Inf
    assert (s > 0).all()
    assert s.isfinite().all()
    assert rotation.left.isfinite().sum() == x.numel() - 2
    # Only the products of rows 3 and 4, which have poisoned blocks, are NaN.
    y = run(x, w / 1e4, dy, options)[0]
    assert torch.equal(y.isnan().any(1).nonzero().flatten(), torch.tensor([3, 4]))
    assert_equal(run(x[:0], w, dy[:0], options), (torch.zeros(0, 32), torch.zeros(0, 96), torch.zeros(32, 96)))


def test_batch_and_sequence_are_one_axis_of_tokens(data):
    x, w, dy = data
    apart = run(x.view(5, 10, 96), w, dy.view(5, 10, 32))[0]
    assert torch.equal(apart.view(50, 32), run(x, w, dy)[0])


def test_bf16_operands_are_smoothed_in_fp32(data):
    x, w, _ = (t.bfloat16() for t in data)
    rotation = program().fprop.rotate(x, w, None)
    s = channel_scales(x.float())
    assert rotation.left.dtype is torch.float32
    assert torch.equal(rotation.left, x.float() / s)
    assert torch.equal(rotation.right, w.float() * s)


@pytest.mark.slow
def test_in_a_model_only_the_down_projection_is_smoothed():
    model, x = SwiGlu(32, 96, bias=False), torch.randn(2, 10, 32)
    weights = [m.weight.detach().clone() for m in (model.gate, model.up, model.down)]
    y = applied(model, policy(rest=True))(x)
    torch.testing.assert_close(y.detach().view(20, 32), by_hand(x.view(20, 32), *weights), rtol=0, atol=0)
    y.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_rule_for_swiglu_refuses_a_model_without_one():
    model = applied(nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)), policy(rest=True))
    with pytest.raises(PolicyError, match="rule 'down' matches no site of this model"):
        model(torch.randn(4, 32))


def test_only_products_behind_a_swiglu_are_smoothed():
    technique = policy().rules[0].techniques[0]
    for producer in (None, "gelu", "silu", "mul", "swiglu"):
        acting = {Gemm.FPROP} if producer == "swiglu" else set()
        assert gemms_at(technique, Layer(policy, 96, 32, producer).site) == acting


class SwiGluExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Parameter(gaussian(3, 96, 32, seed=seed) / 6) for seed in (0, 1))
        self.down = nn.Parameter(gaussian(3, 32, 96, seed=2) / 6)

    def activation(self, gate, up):
        return F.silu(gate) * up

    def forward(self, x, ends):
        gate, up = (grouped_mm(x, w.mT, offs=ends) for w in (self.gate, self.up))
        return grouped_mm(self.activation(gate, up), self.down.mT, offs=ends)


class GptOssExperts(SwiGluExperts):
    """GPT-OSS's activation: clamped projections, gate·σ(1.702·gate)·(up + 1)."""

    def activation(self, gate, up):
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


class Gelu(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32))

    def forward(self, x, ends):
        return super().forward(x)


@pytest.mark.captured
@pytest.mark.parametrize(("module", "made"), [(GptOssExperts, "mul, other modules"), (Gelu, "gelu, other modules")])
def test_a_model_without_silu_times_up_is_warned_about(module, made, tmp_path):
    """The first forward warns, because a policy is loaded without the model."""
    x, ends = torch.randn(22, 32), torch.tensor([7, 7, 20], dtype=torch.int32)
    path = tmp_path / "p.yaml"
    path.write_text("""version: 1
techniques: [smooth_swiglu]
rules:
  - match: {op: [linear, grouped]}
    quantize: {element: e2m1, block: 32}
""")
    model = applied(module(), path)
    message = rf"p.yaml:4: technique 'smooth_swiglu' has no effect in this model, .* inputs come from {made}\. Remove"
    with pytest.warns(PolicyWarning, match=message) as seen:
        model(x, ends)
    assert len(seen) == 1
    model(x, ends)  # does not warn again
    with pytest.warns(PolicyWarning, match=message):
        fp4graph.explain(module(), path, (x, ends))
    applied(SwiGluExperts(), path)(x, ends)  # no warning: one of three weights is behind a SwiGLU


@pytest.mark.slow
def test_each_expert_has_separate_scales_of_channels():
    """One expert has no tokens, and two rows at the end belong to no expert."""
    model, x, ends = SwiGluExperts(), torch.randn(22, 32), torch.tensor([7, 7, 20], dtype=torch.int32)
    weights = [w.detach().clone() for w in (model.gate, model.up, model.down)]
    y = applied(model, policy(op="grouped", rest=True))(x, ends)
    for expert, tokens in ((0, slice(0, 7)), (2, slice(7, 20))):
        torch.testing.assert_close(y[tokens], by_hand(x[tokens], *(w[expert] for w in weights)), rtol=0, atol=0)
    assert not y[20:].any()
    y.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
