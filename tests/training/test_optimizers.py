"""The optimizer's stages around optimizers of torch and timm: they act, resume, or say why not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import timm.optim
import torch
from torch import nn

import fp4graph
from fp4graph.model.runtime import runtime_of
from fp4graph.optim import StableSPAM
from tests.helpers.policies import TIES_UP, one_rule
from tests.helpers.steps import Stream, assert_resumes, push
from tests.helpers.training import applied

SPEC = fp4graph.QuantSpec(block=32, scale=fp4graph.ScaleSpec("e8m0", "ceil"), ties="up")
FREEZE = {"freeze": {"momentum": 0.3, "threshold": 0.25}}
DAMPEN = {"dampen": {"strength": 0.1, "total_steps": 20}}
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def from_timm(name: str, **options: Any) -> Make:
    return lambda p: timm.optim.create_optimizer_v2(list(p), opt=name, lr=0.01, **options)


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.03),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "StableSPAM": lambda p: StableSPAM(p, lr=0.01),
    **{name: from_timm(name) for name in ("adamw", "lamb", "lion", "nadamw", "muon", "adan", "adopt", "sgdw", "mars")},
}


def prepared(make: Make, *techniques: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = applied(nn.Linear(64, 6), one_rule(quantize=TIES_UP, techniques=list(techniques)))
    return model, fp4graph.prepare_optimizer(model, make(model.parameters()))


def gradients(steps: int) -> Stream:
    """Return gradients that push weights to and fro, again and again over a threshold, and biases one way."""
    generator = torch.Generator().manual_seed(1)
    signs = [1 if t % 2 else -1 for t in range(steps)]
    return [[s * 0.1 + 0.1 * torch.randn(6, 64, generator=generator), torch.ones(6)] for s in signs]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dampen_is_a_gradient_to_any_optimizer(name: str) -> None:
    model, optimizer = prepared(OPTIMIZERS[name], {"dampen": {"strength": 0.1}})
    plain = nn.Linear(64, 6)
    plain.load_state_dict({"weight": model.weight, "bias": model.bias})
    reference = OPTIMIZERS[name](plain.parameters())
    for grad, bias in gradients(5):
        weight = plain.weight.detach()
        push(reference, plain.parameters(), [[grad + 0.2 * (weight - fp4graph.fake_quantize(weight, SPEC)), bias]])
        push(optimizer, model.parameters(), [[grad, bias]])
        torch.testing.assert_close(model.weight, plain.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_freeze_holds_against_any_optimizer(name: str) -> None:
    model, optimizer = prepared(OPTIMIZERS[name], FREEZE)
    grads = gradients(60)
    push(optimizer, model.parameters(), grads[:50])
    state, before = optimizer.state[model.weight], model.weight.detach().clone()
    frozen = state["fp4graph.freeze.frozen"].clone()
    assert frozen.any()
    push(optimizer, model.parameters(), grads[50:])
    assert torch.equal(model.weight[frozen], before[frozen])
    assert torch.equal(model.weight[frozen], state["fp4graph.freeze.mean"][frozen])
    assert not torch.equal(model.weight[~frozen], before[~frozen])  # so not all are frozen


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_techniques_resumes_with_any_optimizer(name: str) -> None:
    (_, optimizer), _ = assert_resumes(lambda: prepared(OPTIMIZERS[name], DAMPEN, FREEZE), gradients(30), 15)
    state = optimizer.state_dict()["state"][0]
    entries = ("freeze.frozen", "freeze.direction", "freeze.mean", "dampen.steps")
    assert state.keys() >= {f"fp4graph.{entry}" for entry in entries}


# ---------------------------------------------------------------------- wrappers


def test_a_wrapper_that_runs_no_hooks_is_refused_where_something_acts() -> None:
    message = r"Lookahead runs no hooks around its step\(\).*prepare the wrapped one"
    for technique in (DAMPEN, FREEZE, "q_ema", "stable_spam"):
        with pytest.raises(fp4graph.Error, match=message):
            prepared(from_timm("lookahead_adamw"), technique)
    model, optimizer = prepared(from_timm("lookahead_adamw"))
    push(optimizer, model.parameters(), gradients(2))


@pytest.mark.parametrize("technique", ["dampen", "freeze", "q_ema", "stable_spam"])
def test_the_optimizer_in_a_lookahead_can_be_prepared(technique: str) -> None:
    """Lookahead moves weights after the hooks; the hooks see the move at the next step."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = prepared(from_timm("adamw"), technique)
        return model, timm.optim.Lookahead(optimizer, k=4)

    (_, lookahead), _ = assert_resumes(make, gradients(30), 15)
    assert lookahead.param_groups[0]["lookahead_step"] == 30


def test_a_refused_wrapper_leaves_nothing_prepared() -> None:
    model, base = prepared(from_timm("adamw"), DAMPEN)
    runtime = runtime_of(model)
    assert runtime is not None
    runtime.optimizers.parameters.clear()
    with pytest.raises(fp4graph.Error, match="runs no hooks"):
        fp4graph.prepare_optimizer(model, timm.optim.Lookahead(base))
    assert not runtime.optimizers.parameters
