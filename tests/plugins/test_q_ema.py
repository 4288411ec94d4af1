"""q_ema against Algorithm 1 of the TetraJet paper, as a loop over elements, and against Eq. 10."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import fp4graph
from fp4graph.ops.product import total
from fp4graph.technique.operands import Operand
from tests.helpers.policies import TIES_UP, loaded, one_rule
from tests.helpers.training import applied, prepared
from tests.plugins.layer import SPEC_TIES_UP, Layer, draw, gaussian
from tests.recipes.mx_references import q_ema_weight

policy = partial(loaded, "q_ema", quantize=TIES_UP)
layer = Layer(policy)


def quantized(w, average, options=None, step=0, **rest):
    return total(layer.operand(options, Operand.FPROP_WEIGHT, **rest)(w, draw(step), {"q_ema": {"weight": average}}))


def algorithm_1(w, average):
    return torch.from_numpy(q_ema_weight(w.numpy(), average.numpy())).float()


@pytest.mark.parametrize("width", [64, 50])
@pytest.mark.parametrize("drift", [0.01, 0.3, 3.0])
def test_values_are_those_of_algorithm_1(width, drift):
    w = gaussian(40, width)
    average = w + drift * gaussian(40, width, seed=1)
    chosen = quantized(w, average)
    assert torch.equal(chosen, algorithm_1(w, average))
    assert not torch.equal(chosen, fp4graph.fake_quantize(w, SPEC_TIES_UP))


def test_exact_values_and_ties():
    w, average = torch.zeros(1, 32), torch.zeros(1, 32)
    w[0, :6] = torch.tensor([6.0, 2.4, 2.4, 2.4, 2.0, -5.0])
    average[0, :6] = torch.tensor([0.0, 2.5, 2.4999, 9.0, 5.0, -4.9])
    # 6 is a value, whatever its average. A tie of the average goes up, also for negative values.
    assert quantized(w, average)[0, :6].tolist() == [6.0, 3.0, 2.0, 3.0, 2.0, -4.0]
    for value, expected in ((-5.0, -4.0), (-5.1, -6.0)):
        average[0, 5] = value
        assert quantized(w, average)[0, 5] == expected


@pytest.mark.parametrize(
    "group_scale", [{"tensor_scaling": {"target": 5.0}}, {"macro_block_scaling": {"block": 64}}], ids=str
)
def test_the_average_is_normalized_as_the_weight_is(group_scale):
    """Scales and neighbours come from w/γ, so e/γ is compared with them. An average e = w rounds to nearest."""
    w = gaussian(16, 64, seed=1) / 100
    with_average = quantized(w, w, more=[group_scale])
    plain = Layer(lambda options: fp4graph.load_policy(one_rule(group_scale, quantize=TIES_UP)))
    without = total(plain.operand(None, Operand.FPROP_WEIGHT)(w, None))
    assert torch.equal(with_average, without)


def test_forwards_before_start_after_round_to_nearest():
    w = gaussian(16, 64, seed=1)
    average = w.roll(1, 0)
    for step in range(5):
        expected = fp4graph.fake_quantize(w, SPEC_TIES_UP) if step < 3 else quantized(w, average)
        assert torch.equal(quantized(w, average, {"start_after": 3}, step), expected)
    assert torch.equal(quantized(w, w), fp4graph.fake_quantize(w, SPEC_TIES_UP))  # the average e = w


def test_the_average_follows_eq_10_at_every_optimizer_step():
    torch.manual_seed(0)
    model = applied(torch.nn.Linear(64, 8), policy({"beta": 0.9}))
    optimizer = prepared(model, torch.optim.SGD, lr=0.5)
    expected = model.weight.detach().double().clone()
    x = torch.randn(16, 64)
    for _ in range(4):
        for _ in range(2):  # accumulation: two forwards to a step
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = 0.9 * expected + (1 - 0.9) * model.weight.detach().double()
    state = model._fp4graph_q_ema_weight
    torch.testing.assert_close(state.double(), expected, rtol=0, atol=4 * 2.0**-23)  # one fp32 rounding per step
    assert not torch.allclose(state, model.weight, atol=1e-4)


@pytest.mark.long
def test_inductor_computes_the_bits_of_eager(inductor):
    w = gaussian(24, 64, seed=2)
    average = w + 0.3 * w.roll(1, 0)

    def both(w, average):
        return quantized(w, average), quantized(w, average, {"start_after": 1}, 2)

    for a, b in zip(both(w, average), inductor(both, w, average)(w, average), strict=True):
        assert torch.equal(a, b)


def test_a_step_that_only_initializes_state_does_not_move_the_average():
    """torch's distributed checkpoint takes such a step before it loads, at learning rate 0 with zero gradients."""
    model = applied(torch.nn.Linear(64, 8), policy({"beta": 0.9}))
    optimizer = prepared(model, torch.optim.SGD, lr=0.0)
    average = model._fp4graph_q_ema_weight
    average.add_(1)  # as loaded from a checkpoint
    before = average.clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(model._fp4graph_q_ema_weight, before)
    model.weight.grad.fill_(1.0)  # as in the first step of a warm-up, whose rate is 0 too
    optimizer.step()
    assert not torch.equal(model._fp4graph_q_ema_weight, before)
