"""explain() lists the FLOPs that torch's counter counts, for models of many families, and every operation with them."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import partial

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

import fp4graph
from fp4graph.graph import operations
from fp4graph.graph.site import Site
from fp4graph.model import census
from fp4graph.model.runtime import runtime_of
from fp4graph.technique import Factors, ProductOperation
from fp4graph.technique.registry import Registry
from tests.helpers import mixtures, models
from tests.helpers.long import long_but
from tests.helpers.policies import one_rule
from tests.helpers.techniques import offering
from tests.helpers.training import applied, stances, uncompiled

pytestmark = pytest.mark.slow

TOKENS = (2, 24)


def tokens():
    return torch.randint(97, TOKENS)


def images(size=32):
    return torch.randn(2, 3, size, size)


def of_timm(name, size, **options):
    return timm.create_model(name, num_classes=5, **options), (images(size),), {}


def of_transformers(name, *args, given=None, **options):
    """Return a model for conditional generation or causal language modelling."""
    config = getattr(transformers, f"{name.partition('For')[0]}Config")(vocab_size=97, use_cache=False, **options)
    return getattr(transformers, name)(config), args, given or {}


def of_diffusers(name, *args, given, **options):
    diffusers = pytest.importorskip("diffusers")
    return getattr(diffusers, name)(**options), args, {**given, "return_dict": False}


def mixture(name):
    return mixtures.mixture(name, num_hidden_layers=2, use_cache=False), (tokens(),), {}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(97, 32), nn.LSTM(32, 48, 2, batch_first=True), nn.Linear(48, 97)

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0])


class EinsumAttention(nn.Module):
    """Attention of three heads with all products written as einsums."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Parameter(torch.randn(3, 3, 8, 24)), nn.Parameter(torch.randn(3, 8, 24))

    def forward(self, x):
        q, k, v = torch.einsum("btd,shed->sbhte", x, self.qkv)
        weights = torch.einsum("bhqe,bhke->bhqk", q, k).softmax(-1)
        return torch.einsum("bhqk,bhke,hed->bqd", weights, v, self.out)


#: A model with the arguments of a call, by name.
FAMILIES = {
    "vit": lambda: (models.vit(), (images(),), {}),
    "llama": lambda: (models.llama(), (tokens(),), {}),
    "GPT-OSS": lambda: mixture("GPT-OSS"),
    "t5": lambda: of_transformers(
        "T5ForConditionalGeneration", given={"input_ids": tokens(), "labels": tokens()},
        d_model=64, d_kv=32, d_ff=96, num_layers=2, num_heads=2, decoder_start_token_id=0,
    ),
    "lstm": lambda: (Recurrent(), (tokens(),), {}),
    "einsum attention": lambda: (EinsumAttention(), (torch.randn(2, 7, 24),), {}),
    "convnext": lambda: of_timm("convnext_atto", 64, depths=(1, 1, 2, 1), dims=(16, 32, 48, 64)),
    "Qwen3-MoE": lambda: mixture("Qwen3-MoE"),
    "mamba2": lambda: of_transformers(
        "Mamba2ForCausalLM", tokens(), hidden_size=64, num_hidden_layers=2, num_heads=4, head_dim=32, state_size=16,
        n_groups=1, chunk_size=8, expand=2, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    ),
    "dit": lambda: of_diffusers(
        "DiTTransformer2DModel", torch.randn(2, 4, 8, 8),
        given={"timestep": torch.tensor([3, 7]), "class_labels": torch.tensor([1, 2])}, num_attention_heads=2,
        attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2, sample_size=8, patch_size=2,
        norm_num_groups=8,
    ),
    "swin": lambda: of_timm(
        "swin_tiny_patch4_window7_224", 56, img_size=56, depths=(2, 1), embed_dim=32, num_heads=(1, 2)
    ),
    "vit of torchvision": lambda: (
        torchvision.models.VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64),
        (images(),), {},
    ),
    "resnet": lambda: of_timm("resnet10t", 64),
    "Mixtral": lambda: mixture("Mixtral"),
    "DeepSeek-V3": lambda: mixture("DeepSeek-V3"),
    "whisper": lambda: of_transformers(
        "WhisperForConditionalGeneration",
        given={"input_features": torch.randn(2, 16, 40), "decoder_input_ids": tokens()}, num_mel_bins=16, d_model=64,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=96,
        decoder_ffn_dim=96, max_source_positions=20, max_target_positions=32, pad_token_id=0, bos_token_id=0,
        eos_token_id=0, decoder_start_token_id=0,
    ),
    "unet": lambda: of_diffusers(
        "UNet2DModel", torch.randn(2, 3, 8, 8), torch.tensor([3, 7]), given={}, sample_size=8,
        block_out_channels=(16,), layers_per_block=1, norm_num_groups=8, attention_head_dim=8,
        down_block_types=("AttnDownBlock2D",), up_block_types=("AttnUpBlock2D",),
    ),
}  # fmt: skip


def grouped(layers, *, width, hidden, top_k):
    """Return the FLOPs of the experts: each token has ``top_k`` gate, up and down projections."""
    return 2 * math.prod(TOKENS) * top_k * layers * 3 * width * hidden


#: FLOPs that torch's counter does not count, from the equations of the layers.
UNCOUNTED = {
    "Qwen3-MoE": grouped(2, width=64, hidden=48, top_k=2),
    "Mixtral": grouped(2, width=64, hidden=96, top_k=2),
    "GPT-OSS": grouped(2, width=64, hidden=96, top_k=2),
    "DeepSeek-V3": grouped(1, width=64, hidden=48, top_k=2),
    # MKL-DNN's kernel is not counted: in two layers, four gates of 48 units, each with an input and a state.
    "lstm": 2 * math.prod(TOKENS) * 4 * 48 * ((32 + 48) + (48 + 48)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_listed_flops_equal_counted_flops(name):
    torch.manual_seed(0)
    model, args, kwargs = FAMILIES[name]()
    explanation = fp4graph.explain(model, "bf16", args, kwargs)
    # Before torch 2.15 the counter knows the products of attention, but not the CPU's fused attention.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(*args, **kwargs)
    counted = counter.get_total_flops() + UNCOUNTED.get(name, 0)
    assert all(site.flops is not None for site in explanation.sites)
    assert counted > 0
    if name == "lstm" and not models.RESUMES_AFTER_RNN:
        assert re.search(r"torch counts 446976 FLOPs.* listed sites have 0; the others \(head\)", explanation.problem)
        return
    assert explanation.problem is None
    assert sum(site.flops for site in explanation.sites) == pytest.approx(counted, rel=1e-3)
    assert explanation.flops == sum(sum(groups.values()) for groups in explanation.totals.values())


def policy(*ops, **more):
    """Return a policy with a rule for each op, which need not be in the model."""
    quantize = {"element": "e2m1", "block": 8}
    rules = [{"name": op, "match": {"op": op}, "quantize": quantize, "required": False, **more} for op in ops]
    return {"version": 1, "name": "p", "rules": rules}


WEIGHTS, EVERYTHING = policy("linear"), policy("linear", "matmul")
BACKWARD = policy("linear", "matmul", operands={"fprop": "keep"})


@pytest.mark.parametrize("name", long_but(["einsum attention"], ["resnet", "einsum attention"]))
def test_flops_stay_the_same_where_everything_is_quantized(name):
    """The pass writes quantized convolutions and einsums out as products."""
    torch.manual_seed(0)
    model, args, kwargs = FAMILIES[name]()
    explanation = fp4graph.explain(model, policy("linear", "matmul", "sdpa", "conv"), args, kwargs)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*args, **kwargs)
    assert explanation.flops == pytest.approx(counter.get_total_flops(), rel=1e-3)
    assert sum(explanation.totals["quantized"].values()) == explanation.flops


class Called(nn.Module):
    """Calls ``function`` with ``x [4, 8, 16]`` and with a parameter, or None."""

    def __init__(self, function, *shape):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(shape)) if shape else None

    def forward(self, x):
        return self.function(x, self.weight)


def names(explanation):
    return [(site.op, site.quantized) for site in explanation.sites]


WRITTEN_OUT = {
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=([2, 1], [0, 1])), (16, 8, 24), ["linear"]),
    "tensordot, one axis": (lambda x, w: torch.tensordot(x, w, 1), (16, 24), ["linear"]),
    "tensordot, broadcast": (lambda x, w: torch.tensordot(x, w, 1), (1, 24), ["linear"]),
    "inner": (torch.inner, (24, 16), ["linear"]),
    "inner of activations": (lambda x, w: torch.inner(x, x[0]), (), ["matmul"]),
    "multi_dot": (lambda x, w: torch.linalg.multi_dot([x[0], w, w.T, w]), (16, 24), ["linear", "linear", "linear"]),
    "operator": (lambda x, w: torch.ops.aten.linalg_multi_dot([x[0], w, w.T]), (16, 4), ["linear", "linear"]),
    "chain_matmul": (
        lambda x, w: torch.chain_matmul(x[0].T, x[0], w, w.T), (16, 4), ["linear", "matmul", "linear"]  # as (0(12))3
    ),
    "addbmm": (lambda x, w: torch.addbmm(x[0] @ x[1].T, x, x.mT, beta=0.5, alpha=2.0), (), ["matmul", "matmul"]),
    "addbmm method": (lambda x, w: (x[0] @ x[1].T).addbmm(x, x.mT), (), ["matmul", "matmul"]),
    "bilinear": (lambda x, w: nn.functional.bilinear(x, x + 1, w, w[:, 0, 0]), (6, 16, 16), ["linear"]),
    "einsum of three": (lambda x, w: torch.einsum("btd,de,ef->btf", x, w, w.T), (16, 24), ["linear", "linear"]),
    "einsum with ...": (lambda x, w: torch.einsum("... k, kn -> n...", x, w), (16, 24), ["linear"]),
    "einsum of lists": (lambda x, w: torch.einsum(x, [0, 1, 2], w, [2, 30], [30, 0, 1]), (16, 24), ["linear"]),
    "einsum of lists with ...": (lambda x, w: torch.einsum(x, [..., 2], w, [2, 3]), (16, 24), ["linear"]),
    "einsum without ->": (lambda x, w: torch.einsum("zk,kA", x[0], w), (16, 24), ["linear"]),
    "einsum of both": (lambda x, w: torch.einsum("...ik,...jk,...jZ", x, x, x), (), ["matmul", "matmul"]),
    "einsum, factors": (lambda x, w: torch.einsum("btd,t,de->bte", x, x[0, :, 0], w), (16, 24), ["einsum", "linear"]),
    "einsum, operator": (lambda x, w: torch.ops.aten.einsum("btd,de->bte", [x, w], path=None), (16, 24), ["linear"]),
    "einsum, broadcast": (lambda x, w: torch.einsum("btd,bde->bte", x, w), (1, 16, 24), ["linear"]),
    "einsum, broadcast x": (lambda x, w: torch.einsum("btd,bde->bte", x[:1], w), (3, 16, 24), ["linear"]),
    "einsum, broadcast in the sum": (lambda x, w: torch.einsum("btd,tde->be", x, w), (8, 1, 24), ["linear"]),
    "einsum of activations": (lambda x, w: torch.einsum("btd,bsd,bse->bte", x, x, x), (), ["matmul", "matmul"]),
}  # fmt: skip
SHORT = ("tensordot", "inner", "multi_dot", "addbmm", "bilinear", "einsum of three", "einsum of lists with ...",
         "einsum of both", "einsum, factors", "einsum, operator", "einsum, broadcast")  # fmt: skip
UNCOUNTED_FLOPS = {"addbmm": 2 * 4 * 8 * 16 * 8, "bilinear": 2 * 4 * 8 * 6 * 16 * 16}


def output(model, policy, x, stance="default"):
    """Return the output of ``model`` under ``policy``, compiled or operation by operation."""
    with torch.compiler.set_stance(stance):
        y = applied(model, policy)(x)
    fp4graph.remove(model)
    return y


@pytest.mark.parametrize("name", long_but(SHORT, WRITTEN_OUT))
@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated", "ignore:.*runs uncompiled")
def test_an_operation_of_several_products_is_written_out_for_a_rule_that_wants_them(name):
    function, shape, ops = WRITTEN_OUT[name]
    torch.manual_seed(0)
    model, x = Called(function, *shape), torch.randn(4, 8, 16)
    expected = model(x)
    quantized, kept = fp4graph.explain(model, EVERYTHING, (x,)), fp4graph.explain(model, "bf16", (x,))
    assert quantized.problem is None
    assert names(quantized) == [(op, op != "einsum") for op in ops]  # op einsum: the pair has no contraction axis
    assert {site.standing for site in kept.sites} == {"kept"}  # a rule could quantize all of them
    with FlopCounterMode(display=False) as counter:
        model(x)
    counted = counter.get_total_flops() + UNCOUNTED_FLOPS.get(name.partition(" ")[0], 0)
    assert kept.flops == quantized.flops == counted
    # With fprop in high precision the products sum in another order, and else compute the same.
    tolerance = {"rtol": 1e-5, "atol": 1e-5 * expected.abs().max().item()}
    torch.testing.assert_close(output(model, BACKWARD, x), expected, **tolerance)
    assert torch.equal(output(model, "bf16", x), expected)  # torch's own operation runs
    rounded = output(model, EVERYTHING, x)
    assert not torch.allclose(rounded, expected, **tolerance)
    assert torch.equal(rounded, output(model, EVERYTHING, x, "force_eager"))


#: Operations, the names that torch gives their arguments ("" has a position alone), and arguments made of ``x [4, 8,
#: 16]`` and ``w [16, 24]``.
BY_KEYWORD = [
    (nn.functional.linear, "input weight bias", lambda x, w: (x, w.T, w[0])),
    (torch.matmul, "input other", lambda x, w: (x, w)),
    (torch.matmul, "x1 x2", lambda x, w: (x, w)),  # as NumPy does
    (torch.Tensor.matmul, " other", lambda x, w: (x, w)),
    (torch.Tensor.__matmul__, " other", lambda x, w: (x, w)),
    (torch.mm, "input mat2", lambda x, w: (x[0], w)),
    (torch.Tensor.bmm, " mat2", lambda x, w: (x, x.mT)),
    (torch.ops.aten.bmm, "self mat2", lambda x, w: (x, x.mT)),
    (torch.addmm, "input mat1 mat2", lambda x, w: (w[0], x[0], w)),
    (torch.baddbmm, "input batch1 batch2", lambda x, w: (x.mT, x.mT, x[:, :, :8])),
    (torch.Tensor.baddbmm, " batch1 batch2", lambda x, w: (x.mT, x.mT, x[:, :, :8])),
    (torch.tensordot, "a b dims", lambda x, w: (x, w, 1)),
    (torch.inner, "input other", lambda x, w: (x, w.T)),
    (torch.linalg.multi_dot, "tensors", lambda x, w: ([x[0], w, w.T],)),
    (torch.ops.aten.einsum, "equation tensors", lambda x, w: ("btd,de->bte", [x, w])),
    (torch.addbmm, "input batch1 batch2", lambda x, w: (x[0, :, :8], x, x.mT)),
    (nn.functional.bilinear, "input1 input2 weight bias", lambda x, w: (x, x, w.T[:, :, None] * w[0, :16], w[0])),
    (nn.functional.conv1d, "input weight bias", lambda x, w: (x.mT, w.T[..., None], w[0])),
    (nn.functional.scaled_dot_product_attention, "query key value", lambda x, w: (x, x, x)),
    (torch.mv, "input vec", lambda x, w: (x[0], x[0, 0])),
    (torch.addmv, "input mat vec", lambda x, w: (x[0, :, 0], x[0], x[0, 0])),
    (torch.dot, "input tensor", lambda x, w: (x[0, 0], x[0, 0])),
    (torch.vdot, "input other", lambda x, w: (x[0, 0], x[0, 0])),
    (torch.linalg.vecdot, "x y", lambda x, w: (x, x)),
    (torch.outer, "input vec2", lambda x, w: (x[0, 0], x[0, 0])),
    (torch.cdist, "x1 x2", lambda x, w: (x, x)),
]


@uncompiled
def test_a_call_by_keyword_is_read_as_the_call_by_position():
    def by_keyword(x, w):
        results = []
        for operation, names, arguments in BY_KEYWORD:
            named = dict(zip(names.split(" "), arguments(x, w), strict=True))
            results.append(operation(*([named.pop("")] if "" in named else []), **named))
        return results

    def by_position(x, w):
        return [operation(*arguments(x, w)) for operation, _, arguments in BY_KEYWORD]

    x, asked = torch.randn(4, 8, 16), policy("linear", "matmul", "conv", "sdpa")
    sites, outputs = [], []
    for function in (by_position, by_keyword):
        torch.manual_seed(0)
        model = Called(function, 16, 24)
        for name in ("bf16", asked):
            sites.append(
                [
                    (site.op, site.quantized, site.shapes, site.flops)
                    for site in fp4graph.explain(model, name, (x,)).sites
                ]
            )
        outputs += [output(model, asked, x, stance) for stance in ("default", "force_eager")]
    assert sites[:2] == sites[2:]
    assert all(flops is not None for *_, flops in sites[0])
    for other in outputs[1:]:
        assert all(map(torch.equal, outputs[0], other))


#: Calls of addmm and baddbmm with an alpha or beta of a size that changes.
OF_SIZES = {
    "a size": (lambda x, w: torch.addmm(w[0], x, w, alpha=x.shape[0]), (16, 24)),
    "its root": (lambda x, w: torch.addmm(w[0], x, w, beta=0.5, alpha=x.shape[0] ** -0.5), (16, 24)),
    "beta": (lambda x, w: torch.addmm(w[0], x, w, beta=x.shape[0], alpha=2.0), (16, 24)),
    "the weight first": (lambda x, w: torch.addmm(w[:, :1], w, x.mT, alpha=x.shape[0]), (24, 16)),
    "activations": (lambda x, w: torch.baddbmm(x[None] @ x.mT, x[None], x.mT[None], alpha=1 / x.shape[0]), ()),
}


@uncompiled
@pytest.mark.parametrize("name", OF_SIZES)
def test_a_product_may_be_scaled_by_a_size_that_changes(name):
    function, shape = OF_SIZES[name]
    torch.manual_seed(0)
    model, batches = Called(function, *shape), [torch.randn(n, 16).requires_grad_() for n in (4, 5, 6, 7)]
    results = []
    for stance in ("default", "force_eager"):
        applied(model, EVERYTHING)
        with torch.compiler.set_stance(stance):
            outputs = [model(x) for x in batches]
        results.append([*outputs, *torch.autograd.grad(sum(y.square().sum() for y in outputs), batches)])
        assert all(site.quantized for site in runtime_of(model).sites)
        fp4graph.remove(model)
    assert all(map(torch.equal, *results))


@uncompiled
@stances
@pytest.mark.parametrize("equation", ["ed,btd->bte", "btd,ed->tbe", "btd,ed->bet", "btd,ed->bte"])
def test_the_result_of_an_einsum_is_contiguous_where_torchs_is(equation, stance):
    order = equation.startswith("ed")
    model = Called(lambda x, w: torch.einsum(equation, *((w, x) if order else (x, w))), 24, 16)
    x = torch.randn(4, 8, 16)
    assert output(model, EVERYTHING, x, stance).is_contiguous() == model(x).is_contiguous()


def test_without_opt_einsum_the_products_of_an_einsum_go_from_left_to_right():
    """torch multiplies in this order too, and not in that of fewest FLOPs."""
    torch.manual_seed(0)
    model = Called(lambda x, w: torch.einsum("btd,de,ef,fg->btg", x, w, w.T, w), 16, 24)
    x = torch.randn(4, 8, 16)
    with torch.backends.opt_einsum.flags(enabled=False):
        explanation = fp4graph.explain(model, WEIGHTS, (x,))
        expected = model(x)
        torch.testing.assert_close(output(model, BACKWARD, x), expected)
    assert names(explanation) == [("linear", True)] * 3
    assert explanation.flops == 3 * 2 * 4 * 8 * 16 * 24


@uncompiled
@stances
@pytest.mark.parametrize("name", long_but(SHORT, WRITTEN_OUT))
@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
def test_what_is_written_out_has_torchs_dtype_under_autocast(name, stance):
    function, shape, _ = WRITTEN_OUT[name]
    model, x = Called(function, *shape), torch.randn(4, 8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert output(model, EVERYTHING, x, stance).dtype is model(x).dtype


@uncompiled
@stances
def test_an_einsum_under_autocast_takes_operands_of_two_dtypes(stance):
    model, x = Called(lambda x, w: torch.einsum("btd,de->bte", x, w), 16, 24), torch.randn(4, 8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = output(model, EVERYTHING, x.bfloat16(), stance)
        assert torch.equal(y, output(model, EVERYTHING, x.bfloat16().float(), stance))


def test_a_tensordot_that_sums_all_of_an_operand_is_not_written_out():
    for function in (lambda x, w: torch.tensordot(x, w, ([1, 2], [0, 1])), lambda x, w: torch.tensordot(w, x[0])):
        explanation = fp4graph.explain(Called(function, 8, 16), EVERYTHING, (torch.randn(4, 8, 16),))
        assert names(explanation) == [("tensordot", False)]
        assert "tensordot multiplies with a parameter in a way that cannot be quantized yet" in explanation.problem


@torch.library.custom_op("fp4graph_tests::twice", mutates_args=())
def product_of_a_library(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@product_of_a_library.register_fake
def _(a, b):
    return a @ b


@register_flop_formula(torch.ops.fp4graph_tests.twice)
def _(a, b, *args, **kwargs):
    return 2 * a[0] * a[1] * b[1]


@uncompiled
@stances
def test_an_operation_that_only_the_counter_knows_is_an_error_until_a_rule_keeps_it(stance):
    """The factors are activations, which no rule of the policy would quantize."""
    model, x = nn.Sequential(nn.Linear(16, 16), Called(lambda x, _: product_of_a_library(x, x.mT))), torch.randn(4, 16)
    explanation = fp4graph.explain(model, WEIGHTS, (x,))
    assert names(explanation) == [("linear", True), ("twice", False)]
    assert "1: twice multiplies matrices" in explanation.problem
    with pytest.raises(fp4graph.CaptureError, match=r"^1: twice .*does not know this operation.*a rule before"):
        output(model, WEIGHTS, x, stance)
    kept = policy("linear")
    kept["rules"].insert(0, {"name": "kept", "match": {"module": "1"}, "keep": "not yet"})
    assert output(model, kept, x, stance).shape == (4, 4)
    found = fp4graph.explain(model, kept, (x,)).sites[1]
    assert (found.reason, found.rule_index, found.standing) == ("not yet", 0, "kept")
    assert found.shapes == ((4, 16), (16, 4))
    assert output(model, "bf16", x, stance).shape == (4, 4)


def taught(monkeypatch, read):
    """Let a plugin read calls of ``fp4graph_tests::twice``."""
    plugin = offering(products=[ProductOperation("fp4graph_tests::twice", read)])
    found = Registry([("its plugin", plugin)], entry_point_group=None)
    monkeypatch.setattr(operations, "default_registry", lambda: found)


@torch.library.custom_op("fp4graph_tests::and_add", mutates_args=())
def product_and_sum_of_a_library(a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    return a @ b + addend


@product_and_sum_of_a_library.register_fake
def _(a, b, addend):
    return a @ b + addend


def taught_addition(monkeypatch):
    read = partial(Factors, form="matmul")
    operation = ProductOperation("fp4graph_tests::and_add", lambda a, b, addend: read(a, b, addend=addend))
    found = Registry([("its plugin", offering(products=[operation]))], entry_point_group=None)
    monkeypatch.setattr(operations, "default_registry", lambda: found)


@uncompiled
@stances
@pytest.mark.parametrize("form", ["matmul", "linear"])
def test_a_plugin_teaches_the_pass_an_operation(monkeypatch, form, stance):
    x, same = torch.randn(16, 16), {"matmul": torch.matmul, "linear": nn.functional.linear}[form]
    expected = output(Called(lambda x, _: same(x, x.mT)), EVERYTHING, x)
    taught(monkeypatch, lambda a, b: Factors(a, b, form))
    model = Called(lambda x, _: product_of_a_library(x, x.mT))
    (found,) = fp4graph.explain(model, EVERYTHING, (x,)).sites
    assert (found.op, found.quantized, found.flops) == (form, True, 2 * 16**3)
    assert torch.equal(output(model, EVERYTHING, x, stance), expected)


#: The addends of a product with ``x [2, 4, 16]``.
ADDENDS = [(2, 4, 16), (4, 16), (1, 1, 16), (2, 1, 16), (4, 1), (1, 16), (16,), ()]


@uncompiled
@stances
@pytest.mark.parametrize("shape", ADDENDS, ids=str)
def test_a_plugin_may_add_a_tensor_that_broadcasts_to_the_product(monkeypatch, shape, stance):
    """A fused linear layer adds the residual stream."""
    x, addend = torch.randn(2, 4, 16), torch.randn(shape).requires_grad_()
    taught_addition(monkeypatch)
    model = Called(lambda x, w: product_and_sum_of_a_library(x, w, addend), 16, 16)
    y = output(model, EVERYTHING, x, stance)
    model.function = torch.matmul
    without = output(model, EVERYTHING, x, stance)
    torch.testing.assert_close(y, without + addend)
    dy = torch.randn_like(y)
    torch.testing.assert_close(*(torch.autograd.grad(z, addend, dy)[0] for z in (y, without.detach() + addend)))


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda a, b: 3, "TypeError: read.. must return Factors; got 3"),
        (lambda a, b: Factors(a, None), "TypeError: a, b and addend"),
        (lambda a: a, "TypeError: .*takes 1 positional argument"),
        (lambda a, b: Factors(a, b, "conv"), "ValueError: form is"),
        (lambda a, b: Factors(a, b, alpha=b), "TypeError: alpha and beta"),
    ],
)
def test_an_error_in_a_reader_of_a_plugin_names_the_plugin(monkeypatch, read, message):
    taught(monkeypatch, read)
    model = Called(lambda x, _: product_of_a_library(x, x.mT))
    with pytest.raises(fp4graph.PluginError, match=rf"plugin 'its plugin': .*fp4graph_tests::twice.*{message}"):
        fp4graph.explain(model, EVERYTHING, (torch.randn(4, 16),))


def test_the_table_has_every_operation_of_torchs_counter():
    """So an operation that only the counter knows is of another library, or new in torch."""
    forward = [op for op in flop_registry if "backward" not in str(op)]
    of_torch = [op for op in forward if isinstance(op, torch._ops.HigherOrderOperator) or str(op).startswith("aten.")]
    assert len(of_torch) > 10
    assert [op for op in of_torch if op not in operations.TABLE] == []


REASONS = {
    "complex": (lambda x, w: torch.view_as_complex(x.unflatten(-1, (8, 2))) @ torch.complex(w, w), (8, 8), "complex"),
    "integers": (lambda x, w: x[0].int() @ x[0].int().T, (), "not floating point"),
    "vector": (lambda x, w: x[0] @ x[0, 0], (), "a matrix-vector product"),
    "outer": (lambda x, w: torch.outer(x[0, 0], x[0, 1]), (), "no contraction axis"),
    "distances": (lambda x, w: torch.cdist(x, w), (8, 16), "distances are kept"),
    "linear algebra": (lambda x, w: torch.linalg.matrix_power(x @ x.mT, 2), (), "linear algebra is kept"),
    "a rule could": (lambda x, w: nn.functional.conv1d(x, w), (6, 8, 3), "kept in high precision unless a rule"),
    "convolution": (lambda x, w: nn.functional.conv_transpose1d(x, w), (8, 6, 3), "convolutions are kept"),
    "2-D convolution": (lambda x, w: nn.functional.conv_transpose2d(x, w), (4, 6, 3, 3), "convolutions are kept"),
    "3-D convolution": (lambda x, w: nn.functional.conv_transpose3d(x[None], w), (1, 6, 3, 3, 3), "convolutions are"),
    "deprecated": (lambda x, w: torch.addmm(0.5, x[0, :, :8], x[1], x[2].T), (), "that torch deprecates"),
    "in place": (lambda x, w: torch.zeros(8, 8).addmm_(x[0], x[1].T), (), "writes in place"),
    "int_mm": (lambda x, w: torch._int_mm(x.flatten(0, 1).char(), x.flatten(0, 1).char().T), (), "quantized already"),
}


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.filterwarnings("ignore:This overload of addmm is deprecated")
def test_an_operation_that_is_not_quantized_is_listed_with_the_reason(name):
    function, shape, reason = REASONS[name]
    explanation = fp4graph.explain(Called(function, *shape), EVERYTHING, (torch.randn(4, 8, 16),))
    standings = {site.standing for site in explanation.sites if reason in site.reason}
    assert standings == {"kept" if name == "a rule could" else "not supported"}


#: Products of x [8, 16] and a parameter [8, 16], one of which is sparse. Dynamo compiles none of them.
SPARSE = {
    "mm": lambda x, w: torch.sparse.mm(w.to_sparse(), x.mT),
    "mm of sparse tokens": lambda x, w: torch.sparse.mm(x.to_sparse(), w.mT),
    "addmm": lambda x, w: torch.sparse.addmm(x @ x.mT, w.to_sparse_coo(), x.mT),
    "sampled_addmm": lambda x, w: torch.sparse.sampled_addmm(torch.eye(8).to_sparse_csr(), x, w.mT).to_dense(),
    "operator": lambda x, w: w.to_sparse_csr() @ x.mT,
    "linear": lambda x, w: nn.functional.linear(x, w.to_sparse()),
}


@uncompiled
@stances
@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_product_with_a_parameter_is_an_error_until_a_rule_keeps_it(name, stance):
    model, x = nn.Sequential(nn.Linear(16, 16), Called(SPARSE[name], 8, 16)), torch.randn(8, 16)
    kept = policy("linear")
    with pytest.raises(fp4graph.CaptureError, match=r"^1: .*sparse.*to_dense.*match: \{module: '1'\}"):
        output(model, WEIGHTS, x, stance)
    kept["rules"].insert(0, {"match": {"module": "1"}, "keep": "sparse", "required": False})
    assert output(model, kept, x, stance).shape == (8, 8)


def test_the_forward_of_an_autograd_function_is_counted_once():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w.mT, x.flatten(0, 1).mT @ grad.flatten(0, 1)

    explanation = fp4graph.explain(Called(Product.apply, 16, 24), "bf16", (torch.randn(4, 8, 16, requires_grad=True),))
    assert explanation.flops == 2 * 4 * 8 * 16 * 24


def test_explain_refuses_a_forward_that_depends_on_values():
    model = Called(lambda x, w: x[(x > 0).any(-1)] @ w, 16, 8)
    with pytest.raises(fp4graph.CaptureError, match=r"depends on the values of tensors .*set_experts_implementation"):
        fp4graph.explain(model, "bf16", (torch.randn(4, 8, 16),))


RECURRENT = pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])


@uncompiled
@RECURRENT
def test_a_recurrent_layer_is_listed_also_where_nothing_is_compiled(kind, gates):
    model, x = nn.Sequential(nn.Linear(16, 16), getattr(nn, kind)(16, 24)), torch.randn(4, 8, 16)
    explanation = fp4graph.explain(model, EVERYTHING, (x,))
    with torch.compiler.set_stance("force_eager"):
        applied(model, EVERYTHING)(x)
    for sites in (explanation.sites, runtime_of(model).sites):
        listed = [(site.module, site.op, site.flops) for site in sites]
        assert listed == [("0", "linear", 2 * 32 * 16 * 16), ("1", "recurrent", 2 * 32 * gates * 24 * (16 + 24))]
    assert "not supported" in str(explanation)


@RECURRENT
def test_the_cells_of_recurrent_layers_are_listed(kind, gates):
    explanation = fp4graph.explain(getattr(nn, f"{kind}Cell")(16, 24), "bf16", (torch.randn(4, 16),))
    assert [(site.op, site.flops) for site in explanation.sites] == [("recurrent", 2 * 4 * gates * 24 * (16 + 24))]
    assert explanation.totals["not supported"] == {"recurrent layers": explanation.flops}


@pytest.mark.parametrize("blocks", [4, pytest.param(32, marks=pytest.mark.long)])
def test_repeated_blocks_share_lines(blocks):
    explanation = fp4graph.explain(models.llama(num_hidden_layers=blocks), "nvfp4-te", (tokens(),))
    assert len(explanation.sites) == blocks * 8 + 1
    text, every = str(explanation), explanation.table(every=True)
    assert len(text.splitlines()) < 40  # a screen
    assert f"layers.1-{blocks - 2}.self_attn.q_proj" in text  # the first and the last block are kept
    assert "layers.0.self_attn.q_proj" in text
    assert f"layers.0-{blocks - 1}.self_attn " in text  # the fused attention
    assert "layers.1.self_attn.q_proj" in every
    assert "layers.1.self_attn.q_proj" not in text


def site(module, **changes):
    return dataclasses.replace(Site(module, "linear", ((2, 3), (3, 4)), None, "", {}, False, flops=48), **changes)


@pytest.mark.parametrize(
    ("modules", "lines"),
    [
        (["a.0.b", "a.1.b", "a.3.b"], ["a.0-1,3.b"]),
        (["s.0.1.x", "s.0.2.x", "s.1.1.x", "s.1.2.x"], ["s.0-1.1-2.x"]),
        (["s.0.0.x", "s.0.1.x", "s.1.0.x"], ["s.0.0-1.x", "s.1.0.x"]),
        (["layer_2.fc", "layer_10.fc"], ["layer_2,10.fc"]),
        (["", None, "conv1", "conv2"], ["(root)", "-", "conv1", "conv2"]),
        (["a.0", "a.0", "a.1", "a.1"], ["a.0-1", "a.0-1"]),
    ],
)
def test_lines_join_names_that_differ_in_numbers(modules, lines):
    sites = [site(module) for module in modules]
    folded = census.folded(sites)
    assert [name for name, _ in folded] == lines
    assert sorted(id(one) for _, joined in folded for one in joined) == sorted(map(id, sites))


@pytest.mark.parametrize(
    "changes", [{"op": "matmul"}, {"shapes": ((2, 3), (3, 5))}, {"rule": "r"}, {"reason": "why"}, {"quantized": True}]
)
def test_lines_join_only_sites_that_agree_in_all_else(changes):
    assert len(census.folded([site("a.0"), site("a.1")])) == 1
    assert len(census.folded([site("a.0"), site("a.1", **changes)])) == 2


def test_the_summary_has_shares_of_flops():
    sites = [
        site("b.0", quantized=True, rule="blocks", flops=870),
        site("head", flops=60),
        site("b.0.router", rule="router", rule_index=1, flops=30),
        site("b.0", op="sdpa", flops=20),
        site("patch", op="conv", supported=False, flops=20),
        site("x", op="thing", supported=False, flops=None),
    ]
    assert census.summary(sites) == (
        "quantized: 87 % of forward matmul FLOPs; kept: 11 % (head, router, attention); "
        "not supported: 2 % (convolutions); sites of unknown FLOPs: 1"
    )
    assert [census.percent(*pair) for pair in ((0, 5), (1, 1000), (999, 1000), (5, 5))] == [
        "0 %", "<1 %", ">99 %", "100 %"
    ]  # fmt: skip


@uncompiled
@stances
@pytest.mark.parametrize(
    ("product", "shape"),
    [(lambda y, w: y.new_zeros(8, 8).addmm_(y, w.T), (8, 16)), (lambda y, _: product_of_a_library(y, y.mT), ())],
    ids=["in place", "activations"],
)
def test_the_rule_that_an_error_advises_keeps_a_product_of_the_root(product, shape, stance):
    root, x = Called(lambda x, w: product(root.body(x), w), *shape), torch.randn(8, 16)
    root.body = nn.Linear(16, 16)
    data = policy("linear")
    with pytest.raises(fp4graph.CaptureError, match=r"match: \{module: ''\}"):
        output(root, data, x, stance)
    fp4graph.remove(root)
    data["rules"].insert(0, {"match": {"module": ""}, "keep": "not quantized yet"})
    assert output(root, data, x, stance).shape == (8, 8)


def test_brackets_and_colons_of_names_and_reasons_are_shown_as_they_are() -> None:
    policy = one_rule() | {"rules": [{"name": "[head] :fire:", "match": {"module": "1"}, "keep": "see [/b]"}]}
    policy["rules"] += one_rule()["rules"]
    text = str(fp4graph.explain(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), policy, torch.randn(2, 32)))
    assert "[head] :fire:" in text
    assert "see [/b]" in text
