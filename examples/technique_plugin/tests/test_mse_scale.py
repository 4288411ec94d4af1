"""The technique against a loop over blocks, the format against its values, and a model trained with both."""

import dataclasses
import math

import pytest
import torch

import fp4graph
from fp4graph.graph.plan import plan_site
from fp4graph.technique.registry import default_registry
from fp4graph.technique.site import SiteView

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def policy(factors=(1.0, 0.5, 2.0), **quantize):
    data = {
        "version": 1,
        "name": "mse",
        "rules": [{"name": "all", "match": {"op": "linear"}, "quantize": {"block": 32} | quantize}],
        "techniques": [{"mse_scale": {"factors": list(factors)}}],
    }
    return fp4graph.load_policy(data)


def nearest(u, grid):
    """Return the value of ``grid`` (with signs) nearest to ``u``; ties go to the even code."""
    codes = range(len(grid))
    code = min(codes, key=lambda i: (abs(grid[i] - min(abs(u), grid[-1])), i % 2))
    return math.copysign(grid[code], u)


def reference(block, factors, grid):
    """Return one block dequantized under the best of the decode scales 2^(floor(log2(c·Z)) - floor(log2 Qmax))."""
    best, least = None, math.inf
    for factor in factors:
        z = factor * max(map(abs, block))
        scale = 2.0 ** (math.frexp(z)[1] - math.frexp(grid[-1])[1])
        values = [scale * nearest(x / scale, grid) for x in block]
        error = sum((q - x) ** 2 for q, x in zip(values, block, strict=True))
        if error < least:
            best, least = values, error
    return best


def test_the_plugin_is_found():
    assert default_registry().origin("mse_scale") == "mse_scale"
    assert "mse_scale" not in default_registry().failures


def test_the_format_is_a_grid_of_halves():
    element = default_registry().elements["e1m2"]
    assert element.magnitudes() == (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
    assert element.code_bits == 4


@pytest.mark.parametrize(("element", "grid"), [("e2m1", E2M1), ("e1m2", [i / 2 for i in range(8)])])
def test_every_block_has_the_scale_of_least_error(element, grid):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) ** 3  # heavy tails: clipping pays
    rule = policy(element=element).rules[0]
    program = plan_site(SiteView("fc", "linear", 64, 8, 512), rule).program.operand(fp4graph.Operand.FPROP_WEIGHT)
    (term,) = program(x)
    blocks = [reference(block, (1.0, 0.5, 2.0), grid) for block in x.reshape(-1, 32).tolist()]
    assert torch.equal(term.values, torch.tensor(blocks).reshape(8, 64))
    plain = dataclasses.replace(program, parts=())(x)[0].values
    assert (term.values - x).square().sum() < (plain - x).square().sum()


def test_zeros_and_infinities():
    x = torch.zeros(2, 64)
    x[1, 3] = torch.inf
    program = plan_site(SiteView("fc", "linear", 64, 2, 128), policy().rules[0]).program
    values = program.operand(fp4graph.Operand.FPROP_INPUT)(x)[0].values
    assert values[0].eq(0).all()
    assert values[1, :32].isnan().all()
    assert values[1, 32:].eq(0).all()


def test_training():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    x, y = torch.randn(64, 32), torch.randn(64, 8)
    model = fp4graph.apply(model, policy(element="e1m2"), backend="eager")
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.Adam(model.parameters(), lr=0.01))
    losses = []
    for _ in range(20):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_wrong_factors():
    for factors in ([], [0.0], [-1.0]):
        with pytest.raises(fp4graph.PolicyError, match="factors"):
            policy(factors)
