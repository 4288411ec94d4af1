"""``from_pretrained`` under a policy: the model of ``fp4graph.apply``, saved and loaded with its policy and state."""

import copy
import json
import pickle

import pytest
import torch

import fp4graph
from fp4graph.errors import PolicyError
from fp4graph.model.runtime import runtime_of
from tests.helpers.models import llama
from tests.helpers.steps import differences

transformers = pytest.importorskip("transformers", reason="install fp4graph[hf]")
from fp4graph.integrations import FP4GraphConfig  # noqa: E402

IDS = torch.arange(32).reshape(2, 16)
EAGER = {"backend": "eager", "seed": 3}


@pytest.fixture
def folder(tmp_path):
    llama().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def loaded(folder, policy=None, **more):
    config = {} if policy is None else {"quantization_config": FP4GraphConfig(policy, **EAGER)}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **config, **more)


def step(model):
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    return model


@pytest.mark.slow
@pytest.mark.usefixtures("operation_by_operation")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pretrained_makes_the_model_that_apply_makes(folder, dtype):
    model = loaded(folder, "tetrajet", dtype=dtype)
    expected = fp4graph.apply(loaded(folder, dtype=dtype), "tetrajet", **EAGER)
    assert not differences(*(dict(step(each).named_parameters()) for each in (model, expected)))


@pytest.mark.usefixtures("operation_by_operation")
def test_a_saved_folder_restores_weights_policy_and_state(folder, tmp_path):
    model = step(fp4graph.apply(loaded(folder, "tetrajet"), "tetrajet-qema", **EAGER))
    model.save_pretrained(tmp_path / "trained")
    written = json.loads((tmp_path / "trained/config.json").read_text())["quantization_config"]
    assert (written["quant_method"], written["policy"]["name"], written["seed"]) == ("fp4graph", "tetrajet-qema", 3)
    again = loaded(tmp_path, subfolder="trained")
    runtime = runtime_of(again)
    assert runtime.policy.fingerprint == fp4graph.load_policy("tetrajet-qema").fingerprint
    state = model.state_dict()
    assert any("q_ema" in key for key in state)
    assert not differences(dict(state), dict(again.state_dict()))
    plain = fp4graph.remove(copy.deepcopy(again)).eval()
    with torch.no_grad():
        assert torch.equal(plain(IDS).logits, fp4graph.remove(model).eval()(IDS).logits)


@pytest.mark.usefixtures("operation_by_operation")
def test_a_saved_folder_holds_the_given_weights_and_no_removed_policy(folder, tmp_path):
    model, removed = (loaded(folder, "tetrajet") for _ in range(2))
    fp4graph.remove(removed).save_pretrained(folder)
    assert runtime_of(loaded(folder)) is None
    zeros = {key: torch.zeros_like(value) for key, value in model.float().state_dict().items()}
    pickle.loads(pickle.dumps(model.config)).save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, state_dict=zeros)
    assert not any(parameter.any() for parameter in loaded(tmp_path).parameters())
    assert runtime_of(loaded(tmp_path)).policy.name == "tetrajet"
    with pytest.raises(fp4graph.Error, match="put the weights on meta"):
        loaded(tmp_path, device_map="meta")


@pytest.mark.usefixtures("operation_by_operation")
def test_a_copy_is_saved_with_the_policy_that_the_copy_has(folder, tmp_path):
    model = loaded(folder, "tetrajet")
    copied, removed = copy.deepcopy(model), fp4graph.remove(copy.deepcopy(model))
    fp4graph.apply(copied, "microscaling", backend="aot_eager")
    again = pickle.loads(pickle.dumps(removed.config))
    for each, expected in (
        (model, ("tetrajet", "eager")), (copied, ("microscaling", "aot_eager")), (removed, None), (again, None),
    ):  # fmt: skip
        each.save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
        assert (written and (written["policy"]["name"], written["backend"])) == expected


@pytest.mark.slow
def test_a_trainer_trains_the_model(folder, tmp_path):
    model = loaded(folder, "tetrajet")
    options = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "max_steps": 1}
    data = [{"input_ids": row, "labels": row} for row in IDS]
    trainer = transformers.Trainer(model, transformers.TrainingArguments(str(tmp_path), **options), train_dataset=data)
    assert trainer.train().training_loss > 0


def test_a_config_refuses_a_policy_that_cannot_be_loaded():
    with pytest.raises(PolicyError, match="did you mean"):
        FP4GraphConfig("tetrajett")
