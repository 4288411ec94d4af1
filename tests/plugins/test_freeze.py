"""freeze against the counting rule of Nagel et al. in NumPy."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import fp4graph
from tests.helpers import training
from tests.helpers.policies import NVFP4, TIES_UP, one_rule, with_technique
from tests.plugins.layer import FREEZE, step, stepped
from tests.recipes import optimizer_references as references

policy = partial(with_technique, "freeze", quantize=TIES_UP)
sgd = partial(torch.optim.SGD, lr=1.0)


def prepared(options=FREEZE, dtype=torch.float32, **where):
    return stepped(policy(options, **where), sgd, dtype)


def remembered(applied, optimizer, name):
    return optimizer.state[applied.weight][f"fp4graph.freeze.{name}"]


def wandering(steps, dtype=torch.float32):
    """Yield gradients that push each weight to and fro, some farther than others, and some mostly in one direction."""
    generator = torch.Generator().manual_seed(1)
    reach = torch.rand(6, 64, generator=generator) * 0.1
    drift = torch.randn(6, 64, generator=generator) * 0.01
    for t in range(steps):
        noise = torch.randn(6, 64, generator=generator) * 0.01
        yield ((reach if t % 2 else -reach) + drift + noise).to(dtype)


@pytest.mark.parametrize("schedule", [{}, {"final_threshold": 0.2, "total_steps": 40, "start": 0.25}])
def test_every_element_follows_the_rule(schedule):
    grads, options = list(wandering(50)), {**FREEZE, **schedule}
    applied, optimizer = prepared(options)
    start, rule = applied.weight.detach().double().numpy(), partial(references.sgd, lr=1.0)
    expected = references.train_freeze(
        start, lambda _, state: grads[state["step"] - 1].double().numpy(), 50, rule, **options
    )
    for grad, weight in zip(grads, expected.weights, strict=True):
        step(applied, optimizer, grad)
        torch.testing.assert_close(applied.weight.double(), torch.from_numpy(weight), rtol=1e-5, atol=1e-6)
    frozen, frequency = (remembered(applied, optimizer, name) for name in ("frozen", "frequency"))
    assert torch.equal(frozen, torch.from_numpy(expected.frozen[-1]))
    assert 0.1 < frozen.float().mean() < 0.99
    torch.testing.assert_close(frequency, torch.from_numpy(expected.frequencies[-1]).float())


def one_weight(path, **options):
    """Return after each step the value of an element that moves along ``path`` under scale 1, and if it is frozen."""
    applied, optimizer = prepared(options)
    with torch.no_grad():
        applied.weight.zero_()
        applied.weight[:, ::32] = 6.0
        applied.weight[0, 1] = path[0]
    seen = []
    for value in path[1:]:
        grad = torch.zeros(6, 64)
        grad[0, 1] = applied.weight[0, 1].item() - value
        step(applied, optimizer, grad)
        seen.append((applied.weight[0, 1].item(), remembered(applied, optimizer, "frozen")[0, 1].item()))
    return seen


@pytest.mark.parametrize(
    ("path", "threshold", "frozen_from"),
    [
        ([0.1, 0.3, 0.8, 1.3, 1.8, 2.6, 3.6, 5.5], 0.1, None),  # always in the same direction
        ([2.4, 2.3, 2.2, 2.3, 2.4, 2.2, 2.0, 2.4], 0.1, None),  # to and fro within one value
        ([2.4, 2.6, 2.7, 2.6, 2.8, 3.4, 3.6, 3.7], 0.1, None),  # changes, and stays for a while
        # Q: 2, 3, 3, 3, 2. A turn is opposite to the latest change, however long ago that was (Nagel et al.).
        ([2.4, 2.6, 2.7, 2.8, 2.4], 0.4, 3),
        # Q: 2, 3, 2, 3, 2. The first change is not a turn. f after three turns with m = 1/2 is 1/2, 3/4, 7/8.
        ([2.4, 2.6, 2.4, 2.6, 2.4, 9.0, -9.0], 0.8, 3),
    ],
)
def test_turns_freeze_an_element_at_the_mean_of_its_earlier_values(path, threshold, frozen_from):
    seen = one_weight(path, momentum=0.5, threshold=threshold)
    frozen = [] if frozen_from is None else seen[frozen_from:]
    assert [each for _, each in seen] == [False] * (len(seen) - len(frozen)) + [True] * len(frozen)
    if threshold == 0.8:  # (((2 + 3)/2 + 2)/2 + 3)/2
        assert [weight for weight, _ in frozen] == [2.625] * 3


def test_dtypes_of_the_state_of_a_bf16_weight():
    applied, optimizer = prepared(dtype=torch.bfloat16)
    step(applied, optimizer, *wandering(1, torch.bfloat16))
    dtypes = {"previous": torch.bfloat16, "direction": torch.int8, "frequency": torch.float32, "mean": torch.float32}
    for name, dtype in {**dtypes, "frozen": torch.bool}.items():
        assert remembered(applied, optimizer, name).dtype is dtype


def test_state_may_be_loaded_before_the_optimizer_is_prepared():
    """Unprepared, the optimizer of torch casts loaded booleans and bytes to fp32."""
    applied, optimizer = prepared()
    grads = list(wandering(60))
    for grad in grads[:30]:
        step(applied, optimizer, grad)
    other = training.applied(nn.Linear(64, 6), policy(FREEZE))
    other.load_state_dict(applied.state_dict())
    other_optimizer = sgd(other.parameters())
    other_optimizer.load_state_dict(optimizer.state_dict())
    assert remembered(other, other_optimizer, "frozen").dtype is torch.float32
    fp4graph.prepare_optimizer(other, other_optimizer)
    for grad in grads[30:]:
        step(applied, optimizer, grad)
        step(other, other_optimizer, grad)
    assert torch.equal(applied.weight, other.weight)
    assert remembered(other, other_optimizer, "frozen").dtype is torch.bool


def test_values_that_move_with_their_scales_do_not_turn():
    """A tensor scale follows the largest weight, so it moves every quantized value of the tensor at every step."""
    applied, optimizer = prepared({"momentum": 0.125, "threshold": 0.1}, quantize=NVFP4, more=["tensor_scaling"])
    with torch.no_grad():
        applied.weight.copy_(torch.tensor([0.0, 0.5, 1.0, 3.0]).repeat(6, 16) * 0.01)
        applied.weight[:, ::16] = 0.06
    for t in range(30):
        before = applied.weight.detach().clone()
        step(applied, optimizer, applied.weight.detach() * (0.01 if t % 2 else -0.01))
        assert not torch.equal(before, applied.weight)
    values = remembered(applied, optimizer, "previous")
    assert not torch.equal(values, values.round(decimals=2))
    assert not remembered(applied, optimizer, "frozen").any()


def test_a_weight_that_fprop_keeps_in_high_precision_has_no_state():
    """The technique is the policy's, and one of the rules keeps the weight."""
    data = one_rule(quantize=TIES_UP, techniques=[{"freeze": FREEZE}])
    kept = {"name": "kept", "match": {"module": "0"}, "operands": {"fprop.weight": "keep"}}
    data["rules"].insert(0, data["rules"][0] | kept)
    model = training.applied(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), data)
    optimizer = training.prepared(model, torch.optim.SGD)
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    assert "fp4graph.freeze.frozen" not in optimizer.state.get(model[0].weight, {})
    assert "fp4graph.freeze.frozen" in optimizer.state[model[1].weight]
