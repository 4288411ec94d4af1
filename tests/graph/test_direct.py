"""The pass without a graph: the operations of an uncompiled forward are read as Dynamo's are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4graph
from fp4graph.model.runtime import runtime_of
from tests.helpers.models import module_of
from tests.helpers.policies import one_rule
from tests.helpers.training import applied, assert_equal, prepared, stances, train, uncompiled

#: Operators of Python for which torch calls a function around a method of C, or a function of its own.
OPERATORS = {
    "**": lambda x: x**2,
    "** of a number": lambda x: 2**x,
    "**=": lambda x: (x * 1).__ipow__(2),
    "//": lambda x: x // 0.5,
    "% of a number": lambda x: 2 % x,
    "number - x": lambda x: 1 - x,
}


@uncompiled
@pytest.mark.parametrize("name", OPERATORS)
def test_an_uncompiled_forward_runs_the_operators_of_python(name):
    def forward(self, x):
        return self.second(OPERATORS[name](self.first(x)))

    results = []
    for stance in ("force_eager", "default"):
        torch.manual_seed(0)
        model = applied(module_of(forward, first=nn.Linear(32, 32), second=nn.Linear(32, 8)), one_rule())
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
        with torch.compiler.set_stance(stance):
            results.append(model(x))
    assert_equal(results[:1], results[1:])


class Samples(nn.Module):
    """Multiplies with the rows of a layer's weight that the batch names, as a sampled softmax does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x, rows):
        return F.linear(self.first(x), self.head.weight[rows])


ROWS = torch.tensor([3, 1, 0, 7, 5, 2, 8, 9])


@uncompiled
@stances
def test_picked_rows_of_a_weight_are_a_linear_layer(stance):
    model, x = applied(Samples(), one_rule()), torch.randn(4, 32)
    spec = fp4graph.load_policy(one_rule()).rules[0].specs.six[0]
    with torch.compiler.set_stance(stance), torch.no_grad():
        y = model(x, ROWS)
        hidden, rows = model.first(x), model.head.weight[ROWS]
    expected = fp4graph.fake_quantize(hidden, spec) @ fp4graph.fake_quantize(rows, spec).mT
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)
    assert [(site.module, site.op) for site in runtime_of(model).sites] == [("first", "linear"), ("head", "linear")]


@uncompiled
def test_the_state_of_picked_rows_is_picked_alike():
    batches = [(torch.randn(4, 32, generator=torch.Generator().manual_seed(i)), ROWS.roll(i)) for i in range(3)]
    results = []
    for stance in ("default", "force_eager"):
        model = applied(Samples(), one_rule({"q_ema": {"beta": 0.9}}), total_forwards=9)
        with torch.compiler.set_stance(stance):
            results.append(train(model, prepared(model), batches))
    assert_equal(*results)


#: Views and casts of a weight ``[16, 32]``, each with a function that makes ``[32, 16]`` of it, in the dtype of x.
SHOWN = {
    "type": lambda w, x: w.bfloat16().type(x.dtype).t(),
    "double": lambda w, x: w.double().type_as(x).t(),
    "data": lambda w, x: w.data.t(),
    "H": lambda w, x: w.H,
    "mH": lambda w, x: w.mH,
    "ravel": lambda w, x: w.t().ravel().view(32, 16),
    "view_as": lambda w, x: w.t().reshape(16, 32).view_as(torch.empty(32, 16)),
    "reshape_as": lambda w, x: w.t().flatten().reshape_as(torch.empty(32, 16)),
    "expand_as": lambda w, x: w.t().expand_as(torch.empty(32, 16)),
    "broadcast_to": lambda w, x: w.t().broadcast_to(32, 16),
    "vsplit": lambda w, x: w.vsplit(1)[0].t(),
    "cpu": lambda w, x: w.cpu().t(),
    "+": lambda w, x: (+w).t(),
}


@uncompiled
@pytest.mark.parametrize("name", SHOWN)
def test_a_weight_is_known_through_its_views_and_casts(name):
    class Shows(Samples):
        def forward(self, x):
            return self.first(x) @ SHOWN[name](self.head.weight, x)

    results = []
    for stance in ("default", "force_eager"):
        model = applied(Shows(), one_rule({"q_ema": {"beta": 0.9}}), total_forwards=9)
        with torch.compiler.set_stance(stance):
            results.append(train(model, prepared(model), [(torch.ones(4, 32) / 3,)] * 2))
        sites = runtime_of(model).sites
        assert [(site.module, site.op) for site in sites] == [("first", "linear"), ("head", "linear")]
    assert_equal(*results)
