"""Routers and heads: found by names, methods or the graph, and kept by every policy that does not name the role."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from timm.layers import GatedMlp
from timm.models.mlp_mixer import MlpMixer, SpatialGatingBlock
from torch import nn

import fp4graph
from fp4graph.errors import CaptureError
from fp4graph.graph.names import Names
from fp4graph.policy import shipped_policies
from fp4graph.technique.registry import default_registry
from tests.helpers.models import grouped_mm
from tests.helpers.policies import one_rule
from tests.helpers.training import applied, prepared, train, uncompiled

EVERY_LINEAR = one_rule(quantize={"block": 32})


class Experts(nn.Module):
    """Adds the outputs of two experts, each a linear layer, with ``weights``."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, weights):
        return weights[..., :1] * self.one(x) + weights[..., 1:] * self.two(x)


class Mixture(nn.Module):
    """A mixture of experts whose router is called ``name``; ``choose`` makes weights of its logits."""

    def __init__(self, name: str, choose) -> None:
        super().__init__()
        self.name, self.choose = name, choose
        self.add_module(name, nn.Linear(32, 4))
        self.parts = Experts()

    def forward(self, x):
        return x + self.parts(x, self.choose(getattr(self, self.name)(x)))


def softmax_then_top_k(logits):  # Qwen3-MoE, Mixtral
    values, _ = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float), 2, dim=-1)
    return values / values.sum(-1, keepdim=True)


def top_k_then_softmax(logits):  # GPT-OSS
    return logits.topk(2, dim=-1)[0].softmax(-1)


def sigmoid_bias_top_k(logits):  # DeepSeek-V3
    scores = logits.sigmoid()
    chosen = torch.topk(scores + torch.ones(4) / 8, k=2, dim=-1, sorted=False)[1]
    return scores.gather(-1, chosen)


def noisy(
    logits,
):  # Shazeer et al. compute the spread of the noise in a second layer; here it is the upper half of the logits
    logits, spread = logits.chunk(2, -1)
    return (logits + torch.ones_like(logits) * F.softplus(spread)).topk(2, -1)[0].softmax(-1)


def gate_by_all(logits):  # no choice: every expert works
    return F.softmax(logits, -1)[..., :2]


class Model(nn.Module):
    def __init__(self, name="pick", choose=softmax_then_top_k) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Mixture(name, choose) for _ in range(2)))
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.layers(x))


CHOOSING = [softmax_then_top_k, top_k_then_softmax, sigmoid_bias_top_k, noisy]
X = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))


def kept(explanation) -> dict[str, str]:
    return {site.module: site.reason for site in explanation.sites if not site.quantized}


@pytest.mark.slow
@pytest.mark.parametrize("choose", CHOOSING)
def test_a_router_is_found_in_the_graph_and_kept(choose):
    found = kept(fp4graph.explain(Model("pick", choose), EVERY_LINEAR, (X,)))
    assert found.keys() == {"layers.0.pick", "layers.1.pick"}
    assert all("chooses experts" in reason and "role: router" in reason for reason in found.values())


class Routed(Mixture):
    """A mixture of experts that returns the logits of its router, too."""

    def forward(self, x):
        logits = self.pick(x)
        return logits, self.parts(x, self.choose(logits))


@pytest.mark.parametrize("choose", CHOOSING)
def test_a_router_that_only_the_graph_shows_trains_in_high_precision(choose):
    model = applied(Routed("pick", choose), EVERY_LINEAR | {"techniques": ["q_ema"]})

    def run(x):
        logits, y = model(x)
        assert torch.equal(logits, F.linear(x, model.pick.weight, model.pick.bias))
        return y

    train(model, prepared(model), [(X,)] * 3, run)


def in_place(operation):
    return lambda logits: operation(logits.clone())


#: Arithmetic on logits, in the spellings that Dynamo or torch name differently.
ARITHMETIC = [
    lambda x: x / 2,
    lambda x: 2 - x,
    lambda x: 1 / x,
    lambda x: -x,
    lambda x: x**2,
    lambda x: torch.subtract(x, 1),
    lambda x: torch.rsub(x, 1),
    lambda x: torch.multiply(x, 2),
    lambda x: torch.divide(x, 2),
    lambda x: F.softplus(x).sqrt(),  # DeepSeek-V4
    in_place(lambda x: operator.itruediv(x, 2)),
    in_place(lambda x: operator.isub(x, 2)),
    in_place(lambda x: x.div_(2)),
    in_place(lambda x: x.masked_fill_(x > 1, 0.0)),
]


@uncompiled
@pytest.mark.parametrize("number", range(len(ARITHMETIC)))
def test_a_router_is_found_behind_arithmetic_on_its_logits(number):
    mixture = Mixture("pick", lambda logits: top_k_then_softmax(ARITHMETIC[number](logits)))
    assert kept(fp4graph.explain(mixture, EVERY_LINEAR, (X,))).keys() == {"pick"}
    with torch.compiler.set_stance("force_eager"), pytest.raises(CaptureError, match=r"pick.*by top-k"):
        applied(mixture, EVERY_LINEAR)(X)


class Predicts(Model):
    def forward(self, x):
        logits = super().forward(x)
        return logits, logits.softmax(-1).argmax(-1)


class SparseStream(Model):
    """Chooses elements of the residual stream by top-k, in its output."""

    def forward(self, x):
        return super().forward(x), self.layers(x).topk(8)[0]


class SparseCode(nn.Module):
    """A top-k autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        values, indices = self.encode(x).topk(8)
        return self.decode(torch.zeros(*x.shape[:-1], 128).scatter(-1, indices, values))


class MoEGatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x):
        gate, up = self.w1(x).chunk(2, -1)
        return self.w2(F.silu(gate) * up)


class OwnClassifier(Model):
    """Has a method that is named like timm's and has other parameters."""

    def get_classifier(self, name):
        raise AssertionError


NO_ROUTERS = [kind("pick", gate_by_all) for kind in (Model, Predicts, SparseStream, OwnClassifier)]


@pytest.mark.slow
@pytest.mark.parametrize("model", [*NO_ROUTERS, SparseCode(), MoEGatedMLP()], ids=lambda model: type(model).__name__)
def test_a_model_without_routers_keeps_no_site(model):
    assert not kept(fp4graph.explain(model, EVERY_LINEAR, (X,)))


class MixtureRouter(nn.Module):
    """Owns experts, although its class is called a router."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 32, 32))

    def forward(self, x):
        ends = torch.tensor([2, 6], dtype=torch.int32)
        return grouped_mm(x, self.weight, offs=ends)


def test_experts_of_a_module_that_is_called_a_router_are_quantized():
    assert not kept(fp4graph.explain(nn.Sequential(MixtureRouter()), one_rule(op="grouped"), (X,)))


def every_linear_after(rule):
    return {**EVERY_LINEAR, "rules": [rule, *EVERY_LINEAR["rules"]]}


@pytest.mark.slow
def test_a_rule_that_names_the_role_quantizes_routers():
    quantized = {"name": "routers", "match": {"role": "router"}, "quantize": {"block": 16}}
    sites = fp4graph.explain(Model("pick"), every_linear_after(quantized), (X,)).sites
    assert {site.module for site in sites if site.rule == "routers"} == {"layers.0.pick", "layers.1.pick"}
    assert all(site.quantized for site in sites)


class TopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32))

    def forward(self, x):
        return F.linear(x, self.weight)


class Named(nn.Module):
    """A router, ``gate``, that is known by its class or by its name beside ``experts``."""

    def __init__(self, by_class: bool) -> None:
        super().__init__()
        self.gate = TopKRouter() if by_class else nn.Linear(32, 4)
        self.gate_proj = nn.Linear(32, 32)
        self.add_module("parts" if by_class else "experts", nn.ModuleList([nn.Linear(32, 32)]))

    def forward(self, x):
        return self.gate_proj(x) * self.gate(x).sum(-1, keepdim=True)


@pytest.mark.slow
def test_a_gate_without_experts_is_no_router():
    # gMLP's SpatialGatingUnit multiplies with the output of a linear layer.
    sizes = {"num_blocks": 2, "embed_dim": 64, "mlp_ratio": 2, "patch_size": 8, "img_size": 32, "num_classes": 4}
    model = MlpMixer(block_layer=SpatialGatingBlock, mlp_layer=GatedMlp, **sizes)
    sites = fp4graph.explain(model, "tetrajet", (torch.randn(1, 3, 32, 32),)).sites
    assert {site.module.rpartition(".")[2] for site in sites if site.quantized} >= {"proj", "fc1", "fc2"}
    assert not any(site.rule == "routers" for site in sites)


@pytest.mark.parametrize("by_class", [False, True])
def test_a_router_is_known_by_its_name_or_class(by_class):
    found = kept(fp4graph.explain(Named(by_class), EVERY_LINEAR, (X,)))
    assert found.keys() == {"gate"}


@uncompiled
def test_an_unnamed_router_that_ran_uncompiled_is_refused_where_it_chooses():
    with pytest.raises(CaptureError, match=r"layers.0.pick.*by top-k"):
        applied(Model("pick"), EVERY_LINEAR).layers[0](X)
    keeps = {"name": "r", "match": {"module": "*.pick"}, "keep": "yes"}
    applied(Model("pick"), every_linear_after(keeps)).layers[0](X)


class Language(nn.Module):
    """A model of one block with a head. Without ``shows``, the head is tied to the embedding."""

    def __init__(self, shows: bool) -> None:
        super().__init__()
        self.embedding, self.inside, self.out = nn.Embedding(16, 32), nn.Linear(32, 32), nn.Linear(32, 16, bias=False)
        if not shows:
            self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.inside(self.embedding(x)))


class Showing(Language):
    """Returns the head from a method, as Hugging Face's models do."""

    def get_output_embeddings(self):
        return self.out


TOKENS = torch.arange(12).reshape(2, 6)


@pytest.mark.parametrize("model", [Language(shows=False), Showing(shows=True)], ids=["tied", "shown"])
def test_the_head_of_a_model_of_one_block_is_kept(model):
    found = kept(fp4graph.explain(model, "tetrajet", (TOKENS,)))
    assert found["out"].startswith("the head computes the model's output")


@pytest.mark.parametrize("name", shipped_policies(default_registry()))
def test_every_shipped_policy_keeps_routers_and_heads(name):
    policy = fp4graph.load_policy(name)
    router, head = Names(Named(by_class=False)), Names(Showing(shows=True))
    for names, module, rule in ((router, "gate", "routers"), (head, "out", "heads")):
        decision = policy.decide(names.view(module, "linear", (32, 64, 2048)))
        assert not decision.rule.quantizes
        # The rule is built in, or a rule of the policy, such as one that keeps the first blocks.
        assert decision.index >= 0 or decision.rule.name == rule


def test_a_rule_without_a_role_quantizes_heads():
    assert not kept(fp4graph.explain(Showing(shows=True), EVERY_LINEAR, (TOKENS,)))
