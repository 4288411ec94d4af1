"""Rules that tell sites apart by what computes their input: the optimizer's side follows the graph's decision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.model.runtime import runtime_of

QUANTIZE = {"element": "e2m1", "block": 32, "scale": {"format": "e8m0", "rounding": "ceil"}}


class Perceptron(nn.Module):
    """Two linears, of which the second reads a GELU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def policy(technique: dict | None, *, on: str) -> dict:
    """``technique`` in the rule for inputs of a GELU, or in the one for all others."""
    after = {"name": "after gelu", "match": {"producer": "gelu"}, "quantize": QUANTIZE}
    rest = {"name": "rest", "match": {"op": "linear"}, "quantize": QUANTIZE}
    (after if on == "gelu" else rest)["techniques"] = [technique] if technique else []
    return {"version": 1, "name": "by producer", "rules": [after, rest]}


def trained(technique: dict | None, on: str = "gelu", steps: int = 2) -> nn.Module:
    model = fp4graph.apply(Perceptron(), policy(technique, on=on), backend="eager")
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("on", "moved", "still"), [("gelu", "down", "up"), ("rest", "up", "down")])
def test_dampen_acts_where_the_graph_says(on: str, moved: str, still: str) -> None:
    damped, plain = trained({"dampen": {"strength": 10.0}}, on, steps=1), trained(None, on, steps=1)
    assert not torch.equal(damped.get_parameter(f"{moved}.weight"), plain.get_parameter(f"{moved}.weight"))
    assert torch.equal(damped.get_parameter(f"{still}.weight"), plain.get_parameter(f"{still}.weight"))


@pytest.mark.slow
@pytest.mark.parametrize(("on", "moved"), [("gelu", "down"), ("rest", "up")])
def test_q_ema_averages_where_the_graph_says(on: str, moved: str) -> None:
    start = Perceptron()
    model = trained({"q_ema": {"beta": 0.5}}, on, steps=1)
    for name in ("up", "down"):
        average = model.get_submodule(name)._fp4graph_q_ema_weight
        first = start.get_parameter(f"{name}.weight").detach()
        after = model.get_parameter(f"{name}.weight").detach()
        expected = 0.5 * first + 0.5 * after if name == moved else first
        torch.testing.assert_close(average, expected, rtol=1e-6, atol=1e-8)  # one rounding of the average


@pytest.mark.slow
def test_the_optimizers_view_is_that_of_the_graph() -> None:
    weights = {weight.name: weight for weight in runtime_of(trained(None)).weights}
    assert {name: weight.rule.name for name, weight in weights.items()} == {
        "up.weight": "rest",
        "down.weight": "after gelu",
    }
    assert weights["down.weight"].view.producer == "gelu"


def test_two_products_that_different_rules_decide_cannot_share_a_technique_on_the_weight() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(nn.functional.gelu(self.fc(x)))

    model = fp4graph.apply(Twice(), policy({"dampen": {}}, on="gelu"), backend="eager")
    for _ in range(2):
        with pytest.raises(fp4graph.CaptureError, match=r"^fc\.weight: two products.*'rest'.*'after gelu'"):
            model(torch.randn(4, 32))


def test_a_parameter_stored_as_it_is_multiplied_is_quantized_along_its_contraction_axis() -> None:
    class Direct(nn.Module):
        """``x @ W`` with ``W [K, N]``, which no module of torch owns."""

        def __init__(self) -> None:
            super().__init__()
            self.mixing_weight = nn.Parameter(torch.randn(64, 32, generator=torch.Generator().manual_seed(2)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.mixing_weight

    model = fp4graph.apply(Direct(), "tetrajet", backend="eager")
    model(torch.randn(4, 64))
    (weight,) = runtime_of(model).weights
    spec = fp4graph.QuantSpec(scale=fp4graph.ScaleSpec(rounding="ceil"), ties="up")
    expected = fp4graph.fake_quantize(model.mixing_weight, spec, dim=0)
    assert torch.equal(weight.quantize(model.mixing_weight, runtime_of(model).step), expected)
