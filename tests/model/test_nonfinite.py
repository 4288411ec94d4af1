"""detect_nonfinite names the place where NaN or Inf arises, and only there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4graph


class Net(nn.Module):
    """Two products, an attention mask of -inf, and an operation between them that may be made to fail."""

    def __init__(self, middle=torch.relu):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)
        self.middle = middle

    def forward(self, x):
        masked = torch.where(torch.arange(32) < 30, x, -torch.inf).softmax(-1)
        return self.second(self.middle(self.first(masked)))


POLICY = {
    "version": 1,
    "name": "p",
    "rules": [
        {
            "name": "all",
            "match": {"op": "linear"},
            "quantize": {"element": "e2m1", "block": 16, "scale": {"format": "e8m0", "rounding": "ceil"}},
            "operands": {"backward": {"rounding": "stochastic"}},
        }
    ],
}


def applied(**options):
    return fp4graph.apply(Net(**options), POLICY, backend="eager")


@pytest.fixture
def x():
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
def test_a_healthy_step_is_the_same_step(x):
    """Masks of -inf are none of its business; noise, gradients and the count are those of any other step."""
    watched, plain = applied(), applied()
    for _ in range(2):
        with fp4graph.detect_nonfinite(watched):
            watched(x).square().mean().backward()
        plain(x).square().mean().backward()
    for a, b in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert watched(x).isfinite().all()
    assert not watched.first.weight._backward_hooks  # nothing is left on parameters


def test_a_weight_that_is_not_finite(x):
    model = applied()
    with torch.no_grad():
        model.second.weight[3, 5] = torch.nan
    with (
        fp4graph.detect_nonfinite(model),
        pytest.raises(fp4graph.NonFiniteError, match="before this forward") as caught,
    ):
        model(x)
    assert caught.value.site == "second.weight, forward"


def test_an_input_that_is_not_finite(x):
    model = applied()
    x[2, 3] = torch.inf
    with (
        fp4graph.detect_nonfinite(model),
        pytest.raises(fp4graph.NonFiniteError, match="before this forward") as caught,
    ):
        model(x)
    assert caught.value.site.startswith("input ")


def test_a_product_that_overflows(x):
    model = applied()
    with torch.no_grad():
        model.first.weight.fill_(3e38)
        model.first.bias.fill_(3e38)
    with fp4graph.detect_nonfinite(model), pytest.raises(fp4graph.NonFiniteError, match="of finite values") as caught:
        model(x)
    assert caught.value.site == "first, forward"


def test_an_operation_that_is_no_product(x):
    model = applied(middle=lambda h: torch.log(h - 1e6))
    with fp4graph.detect_nonfinite(model), pytest.raises(fp4graph.NonFiniteError) as caught:
        model(x)
    assert caught.value.site == "(root) (log), forward"


@pytest.mark.slow
def test_a_gradient(x):
    """sqrt at 0: finite forward, infinite gradient."""
    model = applied(middle=lambda h: torch.sqrt(torch.relu(h)))
    with fp4graph.detect_nonfinite(model), pytest.raises(fp4graph.NonFiniteError, match="a gradient") as caught:
        model(x).sum().backward()
    assert caught.value.site == "(root) (sqrt), backward"


def test_a_gradient_of_a_product(x):
    """dY is finite, dY·W is not."""
    model = applied()
    with torch.no_grad():
        model.second.weight.mul_(1e10)
    with fp4graph.detect_nonfinite(model), pytest.raises(fp4graph.NonFiniteError, match="a gradient") as caught:
        model(x).backward(torch.full((8, 32), 1e36) * torch.tensor([1.0, -1.0]).repeat(4)[:, None])
    assert caught.value.site == "second, backward"


def test_the_loss(x):
    model = applied()
    with fp4graph.detect_nonfinite(model), pytest.raises(fp4graph.NonFiniteError, match="arose in the loss"):
        (model(x).sum() * torch.inf).backward()


def test_needs_an_applied_model():
    with pytest.raises(fp4graph.Error, match="prepared"):
        fp4graph.detect_nonfinite(Net())


def test_an_untouched_optimizer_is_noticed_where_a_technique_acts_on_all_of_it(x):
    """Even where nothing is quantized."""
    policy = {"version": 1, "name": "p", "default": "keep", "techniques": ["stable_spam"]}
    model = fp4graph.apply(Net(), policy, backend="eager")
    F.mse_loss(model(x), x).backward()
    with pytest.raises(fp4graph.CaptureError, match="prepare_optimizer"):
        model(x)
