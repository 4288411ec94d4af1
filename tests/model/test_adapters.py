"""Adapters stay in high precision under every shipped policy, and the layers that they wrap are quantized as before.

The modules are named and built as in Hugging Face PEFT; ``tests/clients`` tests PEFT itself.
"""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import fp4graph
from fp4graph.errors import CaptureError, Error, PolicyError, PolicyWarning
from fp4graph.graph.names import Names
from fp4graph.model import running
from fp4graph.model.prepare import PhasePlan
from fp4graph.model.runtime import runtime_of
from fp4graph.policy import shipped_policies
from fp4graph.technique.registry import default_registry
from tests.helpers.long import LONG
from tests.helpers.models import module_of
from tests.helpers.policies import NVFP4, one_rule
from tests.helpers.training import applied, assert_equal, gradients


class Lora(nn.Module):
    """PEFT's ``lora.Linear``: a layer, and beside it two layers that add an update of rank 4."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, layer.out_features, bias=False)})
        self.disabled = False

    def forward(self, x):
        y = self.base_layer(x)
        return y if self.disabled else y + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


class Loha(nn.Module):
    """PEFT's ``LoHaLinear``: the adapter is two parameters, which the wrapper's forward multiplies."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.hada_w1_a = nn.ParameterDict({"default": nn.Parameter(torch.randn(layer.out_features, 4))})
        self.hada_w1_b = nn.ParameterDict({"default": nn.Parameter(torch.randn(4, layer.in_features))})

    def forward(self, x):
        delta = self.hada_w1_a["default"] @ self.hada_w1_b["default"]
        return self.base_layer(x) + F.linear(x, 0.1 * delta)


class Handmade(nn.Linear):
    """A layer that owns the parameters of its adapter."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self.lora_A = nn.Parameter(torch.randn(4, layer.in_features))
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, 4))

    def forward(self, x):
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T


def trained_rows(layer):
    """Wrap a layer so that some rows train, as PEFT does: ``TrainableTokensWrapper(TrainableTokensLayer(...))``."""

    def forward(self, x):
        layer, rows = self.base_layer, torch.tensor([1, 3])
        return F.linear(x, layer.weight.index_copy(0, rows, self.trainable_tokens_delta["default"]), layer.bias)

    delta = nn.ParameterDict({"default": nn.Parameter(torch.ones(2, layer.in_features))})
    inner = module_of(forward, base_layer=layer, trainable_tokens_delta=delta)
    return module_of(lambda self, x: self.token_adapter(x), token_adapter=inner)


def peft_model(model):
    """Wrap a model as PEFT does: it becomes ``base_model.model``."""
    return module_of(lambda self, x: self.base_model["model"](x), base_model=nn.ModuleDict({"model": model}))


class Block(nn.Module):
    def __init__(self, wrap) -> None:
        super().__init__()
        self.qkv, self.fc = wrap(nn.Linear(32, 32)), nn.Linear(32, 32)

    def forward(self, x):
        return x + self.fc(F.gelu(self.qkv(x)))


def net(wrap=lambda layer: layer):
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(wrap) for _ in range(3)))
    return module_of(lambda self, x: self.head(self.blocks(x)), blocks=blocks, head=nn.Linear(32, 8))


X = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))


def wrapped(net, wrap):
    """Wrap the layers of a net, as PEFT does: in place."""
    torch.manual_seed(1)
    for block in net.blocks:
        block.qkv = wrap(block.qkv)
    return net


def decided(model, policy="mxfp4"):
    """Return the quantized modules of the first block and, with their rules, its kept modules, as ``explain`` says."""
    explanation = fp4graph.explain(model, policy, (X,))
    assert explanation.problem is None
    sites = [site for site in explanation.sites if "blocks.0." in site.module]
    assert all("adapter" in site.reason for site in sites if not site.quantized)
    named = [(site.module.partition("blocks.0.")[2], site) for site in sites]
    return [name for name, s in named if s.quantized], [(name, s.rule) for name, s in named if not s.quantized]


@pytest.mark.parametrize("name", shipped_policies(default_registry()))
def test_every_shipped_policy_plans_the_same_weights_with_and_without_adapters(name):
    policy = fp4graph.load_policy(name)
    for phase in range(len(policy.phases) + 1):
        adapted, plain = (PhasePlan(m, policy.in_phase(phase)) for m in (peft_model(net(Lora)), net()))
        names = [weight.name.removeprefix("base_model.model.").replace(".base_layer", "") for weight in adapted.weights]
        assert names == [weight.name for weight in plain.weights]
        assert [weight.plan for weight in adapted.weights] == [weight.plan for weight in plain.weights]
        assert adapted.hosts() == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "layer", "adapters"),
    [
        (Lora, "qkv.base_layer", ["qkv.lora_A.default", "qkv.lora_B.default"]),
        # The product of the adapter's two parameters, and the wrapper's product of x with the result.
        (Loha, "qkv.base_layer", ["qkv.hada_w1_b", "qkv"]),
        (Handmade, "qkv", ["qkv", "qkv"]),
    ],
)
def test_the_products_of_each_kind_of_adapter_are_kept(wrap, layer, adapters):
    assert decided(net(wrap)) == ([layer, "fc"], [(name, "adapters") for name in adapters])


BLOCKS = {"name": "rest", "match": {"block": True}, "quantize": {}}


def policy_of(*rules):
    return {"version": 1, "default": "keep", "rules": list(rules)}


@pytest.mark.slow
def test_a_rule_for_the_role_quantizes_adapters_and_broader_rules_do_not():
    role = {"name": "adapters too", "match": {"role": "adapter"}, "quantize": {"block": 16}}
    quantized = ["qkv.base_layer", "qkv.lora_A.default", "qkv.lora_B.default", "fc"]
    assert decided(net(Lora), policy_of(role, BLOCKS)) == (quantized, [])
    named = policy_of({"match": {"module": "*.default"}, "quantize": {}})
    problem = fp4graph.explain(net(Lora), named, (X,)).problem
    assert "blocks.0.qkv.lora_A.default is one of the adapters, which only a rule that says 'role: adapter'" in problem
    with pytest.raises(PolicyError, match="only a rule that says 'role: adapter'"):
        applied(net(Lora), named)(X)
    # The default is such a broader rule.
    assert decided(net(Lora), {"version": 1, "default": {"block": 32}})[0] == ["qkv.base_layer", "fc"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize(
    ("glob", "wrap", "adapters"),
    [
        ("*lora_A*", Lora, ["qkv.lora_A.default"]),
        ("*.lora_?.default", Lora, ["qkv.lora_A.default", "qkv.lora_B.default"]),
        ("*lora*", Lora, ["qkv.lora_A.default", "qkv.lora_B.default"]),
        ("*hada_*", Loha, ["qkv.hada_w1_b"]),
    ],
)
def test_a_glob_that_names_adapters_matches_them_without_the_role(glob, wrap, adapters, required):
    adapted = {"name": "adapters too", "match": {"module": glob}, "quantize": {"block": 16}, "required": required}
    quantized, kept = decided(net(wrap), policy_of(BLOCKS, adapted))
    assert sorted(quantized) == sorted(["qkv.base_layer", *adapters, "fc"])
    assert all(rule == "adapters" for _, rule in kept)  # PEFT's other matrix, or the wrapper's product
    # On a model without adapters the rule changes nothing.
    if not required:
        assert decided(net(), policy_of(BLOCKS, adapted))[0] == ["qkv", "fc"]


def test_globs_of_adapters_and_of_layers_do_not_share_a_rule(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\nrules:\n  - match:\n      module: ['*lora_A*', '*.fc']\n    quantize: {block: 16}\n")
    with pytest.raises(PolicyError, match=r"p\.yaml:4: '\*lora_A\*' names adapters .* a rule of their own"):
        fp4graph.load_policy(path)
    path.write_text(path.read_text().replace("quantize: {block: 16}", "keep: sensitive") + "default: {block: 16}\n")
    fp4graph.load_policy(path)


@pytest.mark.slow
@pytest.mark.parametrize("place", [lambda model: model, peft_model], ids=["plain", "PEFT model"])
def test_a_rule_that_names_a_layer_matches_it_inside_its_wrapper(place):
    keep = {"name": "kept", "match": {"module": ["head", "blocks.0.qkv"]}, "keep": "sensitive"}
    sites = fp4graph.explain(place(net(Lora)), policy_of(keep, *one_rule()["rules"]), (X,)).sites
    kept = [site.module.removeprefix("base_model.model.") for site in sites if site.rule == "kept"]
    assert kept == ["blocks.0.qkv.base_layer", "head"]  # the rule does not name the wrapper's adapter


def test_layers_with_adapters_are_not_counted_as_blocks():
    class Layer(nn.Module):
        def __init__(self, wrap) -> None:
            super().__init__()
            self.attn = nn.Linear(8, 8)
            self.experts = nn.ModuleList(nn.Sequential(wrap(nn.Linear(8, 8)), nn.Linear(8, 8)) for _ in range(2))

    adapted, plain = (Names(nn.Sequential(Layer(wrap), Layer(wrap))).blocks for wrap in (Lora, lambda layer: layer))
    assert adapted == plain
    assert set(adapted) == {"0", "1"}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["tetrajet", "tetrajet-qema"])
def test_reference_models_of_trainers_are_quantized(policy):
    """A trainer's reference is the model with its adapters disabled, or a copy of the model."""
    plain, model = (applied(each.eval(), policy) for each in (net(), peft_model(wrapped(net(), Lora))))
    reference = copy.deepcopy(model)

    def disable(model):
        for module in model.modules():
            module.disabled = True

    disable(model)
    with torch.no_grad():
        expected = plain(X)
        assert torch.equal(model(X), expected)
        assert runtime_of(reference) is not None
        assert not torch.equal(reference(X), expected)
        disable(fp4graph.remove(reference))
        assert not torch.equal(reference(X), expected)  # what the outputs above would be in high precision


def test_a_module_named_base_layer_is_wrapped_only_beside_an_adapter():
    layers = {name: nn.Linear(32, 32) for name in ("base_layer", "top_layer")}
    head = module_of(lambda self, x: self.top_layer(self.base_layer(x)), **layers)
    sites = fp4graph.explain(nn.Sequential(head), one_rule(), (X,)).sites
    assert {site.module: site.quantized for site in sites} == {f"0.{name}": True for name in layers}


def quantizers(trainable: bool) -> list[int]:
    """Count the quantizers in the forward graph and in the backward graph of two adapted layers."""
    counts, operators = [], ("quantize", "quantize_and_pack", "requantize")

    def count(graph, inputs):
        targets = [getattr(torch.ops.fp4graph, name).default for name in operators]
        counts.append(sum(node.target in targets for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    torch.manual_seed(0)
    model = nn.Sequential(Lora(nn.Linear(64, 96)), nn.GELU(), Lora(nn.Linear(96, 32)))
    for layer in (model[0].base_layer, model[2].base_layer):
        layer.requires_grad_(trainable)
    inner = aot_autograd(fw_compiler=count, bw_compiler=count)
    with mock.patch.object(running, "inner_backend", return_value=inner):
        fp4graph.apply(model, one_rule(quantize=NVFP4), backend="aot_eager")
        model(torch.randn(32, 64)).sum().backward()
    return counts


@pytest.mark.slow
@pytest.mark.compiler
def test_a_frozen_layer_quantizes_nothing_for_wgrad():
    """Each GEMM quantizes two operands. Both layers have fprop, the second has dgrad, those that train have wgrad."""
    assert quantizers(trainable=True) == [4, 2 + 4]
    assert quantizers(trainable=False) == [4, 2]


def assert_same_step(model, reference):
    """Compare outputs and gradients of a step of both models."""
    results = []
    for each in (model, reference):
        each.zero_grad()
        y = each(X)
        y.square().mean().backward()
        results.append([y.detach(), *gradients(each)])
    assert_equal(*results)


@pytest.mark.slow
@pytest.mark.parametrize("called", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("rows", [False, pytest.param(True, marks=LONG)], ids=["layers", "layers and rows of the head"])
def test_adapters_join_and_leave_an_applied_model(called, rows):
    """The names of modules change, by which noise is drawn: tetrajet's gradients show whether the new names are used.

    PEFT's ``trainable_token_indices`` trains rows of a head that is tied to the embedding.
    """
    model, reference = (applied(net(), "tetrajet") for _ in range(2))
    if called:
        assert_same_step(model, reference)
    for each in (model, reference):
        wrapped(each, Lora)
        if rows:
            each.head = trained_rows(each.head)
    applied(reference, "tetrajet")
    assert_same_step(model, reference)
    assert runtime_of(model).count == runtime_of(reference).count == 1 + called
    if rows:
        (head,) = [site for site in runtime_of(model).sites if site.module.startswith("head")]
        assert head.module == "head.token_adapter"
        keep = {"name": "kept", "match": {"module": "head"}, "keep": "sensitive"}
        (kept,) = [s for s in fp4graph.explain(model, policy_of(keep, BLOCKS), (X,)).sites if s.rule == "kept"]
        assert kept.module == "head.token_adapter"
    for each in (model, reference):
        for block in each.blocks:
            block.qkv = block.qkv.base_layer
        if rows:
            each.head = each.head.token_adapter.base_layer
    applied(reference, "tetrajet")
    assert_same_step(model, reference)
    assert {site.module for site in runtime_of(model).sites} == {site.module for site in runtime_of(reference).sites}


@pytest.mark.slow
def test_adapters_join_a_model_whose_parts_are_called():
    model, reference = applied(net(), "tetrajet"), applied(wrapped(net(), Lora), "tetrajet")
    wrapped(model, Lora)
    with torch.no_grad(), pytest.warns(PolicyWarning, match="called by itself"):
        assert torch.equal(model.blocks(X), reference.blocks(X))


@pytest.mark.slow
def test_a_layer_that_joins_with_an_adapter_is_refused():
    model = wrapped(applied(net(), "tetrajet"), Lora)
    model.head = nn.Sequential(nn.Linear(32, 32), model.head)
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"^head: adapters and head, head\.0 were added .*apply\(.*\) again"):
            model(X)
    applied(model, "tetrajet")(X).sum().backward()


@pytest.mark.slow
def test_a_module_may_join_unused_or_under_a_policy_that_quantizes_nothing():
    model = applied(net(), "tetrajet").eval()
    expected = model(X)
    model.unused = nn.Linear(2, 2)
    assert torch.equal(model(X), expected)
    plain = wrapped(applied(net(), "bf16"), Lora)
    plain.head = nn.Sequential(nn.Linear(32, 32), plain.head)
    assert plain(X).isfinite().all()


def test_adapters_that_join_inside_detect_nonfinite_are_refused():
    model = applied(net(), "tetrajet")
    with fp4graph.detect_nonfinite(model), pytest.raises(Error, match="adapters joined or left the model inside"):
        wrapped(model, Lora)(X)
