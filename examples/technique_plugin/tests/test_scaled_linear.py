"""The operator as a site: listed, counted, quantized by its equation, and trained."""

import pytest
import torch

import fp4graph
from fp4graph.technique.registry import default_registry

SPEC = fp4graph.QuantSpec("e2m1", block=32)
RULE = {"name": "all", "match": {"op": "linear"}, "quantize": {"element": "e2m1", "block": 32}}
ALL = {"version": 1, "name": "all", "rules": [RULE]}


class Scaled(torch.nn.Linear):
    def forward(self, x):
        return torch.ops.fp4graph_example.scaled_linear(x, self.weight, self.bias, 0.5)


def layer():
    torch.manual_seed(0)
    return Scaled(64, 24), torch.randn(5, 64, requires_grad=True)


def test_the_plugin_is_found():
    assert default_registry().products["fp4graph_example::scaled_linear"].plugin == "scaled_linear"


@pytest.mark.parametrize("policy", [ALL, "bf16"])
def test_it_is_a_site_with_its_flops(policy):
    model, x = layer()
    (site,) = fp4graph.explain(model, policy, (x,)).sites
    assert (site.module, site.op, site.quantized, site.flops) == ("", "linear", policy is ALL, 2 * 5 * 64 * 24)


def test_its_factors_are_quantized():
    model, x = layer()
    with torch.no_grad():
        y = fp4graph.apply(model, ALL, backend="eager")(x)
        quantized = [fp4graph.fake_quantize(factor, SPEC) for factor in (x, model.weight)]
    torch.testing.assert_close(y, 0.5 * quantized[0] @ quantized[1].T + model.bias)


def test_it_trains_although_the_operator_has_no_backward():
    model, x = layer()
    model = fp4graph.apply(model, ALL, backend="eager")
    model(x).square().mean().backward()
    assert model.weight.grad.isfinite().all()
    assert model.weight.grad.any()
