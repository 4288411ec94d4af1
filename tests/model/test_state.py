"""State in an applied model: the tree of modules stays the plain model's, and former layouts are read."""

from __future__ import annotations

import copy
import io

import pytest
import timm
import torch
import torchinfo
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import fp4graph
from fp4graph.model.runtime import runtime_of

TOKENS = torch.arange(32).reshape(2, 16)
EAGER = {"backend": "eager"}


def vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2, use_cache=False))


def llama() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes))


def shape_of(model: nn.Module) -> list[tuple[str, type, list[str], int]]:
    named = model.named_modules()
    return [(name, type(m), [n for n, _ in m.named_children()], sum(1 for _ in m.modules())) for name, m in named]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fp4graph.PolicyWarning")  # torchinfo's hooks break graphs and recompile them
@pytest.mark.parametrize(
    ("make", "x"),
    [
        pytest.param(vit, torch.zeros(2, 3, 32, 32), marks=pytest.mark.long),
        (gpt2, TOKENS),
        pytest.param(llama, TOKENS, marks=pytest.mark.long),
    ],
)
def test_who_walks_the_modules_finds_those_of_the_plain_model(make, x: Tensor) -> None:
    plain = make().eval()
    applied = fp4graph.apply(copy.deepcopy(plain), "tetrajet-qema", **EAGER)
    assert shape_of(applied) == shape_of(plain)
    counts = [torchinfo.summary(m, input_data=x, verbose=0).total_mult_adds for m in (plain, applied)]
    assert counts[0] == counts[1] > 0
    assert shape_of(applied) == shape_of(plain)


def sequence() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))


def test_a_part_of_a_container_is_its_children() -> None:
    model = fp4graph.apply(sequence(), "tetrajet-qema", **EAGER)
    assert len(model) == 3
    assert len(nn.Sequential(*list(model.children())[:-1])) == 2
    assert [type(m) for m in model.modules() if not list(m.children())] == [nn.Linear, nn.GELU, nn.Linear]


def test_entries_of_the_former_layout_load_and_are_stripped() -> None:
    average = torch.full((32, 32), 3.0)
    former = sequence().state_dict() | {
        "0._fp4graph.q_ema_weight": average,
        "0._fp4graph.root.forwards": torch.tensor(5),
    }
    model = fp4graph.apply(sequence(), "tetrajet-qema", **EAGER)
    model.load_state_dict(former)
    assert torch.equal(model.state_dict()["0._fp4graph_q_ema_weight"], average)
    assert torch.equal(model.state_dict()["2._fp4graph_q_ema_weight"], model[2].weight)  # absent, so made anew
    assert runtime_of(model).count == 5
    assert fp4graph.strip(former).keys() == fp4graph.strip(model.state_dict()).keys() == sequence().state_dict().keys()


def test_conversions_leave_state_as_it_is() -> None:
    model = fp4graph.apply(sequence(), "tetrajet-qema", **EAGER)
    key = model[0]._fp4graph_key.clone()
    model(torch.randn(32, 32)).sum().backward()
    for convert in (
        nn.Module.bfloat16,
        nn.Module.half,
        lambda m: m.to(torch.float64),
        lambda m: m.to_empty(device="cpu"),
    ):
        convert(model)
        assert model[0]._fp4graph_q_ema_weight.dtype is torch.float32
        assert torch.equal(model[0]._fp4graph_key, key)
        assert model._fp4graph_forwards == runtime_of(model).count == 1
    assert model[0].weight.dtype is torch.float64


def test_a_pickled_model_carries_its_state() -> None:
    model = fp4graph.apply(sequence(), "tetrajet-qema", **EAGER)
    with torch.no_grad():
        model[0]._fp4graph_q_ema_weight.fill_(2.0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False).to(torch.bfloat16)
    assert again[0]._fp4graph_q_ema_weight.dtype is torch.float32
    assert again[0]._fp4graph_q_ema_weight.unique().tolist() == [2.0]
    assert model[0]._fp4graph.module is model[0]
    assert again[0]._fp4graph.module is again[0]


def test_remove_leaves_nothing() -> None:
    model, plain = fp4graph.remove(fp4graph.apply(sequence(), "tetrajet-qema", **EAGER)), sequence()
    assert [m.__dict__.keys() for m in model.modules()] == [m.__dict__.keys() for m in plain.modules()]
    assert not list(model.buffers())


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.name)(x)


@pytest.mark.parametrize("name", ["_fp4graph", "_fp4graph_key"])
def test_a_module_of_our_name_is_refused(name: str) -> None:
    for call in (fp4graph.apply, lambda m, p: fp4graph.explain(m, p, (torch.zeros(2, 32),))):
        with pytest.raises(fp4graph.Error, match=rf"Named '\(root\)' has an attribute '{name}' .*; rename it"):
            call(Named(name), "tetrajet")


def test_a_count_that_no_state_dict_holds_is_warned_about() -> None:
    """The policy has another phase; weights alone bring the model back to the first."""
    keep = {"rules": [{"name": "all", "match": {"op": "linear"}, "quantize": {"element": "e2m1", "block": 16}}]}
    policy = {"version": 1, "name": "late", **keep, "phases": [{"at": 1, "rules": [], "default": "keep"}]}
    model = fp4graph.apply(sequence(), policy, **EAGER)
    model(torch.randn(32, 32))
    saved = model.state_dict()
    for change in (lambda m: m, copy.deepcopy, lambda m: fp4graph.apply(m, policy, **EAGER)):
        other = fp4graph.apply(sequence(), policy, **EAGER)
        other.load_state_dict(saved)
        other = change(other)
        with pytest.warns(fp4graph.PolicyWarning, match="'late' begins in its first phase.*state of the prepared"):
            other(torch.randn(32, 32))
    other.load_state_dict(saved)
    other(torch.randn(32, 32))  # the count goes on

    resumed = fp4graph.apply(sequence(), policy, **EAGER)
    optimizers = [fp4graph.prepare_optimizer(m, torch.optim.SGD(m.parameters())) for m in (model, resumed)]
    resumed.load_state_dict(saved)
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    resumed(torch.randn(32, 32))
    assert runtime_of(resumed).phase == 1


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("policy", ["tetrajet", "tetrajet-qema"])
def test_weights_assigned_to_a_model_on_meta_train_as_anywhere(policy: str, moved: bool) -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), torch.randn(32, 32)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    rules = {"rules": [{"name": "all", "match": {"op": "linear"}, "quantize": {"element": "e2m1", "block": 32}}]}
    chosen = {"version": 1, "extends": policy, **rules, "techniques": ["stochastic_rounding"]}
    fp4graph.apply(model, chosen, **EAGER)
    model.load_state_dict(plain.state_dict(), assign=True)
    if moved:
        model.to("cpu")
    gradients = []
    for trained in (model, fp4graph.apply(plain, chosen, **EAGER)):
        trained.requires_grad_()
        fp4graph.prepare_optimizer(trained, torch.optim.SGD(trained.parameters()))
        trained(x).square().sum().backward()
        gradients.append([parameter.grad for parameter in trained.parameters()])
    assert all(map(torch.equal, *gradients))
