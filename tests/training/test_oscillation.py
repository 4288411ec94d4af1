"""A built problem whose weights oscillate, and what the remedies of TetraJet sec. 5 and 6 do about it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp4graph.model.runtime import runtime_of
from fp4graph.model.weight_quantizer import quantize
from tests.helpers.policies import TIES_UP, one_rule
from tests.helpers.steps import descend
from tests.helpers.training import applied, prepared

pytestmark = pytest.mark.slow

WARM_UP, WINDOW = 300, 200  # steps; 200 is the paper's span for validation


def oscillating_share(technique: object) -> float:
    """Share of the weights with R_w > 16 over the last steps of learning a linear map with quantized weights.

    The optimum of each weight lies between two FP4 values, so the straight-through gradient changes its sign with the
    side that the weight is rounded to: the latent weight creeps over the threshold and back while its quantized value
    jumps. R_w = Σ abs(ΔQ(w)) / Σ abs(Δw), 0/0 = 0.
    """
    torch.manual_seed(0)
    model, target = nn.Linear(64, 32, bias=False), torch.randn(32, 64) / 8
    kept = {"fprop.input": "keep", "backward": "keep"}
    model = applied(model, one_rule(*([technique] if technique else []), quantize=TIES_UP, operands=kept))
    optimizer = prepared(model, lr=1e-4, weight_decay=0.0)
    with torch.no_grad():
        model.weight.copy_(target)  # at the optimum, as late in training
    runtime, generator = runtime_of(model), torch.Generator().manual_seed(1)
    (weight,) = runtime.weights

    def loss() -> torch.Tensor:
        x = torch.randn(64, 64, generator=generator)
        return (model(x) - x @ target.T).square().mean()

    descend(loss, optimizer, WARM_UP - 1)
    latent, quantized = [], []
    for _ in range(1 + WINDOW):
        descend(loss, optimizer, 1)
        latent.append(model.weight.detach().clone())
        quantized.append(quantize(weight, latent[-1], runtime.step))
    moved, moved_q = (torch.stack(values).diff(dim=0).abs().sum(0) for values in (latent, quantized))
    ratio = torch.where(moved_q == 0, 0.0, moved_q / moved)
    return (ratio > 16).float().mean().item()


@pytest.fixture(scope="module")
def plain() -> float:
    return oscillating_share(None)


def test_the_problem_oscillates(plain: float) -> None:
    assert plain > 0.05


#: Techniques, and the bounds of their share relative to the plain run's. TetraJet sec. 7.2; Tables 3 and 4: dampening
#: leaves most of the oscillation, freezing ends it (and, in a training that has far to go, progress with it).
REMEDIES = {
    "q_ema": ({"q_ema": {"beta": 0.998}}, -1.0, 0.7),
    # A detection ends shortly before the window begins, and no other falls into it, which would train plainly.
    "q_ramping": ({"q_ramping": {"t_update": 260, "n_max": 230, "t0": 30}}, -1.0, 0.7),
    "dampen": ({"dampen": {"strength": 0.01}}, 0.5, 0.95),
    "freeze": ("freeze", -1.0, 0.3),
}


@pytest.mark.long
@pytest.mark.parametrize("name", REMEDIES)
def test_fewer_weights_oscillate(name: str, plain: float) -> None:
    technique, least, most = REMEDIES[name]
    share = oscillating_share(technique)
    print(f"{name}: {share:.1%} of the weights oscillate, {plain:.1%} without")
    assert least * plain < share < most * plain
