"""An applied model: what it computes, what it keeps, and how it is undone."""

from __future__ import annotations

import copy
import zlib
from functools import partial

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import fp4graph
from fp4graph.graph.functions import site_function
from fp4graph.model.runtime import runtime_of
from fp4graph.numerics import noise
from tests.helpers.models import Mlp, module_of
from tests.helpers.policies import MXFP4, NVFP4, one_rule
from tests.helpers.sites import program_of
from tests.helpers.training import applied, assert_equal, gradients, prepared

X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
perceptron = partial(Mlp, 32, 48, 32)


def stepped(model, *args):
    model.zero_grad()
    model(*args).square().mean().backward()
    return gradients(model)


@pytest.mark.slow
def test_deit_tiny_has_48_sites_in_one_graph_and_keeps_its_state_dict():
    model = timm.create_model("deit_tiny_patch16_224")
    kind, before = type(model), copy.deepcopy(model.state_dict())
    explanation = fp4graph.explain(model, "tetrajet", (torch.empty(2, 3, 224, 224),))
    assert (explanation.quantized, explanation.graphs, explanation.problem) == (48, 1, None)
    assert "<td" in explanation._repr_html_()
    kept = {(site.module, site.op): site.reason for site in explanation.sites if not site.quantized}
    attention = {(f"blocks.{i}.attn", "sdpa") for i in range(12)}
    assert set(kept) == {("patch_embed.proj", "conv"), ("head", "linear"), *attention}
    assert all(kept.values())
    assert model.state_dict().keys() == before.keys()
    with torch.no_grad():
        applied(model, "tetrajet")(torch.randn(1, 3, 224, 224))
    assert sum(site.quantized for site in runtime_of(model).sites) == 48
    assert runtime_of(model).capture.graphs == 1
    after = fp4graph.strip(model.state_dict())
    assert after.keys() == before.keys()
    assert_equal(after.values(), before.values())
    assert type(model) is kind
    model.load_state_dict(before, strict=True)


def test_an_explanation_shows_names_and_reasons_as_the_policy_writes_them():
    rule = {"name": "[wide] first", "match": {"module": "*"}, "keep": "[table 3] loss :warning: grows"}
    policy = {"version": 1, "name": "[a]", "default": "keep", "rules": [rule]}
    text = str(fp4graph.explain(nn.Linear(32, 32), policy, (X,)))
    for words in ("[a]: 0 of 1 sites", "[wide] first", "[table 3] loss :warning: grows"):
        assert words in text


@pytest.mark.slow
def test_noise_repeats_under_one_seed_and_differs_by_seed_and_forward():
    models = [applied(perceptron(), "tetrajet", seed=seed) for seed in (1, 1, 2)]
    a, b, c = (stepped(model, X) for model in models)
    assert_equal(a, b)
    assert not torch.equal(a[0], c[0])
    with torch.no_grad():
        models[0](X)  # without gradients: not counted, as an evaluation is not
        models[0].eval()(X)
    assert not torch.equal(a[0], stepped(models[0].train(), X)[0])
    assert int(models[0]._fp4graph_forwards) == 2


@pytest.mark.slow
def test_two_forwards_before_their_backwards_keep_their_own_noise():
    model, other = (applied(perceptron(), "tetrajet", backend="aot_eager") for _ in range(2))
    alone = [stepped(model, X) for _ in range(2)]
    losses = [other(X).square().mean() for _ in range(2)]
    for loss, expected in zip(losses, alone, strict=True):
        other.zero_grad()
        loss.backward()
        assert_equal(gradients(other), expected)


@pytest.mark.long
@pytest.mark.slow
def test_dynamic_batch_sizes_do_not_recompile_without_end(vit):
    model = applied(vit(), "tetrajet", backend="aot_eager")
    for batch in (2, 3, 5, 7, 8, 11, 16):
        model(torch.randn(batch, 3, 32, 32)).sum().backward()
    assert len(runtime_of(model).sites) / 12 <= 3  # each capture lists 12 sites


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["tetrajet", "tetrajet-qema"])
def test_bypass_and_remove_give_the_plain_model(vit, images, policy):
    model, plain = vit().eval(), vit().eval()
    with torch.no_grad():
        exact = plain(images)
        quantized = applied(model, policy)(images)
        assert not torch.equal(exact, quantized)
        with fp4graph.bypass(model):
            assert torch.equal(model(images), exact)
            assert torch.equal(model.forward_head(model.forward_features(images)), exact)
        assert torch.equal(model(images), quantized)
        fp4graph.remove(model)
        assert torch.equal(model(images), exact)
        assert torch.equal(model.forward(images), exact)
    assert [m.__dict__.keys() for m in model.modules()] == [m.__dict__.keys() for m in plain.modules()]
    assert dict(model.named_buffers()).keys() == dict(plain.named_buffers()).keys()
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert not any(m._forward_pre_hooks or m._compiled_call_impl for m in model.modules())
    with pytest.raises(fp4graph.Error, match="not applied"):
        fp4graph.remove(model)


def test_removing_gives_a_bare_layer_its_forward_back():
    model = applied(nn.Linear(32, 32), "tetrajet")
    assert "forward" in model.__dict__
    assert "forward" not in fp4graph.remove(model).__dict__


def test_a_forward_that_was_set_on_a_bare_layer_runs_under_a_policy_and_afterwards():
    model = nn.Linear(32, 32)
    forward = model.forward
    model.forward = lambda x: forward(x) + 1
    before = model(X)
    assert torch.equal(applied(model, "bf16")(X), before)
    quantized = applied(nn.Linear(32, 32), one_rule())
    quantized.load_state_dict(model.state_dict())
    applied(model, one_rule())
    for each in (model, copy.deepcopy(model)):
        assert torch.equal(each(X), quantized(X) + 1)
        assert torch.equal(fp4graph.remove(each)(X), before)


def test_removing_from_a_model_removes_the_policies_of_its_parts():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    before = model(X)
    applied(model[0], one_rule())
    applied(model[1], "bf16")
    assert fp4graph.remove(model) is model
    assert torch.equal(model(X), before)
    assert runtime_of(model[0]) is runtime_of(model[1]) is None


@pytest.mark.long
@pytest.mark.slow
def test_several_applied_models_do_not_disturb_each_other(vit, images):
    policies = ["tetrajet", "microscaling", "mxfp4", "nvfp4", "bf16"]
    alone = [stepped(applied(vit(), policy), images) for policy in policies]
    # 10 models: more than the recompile limit of 8.
    models = [applied(vit(), policy) for policy in policies * 2]
    for i, model in enumerate(models):
        assert_equal(stepped(model, images), alone[i % 5])


class Broken(nn.Module):
    """Two linears with a graph break, the first used before and after it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, broken=True):
        x = self.a(x)
        if broken:
            torch._dynamo.graph_break()
        return self.b(self.a(x))


def last(model, *calls):
    """Return the outputs and a gradient of the last call. Earlier calls have no gradients, so they are not counted."""
    for call in calls[:-1]:
        with torch.no_grad():
            model(X, call)
    y = model(X, calls[-1])
    y = [y] if isinstance(y, torch.Tensor) else y
    sum(each.square().sum() for each in y).backward()
    return [*(each.detach() for each in y), model.a.weight.grad]


@pytest.mark.slow
@pytest.mark.parametrize("broken", [[True], [False, True], [True, False], [False, True, False, True]])
def test_a_graph_break_changes_no_noise_whatever_ran_before(broken):
    """In TRL, a training step has graph breaks that a generation does not have; both must draw the same noise."""
    model = applied(Broken(), "tetrajet")
    assert_equal(last(model, *broken), last(applied(Broken(), "tetrajet"), False))
    assert {(s.module, s.occurrence) for s in runtime_of(model).sites} == {("a", 0), ("a", 1), ("b", 0)}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=[pytest.mark.long, pytest.mark.inductor])])
def test_graphs_that_were_captured_apart_draw_apart(backend):
    """Each graph stores the occurrences of its sites. A graph that is captured without the earlier graphs of its
    forward counts from zero too, and must still draw other noise than they do."""

    class Early(Broken):
        def forward(self, x, early):
            first = [self.a(x)] if early else []
            torch._dynamo.graph_break()
            return [*first, self.a(x), self.b(x)]

    class Loop(Broken):  # Dynamo compiles part() as a frame of its own, whose graph runs several times in a forward
        def part(self, x):
            y = self.a(x)
            torch._dynamo.graph_break()
            return y.clone()

        def forward(self, x, count):
            torch._dynamo.graph_break()
            return [self.part(x) for _ in range(count)]

    options = {"policy": one_rule(quantize=NVFP4 | {"rounding": "stochastic"}), "backend": backend, "seed": 0}
    early = last(applied(Early(), **options), False, True)
    assert not torch.equal(early[0], early[1])  # the same input, weight and module
    assert_equal(last(applied(Early(), **options), False, True), early)
    *outputs, _ = last(applied(Loop(), **options), 3)
    # Rounding errors of products that draw apart are not correlated.
    exact = Loop().a(X).detach()
    errors = torch.stack([(each - exact).flatten() for each in outputs])
    assert torch.corrcoef(errors).triu(1).abs().max() < 0.3


@pytest.mark.slow
def test_autocast_trains(vit, images):
    model = applied(vit(), "tetrajet", backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        y = model(images)
    y.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_noise_of_a_site_is_a_function_of_its_name(vit):
    key = applied(vit(), "tetrajet").blocks[1].mlp.fc2._fp4graph_key
    assert torch.equal(key, noise.make_key("site", "blocks.1.mlp.fc2"))


@pytest.mark.slow
@pytest.mark.parametrize("first", ["apply", "compile"])
def test_the_result_of_torch_compile_stands_for_the_model_inside(first):
    policy = one_rule(match={"module": "first"})
    expected = applied(perceptron(), policy)(X)
    model = perceptron() if first == "compile" else applied(perceptron(), policy)
    compiled = torch.compile(model, backend="aot_eager")
    if first == "compile":
        assert not torch.equal(compiled(X), expected)
        assert applied(compiled, policy) is compiled
    optimizer = prepared(compiled, torch.optim.SGD)
    assert_equal([compiled(X)], [expected])
    compiled(X).sum().backward()
    optimizer.step()
    assert runtime_of(compiled).count == 2
    assert model.state_dict().keys() == perceptron().state_dict().keys()
    fp4graph.remove(compiled)
    assert runtime_of(model) is None


@pytest.mark.parametrize("before", ["tetrajet", "tetrajet-qema"])
def test_state_starts_at_the_weights_of_the_first_forward_after_applying_again(before):
    model = applied(applied(perceptron(), before), "tetrajet-qema")
    with torch.no_grad():
        model.first.weight.add_(1)
    model(X)
    assert torch.equal(model.first._fp4graph_q_ema_weight, model.first.weight)


STOCHASTIC = one_rule(quantize=MXFP4 | {"rounding": "stochastic"}, operands={"backward": "keep"})


def test_the_noise_of_a_second_weight_has_the_salt_of_its_name():
    """The salt is CRC-32 of ``name#occurrence``, 30 bits of it, made odd. It must stay: seeded runs repeat in later
    versions."""
    weights = {name: nn.Parameter(torch.randn(48, 32)) for name in ("a_weight", "b_weight")}
    model = module_of(lambda self, x: (F.linear(x, self.a_weight), F.linear(x, self.b_weight)), **weights)
    _, y = applied(model, STOCHASTIC, seed=3)(X)
    salt = zlib.crc32(b"b_weight#1") & 0x3FFFFFFF | 1
    product = site_function(program_of(STOCHASTIC, "linear", 32, 48), "linear", 1.0, 1.0)
    assert torch.equal(y, product(X, model.b_weight, None, model._fp4graph_key, noise.make_step(3, 0, 0), salt))


def test_ranks_draw_different_noise_before_they_join_a_process_group(monkeypatch):
    def output():
        torch.manual_seed(0)
        return applied(perceptron(), STOCHASTIC)(X)

    alone = output()
    monkeypatch.setenv("RANK", "0")
    assert torch.equal(output(), alone)
    monkeypatch.setenv("RANK", "1")
    assert not torch.equal(output(), alone)
