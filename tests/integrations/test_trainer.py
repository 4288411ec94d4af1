"""An unmodified transformers.Trainer with FP4GraphCallback: what it trains, saves, resumes and refuses."""

import json
import re

import pytest
import torch

import fp4graph
from fp4graph.model.runtime import runtime_of

pytest.importorskip("transformers", reason="install fp4graph[hf]")
pytest.importorskip("accelerate", reason="install fp4graph[hf]")

import transformers

from fp4graph.integrations import FP4GraphCallback
from fp4graph.optim import StableSPAM
from tests.helpers.long import LONG
from tests.helpers.processes import python, run
from tests.helpers.steps import differences

# transformers 5 deprecates this option, and transformers 4 has no other name for it.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated")


@pytest.fixture
def trainer(llama, counting, tmp_path):
    """Return a function that makes a Trainer, without FP4GraphCallback if ``callback`` is False."""

    def make(policy="tetrajet-qema", *, callback=True, folder="run", optimizer=None, **options):
        settings = {
            "max_steps": 6, "per_device_train_batch_size": 8, "learning_rate": 3e-3, "save_steps": 3,
            "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True,
        }  # fmt: skip
        args = transformers.TrainingArguments(str(tmp_path / folder), **{**settings, **options})
        callbacks = [FP4GraphCallback(policy, backend="eager")] if callback else []
        data = {"train_dataset": counting, "eval_dataset": counting}
        model = llama()
        optimizers = (optimizer(model.parameters(), lr=3e-3) if optimizer else None, None)
        return transformers.Trainer(model, args, **data, callbacks=callbacks, optimizers=optimizers)

    return make


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_trains_nearly_as_in_high_precision_and_resumes_to_the_last_bit(trainer, tmp_path):
    whole = trainer()
    whole.train()
    plain = trainer(callback=False, folder="plain")
    plain.train()
    assert losses(whole)[-1] < losses(whole)[0] - 0.1
    assert losses(whole) != losses(plain)
    assert losses(whole) == pytest.approx(losses(plain), rel=0.1)
    runtime = runtime_of(whole.model)
    quantized = {site.module for site in runtime.sites if site.quantized}
    assert len(quantized) == 14  # q, k, v, o, gate, up, down of two layers
    assert "lm_head" not in quantized
    assert runtime.root_state.count == 6
    evaluated = whole.evaluate()["eval_loss"]
    assert evaluated < losses(whole)[0]
    assert runtime.root_state.count == 6  # evaluation does not count

    folder = tmp_path / "run" / "checkpoint-3"
    kept = json.loads((folder / "trainer_state.json").read_text())["stateful_callbacks"]["FP4GraphCallback"]
    assert kept["attributes"]["written_under"]["text"] == fp4graph.load_policy("tetrajet-qema").to_yaml()
    assert fp4graph.load_policy(kept["args"]["policy"]) == fp4graph.load_policy("tetrajet-qema")

    again = trainer(folder="again")
    again.train(resume_from_checkpoint=str(folder))
    assert losses(again) == losses(whole)  # the log is restored and continued
    assert not differences(dict(whole.model.state_dict()), dict(again.model.state_dict()))
    layer = whole.model.model.layers[1].mlp.up_proj
    assert not torch.equal(layer._fp4graph_q_ema_weight, layer.weight)


@pytest.mark.slow
def test_a_saved_model_is_the_plain_model_and_state(trainer, llama, tmp_path):
    from safetensors.torch import load_file

    trained = trainer(max_steps=2, save_strategy="no")
    trained.train()
    trained.save_model(str(tmp_path / "model"))
    entries = load_file(tmp_path / "model" / "model.safetensors")
    plain = {key for key in llama().state_dict() if key != "lm_head.weight"}  # tied to the embedding
    assert set(fp4graph.strip(entries)) == plain
    assert "model.layers.0.mlp.up_proj._fp4graph_q_ema_weight" in entries
    reloaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    tokens = torch.arange(24)[None]
    with torch.no_grad(), fp4graph.bypass(trained.model):
        expected = trained.model.eval()(input_ids=tokens).logits
        assert torch.equal(reloaded.eval()(input_ids=tokens).logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "forwards"),
    [
        pytest.param({"policy": "tetrajet-qema", "optimizer": StableSPAM}, 3, marks=pytest.mark.long),
        pytest.param({"bf16": True}, 3, marks=pytest.mark.long),
        ({"gradient_accumulation_steps": 2}, 5),  # five batches in an epoch
        pytest.param({"gradient_checkpointing": True}, 3, marks=pytest.mark.long),
        pytest.param({"torch_compile": True, "torch_compile_backend": "eager"}, 3, marks=pytest.mark.long),
        pytest.param(
            {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_steps": 1},
            3,
            marks=LONG,
        ),
    ],
    ids=["custom optimizer", "bf16", "accumulation", "checkpointing", "torch_compile", "best model reloaded"],
)
def test_trains_with_options_that_wrap_or_reload_the_model(trainer, options, forwards):
    trained = trainer(**{"policy": "tetrajet", "max_steps": 3, "save_strategy": "steps", **options})
    trained.train()
    runtime = runtime_of(trained.model)
    assert runtime.root_state.count == forwards
    assert trained.model.is_gradient_checkpointing == options.get("gradient_checkpointing", False)
    assert len({site.module for site in runtime.sites if site.quantized}) == 14
    assert losses(trained)[-1] < losses(trained)[0]


LATE = [{"at": 0.5, "operands": {"backward": "keep"}}]
PHASES = {"version": 1, "name": "two phases", "extends": "tetrajet", "phases": LATE}


@pytest.mark.long
@pytest.mark.slow
def test_a_phase_at_a_share_begins_at_that_share_of_the_training(trainer, tmp_path):
    whole = trainer(PHASES)
    whole.evaluate()  # in the first phase, before the length of the training is known
    whole.train()
    runtime = runtime_of(whole.model)
    assert runtime.settings.total_forwards == 6
    assert runtime.phase == 1
    again = trainer(PHASES, folder="again")
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert losses(again) == losses(whole)
    assert not differences(dict(whole.model.state_dict()), dict(again.model.state_dict()))
    with pytest.raises(fp4graph.Error, match="was written for a training of 6 forwards, this one has 8"):
        trainer(PHASES, folder="again", max_steps=8).train(
            resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3")
        )


@pytest.mark.slow
@pytest.mark.usefixtures("operation_by_operation")
@pytest.mark.parametrize(
    ("length", "forwards"),
    [pytest.param({"num_train_epochs": 2, "max_steps": -1}, 10, marks=pytest.mark.long), ({"max_steps": 7}, 12)],
)
def test_the_total_counts_the_batches_that_end_an_epoch(trainer, length, forwards):
    trained = trainer(PHASES, gradient_accumulation_steps=2, save_strategy="no", **length)  # five batches in an epoch
    trained.train()
    runtime = runtime_of(trained.model)
    assert runtime.settings.total_forwards == runtime.count == forwards


@pytest.mark.long
@pytest.mark.slow
def test_resuming_under_another_policy_is_refused(trainer, tmp_path):
    trainer("tetrajet", max_steps=2, save_steps=2).train()
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    with pytest.raises(fp4graph.Error, match=r"written under policy 'tetrajet', this model has 'microscaling'"):
        trainer("microscaling", max_steps=3).train(resume_from_checkpoint=checkpoint)
    late = trainer(callback=False, max_steps=3)
    late.add_callback(FP4GraphCallback("tetrajet", backend="eager"))
    with pytest.raises(fp4graph.Error, match=r"callbacks=\[FP4GraphCallback"):
        late.train(resume_from_checkpoint=checkpoint)
    other = trainer(callback=False, max_steps=3, folder="other", save_strategy="no")
    other.train(resume_from_checkpoint=checkpoint)  # a plain model loads the checkpoint of an applied model


@pytest.mark.long
@pytest.mark.slow
def test_a_callback_added_late_trains_from_the_first_step(trainer):
    late = trainer(callback=False, max_steps=2, save_strategy="no")
    late.add_callback(FP4GraphCallback("tetrajet", backend="eager"))
    with pytest.raises(fp4graph.Error, match="evaluation would be in high precision"):
        late.evaluate()
    late.train()
    late.evaluate()
    assert runtime_of(late.model).root_state.count == 2


def test_a_callback_refuses_a_policy_that_cannot_be_loaded():
    with pytest.raises(fp4graph.PolicyError, match="tetrajett"):
        FP4GraphCallback("tetrajett")


@pytest.mark.process
def test_without_the_extra_the_error_says_what_to_install():
    script = (
        "import sys; sys.modules['transformers'] = None\n"
        "import fp4graph, fp4graph.integrations\n"
        "try:\n    fp4graph.integrations.FP4GraphCallback\nexcept fp4graph.Error as error:\n    print(error)"
    )
    assert re.search(r"pip install .*\[hf\]", run(python("-c", script)))
    with pytest.raises(AttributeError):
        fp4graph.integrations.FP5GraphCallback  # noqa: B018
