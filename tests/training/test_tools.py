"""What people train with: autocast, bf16 parameters, checkpointing, and evaluation in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.models import vit
from tests.helpers.steps import same
from tests.helpers.training import applied, prepared

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("operation_by_operation")]


def runs(*policies: str, **options: Any) -> list[Any]:
    """Return four policies with these options of :func:`train`, as parameters; all but ``policies`` are ``long``."""
    names = ("tetrajet", "tetrajet-qema", "nvfp4-best", "quartet")
    marks = {name: () if name in policies else pytest.mark.long for name in names}
    what = " ".join(f"{name}={value}" for name, value in options.items())
    return [pytest.param(name, options, marks=marks[name], id=f"{name} {what}") for name in names]


def train(
    policy: Any,
    images: torch.Tensor,
    *,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    checkpointing: bool = False,
    evaluates: bool = False,
    zeroes: bool = False,
) -> list[torch.Tensor]:
    """Return losses and final parameters."""
    model = vit().to(dtype)
    model.set_grad_checkpointing(checkpointing)
    optimizer = prepared(applied(model, policy), lr=1e-3)
    labels, losses = torch.arange(len(images)), []
    for _ in range(steps):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = nn.functional.cross_entropy(model(images.to(dtype)).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not zeroes)
        losses.append(loss.detach())
        if evaluates:
            model.eval()
            with torch.no_grad():
                assert torch.equal(model(images), model(images))  # no noise in evaluation
            model.train()
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        *runs("tetrajet", "tetrajet-qema", "nvfp4-best", "quartet", autocast=torch.bfloat16),
        *runs(autocast=torch.float16),
        *runs("tetrajet-qema", dtype=torch.bfloat16),
    ],
)
def test_training_in_16_bits_lowers_the_loss(images, policy, options):
    result = train(policy, images, steps=6, **options)
    assert all(value.isfinite().all() for value in result)
    assert result[5] < result[0]
    assert result[-1].dtype is options.get("dtype", torch.float32)


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        *runs("tetrajet-qema", checkpointing=True),
        *runs("tetrajet-qema", evaluates=True),
        *runs("nvfp4-best", zeroes=True),
    ],
)
def test_checkpointing_evaluation_and_zeroed_gradients_change_nothing(images, policy, options):
    assert same(train(policy, images, **options), train(policy, images))
