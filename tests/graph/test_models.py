"""Policies on models of other packages, with the sites that a person would count by hand."""

from __future__ import annotations

import operator

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel

import fp4graph
from fp4graph.graph.attention import attention, encoder_layer
from fp4graph.model.runtime import runtime_of
from tests.helpers import models
from tests.helpers.long import LONG
from tests.helpers.policies import MXFP4, one_rule
from tests.helpers.training import applied, prepared


def in_blocks(*blocks, linears=("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")):
    return [f"{block}.{linear}" for block in blocks for linear in linears]


def swin():
    sizes = {"img_size": 56, "depths": (2, 1), "embed_dim": 32, "num_heads": (1, 2), "num_classes": 5}
    model = timm.create_model("swin_tiny_patch4_window7_224", **sizes)
    names = in_blocks("layers.0.blocks.0", "layers.0.blocks.1", "layers.1.blocks.0")
    return model, (torch.randn(2, 3, 56, 56),), names


def deit():
    model = timm.create_model("deit_tiny_patch16_224", img_size=32, depth=2, num_classes=5)
    return model, (torch.randn(2, 3, 32, 32),), in_blocks("blocks.0", "blocks.1")


def gpt2():
    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=2, vocab_size=97, n_positions=32, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    linears = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    names = in_blocks("transformer.h.0", "transformer.h.1", linears=linears)
    return GPT2LMHeadModel(config), (torch.randint(97, (2, 16)),), names


def bloom():
    """BLOOM names the factors of its products."""
    config = BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=2, use_cache=False)
    linears = ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    names = in_blocks("transformer.h.0", "transformer.h.1", linears=linears)
    return BloomForCausalLM(config), (torch.randint(97, (2, 16)),), names


def llama():
    linears = [*(f"self_attn.{p}_proj" for p in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    names = in_blocks("model.layers.0", "model.layers.1", linears=linears)
    return models.llama(), (torch.randint(97, (2, 16)),), names


def encoder():
    layer = nn.TransformerEncoderLayer(64, 2, 96, batch_first=True)
    return layer, (torch.randn(2, 8, 64),), ["self_attn", "self_attn.out_proj", "linear1", "linear2"]


def bare_linear():
    return nn.Linear(40, 24), (torch.randn(6, 40),), [""]


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.long)], ids=["train", "eval"])
@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(make, marks=pytest.mark.long) for make in (deit, swin)),
        *(pytest.param(make, marks=LONG) for make in (gpt2, bloom)),
        llama,
        encoder,
        bare_linear,
    ],
)
def test_sites_are_those_a_person_counts(make, training):
    model, args, names = make()
    model.train(training)
    explanation = fp4graph.explain(model, "tetrajet-qema", args)
    assert sorted(site.module for site in explanation.sites if site.quantized) == sorted(names)
    assert explanation.problem is None

    optimizer = prepared(applied(model, "tetrajet-qema"))
    with torch.set_grad_enabled(training):
        for _ in range(2 if training else 1):
            out = model(*args)
            if training:
                (out if isinstance(out, torch.Tensor) else out.logits).float().square().mean().backward()
                assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
                optimizer.step()
    assert {site.module for site in runtime_of(model).sites if site.quantized} == set(names)


@pytest.mark.slow
def test_the_swiglu_of_llama_is_known_as_a_producer():
    model, args, _ = llama()
    sites = fp4graph.explain(model, one_rule(match={"op": "linear", "producer": "swiglu"}), args).sites
    assert [s.module for s in sites if s.quantized] == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]


def test_a_quantized_linear_layer_is_known_as_a_producer():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    policy = one_rule()
    policy["rules"].insert(0, {"name": "kept", "match": {"producer": "linear"}, "keep": "for this reason"})
    sites = fp4graph.explain(model, policy, (torch.randn(4, 32),)).sites
    assert [(s.module, s.rule) for s in sites] == [("0", "all"), ("1", "kept"), ("3", "all")]


#: Functions of ``x [1, 4, 32]``, each with the operation that a rule names as its producer.
PRODUCERS = [
    ("gelu", F.gelu),
    ("gelu", lambda x: F.dropout(F.gelu(x), 0.5)),
    ("gelu", lambda x: F.dropout(input=F.gelu(input=x), p=0.5)),
    ("gelu", lambda x: F.gelu(x).bfloat16().float().view(2, 2, 32)),
    ("gelu", lambda x: F.gelu(x).index_select(1, torch.tensor([3, 0]))),
    ("gelu", lambda x: F.dropout(F.gelu(x).reshape(4, 32)[torch.tensor([3, 0])], 0.5)),
    ("silu", F.silu),
    ("swiglu", lambda x: F.silu(x) * x.flip(1)),
    ("swiglu", lambda x: x.flip(1) * F.silu(x)),
    ("swiglu", lambda x: F.silu(x.bfloat16()).type_as(x) * x.flip(1)),
    ("swiglu", lambda x: F.silu(x).mul_(x.flip(1))),
    ("swiglu", lambda x: operator.imul(F.silu(x), x.flip(1))),
    ("swiglu", lambda x: torch.multiply(F.silu(x), x.flip(1))),
    ("sdpa", lambda x: F.scaled_dot_product_attention(x, x, x)),
]


@pytest.mark.parametrize(("producer", "function"), PRODUCERS)
def test_a_producer_is_known_past_views_casts_picked_rows_and_dropout(producer, function):
    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(function(x))

    policy, names = one_rule(), dict.fromkeys(name for name, _ in PRODUCERS)
    policy["rules"][:0] = [{"name": n, "match": {"op": "linear", "producer": n}, "keep": "it"} for n in names]
    sites = fp4graph.explain(Net(32, 32), policy, (torch.randn(1, 4, 32),)).sites
    assert [s.rule for s in sites if s.op == "linear"] == [producer]


@pytest.mark.parametrize(
    ("producer", "options"),
    [
        ("softmax", {}),
        ("softmax", {"is_causal": True}),
        ("masked_fill", {"attn_mask": torch.ones(4, 4, dtype=torch.bool)}),
        ("masked_fill", {"attn_mask": torch.zeros(4, 4)}),
    ],
)
def test_the_second_product_of_attention_is_known_by_its_producer(producer, options):
    """docs/techniques.md says so to techniques that treat the two products differently."""

    class Net(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return F.scaled_dot_product_attention(x, x, x, **options)

    policy = one_rule(op="sdpa")
    policy["rules"].insert(0, {"name": "second", "match": {"op": "sdpa", "producer": producer}, "keep": "it"})
    sites = fp4graph.explain(Net(32, 32), policy, (torch.randn(1, 2, 4, 32),)).sites
    assert [s.rule for s in sites if s.op == "sdpa"] == ["all", "second"]


class Forms(nn.Module):
    """Every spelling of a matrix product."""

    def __init__(self):
        super().__init__()
        self.w_weight = nn.Parameter(torch.randn(32, 32) / 32)
        self.bias = nn.Parameter(torch.randn(32))

    def forward(self, x):
        w, b = self.w_weight, self.bias
        y = F.linear(x, w, b)
        y = y @ w
        y = torch.matmul(y, w.t())
        y = torch.addmm(b, y.flatten(0, 1), w).view_as(x)
        y = torch.addmm(y.flatten(0, 1), y.flatten(0, 1), w, beta=0.5, alpha=2.0).view_as(x)
        y = y.matmul(w)
        y = torch.einsum("btk,nk->btn", y, w)
        z = torch.bmm(y, y.transpose(1, 2))
        z = torch.baddbmm(z, z, z)
        z = torch.einsum("bij,bjk->bki", z, z)
        z @= z.mT
        return torch.mm(z[0], z[1]) + F.scaled_dot_product_attention(z[:, None], z[:, None], z[:, None]).sum()


@pytest.mark.slow
def test_every_spelling_is_found_and_computes_the_same():
    torch.manual_seed(0)
    model, x = Forms(), torch.randn(2, 5, 32)
    rules = [
        {"name": "weights", "match": {"op": "linear"}, "quantize": {**MXFP4, "element": "e4m3"}},
        {"name": "activations", "match": {"op": "matmul"}, "quantize": MXFP4, "operands": {"weights": "keep"}},
        {"name": "attention", "match": {"op": "sdpa"}, "quantize": MXFP4},
    ]
    explanation = fp4graph.explain(model, {"version": 1, "name": "p", "rules": rules}, (x,))
    ops = [site.op for site in explanation.sites if site.quantized]
    assert ops == ["linear"] * 7 + ["matmul"] * 5 + ["sdpa"] * 2
    # With every operand kept, the rewritten model computes what the original computes.
    keep = [{**rule, "operands": {"fprop": "keep", "wgrad": "keep", "dgrad.weight": "keep"}} for rule in rules]
    expected = model(x)
    assert expected.isfinite().all()
    y = applied(model, {"version": 1, "name": "p", "rules": keep})(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5 * expected.detach().abs().max().item())


@pytest.mark.long
@pytest.mark.slow
def test_explain_changes_neither_the_model_nor_the_random_state(vit, images):
    model = vit(drop_rate=0.5)
    keys, before = list(model.state_dict()), torch.get_rng_state()
    fp4graph.explain(model, "tetrajet-qema", (images,))
    assert torch.equal(torch.get_rng_state(), before)
    assert list(model.state_dict()) == keys
    applied(model, "tetrajet")
    assert "8 of 12 sites quantized" in str(fp4graph.explain(model, "microscaling", (images,)))
    model(images)


#: Masks of 5 queries and 6 keys. Two let no key take part for the first query, as padding on the left does.
MASKS = {
    "none": None,
    "bool": torch.rand(5, 6) > 0.3,
    "float": torch.randn(5, 6),
    "no keys": torch.arange(5)[:, None] > torch.arange(6),
    "no keys, float": torch.zeros(5, 6).index_fill(0, torch.tensor([0]), -torch.inf),
}


@pytest.mark.parametrize(
    ("mask", "causal", "gqa", "batch", "dtype"),
    [
        ("none", False, False, (2,), torch.float32),
        ("bool", False, False, (), torch.float32),
        ("float", False, True, (2,), torch.float32),
        ("none", True, False, (), torch.float32),
        ("no keys", False, False, (2,), torch.float32),
        ("no keys, float", False, True, (2,), torch.float32),
        ("no keys, float", False, False, (), torch.bfloat16),  # q, k and v; the mask is fp32
    ],
)
def test_the_opened_attention_is_torchs(mask, causal, gqa, batch, dtype):
    heads = 2 if gqa else 4
    sizes = (4, 5, 8), (heads, 6, 8), (heads, 6, 8)
    qkv = [torch.randn(*batch, *size, dtype=dtype, requires_grad=True) for size in sizes]
    arguments = {"attn_mask": MASKS[mask], "is_causal": causal, "enable_gqa": gqa}
    results = []
    for function in (attention, F.scaled_dot_product_attention):
        y = function(*qkv, **arguments)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), qkv)])
    # The fused kernel sums in another order, and rounds the weights later.
    torch.testing.assert_close(*results, **({"rtol": 0.02, "atol": 0.02} if dtype is torch.bfloat16 else {}))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_the_opened_encoder_layer_is_torchs(norm_first, masked):
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, norm_first=norm_first, activation="gelu").eval()
    x, mask = torch.randn(3, 5, 16), torch.ones(5, 5, dtype=torch.bool).triu(1) if masked else None
    a = layer.self_attn
    with torch.no_grad():
        got = encoder_layer(
            x, 16, 2, a.in_proj_weight, a.in_proj_bias, a.out_proj.weight, a.out_proj.bias, True, norm_first, 1e-5,
            layer.norm1.weight, layer.norm1.bias, layer.norm2.weight, layer.norm2.bias, layer.linear1.weight,
            layer.linear1.bias, layer.linear2.weight, layer.linear2.bias, mask, 0,
        )  # fmt: skip
        torch.testing.assert_close(got, layer(x, src_mask=mask))


@pytest.mark.slow
def test_the_entry_point_opens_the_fused_encoder_layer():
    layer, (x,), _ = encoder()
    layer.eval()
    with torch.no_grad():
        fused = torch.compile(layer, backend="fp4graph", options={"policy": "microscaling", "backend": "eager"})(x)
        y = applied(layer, "microscaling")(x)
    torch.testing.assert_close(fused, y)
    assert not torch.allclose(y, layer.norm2(x))


class Second(nn.Linear):
    """Has the weight of another layer, and calls that layer first."""

    def __init__(self, first):
        super().__init__(64, 64, bias=False)
        self.weight, self.hidden = first.weight, [first]

    def forward(self, x):
        return F.linear(self.hidden[0](x), self.weight)


class Tied(nn.Module):
    """Two layers with one weight; if ``inside``, the second calls the first."""

    def __init__(self, inside):
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.second = Second(self.first) if inside else nn.Linear(64, 64, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(x if isinstance(self.second, Second) else self.first(x))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kept", ["first", "second"])
def test_of_two_layers_with_one_weight_a_rule_keeps_one(kept, inside):
    quantized = one_rule("q_ema")["rules"]
    policy = {"version": 1, "rules": [{"name": "one", "match": {"module": kept}, "keep": "exact"}, *quantized]}
    sites = fp4graph.explain(Tied(inside), policy, torch.randn(2, 64)).sites
    assert {site.module: site.quantized for site in sites} == {"first": kept != "first", "second": kept != "second"}
