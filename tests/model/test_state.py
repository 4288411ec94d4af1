"""State in an applied model, its copies and its averages; the tree of modules stays that of the plain model."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import timm
import torch
import torchinfo
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from transformers import GPT2Config, GPT2LMHeadModel

import fp4graph
from fp4graph.model.runtime import runtime_of
from tests.helpers import models
from tests.helpers.policies import one_rule
from tests.helpers.training import applied, assert_equal, gradients, prepared, saved_whole

TOKENS = torch.arange(32).reshape(2, 16)
X = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2, use_cache=False))


def shape_of(model: nn.Module) -> list[tuple[str, type, list[str], int]]:
    named = model.named_modules()
    return [(name, type(m), [n for n, _ in m.named_children()], sum(1 for _ in m.modules())) for name, m in named]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fp4graph.PolicyWarning")  # torchinfo's hooks break graphs and recompile them
@pytest.mark.parametrize(
    ("make", "x"),
    [
        pytest.param(models.vit, torch.zeros(2, 3, 32, 32), marks=pytest.mark.long),
        (gpt2, TOKENS),
        pytest.param(models.llama, TOKENS, marks=pytest.mark.long),
    ],
)
def test_an_applied_model_has_the_modules_of_the_plain_model(make, x: Tensor) -> None:
    plain = make().eval()
    model = applied(copy.deepcopy(plain), "tetrajet-qema")
    assert shape_of(model) == shape_of(plain)
    counts = [torchinfo.summary(m, input_data=x, verbose=0).total_mult_adds for m in (plain, model)]
    assert counts[0] == counts[1] > 0
    assert shape_of(model) == shape_of(plain)


def sequence() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))


def averaged() -> nn.Module:
    return applied(sequence(), "tetrajet-qema")


def test_a_model_adds_only_the_state_of_techniques_to_its_state_dict_and_no_module() -> None:
    plain, model = sequence().state_dict(), averaged()
    assert shape_of(model) == shape_of(sequence())
    assert applied(sequence(), "tetrajet").state_dict().keys() == plain.keys()
    saved = copy.deepcopy(model.state_dict())
    assert fp4graph.strip(saved).keys() == plain.keys()
    assert saved.keys() - plain.keys() == {"0._fp4graph_q_ema_weight", "2._fp4graph_q_ema_weight"}
    # The first forward after loading keeps the loaded state.
    saved["0._fp4graph_q_ema_weight"] += 1
    model.load_state_dict(saved, strict=True)
    model(X)
    assert_equal(model.state_dict().values(), saved.values())
    # A checkpoint of the plain model begins state at its weights.
    model.load_state_dict({key: value + 1 for key, value in plain.items()}, strict=True)
    assert torch.equal(model[0]._fp4graph_q_ema_weight, plain["0.weight"] + 1)


@pytest.mark.parametrize(
    "former",
    [
        {"0._fp4graph.q_ema_weight": torch.full((32, 32), 3.0), "0._fp4graph.root.forwards": torch.tensor(5)},
        {"_fp4graph.forwards": torch.tensor(5), "_fp4graph._extra_state": torch.zeros(3, dtype=torch.uint8)},
    ],
    ids=["averages and a count", "a count"],
)
def test_entries_of_former_layouts_load_and_are_stripped(former) -> None:
    model, saved = averaged(), sequence().state_dict() | former
    model.load_state_dict(saved)
    expected = former.get("0._fp4graph.q_ema_weight", model[0].weight)
    assert torch.equal(model.state_dict()["0._fp4graph_q_ema_weight"], expected)
    assert torch.equal(model.state_dict()["2._fp4graph_q_ema_weight"], model[2].weight)  # absent, so made anew
    assert runtime_of(model).count == model._fp4graph_forwards == 5
    assert fp4graph.strip(saved).keys() == fp4graph.strip(model.state_dict()).keys() == sequence().state_dict().keys()


def test_hooks_that_rename_keys_of_children_work_in_an_applied_model() -> None:
    def rename(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
        for key in [key for key in state_dict if key.startswith(f"{prefix}old.")]:
            state_dict[key.replace("old.", "0.")] = state_dict.pop(key)

    model = sequence()
    model.register_load_state_dict_pre_hook(rename)
    applied(model, one_rule(techniques=["q_ema"]))
    saved = {key.replace("0.", "old."): value + 1 for key, value in sequence().state_dict().items()}
    model.load_state_dict(saved)
    assert torch.equal(model[0].weight, saved["old.weight"])


def test_loading_other_weights_leaves_state_as_it_is() -> None:
    model = averaged()
    model.load_state_dict(model.state_dict() | {"0._fp4graph_q_ema_weight": torch.full((32, 32), 3.0)})
    model.load_state_dict({"2.weight": torch.ones(32, 32)}, strict=False)
    assert torch.equal(model[0]._fp4graph_q_ema_weight, torch.full((32, 32), 3.0))
    assert torch.equal(model[2]._fp4graph_q_ema_weight, torch.ones(32, 32))


@pytest.mark.parametrize("name", ["0.weight", "1.weight", "2.weight"])
@pytest.mark.parametrize("given", [(), (1,), (2,), (1, 2)])
def test_loading_a_tied_weight_under_one_name_begins_its_state_anew_under_all(
    name: str, given: tuple[int, ...]
) -> None:
    model = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].weight = model[1].weight = model[2].weight
    applied(model, one_rule(techniques=["q_ema"]))
    entries = {index: f"{index}._fp4graph_q_ema_weight" for index in (1, 2)}
    model.load_state_dict(model.state_dict() | dict.fromkeys(entries.values(), torch.full((32, 32), 5.0)))
    saved = {name: torch.ones(32, 32)} | {entries[index]: torch.full((32, 32), 3.0) for index in given}
    model.load_state_dict(saved, strict=False)
    expected = [torch.full((32, 32), 3.0 if index in given else 1.0) for index in entries]
    assert_equal([model[index]._fp4graph_q_ema_weight for index in entries], expected)
    model[0].load_state_dict({"weight": torch.zeros(32, 32)})  # a part of the model alone
    assert_equal([model[index]._fp4graph_q_ema_weight for index in entries], [torch.zeros(32, 32)] * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, None], ids=str)
def test_conversions_leave_state_as_it_is(dtype) -> None:
    model = averaged()
    key = model[0]._fp4graph_key.clone()
    prepared(model)
    model(X).sum().backward()
    if dtype is None:
        model.to_empty(device="cpu")
    else:
        model.to(dtype)(X.to(dtype)).sum().backward()
        assert model[0].weight.dtype is dtype
    assert model[0]._fp4graph_q_ema_weight.dtype is torch.float32
    assert torch.equal(model[0]._fp4graph_key, key)
    assert model._fp4graph_forwards == runtime_of(model).count == 1 + (dtype is not None)


def test_a_pickled_model_carries_its_state() -> None:
    model = averaged()
    with torch.no_grad():
        model[0]._fp4graph_q_ema_weight.fill_(2.0)
    loaded = saved_whole(model)
    assert_equal(loaded.state_dict().values(), model.state_dict().values())
    assert loaded.to(torch.bfloat16)[0]._fp4graph_q_ema_weight.dtype is torch.float32
    assert model[0]._fp4graph.module is model[0]
    assert loaded[0]._fp4graph.module is loaded[0]


def test_a_model_that_an_earlier_version_pickled_may_be_applied_and_removed() -> None:
    model = averaged()
    for module in (model, *model):
        module.__dict__.pop("_save_to_state_dict", None)  # which earlier versions did not override
    former = [saved_whole(model) for _ in range(2)]
    assert_equal(applied(former[0], "tetrajet-qema").state_dict().values(), model.state_dict().values())
    assert not any("fp4graph" in key for key in fp4graph.remove(former[1]).state_dict())


@pytest.mark.parametrize("call", [fp4graph.apply, lambda m, p: fp4graph.explain(m, p, (X,))], ids=["apply", "explain"])
@pytest.mark.parametrize("name", ["_fp4graph", "_fp4graph_key"])
def test_a_module_whose_name_is_reserved_is_refused(name: str, call) -> None:
    model = models.module_of(lambda self, x: getattr(self, name)(x), **{name: nn.Linear(32, 32)})
    with pytest.raises(fp4graph.Error, match=rf"Made '\(root\)' has an attribute '{name}', but .* the attribute$"):
        call(model, "tetrajet")


LATE = one_rule(phases=[{"at": 1, "rules": [], "default": "keep"}]) | {"name": "late"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [lambda m: m, copy.deepcopy, lambda m: applied(m, LATE)], ids=["loaded", "copied", "applied again"]
)
def test_a_count_that_no_state_dict_holds_is_warned_about(change) -> None:
    """A state dict has weights without the count of forwards, so the policy begins in its first phase again."""
    saved, model = applied(sequence(), LATE).state_dict(), applied(sequence(), LATE)
    model.load_state_dict(saved)
    model = change(model)
    with pytest.warns(fp4graph.PolicyWarning, match="'late' begins in its first phase.*state of the prepared"):
        model(X)
    model.load_state_dict(saved)
    model(X)  # the count goes on


def test_the_state_of_an_optimizer_restores_the_count() -> None:
    model, resumed = (applied(sequence(), LATE) for _ in range(2))
    model(X)
    resumed.load_state_dict(model.state_dict())
    prepared(resumed, torch.optim.SGD).load_state_dict(prepared(model, torch.optim.SGD).state_dict())
    resumed(X)
    assert runtime_of(resumed).phase == 1


@pytest.mark.slow
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("policy", ["tetrajet", "tetrajet-qema"])
def test_weights_assigned_to_a_model_on_meta_train_as_anywhere(policy: str, moved: bool) -> None:
    with torch.device("meta"):
        model = sequence()
    chosen = {**one_rule(), "extends": policy, "techniques": ["stochastic_rounding"]}
    applied(model, chosen)
    model.load_state_dict(sequence().state_dict(), assign=True)
    if moved:
        model.to("cpu")
    results = []
    for trained in (model, applied(sequence(), chosen)):
        trained.requires_grad_()
        prepared(trained, torch.optim.SGD)
        trained(X).square().sum().backward()
        results.append(gradients(trained))
    assert_equal(*results)


AVERAGES = {
    "all buffers": partial(AveragedModel, avg_fn=lambda average, value, _: (average + value) / 2, use_buffers=True),
    "state dict": partial(timm.utils.ModelEmaV3, decay=0.5),
    "parameters": AveragedModel,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy"),  # an average without buffers keeps its first count, and so its noise
    [*((name, "tetrajet-qema") for name in AVERAGES), ("all buffers", "mxfp4-rl"), ("state dict", "mxfp4-rl")],
)
def test_an_average_evaluates_as_its_model(name: str, policy: str) -> None:
    """The weights do not change, so the average must equal the model, noise in evaluation included."""
    model = applied(sequence(), policy)
    average = AVERAGES[name](model)
    for _ in range(3 if policy == "mxfp4-rl" else 1):
        model(X).mean().backward()
        (average.update if hasattr(average, "update") else average.update_parameters)(model)
    with torch.no_grad():
        expected = model.eval()(X)
        compiled = torch.compile(average.eval(), backend="aot_eager")
        assert_equal([each(X) for each in (average, average.module.eval(), compiled)], [expected] * 3)
        assert not torch.equal(expected, sequence()(X))


@pytest.mark.slow
def test_a_copy_follows_the_phases_of_its_model_until_it_trains() -> None:
    model = applied(sequence(), one_rule(phases=[{"at": 2, "rules": [], "default": "keep"}]))
    twin, exact = copy.deepcopy(model), sequence()(X)
    with torch.no_grad():
        quantized = twin(X)
    for _ in range(3):
        model(X)
    with torch.no_grad():
        assert_equal([twin(X)], [exact])
        assert not torch.equal(quantized, exact)
    other = copy.deepcopy(twin)
    twin(X)
    model(X)
    assert (runtime_of(model).count, runtime_of(twin).count) == (4, 1)
    with torch.no_grad():
        late = copy.deepcopy(model)
        late(X)
        del model, other
        assert_equal([late(X)], [exact])
    assert runtime_of(pickle.loads(pickle.dumps(copy.deepcopy(twin)))) is None


def test_a_copy_of_a_model_that_quantizes_nothing_is_applied_too() -> None:
    twin = copy.deepcopy(nn.Sequential(applied(sequence(), "bf16")))[0]
    assert torch.equal(twin(X), sequence()(X))
    prepared(twin)
    assert "compile" not in fp4graph.remove(twin).__dict__
    assert runtime_of(pickle.loads(pickle.dumps(applied(twin, "bf16")))) is None


def test_a_copy_knows_a_length_that_its_model_is_told_later() -> None:
    model = applied(sequence(), one_rule(phases=[{"at": 0.5, "rules": [], "default": "keep"}]))
    twin = copy.deepcopy(model)
    fp4graph.set_total_forwards(model, 4)
    for _ in range(2):
        model(X)
    with torch.no_grad():
        assert_equal([twin(X)], [sequence()(X)])
