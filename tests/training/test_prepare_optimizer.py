"""``prepare_optimizer`` for several models on one optimizer, for shared weights, and for every phase."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import timm.optim
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp4graph
from fp4graph.optim import StableSPAM
from tests.helpers.policies import TIES_UP, one_rule, quantizer
from tests.helpers.steps import assert_resumes, push, same
from tests.helpers.training import applied, operation_by_operation
from tests.recipes import optimizer_references as references

BETA = 0.9
Q_EMA = {"q_ema": {"beta": BETA}}
DAMPEN = {"dampen": {"strength": 0.1}}
FREEZE = {"freeze": {"momentum": 0.3, "threshold": 0.25}}
RAMPING = {"q_ramping": {"t_update": 20, "t0": 8, "n_max": 4, "k1": 2.0, "k2": 1}}
OPTIONS = {"theta": 0.97, "gamma1": 0.6, "gamma2": 0.8, "reset_interval": 3, "total_steps": 20}
SPAM = {"stable_spam": OPTIONS}
ADAM = {"lr": 0.02, "betas": (0.85, 0.99), "weight_decay": 0.1}
Stream = list[list[Tensor]]


def policy(*techniques: Any, **more: Any) -> dict[str, Any]:
    return one_rule(quantize=TIES_UP, techniques=list(techniques), **more)


def by_name(**rules: dict[str, Any] | None) -> dict[str, Any]:
    """Return a policy with a rule for each child; None keeps the child in high precision."""
    each = ({"name": name, "match": {"module": name}} | rule for name, rule in rules.items() if rule is not None)
    return {"version": 1, "name": "p", "rules": [{"quantize": TIES_UP} | rule for rule in each], "default": "keep"}


def of(*techniques: Any) -> dict[str, Any]:
    """Return the part of a rule that declares its techniques."""
    return {"techniques": list(techniques)}


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


def prepare(part: nn.Module, optimizer: torch.optim.Optimizer, *techniques: Any) -> None:
    fp4graph.prepare_optimizer(applied(part, policy(*techniques)), optimizer)


def gradients(steps: int, count: int = 2) -> Stream:
    generator = torch.Generator().manual_seed(1)
    return [[0.1 * torch.randn(6, 64, generator=generator) for _ in range(count)] for _ in range(steps)]


def started(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


descent = partial(references.sgd, lr=0.5)


def of_one(stream: Stream, index: int) -> tuple[Any, int]:
    """Return the gradients of one parameter, as the references take them, and their number."""
    grads = [grads[index].double().numpy() for grads in stream]
    return lambda w, state: grads[state["step"] - 1], len(grads)


def assert_averaged(part: nn.Module, start: Tensor, stream: Stream, index: int) -> None:
    """Compare Q-EMA's average with the reference beside gradient descent."""
    training = references.train_qema(start.double().numpy(), *of_one(stream, index), descent, beta=BETA)
    expected = torch.from_numpy(training.averages[-1])
    torch.testing.assert_close(part._fp4graph_q_ema_weight.double(), expected, rtol=0, atol=1e-6)


def assert_dampened(weight: Tensor, start: Tensor, stream: Stream, index: int, strength: float = 0.1) -> None:
    """Compare a weight with gradient descent on the dampening term too; ``strength=0`` leaves the term out."""
    weights = references.train_dampen(start.double().numpy(), *of_one(stream, index), descent, strength=strength)
    torch.testing.assert_close(weight.detach(), torch.from_numpy(weights[-1]).float())


# ---------------------------------------------------------------------- several models


@pytest.mark.parametrize("tied", [False, True])
def test_two_models_on_one_optimizer_are_both_acted_on_once(tied: bool) -> None:
    model = Two(tied)
    start, optimizer = started(model), sgd(model)
    for part in (model.first, model.second):
        prepare(part, optimizer, Q_EMA)
    stream = gradients(5, len(start))
    push(optimizer, model.parameters(), stream)
    for index, part in enumerate((model.first, model.second)):
        assert_averaged(part, start[0 if tied else index], stream, 0 if tied else index)


def test_preparing_again_replaces_the_hooks_of_that_model_alone() -> None:
    model = Two()
    start, optimizer = started(model), sgd(model)
    applied(model.first, policy(Q_EMA))
    applied(model.second, policy(DAMPEN))
    for part in (model.first, model.second, model.first, model.second):
        fp4graph.prepare_optimizer(part, optimizer)
    stream = gradients(5)
    push(optimizer, model.parameters(), stream)
    assert_averaged(model.first, start[0], stream, 0)
    assert_dampened(model.second.weight, start[1], stream, 1)

    prepare(model.second, optimizer)  # dampens no more
    before, more = started(model), gradients(2)
    push(optimizer, model.parameters(), more)
    assert_dampened(model.second.weight, before[1], more, 1, strength=0)
    assert_averaged(model.first, start[0], [*stream, *more], 0)


def test_the_state_of_two_models_on_one_optimizer_resumes() -> None:
    def prepared() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Two()
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        for part, technique in ((model.first, FREEZE), (model.second, RAMPING)):
            prepare(part, optimizer, technique)
        return model, optimizer

    assert_resumes(prepared, gradients(30), 13)


def test_a_technique_of_the_whole_optimizer_acts_once_for_two_models() -> None:
    """The technique conditions every gradient once, so the run equals one with the optimizer StableSPAM."""
    model, reference = Two(), Two()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM, fused=True)
    for part in (model.first, model.second):
        prepare(part, optimizer, SPAM)
    push(optimizer, model.parameters(), gradients(10))
    push(StableSPAM(reference.parameters(), **ADAM, **OPTIONS), reference.parameters(), gradients(10))
    assert same(model.parameters(), reference.parameters())


#: By case: the first model's techniques, the second's, whether they share a weight, and the error's message.
APART = {
    "two sets of options": (
        [SPAM], [{"stable_spam": {**OPTIONS, "theta": 0.5}}], False,
        r"stable_spam acts on the whole optimizer.*theta=0\.97.*theta=0\.5",
    ),
    "opposite orders": ([DAMPEN, SPAM], [SPAM, DAMPEN], False, r"opposite orders.*dampen.*stable_spam"),
    "one parameter": ([DAMPEN, SPAM], [FREEZE], True, r"are one parameter.*dampen"),
}  # fmt: skip


@pytest.mark.parametrize("case", APART)
def test_two_models_that_disagree_are_refused_and_the_first_is_as_it_was(case: str) -> None:
    first, second, tied, message = APART[case]
    model = Two(tied)
    optimizer = torch.optim.AdamW(model.parameters())
    prepare(model.first, optimizer, *first)
    with pytest.raises(fp4graph.Error, match=message):
        prepare(model.second, optimizer, *second)
    push(optimizer, model.parameters(), gradients(1, 1 if tied else 2))
    assert "fp4graph.stable_spam.max_avg" in optimizer.state[model.first.weight]


# ---------------------------------------------------------------------- models and parameters that come and go


def test_a_model_without_its_policy_is_left_alone() -> None:
    model = Two()
    start, optimizer = started(model), sgd(model)
    prepare(model, optimizer, DAMPEN, Q_EMA)
    fp4graph.remove(model)
    stream = gradients(1)
    push(optimizer, model.parameters(), stream)
    for index, parameter in enumerate(model.parameters()):
        assert_dampened(parameter, start[index], stream, index, strength=0)


def test_a_parameter_that_the_optimizer_is_given_later_is_acted_on() -> None:
    model = Two()
    start, optimizer = started(model), sgd(model.first)
    prepare(model, optimizer, Q_EMA)
    optimizer.add_param_group({"params": [model.second.weight]})
    stream = gradients(3)
    push(optimizer, model.parameters(), stream)
    assert_averaged(model.second, start[1], stream, 1)


def test_a_step_with_a_learning_rate_of_0_takes_sparse_gradients() -> None:
    model = applied(nn.Sequential(nn.Embedding(8, 32, sparse=True), nn.Linear(32, 32)), one_rule(techniques=[Q_EMA]))
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.0))
    model(torch.arange(4)).sum().backward()
    optimizer.step()


# ---------------------------------------------------------------------- one policy


SHARED = r"first\.weight .*and second\.weight .*are one parameter.*"
REFUSED: dict[str, tuple[dict[str, Any], bool, str]] = {
    "two sets of options": (
        by_name(first=of(RAMPING), second=of({"q_ramping": RAMPING["q_ramping"] | {"n_max": 3}})),
        False,
        r"q_ramping acts on the whole optimizer.*n_max=4.*n_max=3",
    ),
    "other options": (
        by_name(first=of(DAMPEN), second=of({"dampen": {"strength": 0.3}})),
        True,
        SHARED + "dampen with other options",
    ),
    "other techniques": (by_name(first=of(Q_EMA), second=of(RAMPING)), True, SHARED + "q_ema"),
    "one technique": (by_name(first=of(FREEZE), second={}), True, SHARED + "freeze"),
    "other blocks": (
        by_name(first=of(DAMPEN), second={**of(DAMPEN), "quantize": {**TIES_UP, "block": 16}}),
        True,
        SHARED + "another quantizer",
    ),
    "a later phase": (
        by_name(first={}, second={})
        | {"phases": [{"at": 1000, "rules": by_name(first=of(DAMPEN), second={})["rules"]}]},
        True,
        SHARED + "dampen",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_policy_that_disagrees_with_itself_is_refused(case: str) -> None:
    data, tied, message = REFUSED[case]
    model = applied(Two(tied), data)
    with pytest.raises(fp4graph.Error, match=message):
        fp4graph.prepare_optimizer(model, sgd(model))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: timm.optim.Lookahead(sgd(m)), "runs no hooks"),
        (lambda m: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), "does not hold"),
    ],
    ids=["no hooks", "other weights"],
)
def test_a_later_phase_is_checked_when_the_optimizer_is_prepared(make: Any, message: str) -> None:
    model = applied(Two(), policy(phases=[{"at": 1000, "techniques": [Q_EMA]}]))
    with pytest.raises(fp4graph.Error, match=message):
        fp4graph.prepare_optimizer(model, make(model))


@pytest.mark.parametrize("second", [None, {"operands": {"fprop.weight": "keep"}, "techniques": []}], ids=str)
def test_a_use_in_high_precision_does_not_count(second: Any) -> None:
    """An output layer that is tied to the embedding is such a use."""
    model = applied(Two(tied=True), by_name(first=of(DAMPEN), second=second))
    start, optimizer = started(model), fp4graph.prepare_optimizer(model, sgd(model))
    stream = gradients(1, 1)
    push(optimizer, model.parameters(), stream)
    assert_dampened(model.first.weight, start[0], stream, 0)


class Parts(nn.Linear):
    """Multiplies with parts of its weight."""

    def __init__(self, part: Any) -> None:
        super().__init__(64, 64)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.part(self.weight, index) for index in range(2))
        return F.linear(x[:, : first.shape[1]], first) + F.linear(x[:, : second.shape[1]], second)


ROWS, COLUMNS = (lambda w, i: w.chunk(2)[i]), (lambda w, i: w.split([24, 40], 1)[i][:, : 24 + 16 * i])
BLOCKS, TENSOR = quantizer(16), {"tensor_scaling": {"operands": ["fprop.weight"]}}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("part", "techniques", "quantize", "refused"),
    [
        (ROWS, [DAMPEN], BLOCKS, False), (ROWS, [TENSOR, Q_EMA], BLOCKS, False),
        (ROWS, [TENSOR, DAMPEN], BLOCKS, True), (ROWS, [DAMPEN], quantizer("tensor"), True),
        (lambda w, i: w.split(32, 1)[i], [DAMPEN], BLOCKS, False), (COLUMNS, [DAMPEN], BLOCKS, True),
        (lambda w, i: w.reshape(128, 32), [DAMPEN], BLOCKS, True),
        (lambda w, i: w.T.contiguous().T, [DAMPEN], BLOCKS, False),
    ],
)  # fmt: skip
def test_a_technique_quantizes_a_parameter_only_if_its_parts_have_the_scales_of_the_whole(
    part: Any, techniques: list[Any], quantize: Any, refused: bool, compiled: bool
) -> None:
    model = applied(Parts(part), one_rule(*techniques, quantize=quantize))
    with nullcontext() if compiled else operation_by_operation():
        if refused:
            with pytest.raises(fp4graph.CaptureError, match=r"^weight: technique dampen quantizes .* as one matrix"):
                model(torch.randn(4, 64))
        else:
            model(torch.randn(4, 64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "begins"),
    [(SPAM, SPAM), (SPAM, Q_EMA), (SPAM, None), (None, DAMPEN), (None, FREEZE), (Q_EMA, SPAM)],
    ids=["other options", "other techniques", "no technique", "dampen first", "freeze first", "first before a step"],
)
def test_a_closure_is_called_before_techniques_act_on_gradients(first, begins):
    """Lightning gives every step a closure, and a phase may begin in it."""
    first = {"stable_spam": OPTIONS | {"theta": 0.9}} if first == SPAM else first
    later = {"at": 2, "techniques": [begins]} if begins else {"at": 2, "rules": [], "default": "keep"}
    ended = []
    for closes in (False, True):
        model = applied(Two(), policy(*filter(None, [first]), phases=[later]))
        optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), **ADAM))
        for x in torch.randn(5, 8, 64, generator=torch.Generator().manual_seed(2)):

            def loss(x=x, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                value = model(x).square().mean()
                value.backward()
                return value

            if closes:
                assert optimizer.step(loss).requires_grad
            else:
                loss()
                optimizer.step()
        ended.append([*model.state_dict().values()])
    assert same(*ended)


class Twice(torch.optim.AdamW):
    def step(self, closure):
        with torch.enable_grad():
            return closure(), closure()


class Ascends(torch.optim.AdamW):
    """Computes gradients at the weights that it has moved to, as SAM does."""

    def step(self, closure):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(0.1)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        return super().step()


@pytest.mark.parametrize("kind", [Twice, Ascends])
def test_an_optimizer_that_computes_gradients_again_is_refused_by_techniques_on_gradients(kind):
    model = applied(Two(), policy(SPAM))
    optimizer = fp4graph.prepare_optimizer(model, kind(model.parameters()))
    with pytest.raises(fp4graph.Error, match="calls the closure several times"):
        optimizer.step(lambda: model(torch.randn(8, 64)).sum().backward())
