"""Nothing runs in silent high precision, and every bad input is one clear error."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.runtime import runtime_of


@pytest.fixture
def applied(vit, images):
    model = fp4graph.apply(vit(), "tetrajet", backend="eager")
    model(images)
    return model


def test_deepcopy_raises(applied, images):
    with pytest.raises(fp4graph.UncompiledError, match=r"apply.*bypass"):
        copy.deepcopy(applied)(images)


@pytest.mark.parametrize("call", ["forward", "forward_features"])
def test_methods_raise(applied, images, call):
    with pytest.raises(fp4graph.UncompiledError, match=r"blocks\.0\.attn\.qkv"):
        getattr(applied, call)(images)


def test_a_block_called_alone_raises(applied):
    with pytest.raises(fp4graph.UncompiledError, match="apply"):
        applied.blocks[0](torch.randn(1, 17, 64))


def test_force_eager_raises(applied, images):
    with torch.compiler.set_stance("force_eager"), pytest.raises(fp4graph.UncompiledError, match="force_eager"):
        applied(images)


def test_the_recompile_limit_raises():
    class OneLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(32, 32)

        def forward(self, x):
            return self.fc(x)

    model = fp4graph.apply(OneLayer(), "tetrajet", backend="eager")

    def call_with_ever_more_dimensions():
        for rank in range(8):
            model(torch.randn(*([1] * rank), 2, 32))

    with (
        torch._dynamo.config.patch(recompile_limit=2),
        pytest.raises(fp4graph.UncompiledError, match="recompile limit"),
    ):
        call_with_ever_more_dimensions()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_another_backend_is_refused(vit, backend):
    model = fp4graph.apply(vit(), "tetrajet", backend="eager")
    with pytest.raises(Exception, match=r"another torch\.compile backend"):
        torch.compile(model.blocks[0], backend=backend)(torch.randn(1, 17, 64))


def test_a_bare_linears_forward_raises():
    model = fp4graph.apply(nn.Linear(32, 32), "tetrajet", backend="eager")
    model(torch.randn(4, 32))
    with pytest.raises(fp4graph.UncompiledError, match="apply"):
        model.forward(torch.randn(4, 32))
    assert torch.equal(fp4graph.remove(model).forward(torch.zeros(1, 32))[0], model.bias)


def rule(name="the rule", **match):
    quantize = {"element": "e2m1", "block": 32, "scale": {"format": "e8m0", "rounding": "ceil"}}
    return {"name": name, "match": match, "quantize": quantize}


def test_a_glob_that_names_no_module_fails_at_apply_and_leaves_the_model(vit, images):
    model = vit()
    keys, expected = list(model.state_dict()), model(images)
    with pytest.raises(fp4graph.PolicyError, match=r"blcks.*blocks"):
        fp4graph.apply(model, {"version": 1, "name": "p", "rules": [rule(module="blcks.0.attn.qkv")]})
    assert list(model.state_dict()) == keys
    assert torch.equal(model(images), expected)


def test_a_rule_without_a_site_fails_at_the_first_forward_and_leaves_the_model(vit, images):
    model = vit()
    expected = model(images)
    rules = [rule("wide", op="linear", in_features=12345), rule(op="linear")]
    with pytest.raises(fp4graph.PolicyError, match=r"'wide' matches no site"):
        fp4graph.apply(model, {"version": 1, "name": "p", "rules": rules}, backend="eager")(images)
    assert runtime_of(model) is None
    assert torch.equal(model(images), expected)


def test_a_model_without_a_product_is_refused():
    model = nn.Sequential(nn.ReLU(), nn.LayerNorm(4))
    with pytest.raises(fp4graph.PolicyError, match=r"no site"):
        fp4graph.apply(model, "tetrajet", backend="eager")(torch.randn(2, 4))
    assert torch.equal(model(torch.ones(2, 4)), torch.zeros(2, 4))


def test_nothing_quantized_is_refused(vit, images):
    rules = [{**rule(op="linear", out_features=7), "required": False}]
    with pytest.raises(fp4graph.PolicyError, match="quantizes no site"):
        fp4graph.apply(vit(), {"version": 1, "name": "p", "rules": rules}, backend="eager")(images)


def test_expectations_are_checked(vit, images):
    policy = {"version": 1, "name": "p", "rules": [rule(op="linear")], "expect": {"quantized": {"min": 100}}}
    with pytest.raises(fp4graph.PolicyError, match="100"):
        fp4graph.apply(vit(), policy, backend="eager")(images)


def test_a_nested_application_is_refused(vit):
    model = vit()
    fp4graph.apply(model.blocks, "tetrajet", backend="eager")
    with pytest.raises(fp4graph.Error, match="blocks"):
        fp4graph.apply(model, "tetrajet", backend="eager")


def test_q_ema_without_the_optimizers_hooks_is_refused(vit, images):
    model = fp4graph.apply(vit(), "tetrajet-qema", backend="eager")
    model(images).sum().backward()
    with pytest.raises(fp4graph.CaptureError, match="prepare_optimizer"):
        model(images)


def test_an_optimizer_of_other_parameters_is_refused(vit):
    model = fp4graph.apply(vit(), "tetrajet-qema", backend="eager")
    with pytest.raises(fp4graph.Error, match="does not hold"):
        fp4graph.prepare_optimizer(model, torch.optim.SGD(vit().parameters(), lr=0.1))


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"nn\.Module"):
        fp4graph.apply(torch.nn.functional.relu, "tetrajet")
    with pytest.raises(ValueError, match="inductor, aot_eager, eager"):
        fp4graph.apply(nn.Linear(2, 2), "tetrajet", backend="tensorrt")
    for call in (fp4graph.remove, fp4graph.bypass, fp4graph.grad_scaler):
        with pytest.raises(fp4graph.Error, match="appl"):
            call(nn.Linear(2, 2))
    with pytest.raises(fp4graph.Error, match="appl"):
        fp4graph.prepare_optimizer(nn.Linear(2, 2), None)


def test_the_entry_point_serves_stateless_policies_and_refuses_others(vit, images):
    expected = fp4graph.apply(vit(), "microscaling", backend="eager")(images)
    options = {"policy": "microscaling", "backend": "eager"}
    assert torch.equal(torch.compile(vit(), backend="fp4graph", options=options)(images), expected)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"fp4graph\.apply"):
        torch.compile(vit(), backend="fp4graph", options={"policy": "tetrajet"})(images)


def test_importing_starts_nothing():
    import subprocess
    import sys

    code = (
        "import sys, torch, fp4graph; assert not torch.cuda.is_initialized(); "
        "assert not [m for m in sys.modules if m.startswith('fp4graph_plugins') or m == 'pluggy']; "
        "assert fp4graph.QuantSpec and fp4graph.formats.E2M1.max == 6.0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
