"""An applied model: what it computes, what it keeps, and how it is undone."""

from __future__ import annotations

import copy
import io

import pytest
import timm
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp4graph
from fp4graph.model.runtime import runtime_of
from fp4graph.numerics import noise
from tests.helpers.policies import NVFP4, one_rule


def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_deit_tiny_has_48_sites_in_one_graph_and_keeps_its_state_dict():
    model = timm.create_model("deit_tiny_patch16_224")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    explanation = fp4graph.explain(model, "tetrajet", (torch.empty(2, 3, 224, 224),))
    assert explanation.quantized == 48
    assert explanation.graphs == 1
    assert explanation.problem is None
    kept = {(site.module, site.op): site.reason for site in explanation.sites if not site.quantized}
    assert set(kept) == {
        ("patch_embed.proj", "conv"),
        ("head", "linear"),
        *((f"blocks.{i}.attn", "sdpa") for i in range(12)),
    }
    assert all(kept.values())
    assert model.state_dict().keys() == before.keys()

    fp4graph.apply(model, "tetrajet", backend="eager")
    with torch.no_grad():
        model(torch.randn(1, 3, 224, 224))
    runtime = runtime_of(model)
    assert sum(site.quantized for site in runtime.sites) == 48
    assert runtime.capture.graphs == 1
    after = fp4graph.strip(model.state_dict())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert type(model) is type(timm.create_model("deit_tiny_patch16_224"))
    model.load_state_dict(before, strict=True)
    timm.create_model("deit_tiny_patch16_224").load_state_dict(fp4graph.strip(model.state_dict()), strict=True)


@pytest.mark.slow
def test_eager_and_aot_eager_agree_to_the_bit(vit, images):
    results = []
    for backend in ("eager", "aot_eager"):
        model = fp4graph.apply(vit(), "tetrajet", backend=backend)
        results.append(gradients(model, images))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.slow
def test_a_seed_repeats_and_another_differs(vit, images):
    a, b, c = (gradients(fp4graph.apply(vit(), "tetrajet", backend="eager", seed=s), images) for s in (1, 1, 2))
    name = "blocks.0.attn.qkv.weight"
    assert torch.equal(a[name], b[name])
    assert not torch.equal(a[name], c[name])


@pytest.mark.slow
def test_every_forward_with_gradients_draws_anew_and_evaluation_does_not_count(vit, images):
    model = fp4graph.apply(vit(), "tetrajet", backend="eager")
    first = gradients(model, images)
    with torch.no_grad():
        model(images)
        model.eval()(images)
    model.train()
    assert int(model._fp4graph_forwards) == 1
    second = gradients(model, images)
    assert int(model._fp4graph_forwards) == 2
    assert not torch.equal(first["blocks.0.mlp.fc1.weight"], second["blocks.0.mlp.fc1.weight"])


@pytest.mark.slow
def test_two_forwards_before_one_backward(vit, images):
    model = fp4graph.apply(vit(), "tetrajet", backend="aot_eager")
    alone = []
    for _ in range(2):
        alone.append(gradients(model, images))
    again = fp4graph.apply(vit(), "tetrajet", backend="aot_eager")
    losses = [again(images).square().mean() for _ in range(2)]
    for loss, expected in zip(losses, alone, strict=True):
        again.zero_grad()
        loss.backward()
        assert torch.equal(again.blocks[1].mlp.fc2.weight.grad, expected["blocks.1.mlp.fc2.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
def test_checkpointed_gradients_are_the_plain_ones_to_the_bit(vit, images, backend):
    plain = gradients(fp4graph.apply(vit(), "tetrajet-qema", backend=backend), images)
    model = vit()
    model.set_grad_checkpointing(True)
    checkpointed = gradients(fp4graph.apply(model, "tetrajet-qema", backend=backend), images)
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    assert sum(site.quantized for site in runtime_of(model).sites) == 8


@pytest.mark.slow
def test_dynamic_batch_sizes_do_not_recompile_without_end(vit):
    model = fp4graph.apply(vit(), "tetrajet", backend="aot_eager")
    for batch in (2, 3, 5, 7, 8, 11, 16):
        model(torch.randn(batch, 3, 32, 32)).sum().backward()
    assert len(runtime_of(model).sites) / 12 <= 3  # 12 places of matrix work per capture: static, dynamic, no more


def test_evaluation_runs_quantized(vit, images):
    model = vit().eval()
    with torch.no_grad():
        plain = model(images)
        quantized = fp4graph.apply(model, "tetrajet", backend="eager")(images)
        assert not torch.equal(plain, quantized)
        with fp4graph.bypass(model):
            assert torch.equal(model(images), plain)
            assert torch.equal(model.forward_head(model.forward_features(images)), plain)
        assert torch.equal(model(images), quantized)


def test_remove_restores_the_model(vit, images):
    model = vit()
    before = list(model.__dict__), list(model.state_dict()), model(images)
    fp4graph.remove(fp4graph.apply(model, "tetrajet-qema", backend="eager"))
    assert (list(model.__dict__), list(model.state_dict())) == before[:2]
    assert torch.equal(model(images), before[2])
    assert not any(m._forward_pre_hooks for m in model.modules())
    with pytest.raises(fp4graph.Error, match="not applied"):
        fp4graph.remove(model)


@pytest.mark.slow
def test_applying_again_replaces_the_policy(vit, images):
    model = fp4graph.apply(vit(), "tetrajet-qema", backend="eager")
    model(images)
    fp4graph.apply(model, "microscaling", backend="eager")
    expected = gradients(fp4graph.apply(vit(), "microscaling", backend="eager"), images)
    got = gradients(model, images)
    assert all(torch.equal(got[name], expected[name]) for name in got)
    assert not [key for key in model.state_dict() if "q_ema" in key]


@pytest.mark.long
@pytest.mark.slow
def test_several_applied_models_do_not_disturb_each_other(vit, images):
    policies = ["tetrajet", "microscaling", "mxfp4", "nvfp4", "bf16"]
    alone = [gradients(fp4graph.apply(vit(), p, backend="eager"), images) for p in policies]
    # More than the recompile limit of 8.
    models = [fp4graph.apply(vit(), p, backend="eager") for p in policies * 2]
    for i, model in enumerate(models):
        got = gradients(model, images)
        assert all(torch.equal(got[name], alone[i % 5][name]) for name in got)


class Broken(nn.Module):
    """Two linears with a graph break between, the first used on both sides of it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, broken=True):
        x = self.a(x)
        if broken:
            torch._dynamo.graph_break()
        return self.b(self.a(x))


def test_graph_breaks_keep_every_site_and_repeat_no_noise():
    model = fp4graph.apply(Broken(), "tetrajet", backend="eager")
    model(torch.randn(8, 32)).sum().backward()
    sites = [(s.module, s.occurrence) for s in runtime_of(model).sites]
    assert sites == [("a", 0), ("a", 1), ("b", 0)]


@pytest.mark.parametrize("broken", [[True], [False, True], [True, False], [False, True, False, True]])
def test_a_graph_break_changes_no_noise_whatever_ran_before(broken):
    """A training step of TRL is broken where a generation is not; both have one policy's noise."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))

    def last(calls):
        torch.manual_seed(0)
        model = fp4graph.apply(Broken(), "tetrajet", backend="eager")
        for call in calls[:-1]:
            with torch.no_grad():  # counts nothing
                model(x, call)
        y = model(x, calls[-1])
        y.sum().backward()
        return y.detach(), model.a.weight.grad

    for one, other in zip(last(broken), last([False]), strict=True):
        assert torch.equal(one, other)


class Early(nn.Module):
    """A linear before a graph break, in some calls, and after it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, early):
        first = self.a(x) if early else None
        torch._dynamo.graph_break()
        return first, self.a(x), self.b(x)


class Loop(nn.Module):
    """One frame of Dynamo, with a graph of its own, that runs several times in a forward."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32)

    def part(self, x):
        y = self.a(x)
        torch._dynamo.graph_break()
        return y.clone()

    def forward(self, x, count):
        torch._dynamo.graph_break()
        return [self.part(x) for _ in range(count)]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=[pytest.mark.long, pytest.mark.inductor])])
def test_graphs_that_were_captured_apart_draw_apart(backend):
    """Occurrences are in the graphs: one that was first captured without those before it counts from zero too."""
    policy = one_rule(quantize=NVFP4 | {"rounding": "stochastic"})
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))

    def last(module, *calls):
        torch.manual_seed(0)
        model = fp4graph.apply(module(), policy, backend=backend, seed=0)
        for call in calls[:-1]:
            with torch.no_grad():  # counts nothing
                model(x, call)
        y = model(x, calls[-1])
        sum(each.square().sum() for each in y if each is not None).backward()
        return [each.detach() for each in y if each is not None], model.a.weight.grad

    (first, again, other), gradient = last(Early, False, True)
    assert not torch.equal(first, again)  # the same input, weight and module
    repeated, same = last(Early, False, True)
    assert all(map(torch.equal, repeated, (first, again, other)))
    assert torch.equal(same, gradient)
    one, two, three = last(Loop, 3)[0]
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)
    assert not torch.equal(one, three)
    # Rounding errors of products that draw apart are not correlated.
    torch.manual_seed(0)
    weights = [parameter.detach() for parameter in Loop().parameters()]
    exact = torch.nn.functional.linear(x, *weights)
    errors = torch.stack([(each - exact).flatten() for each in (one, two, three)])
    assert torch.corrcoef(errors).triu(1).abs().max() < 0.3


@pytest.mark.slow
def test_state_travels_and_a_plain_checkpoint_initialises_it(vit, images):
    model = fp4graph.apply(vit(), "tetrajet-qema", backend="eager")
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    gradients(model, images)
    optimizer.step()
    ema = model.blocks[0].attn.qkv._fp4graph_q_ema_weight
    assert not torch.equal(ema, model.blocks[0].attn.qkv.weight)
    saved = copy.deepcopy(model.state_dict())
    other = fp4graph.apply(vit(), "tetrajet-qema", backend="eager")
    other.load_state_dict(saved, strict=True)
    assert torch.equal(other.blocks[0].attn.qkv._fp4graph_q_ema_weight, ema)
    plain = vit().state_dict()
    plain = {key: value + 1 for key, value in plain.items()}
    other.load_state_dict(plain, strict=True)
    assert torch.equal(other.blocks[0].attn.qkv._fp4graph_q_ema_weight, plain["blocks.0.attn.qkv.weight"])


@pytest.mark.slow
def test_the_ema_stays_fp32_in_a_bf16_model(vit, images):
    model = fp4graph.apply(vit(), "tetrajet-qema", backend="eager").to(torch.bfloat16)
    state = model.blocks[0].attn.qkv
    assert model.blocks[0].attn.qkv.weight.dtype is torch.bfloat16
    assert state._fp4graph_q_ema_weight.dtype is torch.float32
    assert state._fp4graph_key.dtype is torch.int32
    model(images.bfloat16()).sum().backward()


@pytest.mark.slow
def test_autocast_trains(vit, images):
    model = fp4graph.apply(vit(), "tetrajet", backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        y = model(images)
    y.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_noise_of_a_site_is_a_function_of_its_name(vit, images):
    key = fp4graph.apply(vit(), "tetrajet", backend="eager").blocks[1].mlp.fc2._fp4graph_key
    assert torch.equal(key, noise.make_key("site", "blocks.1.mlp.fc2"))


@pytest.mark.slow
def test_an_outer_torch_compile_keeps_the_policy(vit, images):
    model = fp4graph.apply(vit(), "tetrajet", backend="eager")
    expected = fp4graph.apply(vit(), "tetrajet", backend="eager")(images)
    assert torch.equal(torch.compile(model, backend="eager")(images), expected)


@pytest.mark.slow
def test_a_deepcopy_applied_again_keeps_its_state(vit, images):
    model = fp4graph.apply(vit(), "tetrajet-qema", backend="eager")
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    gradients(model, images)
    optimizer.step()
    twin = fp4graph.apply(copy.deepcopy(model), "tetrajet-qema", backend="eager")
    key = "blocks.1.mlp.fc1._fp4graph_q_ema_weight"
    assert torch.equal(twin.state_dict()[key], model.state_dict()[key])
    assert torch.equal(twin(images), model(images))


@pytest.mark.slow
def test_torch_save_carries_the_state(vit, images):
    model = fp4graph.apply(vit(), "tetrajet-qema", backend="eager")
    model(images)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(fp4graph.UncompiledError, match="apply"):
        loaded(images)
    assert torch.equal(
        fp4graph.apply(loaded, "tetrajet-qema", backend="eager").blocks[0].norm1.weight, model.blocks[0].norm1.weight
    )


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(2))
        self.recompute = False

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


@pytest.mark.slow
def test_a_users_own_checkpoint_calls():
    x = torch.randn(8, 32)
    grads = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = Checkpointed()
        model.recompute = recompute
        grads.append(gradients(fp4graph.apply(model, "tetrajet", backend="aot_eager"), x))
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_a_sequential_root_keeps_its_length_and_order():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    x = torch.randn(4, 32)
    fp4graph.apply(model, "tetrajet", backend="eager")
    assert len(model) == 3
    assert model(x).shape == (4, 8)
    assert set(model.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_state_dict_holds_what_techniques_keep_and_nothing_else(vit, images):
    plain = vit().state_dict().keys()
    assert fp4graph.apply(vit(), "tetrajet", backend="eager").state_dict().keys() == plain
    model = fp4graph.apply(vit(), "tetrajet-qema", backend="eager")
    saved = model.state_dict()
    assert fp4graph.strip(saved).keys() == plain
    assert {key.rpartition(".")[2] for key in saved.keys() - plain} == {"_fp4graph_q_ema_weight"}
    # What an optimizer's step wrote is not begun anew by the first forward after loading.
    ema = "blocks.0.mlp.fc1._fp4graph_q_ema_weight"
    saved = {key: value + 1 if key == ema else value.clone() for key, value in saved.items()}
    model.load_state_dict(saved)
    model(images)
    assert torch.equal(model.state_dict()[ema], saved[ema])


def test_the_count_in_a_state_dict_of_before_is_read(vit):
    model = fp4graph.apply(vit(), "tetrajet", backend="eager")
    text = torch.zeros(3, dtype=torch.uint8)
    model.load_state_dict({**model.state_dict(), "_fp4graph.forwards": torch.tensor(7), "_fp4graph._extra_state": text})
    assert model._fp4graph_forwards == 7


@pytest.mark.slow
@pytest.mark.parametrize("before", ["tetrajet", "tetrajet-qema"])
def test_state_starts_at_the_weights_of_the_first_forward_after_applying_again(vit, images, before):
    model = fp4graph.apply(vit(), before, backend="eager")
    fp4graph.apply(model, "tetrajet-qema", backend="eager")
    qkv = model.blocks[0].attn.qkv
    with torch.no_grad():
        qkv.weight.add_(1)
    model(images)
    assert torch.equal(qkv._fp4graph_q_ema_weight, qkv.weight)
