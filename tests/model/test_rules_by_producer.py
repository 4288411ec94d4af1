"""Rules that match a site by its producer: what acts on the weight follows the graph's decision."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp4graph
from fp4graph.model.runtime import runtime_of
from fp4graph.model.weight_quantizer import quantize
from tests.helpers.models import Mlp, grouped_mm, module_of
from tests.helpers.policies import MXFP4, one_rule
from tests.helpers.training import applied, prepared, stances, train, uncompiled

start = partial(Mlp, 32, 64, 32, nn.functional.gelu)


def trained(technique: dict | None, moved: str = "second") -> nn.Module:
    """Train a step with ``technique`` in the rule that matches the weight of ``moved``: after a GELU, or the rest."""
    after = {"name": "after gelu", "match": {"producer": "gelu"}, "quantize": MXFP4, "techniques": []}
    rest = {"name": "rest", "match": {"op": "linear"}, "quantize": MXFP4, "techniques": []}
    if technique:
        (after if moved == "second" else rest)["techniques"] = [technique]
    model = applied(start(), {"version": 1, "rules": [after, rest]})
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    train(model, prepared(model, torch.optim.SGD, lr=0.1), [(x,)])
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("moved", "still"), [("second", "first"), ("first", "second")])
def test_techniques_act_where_the_graph_says(moved: str, still: str) -> None:
    damped, plain = trained({"dampen": {"strength": 10.0}}, moved), trained(None)
    assert not torch.equal(damped.get_parameter(f"{moved}.weight"), plain.get_parameter(f"{moved}.weight"))
    assert torch.equal(damped.get_parameter(f"{still}.weight"), plain.get_parameter(f"{still}.weight"))
    model = trained({"q_ema": {"beta": 0.5}}, moved)
    before, after = (dict(each.named_parameters()) for each in (start(), model))
    average = {name: model.get_submodule(name)._fp4graph_q_ema_weight for name in (moved, still)}
    expected = 0.5 * before[f"{moved}.weight"] + 0.5 * after[f"{moved}.weight"]
    torch.testing.assert_close(average[moved], expected, rtol=1e-6, atol=1e-8)  # one rounding of the average
    torch.testing.assert_close(average[still], before[f"{still}.weight"], rtol=0, atol=0)


@pytest.mark.slow
def test_a_weight_has_the_rule_and_the_producer_of_its_site() -> None:
    weights = {weight.name: weight for weight in runtime_of(trained(None)).weights}
    rules = {name: weight.rule.name for name, weight in weights.items()}
    assert rules == {"first.weight": "rest", "second.weight": "after gelu"}
    assert weights["second.weight"].view.producer == "gelu"


MATRIX, MATRICES, ENDS = (64, 64), (2, 64, 64), torch.tensor([3, 8], dtype=torch.int32)
#: Products of ``x`` with a parameter ``w`` that no module of torch owns, the shape of ``w``, and the axis of ``w`` that
#: the product sums. grouped_mm sums axis 1 of the matrices that it is given.
STORED = [
    (lambda x, w: x @ w, MATRIX, 0),
    (lambda x, w: x @ torch.transpose(input=w, dim0=0, dim1=1), MATRIX, 1),
    (lambda x, w: F.linear(x, w.T), MATRIX, 0),
    (lambda x, w: F.linear(x, w.swapdims(0, 1)), MATRIX, 0),
    (lambda x, w: F.linear(x, w.moveaxis(0, 1)), MATRIX, 0),
    (lambda x, w: F.linear(x, w.movedim(-1, 0)), MATRIX, 0),
    (lambda x, w: F.linear(x, w.permute((1, 0))), MATRIX, 0),
    (lambda x, w: F.linear(x, w.transpose(dim0=0, dim1=0).movedim((0, 1), (0, 1))), MATRIX, 1),
    (lambda x, w: x @ w.moveaxis(source=1, destination=0), MATRIX, 1),
    (lambda x, w: x @ w.permute(0, 1).mT, MATRIX, 1),
    (lambda x, w: torch.einsum("td,hkd->thk", x, w.view(4, 16, 64)).flatten(1), MATRIX, 1),
    (lambda x, w: torch.einsum("td,dhk->thk", x, w.view(64, 4, 16)).flatten(1), MATRIX, 0),
    (lambda x, w: grouped_mm(x, w.transpose(1, 2), offs=ENDS), MATRICES, 2),
    (lambda x, w: grouped_mm(x, w.permute(0, 2, 1), offs=ENDS), MATRICES, 2),
    (lambda x, w: grouped_mm(x, w.movedim(1, 2), offs=ENDS), MATRICES, 2),
    (lambda x, w: grouped_mm(x, w.view(2, 64, 64).transpose(1, 2), offs=ENDS), MATRICES, 2),
    (lambda x, w: grouped_mm(x, w.contiguous().transpose(-1, -2), offs=ENDS), MATRICES, 2),
    (lambda x, w: grouped_mm(x, w.mT.permute(0, 2, 1).movedim(-1, 1), offs=ENDS), MATRICES, 2),
]


@stances
@pytest.mark.parametrize(("product", "shape", "axis"), STORED)
@uncompiled
def test_a_parameter_is_quantized_along_its_contraction_axis(product, shape, axis, stance) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    name = "mixing_weight" if shape is MATRIX else "experts_weight"
    model = module_of(lambda self, x: product(x, getattr(self, name)), **{name: nn.Parameter(values)})
    applied(model, "tetrajet" if shape is MATRIX else one_rule(op="grouped", quantize=MXFP4))
    with torch.compiler.set_stance(stance):
        model(torch.randn(8, 64))
    (weight,) = runtime_of(model).weights
    spec = fp4graph.QuantSpec(scale=fp4graph.ScaleSpec(rounding="ceil"), ties="up" if shape is MATRIX else "even")
    expected = fp4graph.fake_quantize(values, spec, dim=axis)
    assert torch.equal(quantize(weight, weight.parameter, runtime_of(model).step), expected)


def added(x):
    x = x * 1
    x += x
    return x


@uncompiled
@stances
@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda x: x / 2, ["div", "truediv"]),
        (lambda x: 1 / (x.abs() + 1), ["div", "truediv"]),
        (lambda x: 1 - x, ["sub"]),
        (added, ["add_", "iadd"]),
        (lambda x: x // 2, ["floordiv"]),
        (lambda x: x % 2, ["remainder", "mod"]),
    ],
)
def test_a_rule_knows_a_producer_compiled_and_uncompiled(function, names, stance) -> None:
    x = torch.randn(32, 32)
    for name in names:
        model = module_of(lambda self, x: self.linear(function(x)), linear=nn.Linear(32, 32, bias=False))
        expected = model(x)
        model = applied(model, one_rule(match={"producer": name}))
        with torch.compiler.set_stance(stance):
            assert not torch.equal(model(x), expected)
