"""dampen against its gradient, written out in Python's floats."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

import fp4graph
from tests.helpers.policies import TIES_UP, with_technique
from tests.plugins.layer import step, stepped

SPEC = fp4graph.QuantSpec(block=32, scale=fp4graph.ScaleSpec("e8m0", "ceil"), ties="up")

policy = partial(with_technique, "dampen", quantize=TIES_UP)


def prepared(options, dtype=torch.float32, **rest):
    return stepped(policy(options, **rest), partial(torch.optim.SGD, lr=0.5), dtype)


def test_the_gradient_is_that_of_the_squared_frobenius_norm():
    """One step of plain gradient descent, element by element, Q by hand: 2.4 and 6 in a block with S = 1."""
    applied, optimizer = prepared({"strength": 0.25})
    with torch.no_grad():
        applied.weight.zero_()[0, :4] = torch.tensor([6.0, 2.4, -0.7, 0.25])
    step(applied, optimizer, torch.zeros(6, 64))
    # Q: 6, 2, -0.5, 0.5 (a tie, up); minus lr 0.5 times 2 times 0.25 times (w - Q).
    expected = [6.0, 2.4 - 0.25 * 0.4, -0.7 + 0.25 * 0.2, 0.25 + 0.25 * 0.25]
    assert applied.weight[0, :4].tolist() == pytest.approx(expected, rel=1e-6)
    assert applied.weight.grad[0, 1].item() == pytest.approx(2 * 0.25 * 0.4, rel=1e-6)
    assert not applied.weight[0, 4:].any()
    assert torch.equal(applied.bias.grad, torch.ones(6))  # biases are not quantized


def test_it_is_what_autograd_makes_of_the_loss_term():
    applied, optimizer = prepared({"strength": 0.3})
    w, task = applied.weight.detach().clone(), torch.randn(6, 64)
    step(applied, optimizer, task)
    leaf = w.double().requires_grad_()
    ((task.double() * leaf).sum() + 0.3 * (leaf - fp4graph.fake_quantize(w, SPEC).double()).square().sum()).backward()
    torch.testing.assert_close(applied.weight.grad.double(), leaf.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("start", [0.0, 0.25])
def test_strength_rises_along_half_a_cosine(start):
    total = 8
    applied, optimizer = prepared({"strength": 0.1, "total_steps": total, "start": start})
    for t in range(1, total + 4):
        w = applied.weight.detach().clone()
        step(applied, optimizer, torch.zeros(6, 64))
        at = min(max((t - start * total) / (total - start * total), 0.0), 1.0)
        strength = 0.1 * (1 - math.cos(math.pi * at)) / 2
        expected = 2 * strength * (w - fp4graph.fake_quantize(w, SPEC))
        torch.testing.assert_close(applied.weight.grad, expected, rtol=1e-5, atol=1e-9)
    assert strength == pytest.approx(0.1)


def test_bf16_weights_get_the_term_rounded_once():
    applied, optimizer = prepared({"strength": 0.3}, torch.bfloat16)
    w, grad = applied.weight.detach().clone(), torch.randn(6, 64).bfloat16()
    step(applied, optimizer, grad)
    term = 0.6 * (w.float() - fp4graph.fake_quantize(w, SPEC).float())
    assert torch.equal(applied.weight.grad, (grad.float() + term).bfloat16())


def test_loss_scaling_and_clipping_come_before_it():
    applied, optimizer = prepared({"strength": 0.1})
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    w = applied.weight.detach().clone()
    x = torch.randn(4, 64)
    scaler.scale(applied(x).sum() * 100).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(applied.parameters(), 1e-3)
    clipped = applied.weight.grad.clone()
    scaler.step(optimizer)
    term = 0.2 * (w - fp4graph.fake_quantize(w, SPEC))
    torch.testing.assert_close(applied.weight.grad, clipped + term, rtol=1e-6, atol=1e-8)
    assert term.norm() > clipped.norm()


def test_it_shares_a_rule_with_q_ema():
    """Q(W) is then the value that q_ema chooses, which the forward multiplies with."""
    applied, optimizer = prepared({"strength": 0.5}, more=["q_ema"])
    with torch.no_grad():
        applied.weight.fill_(2.4)
        applied.weight[:, ::32] = 6.0
        applied._fp4graph_q_ema_weight.copy_(applied.weight + 0.2)
    step(applied, optimizer, torch.zeros(6, 64))
    torch.testing.assert_close(applied.weight.grad[:, 1], torch.full((6,), 2.4 - 3.0))
