"""Captures do not depend on earlier captures; repeated recompilation draws a warning that names its cause."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fp4graph
from fp4graph.errors import PolicyWarning
from fp4graph.graph.site import Site
from fp4graph.model import coverage
from fp4graph.model.runtime import runtime_of
from tests.helpers.breaks import Breaks
from tests.helpers.models import module_of
from tests.helpers.policies import one_rule
from tests.helpers.training import applied

POLICY = one_rule()
BODY = one_rule(match={"module": "*body"})
X = torch.ones(4, 32)


class Checked(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x):
        if x.shape[-1] != 32:
            raise ValueError("32 features are asked for")
        return self.head(self.body(x))


@pytest.mark.slow
@pytest.mark.parametrize("fails", [fp4graph.explain, lambda model, policy, args: applied(model, policy)(*args)])
def test_explain_lists_the_same_after_a_failure(fails):
    def forward(self, x):  # the graph break makes Dynamo compile the functions that forward calls separately
        y = self.inner(x)
        torch._dynamo.graph_break()
        return y

    for wrong in (torch.ones(4, 31), "text"):
        with pytest.raises(Exception, match=r"32 features|has no attribute"):
            fails(module_of(forward, inner=Checked()), BODY, (wrong,))
        explanation = fp4graph.explain(module_of(forward, inner=Checked()), BODY, (X,))
        listed = [(site.module, site.flops) for site in explanation.sites]
        assert listed == [("inner.body", 2 * 4 * 32 * 32), ("inner.head", 2 * 4 * 32 * 16)]
        assert explanation.problem is None


@pytest.mark.parametrize("strict", [False, True])
def test_a_call_is_compiled_after_calls_that_failed(strict):
    model = applied(Checked(), POLICY, strict=strict)
    for _ in range(3):
        with pytest.raises(ValueError, match="32 features"):
            model(torch.ones(4, 31))
    model(X)
    assert runtime_of(model).capture.graphs == 1


@pytest.mark.slow
def test_explain_reports_a_product_outside_of_the_graphs_as_a_problem():
    def forward(self, x):
        y = self.body(x)
        for _ in range(2):
            y = y + self.head(x).sum()
            torch._dynamo.graph_break()
        return y

    model = module_of(forward, body=nn.Linear(32, 32), head=nn.Linear(32, 16))
    problem = fp4graph.explain(model, "bf16", (X,)).problem
    assert f"torch counts {2 * 4 * 32 * 32 + 2 * (2 * 4 * 32 * 16)} FLOPs" in problem
    assert "head" in problem


@pytest.mark.slow
def test_the_sizes_that_one_model_saw_are_not_dynamic_in_the_next():
    fp4graph.explain(Checked(), POLICY, (X[:2],))
    for rows in (4, 3):
        model = applied(Checked(), POLICY)
        model(X[:rows])
        assert [site.shapes[0] for site in runtime_of(model).sites] == [(rows, 32), (rows, 32)]


def changing():
    """Return an applied model whose forward reads numbers from Python attributes."""

    def forward(self, x, *extra):
        x = self.drop(self.fc(x)) * self.options["scale"] + self.step
        return x + len(extra[0]) if extra else x

    model = module_of(forward, fc=nn.Linear(32, 32), drop=nn.Dropout(0.0), step=0, options={"scale": 1})
    return applied(model, POLICY)


def set_step(model, i):
    model.step = i
    model(X)


def switch_modes(model, i):
    model.train(i % 2 == 0)
    with torch.set_grad_enabled(i % 3 == 0):
        model(torch.ones(1 + i % 3, 32))


#: For each thing that changes: how call i is made, and the cause that the warning names, or None without a warning.
CHANGES = {
    "an attribute": (
        set_step, "model.step == 0; model.step == 1; model.step == 2.*buffer.*allow_unspec_int_on_nn_module"
    ),
    "an option": (lambda m, i: (m.options.update(scale=i), m(X)), r"model.options\['scale'\] == 0; .*buffer"),
    "dropout": (
        lambda m, i: (setattr(m.drop, "p", i / 10), m(X)),
        "model.drop.p == 0.0; model.drop.p == 0.1; model.drop.p == 0.2.*change it rarely",
    ),
    "text": (lambda m, i: m(X, "a" * (i + 1)), r"args\[1\] == 'a'; .*Pass a tensor"),
    "ranks": (
        lambda m, i: m(torch.ones(*[1] * i, 4, 32)), r"args\[0\]' rank mismatch. expected 2; .*one number of dimensions"
    ),
    "sizes": (lambda m, i: m(torch.ones(2 + i, 32)), None),
    "modes": (switch_modes, None),
    "an attribute, and modes": (lambda m, i: (m.train(i % 2 == 0), set_step(m, i)), "model.step == 0"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_the_third_recompilation_for_one_cause_warns(name):
    (change, cause), model = CHANGES[name], changing()
    for i in range(3):
        change(model, i)
    if cause is not None:
        with pytest.warns(PolicyWarning, match=f"again: 4 times so far.*{cause}"):
            change(model, 3)
    for i in (4,) if cause else (3, 4, 5):
        change(model, i)  # no second warning


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore", "error::fp4graph.PolicyWarning")
def test_further_models_of_one_class_do_not_count_as_recompilations():
    for _ in range(6):
        model = applied(Breaks(32, 32, 16), POLICY)
        for _ in range(2):
            model(X).sum().backward()


@pytest.mark.slow
def test_the_warning_says_that_earlier_models_filled_the_cache():
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        for _ in range(4):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                applied(Breaks(32, 32, 16), POLICY, recompile_limit=2)(X).sum().backward()
    assert "as many graphs of the code around it" in " ".join(str(warning.message) for warning in caught)


def test_a_kept_site_of_unknown_sizes_is_looked_up_for_each_module_that_shares_its_graph():
    rules = [{"name": name, "match": {"module": name}, "keep": "why"} for name in ("0", "1")]
    policy = one_rule() | {"rules": [*rules, *one_rule()["rules"]]}
    plan = runtime_of(applied(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), policy)).plan
    shapes = (ShapeEnv().create_unbacked_symint(), 32), (32, 32)
    site = Site("0", "linear", shapes, "0", "why", {}, quantized=False, rule_index=0)
    assert [each.rule for each in coverage.each_served([(site, ["0", "1"])], plan)] == ["0", "1"]


@pytest.mark.parametrize(("op", "quantized", "kept"), [("linear", 1, 3), ("matmul", 3, 1)])
def test_expect_counts_every_product_of_a_module(op, quantized, kept):
    def forward(self, x):
        y = self.linear(x)
        return (y @ x.mT).softmax(-1) @ y @ x.mT

    data = one_rule(op=op, expect={"quantized": quantized, "kept": kept})
    applied(module_of(forward, linear=nn.Linear(32, 32)), data)(torch.randn(2, 32, 32))
