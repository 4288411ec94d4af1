"""What ``prepare_optimizer`` attaches: to several models on one optimizer, to shared weights, for every phase."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import timm.optim
import torch
from torch import Tensor, nn

import fp4graph
from fp4graph.optim import StableSPAM
from tests.helpers.policies import one_rule

QUANTIZE = {"element": "e2m1", "block": 32, "scale": {"format": "e8m0", "rounding": "ceil"}, "ties": "up"}
SPEC = fp4graph.QuantSpec(block=32, scale=fp4graph.ScaleSpec("e8m0", "ceil"), ties="up")
BETA = 0.9
Q_EMA = {"q_ema": {"beta": BETA}}
DAMPEN = {"dampen": {"strength": 0.1}}
FREEZE = {"freeze": {"momentum": 0.3, "threshold": 0.25}}
RAMPING = {"q_ramping": {"t_update": 20, "t0": 8, "n_max": 4, "k1": 2.0, "k2": 1}}
SPAM = {"theta": 0.97, "gamma1": 0.6, "gamma2": 0.8, "reset_interval": 3, "total_steps": 20}
ADAM = {"lr": 0.02, "betas": (0.85, 0.99), "weight_decay": 0.1}


def policy(*techniques: Any, **more: Any) -> dict[str, Any]:
    return one_rule(quantize=QUANTIZE, techniques=list(techniques), **more)


def by_name(**rules: dict[str, Any]) -> dict[str, Any]:
    """A policy with a rule for each child."""
    written = [{"name": name, "match": {"module": name}, "quantize": QUANTIZE, **rule} for name, rule in rules.items()]
    return {"version": 1, "name": "p", "rules": written, "default": "keep"}


class Two(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 6, bias=False), nn.Linear(64, 6, bias=False)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def gradients(steps: int, count: int = 2) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[0.1 * torch.randn(6, 64, generator=generator) for _ in range(count)] for _ in range(steps)]


def drive(model: nn.Module, optimizer: torch.optim.Optimizer, stream: Iterable[list[Tensor]]) -> None:
    for grads in stream:
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()


def averages(start: Tensor, stream: Iterable[list[Tensor]], index: int) -> Tensor:
    """Eq. 10 of the TetraJet paper beside gradient descent with a learning rate of 1/2, in fp64."""
    weight, average = start.detach().double(), start.detach().double()
    for grads in stream:
        weight = weight - 0.5 * grads[index].double()
        average = BETA * average + (1 - BETA) * weight
    return average


# ---------------------------------------------------------------------- several models


def test_two_models_on_one_optimizer_are_both_acted_on() -> None:
    model = Two()
    start = [p.detach().clone() for p in model.parameters()]
    for part in (model.first, model.second):
        fp4graph.apply(part, policy(Q_EMA), backend="eager")
    optimizer = sgd(model)
    for part in (model.first, model.second):
        fp4graph.prepare_optimizer(part, optimizer)
    stream = gradients(5)
    drive(model, optimizer, stream)
    for index, part in enumerate((model.first, model.second)):
        expected = averages(start[index], stream, index)
        torch.testing.assert_close(part._fp4graph_q_ema_weight.double(), expected, rtol=0, atol=1e-6)


def test_preparing_again_replaces_the_hooks_of_that_model_alone() -> None:
    model = Two()
    start = [p.detach().clone() for p in model.parameters()]
    fp4graph.apply(model.first, policy(Q_EMA), backend="eager")
    fp4graph.apply(model.second, policy(DAMPEN), backend="eager")
    optimizer = sgd(model)
    for part in (model.first, model.second, model.first, model.second):
        fp4graph.prepare_optimizer(part, optimizer)
    stream = gradients(5)
    drive(model, optimizer, stream)
    torch.testing.assert_close(
        model.first._fp4graph_q_ema_weight.double(), averages(start[0], stream, 0), rtol=0, atol=1e-6
    )
    weight = start[1].clone()
    for _, grad in stream:
        weight -= 0.5 * (grad + 0.2 * (weight - fp4graph.fake_quantize(weight, SPEC)))
    torch.testing.assert_close(model.second.weight.detach(), weight)

    fp4graph.prepare_optimizer(fp4graph.apply(model.second, policy(), backend="eager"), optimizer)  # dampens no more
    before = model.second.weight.detach().clone()
    more = gradients(2)
    drive(model, optimizer, more)
    torch.testing.assert_close(model.second.weight.detach(), before - 0.5 * (more[0][1] + more[1][1]))
    expected = averages(start[0], [*stream, *more], 0)
    torch.testing.assert_close(model.first._fp4graph_q_ema_weight.double(), expected, rtol=0, atol=1e-6)


def test_what_two_models_remember_resumes() -> None:
    def prepared() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Two()
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        for part, technique in ((model.first, FREEZE), (model.second, RAMPING)):
            fp4graph.prepare_optimizer(fp4graph.apply(part, policy(technique), backend="eager"), optimizer)
        return model, optimizer

    stream = gradients(30)
    whole, optimizer = prepared()
    drive(whole, optimizer, stream)
    first, optimizer = prepared()
    drive(first, optimizer, stream[:13])
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    second, optimizer = prepared()
    second.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    drive(second, optimizer, stream[13:])
    for p, q in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_technique_of_the_whole_optimizer_acts_once_for_two_models() -> None:
    """StableSPAM as an optimizer is what the technique amounts to; it conditions every gradient once."""
    model, reference = Two(), Two()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM, fused=True)
    for part in (model.first, model.second):
        fp4graph.prepare_optimizer(fp4graph.apply(part, policy({"stable_spam": SPAM}), backend="eager"), optimizer)
    spam = StableSPAM(reference.parameters(), **ADAM, **SPAM)
    stream = gradients(10)
    drive(model, optimizer, stream)
    drive(reference, spam, stream)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_technique_of_the_whole_optimizer_with_two_sets_of_options_is_refused() -> None:
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters())
    fp4graph.apply(model.first, policy({"stable_spam": SPAM}), backend="eager")
    fp4graph.apply(model.second, policy({"stable_spam": {**SPAM, "theta": 0.5}}), backend="eager")
    fp4graph.prepare_optimizer(model.first, optimizer)
    with pytest.raises(fp4graph.Error, match=r"stable_spam acts on the whole optimizer.*theta=0\.97.*theta=0\.5"):
        fp4graph.prepare_optimizer(model.second, optimizer)
    drive(model, optimizer, gradients(1))  # the first is as it was
    assert "fp4graph.stable_spam.max_avg" in optimizer.state[model.first.weight]


def test_one_policy_gives_a_technique_of_the_whole_optimizer_one_set_of_options() -> None:
    """Each of the two would count every step of every weight."""
    model = Two()
    other = {"q_ramping": {**RAMPING["q_ramping"], "n_max": 3}}
    data = by_name(first={"techniques": [RAMPING]}, second={"techniques": [other]})
    fp4graph.apply(model, data, backend="eager")
    with pytest.raises(fp4graph.Error, match=r"q_ramping acts on the whole optimizer.*n_max=4.*n_max=3"):
        fp4graph.prepare_optimizer(model, sgd(model))


def test_techniques_that_two_models_declare_in_opposite_orders_are_refused() -> None:
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters())
    spam = {"stable_spam": SPAM}
    fp4graph.prepare_optimizer(fp4graph.apply(model.first, policy(DAMPEN, spam), backend="eager"), optimizer)
    fp4graph.apply(model.second, policy(spam, DAMPEN), backend="eager")
    with pytest.raises(fp4graph.Error, match=r"opposite orders.*dampen.*stable_spam"):
        fp4graph.prepare_optimizer(model.second, optimizer)


# ---------------------------------------------------------------------- models and parameters that come and go


def test_a_model_without_its_policy_is_left_alone() -> None:
    model = fp4graph.apply(Two(), policy(DAMPEN, Q_EMA), backend="eager")
    optimizer = fp4graph.prepare_optimizer(model, sgd(model))
    fp4graph.remove(model)
    start = [p.detach().clone() for p in model.parameters()]
    stream = gradients(1)
    drive(model, optimizer, stream)
    for parameter, before, grad in zip(model.parameters(), start, stream[0], strict=True):
        torch.testing.assert_close(parameter.detach(), before - 0.5 * grad)


def test_a_parameter_that_the_optimizer_is_given_later_is_acted_on() -> None:
    model = fp4graph.apply(Two(), policy(Q_EMA), backend="eager")
    start = model.second.weight.detach().clone()
    optimizer = fp4graph.prepare_optimizer(model, sgd(model.first))
    optimizer.add_param_group({"params": [model.second.weight]})
    stream = gradients(3)
    drive(model, optimizer, stream)
    expected = averages(start, stream, 1)
    torch.testing.assert_close(model.second._fp4graph_q_ema_weight.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("phase", "make", "message"),
    [
        ({"techniques": [Q_EMA]}, lambda m: timm.optim.Lookahead(sgd(m)), "runs no hooks"),
        ({"techniques": [Q_EMA]}, lambda m: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), "does not hold"),
    ],
)
def test_a_later_phase_is_looked_at_when_the_optimizer_is_prepared(phase: Any, make: Any, message: str) -> None:
    model = fp4graph.apply(Two(), policy(phases=[{"at": 1000, **phase}]), backend="eager")
    with pytest.raises(fp4graph.Error, match=message):
        fp4graph.prepare_optimizer(model, make(model))


# ---------------------------------------------------------------------- one parameter, two uses

APART = [
    ({"techniques": [DAMPEN]}, {"techniques": [{"dampen": {"strength": 0.3}}]}, "dampen with other options"),
    ({"techniques": [Q_EMA]}, {"techniques": [RAMPING]}, "q_ema"),
    ({"techniques": [FREEZE]}, {}, "freeze"),
    ({"techniques": [DAMPEN]}, {"techniques": [DAMPEN], "quantize": {**QUANTIZE, "block": 16}}, "another quantizer"),
]


@pytest.mark.parametrize(("first", "second", "what"), APART, ids=[what for *_, what in APART])
def test_uses_of_one_parameter_that_disagree_are_refused(first: Any, second: Any, what: str) -> None:
    model = fp4graph.apply(Two(tied=True), by_name(first=first, second=second), backend="eager")
    with pytest.raises(fp4graph.Error, match=rf"first\.weight .*and second\.weight .*are one parameter.*{what}"):
        fp4graph.prepare_optimizer(model, sgd(model))


def test_uses_that_disagree_in_a_later_phase_are_refused_at_once() -> None:
    data = by_name(first={}, second={})
    data["phases"] = [{"at": 1000, "rules": by_name(first={"techniques": [DAMPEN]}, second={})["rules"]}]
    model = fp4graph.apply(Two(tied=True), data, backend="eager")
    with pytest.raises(fp4graph.Error, match=r"first\.weight .*and second\.weight .*are one parameter.*dampen"):
        fp4graph.prepare_optimizer(model, sgd(model))


def test_uses_of_one_parameter_in_two_models_that_disagree_are_refused() -> None:
    model = Two(tied=True)
    optimizer = sgd(model)
    fp4graph.prepare_optimizer(fp4graph.apply(model.first, policy(DAMPEN), backend="eager"), optimizer)
    fp4graph.apply(model.second, policy(FREEZE), backend="eager")
    with pytest.raises(fp4graph.Error, match=r"are one parameter.*dampen"):
        fp4graph.prepare_optimizer(model.second, optimizer)


@pytest.mark.parametrize("second", ["keep", {"operands": {"fprop.weight": "keep"}, "techniques": []}], ids=str)
def test_a_use_in_high_precision_has_no_say(second: Any) -> None:
    """As an output layer that is tied to the embedding."""
    data = by_name(first={"techniques": [DAMPEN]}, second={} if second == "keep" else second)
    if second == "keep":
        data["rules"].pop()
    model = fp4graph.apply(Two(tied=True), data, backend="eager")
    optimizer = fp4graph.prepare_optimizer(model, sgd(model))
    weight = model.first.weight.detach().clone()
    stream = gradients(1, 1)
    drive(model, optimizer, stream)
    expected = weight - 0.5 * (stream[0][0] + 0.2 * (weight - fp4graph.fake_quantize(weight, SPEC)))
    torch.testing.assert_close(model.first.weight.detach(), expected)


def test_one_parameter_in_two_models_is_acted_on_once() -> None:
    model = Two(tied=True)
    optimizer = sgd(model)
    for part in (model.first, model.second):
        fp4graph.prepare_optimizer(fp4graph.apply(part, policy(Q_EMA), backend="eager"), optimizer)
    start = model.first.weight.detach().clone()
    stream = gradients(4, 1)
    drive(model, optimizer, stream)
    expected = averages(start, stream, 0)
    for part in (model.first, model.second):
        torch.testing.assert_close(part._fp4graph_q_ema_weight.double(), expected, rtol=0, atol=1e-6)
