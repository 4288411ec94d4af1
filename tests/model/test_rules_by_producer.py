"""Rules that tell sites apart by what computes their input: the optimizer's side follows the graph's decision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp4graph
from fp4graph.model.runtime import runtime_of
from fp4graph.model.weight_quantizer import quantize
from tests.helpers.models import Mlp, grouped_mm
from tests.helpers.policies import MXFP4, one_rule
from tests.helpers.training import applied, prepared, train

start = partial(Mlp, 32, 64, 32, nn.functional.gelu)


def trained(technique: dict | None, moved: str = "second") -> nn.Module:
    """Train a step with ``technique`` in the rule for inputs of a GELU, or in the one for all others."""
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
def test_the_optimizers_view_is_that_of_the_graph() -> None:
    weights = {weight.name: weight for weight in runtime_of(trained(None)).weights}
    rules = {name: weight.rule.name for name, weight in weights.items()}
    assert rules == {"first.weight": "rest", "second.weight": "after gelu"}
    assert weights["second.weight"].view.producer == "gelu"


#: Products of ``x`` with a parameter ``w [64, 64]`` that no module of torch owns, and the axis of ``w`` that is summed.
STORED: list[tuple[Callable[[Tensor, Tensor], Tensor], int]] = [
    (lambda x, w: x @ w, 0),
    (lambda x, w: F.linear(x, w.T), 0),
    (lambda x, w: F.linear(x, w.swapdims(0, 1)), 0),
    (lambda x, w: F.linear(x, w.moveaxis(0, 1)), 0),
    (lambda x, w: F.linear(x, w.movedim(-1, 0)), 0),
    (lambda x, w: F.linear(x, w.permute((1, 0))), 0),
    (lambda x, w: F.linear(x, w.transpose(dim0=0, dim1=0).movedim((0, 1), (0, 1))), 1),
    (lambda x, w: x @ w.moveaxis(source=1, destination=0), 1),
    (lambda x, w: x @ w.permute(0, 1).mT, 1),
]


@pytest.mark.parametrize("stance", ["default", "force_eager"])
@pytest.mark.parametrize(("product", "axis"), STORED)
@pytest.mark.filterwarnings("ignore:.*runs uncompiled")
def test_a_parameter_is_quantized_along_its_contraction_axis(
    product: Callable[[Tensor, Tensor], Tensor], axis: int, stance: str
) -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixing_weight = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(2)))

        def forward(self, x: Tensor) -> Tensor:
            return product(x, self.mixing_weight)

    model = applied(Direct(), "tetrajet")
    with torch.compiler.set_stance(stance):
        model(torch.randn(4, 64))
    (weight,) = runtime_of(model).weights
    spec = fp4graph.QuantSpec(scale=fp4graph.ScaleSpec(rounding="ceil"), ties="up")
    expected = fp4graph.fake_quantize(model.mixing_weight, spec, dim=axis)
    assert torch.equal(quantize(weight, model.mixing_weight, runtime_of(model).step), expected)


#: Ways to show a stack of experts' matrices ``[E, N, K]`` to a grouped product, which sums axis 1 of what it gets.
TURNED: list[Callable[[Tensor], Tensor]] = [
    lambda w: w.transpose(1, 2),
    lambda w: w.permute(0, 2, 1),
    lambda w: w.movedim(1, 2),
    lambda w: w.view(2, 64, 64).transpose(1, 2),
    lambda w: w.contiguous().transpose(-1, -2),
    lambda w: w.mT.permute(0, 2, 1).movedim(-1, 1),
]


@pytest.mark.parametrize("stance", ["default", "force_eager"])
@pytest.mark.parametrize("turned", TURNED)
@pytest.mark.filterwarnings("ignore:.*runs uncompiled")
def test_experts_are_quantized_along_their_contraction_axis(turned: Callable[[Tensor], Tensor], stance: str) -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts_weight = nn.Parameter(torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(2)))

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            return grouped_mm(x, turned(self.experts_weight), offs=ends)

    model = applied(Direct(), one_rule(op="grouped", quantize=MXFP4))
    with torch.compiler.set_stance(stance):
        model(torch.randn(8, 64), torch.tensor([3, 8], dtype=torch.int32))
    (weight,) = runtime_of(model).weights
    spec = fp4graph.QuantSpec(scale=fp4graph.ScaleSpec(rounding="ceil"))
    expected = fp4graph.fake_quantize(model.experts_weight, spec, dim=2)
    assert torch.equal(quantize(weight, model.experts_weight, runtime_of(model).step), expected)
