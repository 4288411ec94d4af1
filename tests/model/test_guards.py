"""Nothing runs in silent high precision, and every bad input is one clear error."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import torchvision
from torch import nn

import fp4graph
from fp4graph.model import prepare
from fp4graph.model.runtime import runtime_of


@pytest.fixture
def applied(vit, images):
    model = fp4graph.apply(vit(), "tetrajet", backend="eager", strict=True)
    model(images)
    return model


@pytest.mark.slow
def test_a_copied_part_raises(applied):
    with pytest.raises(fp4graph.UncompiledError, match=r"apply.*bypass"):
        copy.deepcopy(applied.blocks[0])(torch.randn(1, 17, 64))


@pytest.mark.slow
@pytest.mark.parametrize("call", ["forward", "forward_features"])
def test_methods_raise(applied, images, call):
    with pytest.raises(fp4graph.UncompiledError, match=r"blocks\.0\.attn\.qkv"):
        getattr(applied, call)(images)


@pytest.mark.slow
def test_a_block_called_alone_raises(applied):
    with pytest.raises(fp4graph.UncompiledError, match="apply"):
        applied.blocks[0](torch.randn(1, 17, 64))


@pytest.mark.slow
def test_force_eager_raises(applied, images):
    with torch.compiler.set_stance("force_eager"), pytest.raises(fp4graph.UncompiledError, match="force_eager"):
        applied(images)


@pytest.mark.slow
def test_the_recompile_limit_raises():
    class OneLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(32, 32)

        def forward(self, x):
            return self.fc(x)

    model = fp4graph.apply(OneLayer(), "tetrajet", backend="eager", strict=True, recompile_limit=2)

    def call_with_ever_more_dimensions():
        for rank in range(8):
            model(torch.randn(*([1] * rank), 2, 32))

    with pytest.raises(fp4graph.UncompiledError, match="recompile limit"):
        call_with_ever_more_dimensions()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_another_backend_is_refused(vit, backend):
    model = fp4graph.apply(vit(), "tetrajet", backend="eager", strict=True)
    with pytest.raises(Exception, match=r"another torch\.compile backend"):
        torch.compile(model.blocks[0], backend=backend)(torch.randn(1, 17, 64))


def test_a_bare_linears_forward_raises():
    model = fp4graph.apply(nn.Linear(32, 32), "tetrajet", backend="eager", strict=True)
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


@pytest.mark.slow
def test_a_rule_without_a_site_is_an_error_at_every_forward_until_remove(vit, images):
    model = vit()
    expected = model(images)
    rules = [rule("wide", op="linear", in_features=12345), rule(op="linear")]
    fp4graph.apply(model, {"version": 1, "name": "p", "rules": rules}, backend="eager")
    for _ in range(3):
        with pytest.raises(fp4graph.PolicyError, match=r"'wide' matches no site"):
            model(images)
    assert torch.equal(fp4graph.remove(model)(images), expected)


class Experts(nn.Module):
    """Four matrices, each for a quarter of the tokens, in a form of torch's grouped product that is no site."""

    def __init__(self):
        super().__init__()
        self.weight_stack = nn.Parameter(torch.randn(4, 32, 64))

    def forward(self, x):
        return torch._grouped_mm(x.bfloat16().unflatten(0, (4, -1)), self.weight_stack.bfloat16()).flatten(0, 1).float()


def mixture():
    return nn.ModuleDict({"layers": nn.Sequential(nn.Linear(32, 32), Experts(), nn.Linear(64, 8))})["layers"]


KEEPS_EXPERTS = {
    "version": 1,
    "name": "p",
    "rules": [{"name": "experts", "match": {"module": "1"}, "keep": "not yet"}, rule(op="linear")],
}


@pytest.mark.slow
def test_a_grouped_product_is_an_error_at_every_forward_until_a_rule_keeps_it():
    model, x = fp4graph.apply(mixture(), "tetrajet", backend="eager"), torch.randn(16, 32)
    for _ in range(2):
        with pytest.raises(fp4graph.CaptureError, match=r"^1: _grouped_mm .*a rule before .*module: '1'}, keep"):
            model(x)
    assert fp4graph.apply(model, KEEPS_EXPERTS, backend="eager")(x).shape == (16, 8)
    assert fp4graph.remove(model)(x).shape == (16, 8)


@pytest.mark.slow
def test_explain_lists_a_grouped_product():
    x = torch.randn(16, 32)
    found = fp4graph.explain(mixture(), "tetrajet", (x,))
    assert "_grouped_mm multiplies" in found.problem
    assert [(site.module, site.op, site.quantized) for site in found.sites] == [
        ("0", "linear", True), ("1", "_grouped_mm", False), ("2", "linear", True)
    ]  # fmt: skip
    kept = fp4graph.explain(mixture(), KEEPS_EXPERTS, (x,))
    assert kept.problem is None
    assert (kept.sites[1].rule, kept.sites[1].reason) == ("experts", "not yet")


def test_nothing_is_asked_of_a_baseline():
    assert fp4graph.apply(mixture(), "bf16", backend="eager")(torch.randn(16, 32)).shape == (16, 8)


@torch.library.custom_op("fp4graph_tests::fused_projection", mutates_args=())
def fused_projection(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


@fused_projection.register_fake
def _(x, w):
    return x.new_empty(x.shape[0], w.shape[0])


class Fused(nn.Linear):
    def forward(self, x):
        return fused_projection(x, self.weight)


class Inner(nn.Linear):
    def forward(self, x):
        return torch.inner(x, self.weight)


class OwnMv(nn.Linear):
    def forward(self, x):
        return torch.stack([self.weight.mv(row) for row in x])


class Turned(nn.Linear):
    def forward(self, x):
        return torch.matmul(self.weight, x.t()).t()


class ByHand(nn.Linear):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            return x @ w.t()

        @staticmethod
        def backward(ctx, grad):
            return grad, grad

    def forward(self, x):
        return self.Product.apply(x, self.weight)


@pytest.mark.parametrize("layer", [Fused, OwnMv, Turned, ByHand])
def test_an_unknown_product_with_a_parameter_is_an_error(layer):
    model = fp4graph.apply(nn.Sequential(layer(32, 64), nn.Linear(64, 8)), "tetrajet", backend="eager")
    with pytest.raises(
        fp4graph.CaptureError, match=r"^0: (fused_projection|mv|matmul|autograd_function_apply) multiplies"
    ):
        model(torch.randn(4, 32))


@pytest.mark.slow
def test_it_is_none_where_no_linear_layer_would_be_quantized(vit, images):
    model = vit()
    model.head = Inner(64, 10, bias=False)
    found = fp4graph.explain(model, "tetrajet", (images,))
    assert found.problem is None
    assert [site.op for site in found.sites if site.module == "head"] == ["inner"]


class Looping(nn.Module):
    """Multiplies with its parameter in a function that no graph shows."""

    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(2, 32, 32))

    @torch.compiler.disable
    def multiply(self, x):
        return x @ self.stack[0]

    def forward(self, x):
        return self.multiply(x)


@pytest.mark.slow
def test_a_product_that_no_graph_shows_is_an_error_if_nothing_may_run_uncompiled():
    model = nn.Sequential(nn.Linear(32, 32), Looping())
    fp4graph.apply(model, "microscaling", backend="eager", strict=True)
    for _ in range(2):
        with pytest.raises(fp4graph.CaptureError, match=r"^1: the module was called.*not captured"):
            model(torch.randn(4, 32))
    kept = {**KEEPS_EXPERTS, "rules": [KEEPS_EXPERTS["rules"][0] | {"required": False}, rule(op="linear")]}
    assert fp4graph.apply(model, kept, backend="eager")(torch.randn(4, 32)).shape == (4, 32)


@pytest.mark.slow
def test_a_module_that_came_after_apply_is_an_error(vit, images):
    model = fp4graph.apply(vit(), "tetrajet", backend="eager")
    model(images)
    model.blocks[1].mlp.fc1 = nn.Linear(64, 256)
    with pytest.raises(fp4graph.CaptureError, match=r"^blocks\.1\.mlp\.fc1: .*after fp4graph\.apply.*again"):
        model(images)
    fp4graph.apply(model, "tetrajet", backend="eager")(images)


@pytest.mark.slow
def test_a_block_that_came_after_apply_is_an_error(vit, images):
    model = fp4graph.apply(vit(), "tetrajet", backend="eager")
    model.blocks.append(vit().blocks[0])
    for _ in range(2):
        with pytest.raises(fp4graph.CaptureError, match=r"^blocks\.2\.attn\.qkv: .*after fp4graph\.apply"):
            model(images)


def test_a_module_out_of_the_models_sight_is_none_that_came_later(images):
    class Judge(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = [nn.Linear(8, 8)]
            self.fc = nn.Linear(8, 64)

        def forward(self, x):
            return self.fc(self.hidden[0](x))

    fp4graph.apply(Judge(), "tetrajet", backend="eager")(torch.randn(4, 8))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


def small_resnet():
    return timm.create_model("resnet10t", num_classes=10)


def normed():
    model = Recurrent()
    torch.nn.utils.parametrizations.weight_norm(model.rnn, "weight_ih_l0")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("make", [Recurrent, normed])
def test_a_recurrent_layer_is_listed_though_no_graph_has_it(make):
    x, policy = torch.randn(2, 5, 32), {"version": 1, "name": "the head", "rules": [rule(module="head")]}
    explained = fp4graph.explain(make(), policy, (x,)).sites
    model = fp4graph.apply(make(), policy, backend="eager")
    model(x)
    for sites in (explained, model._compiled_call_impl.sites):
        assert [(site.module, site.op, site.quantized) for site in sites] == [
            ("head", "linear", True),
            ("rnn", "recurrent", False),
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shape", "head", "what"),
    # timm's models say which layer is their head, so that it is no part of the one block.
    [(small_resnet, (2, 3, 32, 32), "fc", "nothing"), (Recurrent, (2, 5, 32), "head", "only head")],
)
def test_a_policy_for_blocks_does_not_quantize_a_head_alone(make, shape, head, what):
    model = fp4graph.apply(make(), "tetrajet", backend="eager")
    for _ in range(2):
        with pytest.raises(fp4graph.PolicyError, match=rf"stack of blocks.*: {what} would be.*match:"):
            model(torch.randn(shape))
    meant = {"version": 1, "name": "the head", "rules": [rule(module=head)]}
    fp4graph.apply(model, meant, backend="eager")(torch.randn(shape))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), nn.Sequential(nn.utils.weight_norm(nn.Linear(32, 32)))],
    ids=["attention over many tokens", "weight_norm"],
)
def test_only_the_work_of_layers_counts(model):
    policy = {"version": 1, "name": "p", "rules": [rule(op="linear", block=True)]}
    assert fp4graph.explain(model, policy, (torch.randn(2, 512, 32),)).problem is None


def test_a_policy_for_blocks_quantizes_a_perceptron():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
    found = fp4graph.explain(model, "tetrajet", (torch.randn(4, 32),))
    assert (found.quantized, found.problem) == (2, None)


@pytest.mark.slow
def test_layers_with_a_number_behind_an_underscore_are_a_stack():
    model = torchvision.models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10
    )
    found = fp4graph.explain(model, "tetrajet", (torch.randn(2, 3, 16, 16),))
    assert {position.stack for position in found.blocks.values()} == {"encoder.layers.encoder_layer_*"}
    assert found.quantized == 8
    assert not next(site for site in found.sites if site.module == "heads.head").quantized


@pytest.mark.slow
def test_sites_count_their_flops(vit, images):
    found = {site.module: site for site in fp4graph.explain(vit(), "tetrajet", (images,)).sites}
    assert found["blocks.0.attn.qkv"].flops == 2 * (4 * 17) * 64 * 192
    assert found["patch_embed.proj"].flops == 2 * (4 * 16) * (3 * 8 * 8) * 64
    assert found["head"].flops == 2 * 4 * 64 * 10


def test_an_error_stays_one_where_a_later_forward_would_have_passed():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x, both):
            return self.second(self.first(x)) if both else self.first(x)

    rules = [rule("second", module="second"), rule(op="linear")]
    model = fp4graph.apply(Branching(), {"version": 1, "name": "p", "rules": rules}, backend="eager")
    for both in (False, True):
        with pytest.raises(fp4graph.PolicyError, match="'second' matches no site"):
            model(torch.randn(4, 32), both)


@pytest.mark.slow
def test_an_application_that_fails_leaves_the_one_before(vit, images, monkeypatch):
    model = fp4graph.apply(vit(), "tetrajet-qema", backend="eager")
    expected, state = model(images), {k: v.clone() for k, v in model.state_dict().items()}
    tag, failures = prepare.Tag, iter([TypeError("the first tag fails; those of the restored policy do not")])

    def first_fails(*arguments, **named):
        for failure in failures:
            raise failure
        return tag(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "Tag", first_fails)
        with pytest.raises(TypeError, match="the first tag"):
            fp4graph.apply(model, "microscaling", backend="eager")
    assert runtime_of(model).policy.name == "tetrajet-qema"
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model.eval()(images), fp4graph.apply(vit(), "tetrajet-qema", backend="eager").eval()(images))
    assert expected.shape == (4, 10)


def test_a_model_without_a_product_is_refused():
    model = nn.Sequential(nn.ReLU(), nn.LayerNorm(4))
    with pytest.raises(fp4graph.PolicyError, match=r"no site"):
        fp4graph.apply(model, "tetrajet", backend="eager")(torch.randn(2, 4))
    assert torch.equal(fp4graph.remove(model)(torch.ones(2, 4)), torch.zeros(2, 4))


@pytest.mark.slow
def test_nothing_quantized_is_refused(vit, images):
    rules = [{**rule(op="linear", out_features=7), "required": False}]
    with pytest.raises(fp4graph.PolicyError, match="quantizes no site"):
        fp4graph.apply(vit(), {"version": 1, "name": "p", "rules": rules}, backend="eager")(images)


@pytest.mark.slow
def test_expectations_are_checked(vit, images):
    policy = {"version": 1, "name": "p", "rules": [rule(op="linear")], "expect": {"quantized": {"min": 100}}}
    with pytest.raises(fp4graph.PolicyError, match="100"):
        fp4graph.apply(vit(), policy, backend="eager")(images)


def test_a_nested_application_is_refused(vit):
    model = vit()
    fp4graph.apply(model.blocks, "tetrajet", backend="eager")
    with pytest.raises(fp4graph.Error, match="blocks"):
        fp4graph.apply(model, "tetrajet", backend="eager")


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_entry_point_serves_stateless_policies_and_refuses_others(vit, images):
    expected = fp4graph.apply(vit(), "microscaling", backend="eager")(images)
    options = {"policy": "microscaling", "backend": "eager"}
    assert torch.equal(torch.compile(vit(), backend="fp4graph", options=options)(images), expected)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"fp4graph\.apply"):
        torch.compile(vit(), backend="fp4graph", options={"policy": "tetrajet"})(images)


@pytest.mark.process
def test_importing_starts_nothing():
    import subprocess
    import sys

    code = (
        "import sys, torch, fp4graph; assert not torch.cuda.is_initialized(); "
        "assert not [m for m in sys.modules if m.startswith('fp4graph_plugins') or m == 'pluggy']; "
        "assert fp4graph.QuantSpec and fp4graph.formats.E2M1.max == 6.0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
