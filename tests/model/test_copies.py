"""Copies and averages of an applied model."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import timm
import torch
from torch.optim.swa_utils import AveragedModel

import fp4graph
from fp4graph.model.runtime import runtime_of
from tests.helpers.models import Mlp
from tests.helpers.policies import one_rule
from tests.helpers.training import applied, assert_equal

X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
perceptron = partial(Mlp, 32, 48, 32)
AVERAGES = {
    "all buffers": partial(AveragedModel, avg_fn=lambda average, value, _: (average + value) / 2, use_buffers=True),
    "state dict": partial(timm.utils.ModelEmaV3, decay=0.5),
    "parameters": AveragedModel,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy"),  # without averaged buffers the count stays, and the noise with it
    [*((name, "tetrajet-qema") for name in AVERAGES), ("all buffers", "mxfp4-rl"), ("state dict", "mxfp4-rl")],
)
def test_an_average_evaluates_as_its_model(name, policy):
    """With weights that stay, an average is its model: averaged buffers, noise in evaluation and all."""
    model = applied(perceptron(), policy)
    average = AVERAGES[name](model)
    for _ in range(3 if policy == "mxfp4-rl" else 1):
        model(X).mean().backward()
        (average.update if hasattr(average, "update") else average.update_parameters)(model)
    with torch.no_grad():
        expected = model.eval()(X)
        assert_equal([average.eval()(X), average.module.eval()(X)], [expected, expected])
        assert_equal([torch.compile(average, backend="aot_eager")(X)], [expected])
        assert not torch.equal(expected, perceptron()(X))


def test_a_copy_follows_the_phases_of_its_model_until_it_trains():
    model = applied(perceptron(), one_rule(phases=[{"at": 2, "rules": [], "default": "keep"}]))
    twin, exact = copy.deepcopy(model), perceptron()(X)
    with torch.no_grad():
        quantized = twin(X)
    for _ in range(3):
        model(X)
    with torch.no_grad():
        assert_equal([twin(X)], [exact])
        assert not torch.equal(quantized, exact)
    other = copy.deepcopy(twin)
    twin(X)
    model(X)
    assert (runtime_of(model).count, runtime_of(twin).count) == (4, 1)
    with torch.no_grad():
        late = copy.deepcopy(model)
        late(X)
        del model, other
        assert_equal([late(X)], [exact])
    assert runtime_of(pickle.loads(pickle.dumps(copy.deepcopy(twin)))) is None


def test_a_copy_knows_a_length_that_its_model_is_told_later():
    model = applied(perceptron(), one_rule(phases=[{"at": 0.5, "rules": [], "default": "keep"}]))
    twin = copy.deepcopy(model)
    fp4graph.set_total_forwards(model, 4)
    for _ in range(2):
        model(X)
    with torch.no_grad():
        assert_equal([twin(X)], [perceptron()(X)])
