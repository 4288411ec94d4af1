"""dampen against the gradient of its term, written out in Python's floats and by autograd."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

import fp4graph
from tests.helpers.policies import TIES_UP, with_technique
from tests.plugins.layer import SPEC_TIES_UP, step, stepped


def prepared(options, dtype=torch.float32, **rest):
    policy = with_technique("dampen", options, quantize=TIES_UP, **rest)
    return stepped(policy, partial(torch.optim.SGD, lr=0.5), dtype)


def error_of(w):
    """W − Q(W)."""
    return w - fp4graph.fake_quantize(w, SPEC_TIES_UP)


def test_the_gradient_is_that_of_the_squared_frobenius_norm():
    """One step of plain gradient descent, element by element, with Q by hand: the block's scale is 1."""
    applied, optimizer = prepared({"strength": 0.25})
    with torch.no_grad():
        applied.weight.zero_()[0, :4] = torch.tensor([6.0, 2.4, -0.7, 0.25])
    step(applied, optimizer, torch.zeros(6, 64))
    # Q is 6, 2, -0.5 and 0.5 (a tie, which goes up). The step is lr·2·strength·(w - Q), which is 0.25·(w - Q).
    expected = [6.0, 2.4 - 0.25 * 0.4, -0.7 + 0.25 * 0.2, 0.25 + 0.25 * 0.25]
    assert applied.weight[0, :4].tolist() == pytest.approx(expected, rel=1e-6)
    assert applied.weight.grad[0, 1].item() == pytest.approx(2 * 0.25 * 0.4, rel=1e-6)
    assert not applied.weight[0, 4:].any()
    assert torch.equal(applied.bias.grad, torch.ones(6))  # biases are not quantized


def test_the_gradient_is_that_of_autograd_for_the_loss_with_the_term():
    applied, optimizer = prepared({"strength": 0.3})
    w, task = applied.weight.detach().clone(), torch.randn(6, 64)
    step(applied, optimizer, task)
    leaf = w.double().requires_grad_()
    q = fp4graph.fake_quantize(w, SPEC_TIES_UP).double()
    ((task.double() * leaf).sum() + 0.3 * (leaf - q).square().sum()).backward()
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
        torch.testing.assert_close(applied.weight.grad, 2 * strength * error_of(w), rtol=1e-5, atol=1e-9)
    assert strength == pytest.approx(0.1)


def test_bf16_weights_get_the_term_rounded_once():
    applied, optimizer = prepared({"strength": 0.3}, torch.bfloat16)
    w, grad = applied.weight.detach().clone(), torch.randn(6, 64).bfloat16()
    step(applied, optimizer, grad)
    term = 0.6 * (w.float() - fp4graph.fake_quantize(w, SPEC_TIES_UP).float())
    assert torch.equal(applied.weight.grad, (grad.float() + term).bfloat16())


@pytest.mark.parametrize("master", [False, True])
def test_under_autocast_q_is_the_value_that_the_forward_multiplies(master):
    applied, optimizer = prepared({"strength": 0.3}, operands={"fprop.weight": {"from_master": master}})
    with torch.autocast("cpu", torch.bfloat16):
        applied(torch.zeros(8, 64)).sum().backward()
    with torch.no_grad():  # 2.499 in bf16 is 2.5, a tie, which goes up
        applied.weight.fill_(0.5)[:, :2] = torch.tensor([6.0, 2.499])
    w = applied.weight.detach().clone()
    step(applied, optimizer, torch.zeros(6, 64))
    q = fp4graph.fake_quantize(w if master else w.bfloat16().float(), SPEC_TIES_UP)
    assert torch.equal(applied.weight.grad, 0.6 * (w - q))
    assert q[0, 1] == (2 if master else 3)


def test_the_term_is_added_after_unscaling_and_clipping():
    applied, optimizer = prepared({"strength": 0.1})
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    w = applied.weight.detach().clone()
    x = torch.randn(4, 64)
    scaler.scale(applied(x).sum() * 100).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(applied.parameters(), 1e-3)
    clipped = applied.weight.grad.clone()
    scaler.step(optimizer)
    term = 0.2 * error_of(w)
    torch.testing.assert_close(applied.weight.grad, clipped + term, rtol=1e-6, atol=1e-8)
    assert term.norm() > clipped.norm()


def test_it_shares_a_rule_with_q_ema():
    """Q(W) is then the value that q_ema chooses, by which the forward multiplies."""
    applied, optimizer = prepared({"strength": 0.5}, more=["q_ema"])
    with torch.no_grad():
        applied.weight.fill_(2.4)
        applied.weight[:, ::32] = 6.0
        applied._fp4graph_q_ema_weight.copy_(applied.weight + 0.2)
    step(applied, optimizer, torch.zeros(6, 64))
    torch.testing.assert_close(applied.weight.grad[:, 1], torch.full((6,), 2.4 - 3.0))
