"""The count of forwards travels with the optimizer, whose state dict any trainer saves."""

from __future__ import annotations

import gc
import io

import pytest
import torch
from timm.optim import Lookahead
from torch import nn

import fp4graph
from fp4graph.errors import PolicyWarning
from fp4graph.model.runtime import runtime_of


def made(policy="tetrajet", seed=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    fp4graph.apply(model, policy, backend="eager", seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer


def trained(model, optimizer, steps, begin=0):
    for step in range(begin, begin + steps):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def count(model):
    return runtime_of(model).root_state.count


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("prepared", ["before", "after"])
def test_plain_state_dicts_resume_to_the_last_bit(prepared):
    """``prepared`` says whether the optimizer is prepared before it loads its state, or after."""
    model, optimizer = made()
    fp4graph.prepare_optimizer(model, optimizer)
    trained(model, optimizer, 3)
    weights, state = through_a_file(model.state_dict()), through_a_file(optimizer.state_dict())
    expected = trained(model, optimizer, 2, begin=3)

    other, its = made()
    if prepared == "before":
        fp4graph.prepare_optimizer(other, its)
    other.load_state_dict(weights, strict=True)
    its.load_state_dict(state)
    if prepared == "after":
        fp4graph.prepare_optimizer(other, its)
    assert count(other) == 3
    assert not any(key.startswith("fp4graph") for group in its.param_groups for key in group)
    assert all(map(torch.equal, trained(other, its, 2, begin=3), expected))


def test_the_state_loads_where_nobody_knows_us():
    model, optimizer = made()
    fp4graph.prepare_optimizer(model, optimizer)
    trained(model, optimizer, 1)
    plain = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    plain.load_state_dict(model.state_dict(), strict=True)
    its = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    its.load_state_dict(optimizer.state_dict())
    plain(torch.randn(2, 32)).mean().backward()
    its.step()


def test_two_models_keep_their_own_counts():
    (first, _), (second, _) = made(), made(seed=4)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    for model in (first, second):
        fp4graph.prepare_optimizer(model, optimizer)
    first(torch.randn(2, 32))
    first(torch.randn(2, 32))
    second(torch.randn(2, 32))
    saved = optimizer.state_dict()
    first(torch.randn(2, 32))
    optimizer.load_state_dict(saved)
    assert (count(first), count(second)) == (2, 1)


@pytest.mark.parametrize(("other", "what"), [({"seed": 9}, "seed"), ({"policy": "nvfp4"}, "policy")])
def test_another_origin_is_said(other, what):
    model, optimizer = made()
    fp4graph.prepare_optimizer(model, optimizer)
    model, its = made(**other)
    fp4graph.prepare_optimizer(model, its)
    with pytest.warns(PolicyWarning, match=f"another {what}"):
        its.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("gone", ["removed", "baseline", "collected"])
def test_without_a_count_the_state_is_the_optimizers_own(gone):
    model, optimizer = made(*(["bf16"] if gone == "baseline" else []))
    fp4graph.prepare_optimizer(model, optimizer)
    trained(model, optimizer, 1)
    if gone == "removed":
        fp4graph.remove(model)
    if gone == "collected":
        del model
        gc.collect()
    saved = optimizer.state_dict()
    assert len(saved["state"]) == 4
    assert saved["param_groups"][0]["lr"] == 1e-2
    optimizer.load_state_dict(saved)


def test_two_models_that_are_prepared_after_loading():
    (first, _), (second, _) = made(), made(seed=4)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    for model in (first, second):
        fp4graph.prepare_optimizer(model, optimizer)
    trained(first, optimizer, 2)
    trained(second, optimizer, 1)
    (other, _), (another, _) = made(), made(seed=4)
    its = torch.optim.AdamW([*other.parameters(), *another.parameters()])
    its.load_state_dict(optimizer.state_dict())
    for model in (other, another):
        fp4graph.prepare_optimizer(model, its)
    assert (count(other), count(another)) == (2, 1)


def test_wrappers_of_optimizers():
    model, optimizer = made()
    wrapper = Lookahead(optimizer)
    fp4graph.prepare_optimizer(model, wrapper)
    trained(model, wrapper, 2)
    other, its = made()
    fp4graph.prepare_optimizer(other, its := Lookahead(its))
    its.load_state_dict(wrapper.state_dict())
    assert count(other) == 2
