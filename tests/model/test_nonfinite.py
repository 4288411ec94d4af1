"""detect_nonfinite names the place where NaN or Inf arises, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp4graph
from tests.helpers.policies import one_rule, quantizer
from tests.helpers.training import applied, assert_equal, gradients


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


POLICY = one_rule(quantize=quantizer(16), operands={"backward": {"rounding": "stochastic"}})
X = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
def test_a_healthy_step_is_the_same_step():
    """Masks of -inf are ignored; noise, gradients and the count are those of any other step."""
    watched, plain = applied(Net(), POLICY), applied(Net(), POLICY)
    for _ in range(2):
        with fp4graph.detect_nonfinite(watched):
            watched(X).square().mean().backward()
        plain(X).square().mean().backward()
    assert_equal(gradients(watched), gradients(plain))
    assert watched(X).isfinite().all()
    assert not watched.first.weight._backward_hooks  # nothing is left on parameters


def weight(model):
    model.second.weight[3, 5] = torch.nan
    return lambda x: model(x)


def overflow(model):
    model.first.weight.fill_(3e38)
    model.first.bias.fill_(3e38)
    return lambda x: model(x)


def with_input(model):
    return lambda x: model(torch.where(x == x[2, 3], torch.inf, x))


def logarithm(model):
    model.middle = lambda h: torch.log(h - 1e6)
    return lambda x: model(x)


def root(model):
    """sqrt at 0: finite forward, infinite gradient."""
    model.middle = lambda h: torch.sqrt(torch.relu(h))
    return lambda x: model(x).sum().backward()


def product(model):
    """dY is finite, dY·W is not."""
    model.second.weight.mul_(1e10)
    dy = torch.full((8, 32), 1e36) * torch.tensor([1.0, -1.0]).repeat(4)[:, None]
    return lambda x: model(x).backward(dy)


def loss(model):
    return lambda x: (model(x).sum() * torch.inf).backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "text", "site"),
    [
        (weight, "before this forward", "second.weight, forward"),
        (with_input, "before this forward", "input "),
        (overflow, "of finite values", "first, forward"),
        (logarithm, None, "(root) (log), forward"),
        (root, "a gradient", "(root) (sqrt), backward"),
        (product, "a gradient", "second, backward"),
        (loss, "arose in the loss", ""),
    ],
)
def test_the_place_is_named(cause, text, site):
    model = applied(Net(), POLICY)
    with torch.no_grad():
        step = cause(model)
    with fp4graph.detect_nonfinite(model), pytest.raises(fp4graph.NonFiniteError, match=text) as caught:
        step(X)
    assert caught.value.site.startswith(site) if site.endswith(" ") else site in ("", caught.value.site)
