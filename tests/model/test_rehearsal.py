"""``apply(..., example_inputs=...)`` finds at once what the first step would."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.model.runtime import runtime_of

WIDE = {"version": 1, "name": "p", "rules": [{"name": "wide", "match": {"in_features": 12345}, "quantize": {}}]}


@pytest.mark.slow
@pytest.mark.parametrize("given", [lambda x: (x,), lambda x: x, lambda x: {"x": x}], ids=["tuple", "alone", "keywords"])
def test_the_model_is_untouched_where_something_is_wrong(vit, images, given):
    model = vit()
    keys, state = list(model.state_dict()), torch.get_rng_state()
    with pytest.raises(fp4graph.PolicyError, match="'wide' matches no site"):
        fp4graph.apply(model, WIDE, backend="eager", example_inputs=given(images))
    assert runtime_of(model) is None
    assert list(model.state_dict()) == keys
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_it_trains_as_without_where_nothing_is(vit, images):
    with_it = fp4graph.apply(vit(), "tetrajet", backend="eager", example_inputs=images)
    without = fp4graph.apply(vit(), "tetrajet", backend="eager")
    assert torch.equal(with_it(images), without(images))


@pytest.mark.slow
def test_every_phase_is_tried(vit, images):
    policy = {
        **WIDE,
        "rules": [{"name": "all", "match": {}, "quantize": {}}],
        "phases": [{"at": 100, "rules": WIDE["rules"]}],
    }
    with pytest.raises(fp4graph.PolicyError, match="'wide' matches no site"):
        fp4graph.apply(vit(), policy, backend="eager", example_inputs=images)


def test_phases_out_of_order_or_of_unknown_length_are_found(vit, images):
    for phases in ([{"at": 0.5, "default": "keep"}], [{"at": 2, "default": "keep"}, {"at": 1, "default": "keep"}]):
        policy = {"version": 1, "extends": "tetrajet", "phases": phases}
        with pytest.raises(fp4graph.PolicyError, match=r"total_forwards|reorder"):
            fp4graph.apply(vit(), policy, backend="eager", example_inputs=images)


@pytest.mark.slow
def test_a_forward_that_depends_on_values_cannot_be_tried():
    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    model = nn.Sequential(Model(32, 32))
    with pytest.raises(fp4graph.CaptureError, match=r"depends on the values.*leave example_inputs out"):
        fp4graph.apply(model, "microscaling", backend="eager", example_inputs=torch.randn(4, 32))
    with pytest.warns(fp4graph.errors.PolicyWarning, match="'0' runs uncompiled.*does not fit into one graph"):
        fp4graph.apply(model, "microscaling", backend="eager")(torch.randn(4, 32))


@pytest.mark.slow
def test_the_backward_is_tried(monkeypatch):
    from fp4graph_plugins.step_gradient import ElementSlope

    def element_surrogate(self, ratio, context):
        raise RuntimeError("no way back")

    monkeypatch.setattr(ElementSlope, "element_surrogate", element_surrogate)
    with pytest.raises(fp4graph.PluginError, match=r"step_gradient.*at 0: .*no way back"):
        fp4graph.apply(nn.Sequential(nn.Linear(32, 32)), "wang-dge", backend="eager", example_inputs=torch.randn(4, 32))
