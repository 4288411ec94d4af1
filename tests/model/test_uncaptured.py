"""Modules that the compiled call runs outside of its graphs: loops over the values of tensors, disabled functions."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

import fp4graph
from fp4graph.errors import PolicyWarning
from fp4graph.model.runtime import runtime_of
from tests.helpers.breaks import Disables, Logs
from tests.helpers.experts import HIDDEN, WIDTH, Experts, Mixture, tokens
from tests.helpers.models import module_of
from tests.helpers.policies import NVFP4, one_rule
from tests.helpers.training import applied, assert_equal, prepared, train, uncompiled

pytestmark = pytest.mark.slow
loops = partial(Mixture, "loop")
OPS = ["linear", "grouped"]


@uncompiled
def test_each_product_is_a_site_of_the_first_forward():
    model = applied(loops(), one_rule("tensor_scaling", op=OPS, quantize=NVFP4, expect={"quantized": 16}))
    x, choice = tokens()
    model(x.detach(), choice)  # so that the blocks differ in what needs a gradient, and each has a graph
    sites = [site for site in runtime_of(model).sites if site.module == "layers.1.experts"]
    assert [(site.op, site.occurrence, site.quantized) for site in sites] == [("linear", i, True) for i in range(6)]
    counts = torch.bincount(choice)[[0, 2, 3]].repeat_interleave(2)
    assert [site.flops for site in sites] == [2 * int(count) * WIDTH * HIDDEN for count in counts]
    x, choice = tokens(1)
    model(x.detach(), choice)
    assert len(runtime_of(model).sites) == 16
    quantized = {weight.name for weight in runtime_of(model).weights if weight.is_captured}
    assert {f"layers.{i}.experts.w{j}" for i in (0, 1) for j in (1, 2)} <= quantized


@pytest.mark.parametrize(
    ("make", "batch", "text"),
    [
        (loops, tokens(), r"layers\.0\.experts.*uncompiled.*loop.*grouped_mm"),
        (partial(Disables, WIDTH, HIDDEN, WIDTH), tokens()[:1], "'first' runs uncompiled.*disabled function"),
        (partial(Logs, WIDTH, HIDDEN, WIDTH), tokens()[:1], "'first' runs uncompiled.*graph break"),
    ],
    ids=["loop", "disabled function", "graph break"],
)
def test_an_uncaptured_module_draws_one_warning_that_names_it_and_the_reason(make, batch, text):
    model = applied(make(), one_rule(match={"op": OPS}))
    with pytest.warns(PolicyWarning, match=text) as warned:
        train(model, prepared(model), [batch, batch])
    assert len(warned) == 1


@uncompiled
def test_a_matrix_of_no_layer_is_quantized_behind_a_graph_break():
    def forward(self, x):
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x @ self.mixing
        return x

    mixes = module_of(forward, mixing=torch.nn.Parameter(torch.randn(WIDTH, WIDTH)))
    model = applied(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), mixes), one_rule())
    model(torch.randn(8, WIDTH))
    sites = [(site.module, site.quantized) for site in runtime_of(model).sites]
    assert sites == [("0", True), ("1", True), ("1", True)]


@uncompiled
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_products_of_activations_behind_a_graph_break_belong_to_their_module(rounding):
    """Only one of two equal modules is named by the rule, and both share their code."""

    def forward(self, x):
        q, k = self.qk(x).chunk(2, -1)
        torch._dynamo.graph_break()
        return x + q @ k.mT @ x

    def attention():
        return module_of(forward, qk=torch.nn.Linear(WIDTH, 2 * WIDTH))

    policy = one_rule(match={"op": "matmul", "module": "1.attn"}, quantize=NVFP4 | {"rounding": rounding})
    layers = [module_of(lambda self, x: self.attn(x), attn=attention()) for _ in range(2)]
    for layer in layers:
        layer.attn.__class__ = type(layers[0].attn)
    x, outputs = torch.randn(2, 8, WIDTH), []
    for stance in ("default", "force_eager"):
        model = applied(torch.nn.Sequential(*layers), policy, seed=1)
        with torch.compiler.set_stance(stance):
            outputs.append(model(x).detach())
        sites = [(site.module, site.quantized) for site in runtime_of(model).sites if site.op == "matmul"]
        assert [module for module, quantized in sites if quantized] == ["1.attn", "1.attn"]
        fp4graph.remove(model)
    assert torch.equal(*outputs)
    assert not torch.allclose(outputs[0], model(x), atol=1e-3)


@uncompiled
def test_modules_around_a_loop_stay_compiled():
    graphs, model = [], applied(loops(), "tetrajet")
    capture = runtime_of(model).capture
    inner = capture._inner
    capture._inner = lambda gm, inputs: graphs.append(gm) or inner(gm, inputs)
    for step in range(3):
        x, choice = tokens(step)
        model(x.detach(), choice)
    compiled = [node.kwargs["site"] for gm in graphs for node in gm.graph.nodes if "site" in node.kwargs]
    assert sorted(compiled) == [f"layers.{i}.{name}" for i in (0, 1) for name in ("out", "proj")]


@uncompiled
def test_calls_of_one_module_draw_apart():
    def forward(self, x, choice):
        return self.experts(x, choice), self.experts(x, choice)

    policy = one_rule(op=OPS, quantize=NVFP4 | {"rounding": "stochastic"})
    twice = module_of(forward, experts=Experts("loop"))
    model, repeated, other = (applied(copy.deepcopy(twice), policy, seed=seed) for seed in (0, 0, 2))
    results = model(*tokens())
    assert not torch.equal(*results)
    assert [site.occurrence for site in runtime_of(model).sites] == list(range(12))
    assert_equal(repeated(*tokens()), results)
    assert not torch.equal(other(*tokens())[0], results[0])


@uncompiled
def test_an_evaluation_equals_that_of_a_captured_model():
    model, unrolled = applied(loops(), "tetrajet"), applied(Mixture("unrolled"), "tetrajet")
    train(model, prepared(model), [tokens(0), tokens(1)])
    unrolled.load_state_dict(model.state_dict())
    with torch.no_grad():
        y, expected = (each.eval()(*tokens()) for each in (model, unrolled))
        # Both multiply the same rows, but in matrices of other sizes, which sum in another order.
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(y, loops()(*tokens()), rtol=1e-2, atol=1e-2)
    assert runtime_of(model).count == 2


@uncompiled
def test_policies_of_first_and_last_blocks_train_loops_over_experts():
    model = applied(loops(4), "nvfp4-te")
    train(model, prepared(model), [tokens(0), tokens(1)])
    sites = {site.module: site.quantized for site in runtime_of(model).sites}
    assert sites["layers.1.experts"]
    assert not sites.get("layers.0.experts")


@uncompiled
def test_detect_nonfinite_refuses_an_uncaptured_module_by_name():
    model = applied(loops(), "tetrajet")
    model(*tokens())
    refused = pytest.raises(fp4graph.Error, match=r"'layers.0.experts' is not compiled.*grouped_mm")
    with refused, fp4graph.detect_nonfinite(model):
        model(*tokens())
