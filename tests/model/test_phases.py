"""A policy that changes in the course of a training, while it runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.errors import PolicyError
from fp4graph.model.runtime import runtime_of
from tests.helpers.policies import one_rule

QUANTIZE = {"element": "e2m1", "block": 16, "scale": {"format": "e8m0", "rounding": "ceil"}}


def policy(*phases: dict[str, Any], **more: Any) -> dict[str, Any]:
    return one_rule(quantize=QUANTIZE, phases=list(phases), **more)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))


def batch(step: int) -> torch.Tensor:
    return torch.randn(24, 32, generator=torch.Generator().manual_seed(step))


def gradients(applied: nn.Module, step: int) -> list[torch.Tensor]:
    applied.zero_grad()
    applied(batch(step)).square().mean().backward()
    return [p.grad.clone() for p in applied.parameters()]


def alone(data: dict[str, Any], step: int) -> list[torch.Tensor]:
    """Gradients of the same weights and batch under a policy without phases."""
    return gradients(fp4graph.apply(model(), {k: v for k, v in data.items() if k != "phases"}, backend="eager"), step)


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
def test_each_phase_is_its_policy_and_is_captured_once() -> None:
    """Weights stay as they are here, so that each forward can be held against the policy of its phase."""
    exact_backward = policy()
    exact_backward["rules"][0] = {**exact_backward["rules"][0], "operands": {"backward": "keep"}}
    nothing = {"version": 1, "name": "n", "default": "keep"}
    whole = policy({"at": 3, "operands": {"backward": "keep"}}, {"at": 0.75, "rules": [], "default": "keep"})
    applied = fp4graph.apply(model(), whole, backend="eager", total_forwards=8)
    expected = [policy()] * 3 + [exact_backward] * 3 + [nothing] * 2
    captured = []
    for step, data in enumerate(expected):
        assert equal(gradients(applied, step), alone(data, step)), step
        captured.append(runtime_of(applied).capture.graphs)
        assert runtime_of(applied).phase == (step >= 3) + (step >= 6)
    assert captured == [1] * 8  # one graph for each phase, at its first step
    assert not equal(alone(policy(), 4), alone(exact_backward, 4))
    assert not equal(alone(exact_backward, 7), alone(nothing, 7))


@pytest.mark.slow
def test_noise_goes_on_counting() -> None:
    """A phase that changes nothing changes nothing."""
    data = policy(techniques=[{"stochastic_rounding": {"operands": ["forward", "backward"]}}])
    plain = fp4graph.apply(model(), data, backend="eager")
    phased = fp4graph.apply(
        model(), {**data, "phases": [{"at": 2, "techniques": ["stochastic_scale_rounding"]}]}, backend="eager"
    )
    same = fp4graph.apply(model(), {**data, "phases": [{"at": 2, "rules": data["rules"]}]}, backend="eager")
    for step in range(4):
        reference = gradients(plain, step)
        assert equal(gradients(same, step), reference)
        assert equal(gradients(phased, step), reference) == (step < 2)


@pytest.mark.slow
def test_evaluation_is_that_of_the_phase_and_moves_nothing() -> None:
    applied = fp4graph.apply(model(), policy({"at": 2, "rules": [], "default": "keep"}), backend="eager")
    exact = model()
    for _ in range(2):
        with torch.no_grad():
            assert not torch.equal(applied(batch(0)), exact(batch(0)))
        gradients(applied, 0)
    with torch.no_grad():
        assert torch.equal(applied(batch(0)), exact(batch(0)))
    assert runtime_of(applied).root_state.count == 2


@pytest.mark.slow
def test_the_length_of_the_training_is_needed_for_a_share_of_it() -> None:
    data = policy({"at": 0.5, "operands": {"dgrad": "keep"}})
    applied = fp4graph.apply(model(), data, backend="eager")
    with pytest.raises(PolicyError, match="set_total_forwards"):
        applied(batch(0))
    fp4graph.set_total_forwards(applied, 2)
    gradients(applied, 0)
    assert runtime_of(applied).phase == 0
    gradients(applied, 1)
    assert runtime_of(applied).phase == 1
    with pytest.raises(ValueError, match="at least 1; got"):
        fp4graph.set_total_forwards(applied, 0)
    with pytest.raises(fp4graph.Error, match="prepared"):
        fp4graph.set_total_forwards(model(), 3)


def test_phases_out_of_order_are_refused_as_soon_as_that_can_be_told() -> None:
    data = policy({"at": 5, "operands": {"dgrad": "keep"}}, {"at": 0.5, "operands": {"wgrad": "keep"}})
    with pytest.raises(PolicyError, match="reorder"):
        fp4graph.apply(model(), data, backend="eager", total_forwards=10)
    fp4graph.apply(model(), data, backend="eager", total_forwards=12)


RAMPING = {"q_ramping": {"t_update": 9, "n_max": 3, "t0": 4, "k1": 1.0, "k2": 1}}


def run(data: dict[str, Any], steps: range, saved: Any = None) -> tuple[list[torch.Tensor], Any]:
    applied = fp4graph.apply(model(), data, backend="eager")
    optimizer = fp4graph.prepare_optimizer(applied, torch.optim.AdamW(applied.parameters(), lr=1e-2))
    if saved is not None:
        applied.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    for step in steps:
        gradients(applied, step)
        optimizer.step()
    return [p.detach().clone() for p in applied.parameters()], copy.deepcopy(
        (applied.state_dict(), optimizer.state_dict())
    )


@pytest.mark.slow
@pytest.mark.parametrize("technique", [RAMPING, {"q_ema": {"beta": 0.9}}])
def test_what_techniques_remember_lives_on(technique: dict[str, Any]) -> None:
    data = policy(techniques=[technique])
    phased = {**data, "phases": [{"at": 6, "rules": data["rules"]}]}
    assert equal(run(data, range(12))[0], run(phased, range(12))[0])


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, 6, 8])  # before the phase, at its start, in it
def test_resumes_bit_for_bit(at: int) -> None:
    data = policy({"at": 6, "operands": {"backward": "keep"}}, techniques=[RAMPING])
    whole, _ = run(data, range(12))
    _, saved = run(data, range(at))
    resumed, _ = run(data, range(at, 12), saved)
    assert equal(whole, resumed)


@pytest.mark.slow
def test_a_technique_of_a_phase_that_is_over_leaves_nothing_behind() -> None:
    later = {"at": 3, "rules": [], "default": "keep"}
    _, (_, optimizer) = run(policy(later, techniques=[RAMPING, "tensor_scaling"]), range(5))
    assert not [name for entry in optimizer["state"].values() for name in entry if "fp4graph" in name]
    assert optimizer["param_groups"][0]["fp4graph.forwards"] == 5  # the count goes on


def test_the_dynamo_entry_point_has_no_phases() -> None:
    compiled = torch.compile(
        model(),
        backend="fp4graph",
        options={"policy": policy({"at": 5, "operands": {"dgrad": "keep"}}), "backend": "eager"},
    )
    with pytest.raises(Exception, match=r"fp4graph\.apply"):
        compiled(batch(0))


@pytest.mark.slow
def test_watching_sees_the_phase_that_begins() -> None:
    applied = fp4graph.apply(model(), policy({"at": 2, "operands": {"backward": "keep"}}), backend="eager")
    for step in range(2):
        gradients(applied, step)
    with torch.no_grad():
        applied[2].weight[0, 0] = torch.nan
    with fp4graph.detect_nonfinite(applied), pytest.raises(fp4graph.NonFiniteError, match=r"2\.weight"):
        gradients(applied, 2)
    assert runtime_of(applied).phase == 1
    applied = fp4graph.apply(model(), policy({"at": 1, "operands": {"backward": "keep"}}), backend="eager")
    with fp4graph.detect_nonfinite(applied):
        gradients(applied, 0)
        with pytest.raises(fp4graph.Error, match="inside detect_nonfinite"):
            gradients(applied, 1)
