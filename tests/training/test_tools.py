"""What people train with: autocast, bf16 parameters, checkpointing, clipping, evaluation in between, model EMA."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm.utils
import torch
from torch import nn

import fp4graph

pytestmark = pytest.mark.slow

POLICIES = ["tetrajet", "tetrajet-qema", "nvfp4-best", "quartet"]
FEW = ["tetrajet-qema", *(pytest.param(name, marks=pytest.mark.long) for name in ("tetrajet", "nvfp4-best", "quartet"))]


def train(
    model: nn.Module,
    images: torch.Tensor,
    policy: Any,
    *,
    steps: int = 3,
    autocast: torch.dtype | None = None,
    around: Callable[[nn.Module], None] = lambda model: None,
    clip: float | None = None,
    set_to_none: bool = True,
) -> list[torch.Tensor]:
    """Losses and final parameters; ``around`` runs between steps."""
    applied = fp4graph.apply(model, policy, backend="eager")
    optimizer = fp4graph.prepare_optimizer(applied, torch.optim.AdamW(applied.parameters(), lr=1e-3))
    labels, losses = torch.arange(len(images)), []
    for _ in range(steps):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = nn.functional.cross_entropy(applied(images).float(), labels)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(applied.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        around(applied)
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in applied.parameters())]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
@pytest.mark.parametrize("policy", POLICIES)
def test_autocast(vit, images, policy, dtype):
    result = train(vit(), images, policy, steps=6, autocast=dtype)
    assert all(value.isfinite().all() for value in result)
    assert result[5] < result[0]
    assert result[-1].dtype is torch.float32


@pytest.mark.parametrize("policy", FEW)
def test_parameters_in_bf16(vit, images, policy):
    result = train(vit().to(torch.bfloat16), images.to(torch.bfloat16), policy, steps=6)
    assert all(value.isfinite().all() for value in result)
    assert result[5] < result[0]
    assert result[-1].dtype is torch.bfloat16


@pytest.mark.parametrize("policy", FEW)
def test_checkpointing_repeats_the_noise(vit, images, policy):
    plain = train(vit(), images, policy)
    model = vit()
    model.set_grad_checkpointing()
    assert equal(train(model, images, policy), plain)


@pytest.mark.parametrize("policy", FEW)
def test_evaluation_between_steps_changes_nothing(vit, images, policy):
    def evaluate(model: nn.Module) -> None:
        model.eval()
        with torch.no_grad():
            first, second = model(images), model(images)
        assert torch.equal(first, second)  # no noise in evaluation
        model.train()

    assert equal(train(vit(), images, policy, around=evaluate), train(vit(), images, policy))


def test_zeroed_gradients_are_as_good_as_none(vit, images):
    assert equal(
        train(vit(), images, "nvfp4-best", set_to_none=False), train(vit(), images, "nvfp4-best", set_to_none=True)
    )


def test_clipping_comes_before_techniques_that_change_gradients(vit, images):
    """The dampening term is added to the clipped gradient: with everything clipped away it is all there is."""
    policy = {"version": 1, "name": "p", "extends": "tetrajet", "techniques": [{"dampen": {"strength": 0.1}}]}
    applied = fp4graph.apply(vit(), policy, backend="eager")
    optimizer = fp4graph.prepare_optimizer(applied, torch.optim.SGD(applied.parameters(), lr=1.0))
    applied(images).sum().backward()
    nn.utils.clip_grad_norm_(applied.parameters(), 0.0)
    before = applied.blocks[0].mlp.fc1.weight.detach().clone()
    optimizer.step()
    spec = fp4graph.QuantSpec(block=32, scale=fp4graph.ScaleSpec("e8m0", "ceil"), ties="up")
    expected = before - 2 * 0.1 * (before - fp4graph.fake_quantize(before, spec))
    torch.testing.assert_close(applied.blocks[0].mlp.fc1.weight, expected, rtol=0, atol=1e-7)  # two fp32 roundings


def test_a_model_ema_averages_weights_and_leaves_our_counters_whole(vit, images):
    applied = fp4graph.apply(vit(), "tetrajet-qema", backend="eager")
    ema = timm.utils.ModelEmaV3(applied, decay=0.5)
    optimizer = fp4graph.prepare_optimizer(applied, torch.optim.SGD(applied.parameters(), lr=0.1))
    expected = applied.head.weight.detach().clone()
    for _ in range(3):
        applied(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(applied)
        expected = 0.5 * expected + 0.5 * applied.head.weight.detach()
    torch.testing.assert_close(ema.module.head.weight, expected)
    state = ema.module.state_dict()
    assert all(value.is_floating_point() for value in state.values())
    assert not torch.equal(ema.module(images), applied(images))
    twin = fp4graph.apply(copy.deepcopy(ema.module), "tetrajet-qema", backend="eager").eval()
    assert twin(images).isfinite().all()
    with fp4graph.bypass(ema.module):
        assert ema.module(images).isfinite().all()
