"""The count of forwards travels with the optimizer, whose state dict any trainer saves."""

from __future__ import annotations

import gc
import itertools
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from timm.optim import Lookahead
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import fp4graph
from fp4graph.errors import PolicyWarning
from fp4graph.model.runtime import runtime_of
from tests.helpers.models import Mlp
from tests.helpers.steps import descend, same, through_file
from tests.helpers.training import applied, prepared


def made(policy="tetrajet", seed=3, prepares=True):
    model = applied(Mlp(32, 32, 8), policy, seed=seed)
    return model, prepared(model) if prepares else torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(model, optimizer, steps, begin=0):
    batches = (torch.randn(8, 32, generator=torch.Generator().manual_seed(step)) for step in itertools.count(begin))
    descend(lambda: model(next(batches)).square().mean(), optimizer, steps)
    return [p.detach().clone() for p in model.parameters()]


def count(model):
    return runtime_of(model).root_state.count


@pytest.mark.slow
@pytest.mark.parametrize("prepares", [True, False], ids=["prepared before loading", "prepared after loading"])
def test_plain_state_dicts_resume_to_the_last_bit(prepares):
    model, optimizer = made()
    trained(model, optimizer, 3)
    weights, state = through_file(model.state_dict()), through_file(optimizer.state_dict())
    expected = trained(model, optimizer, 2, begin=3)
    resumed, loaded = made(prepares=prepares)
    resumed.load_state_dict(weights, strict=True)
    loaded.load_state_dict(state)
    if not prepares:
        fp4graph.prepare_optimizer(resumed, loaded)
    assert count(resumed) == 3
    assert not any(key.startswith("fp4graph") for group in loaded.param_groups for key in group)
    assert same(trained(resumed, loaded, 2, begin=3), expected)


def test_the_state_loads_without_fp4graph():
    model, optimizer = made()
    trained(model, optimizer, 1)
    plain = Mlp(32, 32, 8)
    plain.load_state_dict(model.state_dict(), strict=True)
    loaded = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    loaded.load_state_dict(optimizer.state_dict())
    trained(plain, loaded, 1)


@pytest.mark.parametrize(("other", "what"), [({"seed": 9}, "seed"), ({"policy": "nvfp4"}, "policy")])
def test_the_state_of_another_seed_or_policy_warns(other, what):
    (_model, optimizer), (_other, loaded) = made(), made(**other)
    with pytest.warns(PolicyWarning, match=f"another {what}"):
        loaded.load_state_dict(optimizer.state_dict())


@pytest.mark.slow
def test_a_load_that_leaves_out_entries_of_techniques_warns(tmp_path, recwarn):
    """torch.distributed.checkpoint reads only entries that the optimizer has; techniques make theirs at a step."""
    warnings.simplefilter("always", PolicyWarning)
    model, optimizer = made("tetrajet-freeze")
    trained(model, optimizer, 2)
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path, no_dist=True)
    for steps in (0, 1):
        other, resumed = made("tetrajet-freeze")
        trained(other, resumed, steps)
        state = get_optimizer_state_dict(other, resumed)
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        recwarn.clear()
        set_optimizer_state_dict(other, resumed, state)
        texts = [str(warning.message) for warning in recwarn if issubclass(warning.category, PolicyWarning)]
        assert ["12 of the 12 entries that techniques had" in text for text in texts] == [True] * (steps == 0)
        assert count(other) == 2


@pytest.mark.parametrize("gone", ["removed", "baseline", "collected"])
def test_without_a_count_the_state_is_the_optimizers_own(gone):
    model, optimizer = made("bf16" if gone == "baseline" else "tetrajet")
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


@pytest.mark.parametrize("again", ["the same", "prepared after loading"])
def test_two_models_keep_their_own_counts(again):
    def two(prepares=True):
        models = made(prepares=False)[0], made(seed=4, prepares=False)[0]
        optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()])
        for model in models if prepares else ():
            fp4graph.prepare_optimizer(model, optimizer)
        return models, optimizer

    models, optimizer = two()
    for model, steps in zip(models, (2, 1), strict=True):
        trained(model, optimizer, steps)
    saved = optimizer.state_dict()
    models[0](torch.randn(2, 32))
    if again != "the same":
        models, optimizer = two(prepares=False)
    optimizer.load_state_dict(saved)
    for model in models if again != "the same" else ():
        fp4graph.prepare_optimizer(model, optimizer)
    assert tuple(map(count, models)) == (2, 1)


def test_a_wrapper_of_an_optimizer_carries_the_count():
    (model, optimizer), (resumed, loaded) = made(prepares=False), made(prepares=False)
    wrapper = fp4graph.prepare_optimizer(model, Lookahead(optimizer))
    trained(model, wrapper, 2)
    fp4graph.prepare_optimizer(resumed, Lookahead(loaded)).load_state_dict(wrapper.state_dict())
    assert count(resumed) == 2
