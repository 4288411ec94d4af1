"""Applied models refuse TorchScript, torch.export and torch.func, which do not see the quantizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import fp4graph
from fp4graph.errors import CaptureError, Error, PolicyWarning
from tests.helpers.long import long_but
from tests.helpers.policies import one_rule
from tests.helpers.training import applied, assert_equal, prepared

X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), nn.Linear(32, 8))


POLICY = one_rule()
MODELS = {"the model": lambda m: m, "a part": lambda m: m[0], "a wrapper": lambda m: nn.Sequential(m, nn.Tanh())}
CONVERSIONS = {
    "jit.script": torch.jit.script,
    "jit.trace": lambda m: torch.jit.trace(m, (X,)),
    "export": lambda m: torch.export.export(m, (X,), strict=False),
    "strict export": lambda m: torch.export.export(m, (X,), strict=True),
}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.slow
@pytest.mark.parametrize("of", long_but(["the model", "a part"], MODELS))
@pytest.mark.parametrize("how", CONVERSIONS)
@pytest.mark.parametrize(
    "ran", [False, pytest.param(True, marks=pytest.mark.long)], ids=["before the first call", "after a call"]
)
def test_an_applied_model_is_not_converted(how, of, ran):
    model = applied(net(), POLICY)
    if ran:
        model(X)
    # Dynamo wraps an error that is raised while torch.export traces in an error of its own, with the same text.
    raised = torch._dynamo.exc.Unsupported if how == "strict export" else Error
    with pytest.raises(raised, match=r"call fp4graph\.remove\(model\) first"):
        CONVERSIONS[how](MODELS[of](model))
    assert torch.equal(model(X), applied(net(), POLICY)(X))  # the attempt changed nothing
    converted = CONVERSIONS[how](MODELS[of](fp4graph.remove(model)))
    converted = converted.module() if "export" in how else converted
    assert torch.equal(converted(X), MODELS[of](net())(X))


@pytest.mark.slow
@pytest.mark.parametrize("how", CONVERSIONS)
def test_a_root_that_owns_its_weight_is_not_converted(how):
    raised = torch._dynamo.exc.Unsupported if how == "strict export" else Error
    with pytest.raises(raised, match=r"call fp4graph\.remove\(model\) first"):
        CONVERSIONS[how](applied(nn.Linear(32, 32), POLICY))


def test_a_strictly_applied_model_is_not_exported():
    model = applied(net(), POLICY, strict=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"call fp4graph\.remove\(model\) first"):
        torch.export.export(model, (X,), strict=True)


def transformed(model):
    parameters = dict(model.named_parameters())
    gradients = grad(lambda p: functional_call(model, p, (X,)).square().mean())(parameters)
    return [gradients["1.bias"], vmap(lambda row: model(row[None])[0])(X)]


def test_transforms_of_torch_func_are_refused_and_run_in_a_bypass():
    model = applied(net(), POLICY)
    with pytest.raises(Error, match=r"torch\.func .* use loss\.backward\(\) .* fp4graph\.bypass\(model\)"):
        transformed(model)
    with pytest.raises(Error, match=r"torch\.func"):
        vmap(model[0])(X)
    with fp4graph.bypass(model):
        found = transformed(model)
    assert_equal(found, transformed(net()))
    nothing = applied(net(), "bf16")  # quantizes nothing, so there is nothing to refuse
    with pytest.warns(PolicyWarning, match=r"runs uncompiled.* torch\.func"):
        assert_equal(transformed(nothing), found)


def test_functional_call_is_a_call_with_other_parameters():
    model, other = applied(net(), POLICY), net()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    parameters = {name: p.detach().clone() for name, p in other.named_parameters()}
    assert torch.equal(functional_call(model, parameters, (X,)), applied(other, POLICY)(X))


def test_functional_call_uses_the_state_of_the_own_weights():
    policy = one_rule({"q_ema": {"beta": 0.9}})
    model, other, unprepared = (applied(net(), policy) for _ in range(3))
    prepared(model), prepared(other)
    given = {name: (p * 1.5).detach().requires_grad_() for name, p in model.named_parameters()}
    first = functional_call(model, given, (X,))
    other(X)
    assert_equal(model.state_dict().values(), other.state_dict().values())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    assert torch.equal(functional_call(model, given, (X,)), other(X))
    assert torch.equal(first, other(X))
    functional_call(unprepared, given, (X,))
    with pytest.raises(CaptureError, match="no optimizer that holds it was prepared"):
        functional_call(unprepared, given, (X,))
