"""``apply(..., example_inputs=...)`` raises the errors of the first step, and ``explain`` takes models without data."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.model.runtime import runtime_of
from tests.helpers.models import Mlp
from tests.helpers.policies import one_rule
from tests.helpers.training import applied

MATCHES_NONE, MISSPELT = one_rule(match={"in_features": 12345}), one_rule(match={"module": "frist"})
X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
#: The policy, the example inputs and the error.
WRONG = {
    "tuple": (MATCHES_NONE, (X,), "'all' matches no site"),
    "alone": (MATCHES_NONE, X, "'all' matches no site"),
    "keywords": (MATCHES_NONE, {"x": X}, "'all' matches no site"),
    "without inputs": (MISSPELT, None, "frist.*first"),
    "phase": (one_rule(phases=[{"at": 100, "rules": MATCHES_NONE["rules"]}]), X, "'all' matches no site"),
    "phase of unknown length": (one_rule(phases=[{"at": 0.5, "default": "keep"}]), X, "total_forwards"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_rehearsal_that_fails_leaves_the_model_untouched(name):
    (policy, inputs, text), model = WRONG[name], Mlp(32, 48, 32)
    keys, state, expected = list(model.state_dict()), torch.get_rng_state(), model(X)
    with pytest.raises(fp4graph.PolicyError, match=text):
        applied(model, policy, example_inputs=inputs)
    assert runtime_of(model) is None
    assert list(model.state_dict()) == keys
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model(X), expected)


@pytest.mark.slow
def test_a_forward_that_depends_on_values_cannot_be_rehearsed():
    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    model = nn.Sequential(Model(32, 32))
    with pytest.raises(fp4graph.CaptureError, match=r"depends on the values.*leave example_inputs out"):
        applied(model, "microscaling", example_inputs=X)
    with pytest.warns(fp4graph.errors.PolicyWarning, match="'0' runs uncompiled.*does not fit into one graph"):
        applied(model, "microscaling")(X)


@pytest.mark.slow
def test_a_rehearsal_runs_the_backward(monkeypatch):
    from fp4graph_plugins.step_gradient import ElementSlope

    monkeypatch.setattr(ElementSlope, "element_surrogate", mock.Mock(side_effect=RuntimeError("no way back")))
    with pytest.raises(fp4graph.PluginError, match=r"step_gradient.*at 0: .*no way back"):
        applied(nn.Sequential(nn.Linear(32, 32)), "wang-dge", example_inputs=X)


class Block(Mlp):
    def __init__(self) -> None:
        super().__init__(32, 64, 32)
        self.register_buffer("positions", torch.arange(32))
        self.plain = torch.ones(32)  # neither a parameter nor a buffer

    def forward(self, x):
        return super().forward(x + self.positions) * self.plain


def net():
    model = nn.Sequential(Block(), Block())
    model[1].first.weight = model[0].first.weight
    return model


def sites(model, x=X):
    with torch.autocast("cpu", torch.bfloat16):
        explanation = fp4graph.explain(model, "tetrajet", (x,))
    assert explanation.problem is None
    return [(site.module, site.shapes, site.rule, site.operands) for site in explanation.sites]


@pytest.mark.slow
@pytest.mark.parametrize("x", [X, X.to("meta")], ids=["inputs with data", "inputs without"])
def test_explain_and_rehearsals_take_a_model_without_data(x):
    with torch.device("meta"):
        model = net()
    assert sites(model, x) == sites(net())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model[0].plain.is_meta
    applied(model, "tetrajet-qema", example_inputs=X)
    assert sites(model, x) == sites(net())
    fp4graph.remove(model)


def test_explain_leaves_the_generators_of_python_and_numpy_as_they_are():
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x) * random.random() * float(np.random.rand())

    before = random.getstate(), np.random.get_state()[1:3]
    fp4graph.explain(Noisy(32, 32), one_rule(), torch.ones(2, 32))
    after = random.getstate(), np.random.get_state()[1:3]
    assert (before[0], before[1][0].tolist(), before[1][1]) == (after[0], after[1][0].tolist(), after[1][1])
