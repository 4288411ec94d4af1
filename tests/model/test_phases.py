"""A policy whose phases follow one another in the course of a training."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import fp4graph
from fp4graph.errors import PolicyError
from fp4graph.model.runtime import runtime_of
from tests.helpers import training
from tests.helpers.models import Mlp
from tests.helpers.policies import one_rule, quantizer
from tests.helpers.steps import same
from tests.helpers.training import assert_equal, prepared, train

KEEP_BACKWARD = {"backward": "keep"}
KEPT: dict[str, Any] = {"rules": [], "default": "keep"}


def policy(*phases: dict[str, Any], **more: Any) -> dict[str, Any]:
    return one_rule(quantize=quantizer(16), phases=list(phases), **more)


def applied(data: dict[str, Any], **options: Any) -> nn.Module:
    return training.applied(Mlp(32, 48, 16), data, **options)


def batch(step: int) -> torch.Tensor:
    return torch.randn(24, 32, generator=torch.Generator().manual_seed(step))


def gradients(model: nn.Module, step: int) -> list[torch.Tensor]:
    model.zero_grad()
    model(batch(step)).square().mean().backward()
    return training.gradients(model)


@pytest.mark.slow
def test_each_phase_is_its_policy_and_is_captured_once() -> None:
    """The weights do not change here, so that each forward can be compared with a model of its phase's policy."""
    alone = [policy(), policy(operands=KEEP_BACKWARD), {"version": 1, "name": "n", "default": "keep"}]
    whole = policy({"at": 3, "operands": KEEP_BACKWARD}, {"at": 0.75, "rules": [], "default": "keep"})
    model = applied(whole, total_forwards=8)
    for step in range(8):
        phase = (step >= 3) + (step >= 6)
        assert_equal(gradients(model, step), gradients(applied(alone[phase]), step))
        assert runtime_of(model).phase == phase
        assert runtime_of(model).capture.graphs == 1  # one graph for each phase, at its first step
    first, second, third = (gradients(applied(data), 4) for data in alone)
    assert not same(first, second)
    assert not same(second, third)


@pytest.mark.slow
def test_a_phase_does_not_restart_the_noise() -> None:
    """A phase with the same rules gives the same gradients as no phase."""
    data = policy(techniques=[{"stochastic_rounding": {"operands": ["forward", "backward"]}}])
    model = applied(data)
    phased = applied(data | {"phases": [{"at": 2, "techniques": ["stochastic_scale_rounding"]}]})
    unchanged = applied(data | {"phases": [{"at": 2, "rules": data["rules"]}]})
    for step in range(4):
        expected = gradients(model, step)
        assert_equal(gradients(unchanged, step), expected)
        assert same(gradients(phased, step), expected) == (step < 2)


@pytest.mark.slow
def test_evaluation_is_under_the_phase_in_force_and_is_not_counted() -> None:
    model, exact = applied(policy({"at": 2, "rules": [], "default": "keep"})), Mlp(32, 48, 16)(batch(0))
    for _ in range(2):
        with torch.no_grad():
            assert not torch.equal(model(batch(0)), exact)
        gradients(model, 0)
    with torch.no_grad():
        assert torch.equal(model(batch(0)), exact)
    assert runtime_of(model).root_state.count == 2


@pytest.mark.slow
def test_a_phase_that_begins_in_an_evaluation_in_inference_mode_trains() -> None:
    data = policy({"at": 2, "operands": KEEP_BACKWARD}, techniques=[{"q_ema": {"beta": 0.9}}])
    results = []
    for context in (torch.no_grad, torch.inference_mode):
        model = applied(data)
        optimizer = prepared(model)
        train(model, optimizer, ((batch(step),) for step in range(2)))
        with context():
            model(batch(2))
        results.append(train(model, optimizer, ((batch(step),) for step in range(2, 4))))
    assert_equal(*results)


@pytest.mark.slow
def test_a_phase_at_a_share_of_the_training_needs_the_training_length() -> None:
    model = applied(policy({"at": 0.5, "operands": {"dgrad": "keep"}}))
    with torch.no_grad():
        model(batch(0))  # before the training, an evaluation is in the first phase
    with pytest.raises(PolicyError, match="set_total_forwards"):
        model(batch(0))
    trained = applied(policy({"at": 0.5, "operands": {"dgrad": "keep"}}))
    trained.load_state_dict(model.state_dict())
    with torch.no_grad(), pytest.raises(PolicyError, match="set_total_forwards"):  # weights of an unknown phase
        trained(batch(0))
    fp4graph.set_total_forwards(model, 2)
    for phase in (0, 1):
        gradients(model, phase)
        assert runtime_of(model).phase == phase
    with pytest.raises(ValueError, match="at least 1; got"):
        fp4graph.set_total_forwards(model, 0)


def test_phases_out_of_order_are_refused_when_the_training_length_is_known() -> None:
    data = policy({"at": 5, "operands": {"dgrad": "keep"}}, {"at": 0.5, "operands": {"wgrad": "keep"}})
    with pytest.raises(PolicyError, match="reorder"):
        applied(data, total_forwards=10)
    applied(data, total_forwards=12)


RAMPING = {"q_ramping": {"t_update": 9, "n_max": 3, "t0": 4, "k1": 1.0, "k2": 1}}


def run(
    data: dict[str, Any], numbers: range, saved: Any = None, *, parts: bool = False, change: Any = None
) -> tuple[list[torch.Tensor], Any]:
    """Train at the batches of ``numbers``, from a saved state if there is one; with ``parts`` load each entry alone,
    with ``change`` train what it returns for the loaded model."""
    model = applied(data)
    optimizer = prepared(model)
    if saved is not None:
        for state in ({key: value} for key, value in saved[0].items()) if parts else [saved[0]]:
            model.load_state_dict(state, strict=not parts)
        again = get_model_state_dict(model)  # asks for an attribute of each entry
        assert_equal((again[key] for key in saved[0]), saved[0].values())
        if change is not None:
            model = change(model)
            optimizer = prepared(model)
        optimizer.load_state_dict(saved[1])
    results = train(model, optimizer, ((batch(step),) for step in numbers))
    return results, copy.deepcopy((model.state_dict(), optimizer.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("technique", [RAMPING, {"q_ema": {"beta": 0.9}}])
def test_state_of_techniques_lives_on_in_a_new_phase(technique: dict[str, Any]) -> None:
    data = policy(techniques=[technique])
    phased = {**data, "phases": [{"at": 6, "rules": data["rules"]}]}
    assert_equal(run(data, range(12))[0], run(phased, range(12))[0])


@pytest.mark.slow
def test_a_training_resumes_bit_for_bit_before_at_and_in_a_phase() -> None:
    data = policy({"at": 6, "operands": KEEP_BACKWARD}, techniques=[RAMPING])
    whole, _ = run(data, range(12))
    for at in (4, 6, 8):
        resumed, _ = run(data, range(at, 12), run(data, range(at))[1])
        assert_equal(resumed, whole[-len(resumed) :])


@pytest.mark.slow
def test_a_training_resumes_in_a_phase_that_begins_or_ends_the_state_of_a_technique() -> None:
    ema = {"q_ema": {"beta": 0.5}}
    for data in (policy({"at": 3, "techniques": [ema]}), policy({"at": 3, **KEPT}, techniques=[ema])):
        whole, _ = run(data, range(8))
        for at, parts in ((2, False), (3, False), (5, False), (5, True)):
            resumed, _ = run(data, range(at, 8), run(data, range(at))[1], parts=parts)
            assert_equal(resumed, whole[-len(resumed) :])
        for change in (copy.deepcopy, partial(training.applied, policy=data)):
            resumed, _ = run(data, range(5, 8), run(data, range(5))[1], change=change)
            assert_equal(resumed, whole[-len(resumed) :])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a state dict was loaded after:fp4graph.PolicyWarning")
def test_a_training_that_begins_with_weights_alone_takes_no_average_of_a_later_phase() -> None:
    data = policy({"at": 1, "techniques": [{"q_ema": {"beta": 0.5}}]})
    whole, states = run(data, range(5))[1][0], []
    for saved in (whole, fp4graph.strip(whole)):
        model = applied(data)
        model.load_state_dict(saved)
        train(model, prepared(model), ((batch(step),) for step in range(2)))
        states.append(model.state_dict())
    assert len(states[0]) == len(whole)
    assert_equal(states[0].values(), states[1].values())


@pytest.mark.slow
def test_a_technique_of_a_former_phase_leaves_no_state_in_the_optimizer() -> None:
    later = {"at": 3, "rules": [], "default": "keep"}
    _, (_, optimizer) = run(policy(later, techniques=[RAMPING, "tensor_scaling"]), range(5))
    assert not [name for entry in optimizer["state"].values() for name in entry if "fp4graph" in name]
    assert optimizer["param_groups"][0]["fp4graph.forwards"] == 5  # the count goes on


def test_an_optimizer_whose_weights_are_frozen_when_a_phase_begins_acts_when_they_train() -> None:
    averages, faster = ([{"q_ema": {"beta": beta}}] for beta in (0.9, 0.5))
    rules = one_rule(*faster, quantize=quantizer(16))["rules"]
    model = applied(one_rule(*averages, quantize=quantizer(16), phases=[{"at": 1, "rules": rules}]))
    layers = [model.first, model.second]
    optimizers = [fp4graph.prepare_optimizer(model, torch.optim.SGD(layer.parameters(), lr=0.1)) for layer in layers]
    moved = []
    for step in range(4):
        model.second.requires_grad_(step not in (1, 2))
        model.zero_grad()
        model(batch(step)).square().mean().backward()
        before = [layer._fp4graph_q_ema_weight.clone() for layer in layers]
        for optimizer in optimizers:
            optimizer.step()
        moved.append(
            [not torch.equal(a, layer._fp4graph_q_ema_weight) for a, layer in zip(before, layers, strict=True)]
        )
    assert moved == [[True, True], [True, False], [True, False], [True, True]]


@pytest.mark.slow
def test_a_phase_cannot_begin_inside_detect_nonfinite_and_is_watched_afterwards() -> None:
    model = applied(policy({"at": 1, "operands": KEEP_BACKWARD}))
    with fp4graph.detect_nonfinite(model):
        gradients(model, 0)
        with pytest.raises(fp4graph.Error, match="inside detect_nonfinite"):
            gradients(model, 1)
    with torch.no_grad():
        model.second.weight[0, 0] = torch.nan
    with fp4graph.detect_nonfinite(model), pytest.raises(fp4graph.NonFiniteError, match=r"second\.weight"):
        gradients(model, 1)
    assert runtime_of(model).phase == 1
