"""TRL's trainers with their defaults: gradient checkpointing on, bf16 autocast, a generation before each step."""

import copy
import math

import pytest

import fp4graph
from fp4graph.integrations import FP4GraphCallback
from fp4graph.model.runtime import runtime_of
from tests.clients import tiny

trl = pytest.importorskip("trl", reason="needs fp4graph[clients]")
datasets = pytest.importorskip("datasets", reason="needs fp4graph[clients]")

COMMON = {
    "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1,
    "learning_rate": 1e-3, "per_device_train_batch_size": 4,
}  # fmt: skip
LINEARS = 14  # q, k, v, o, gate, up, down of two layers


def trains(trainer, steps, changed, products, policy_warnings):
    """Train ``steps``, check that every linear trains and is quantized without a warning, and return the losses."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert all(math.isfinite(loss) for loss in losses)
    assert {name for name, _ in trainer.model.named_parameters() if "proj" in name} <= changed()
    assert (len(losses), runtime_of(trainer.model).count, len(products)) == (steps, steps, LINEARS)
    assert not policy_warnings()
    return losses


def distinct_words(completions, **_):
    return [float(len(set(text.split()))) for text in completions]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_grpo(backend, tmp_path, products, policy_warnings, watch_parameters):
    model = tiny.qwen3()
    fp4graph.apply(model, "mxfp4-rl", backend=backend)
    changed = watch_parameters(model)
    prompts = datasets.Dataset.from_list([{"prompt": tiny.sentence(index, 3 + index % 5)} for index in range(16)])
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=distinct_words,
        args=trl.GRPOConfig(
            str(tmp_path), **{**COMMON, "per_device_train_batch_size": 8}, max_steps=40, num_generations=4,
            max_completion_length=4,
        ),
        train_dataset=prompts,
        processing_class=tiny.tokenizer(),
    )  # fmt: skip
    assert trainer.args.gradient_checkpointing
    trains(trainer, 40, changed, products, policy_warnings)
    if backend == "eager":  # what Inductor runs is not counted
        # A step has at least a prompt, a token, and a training forward whose checkpointed blocks run twice.
        assert min(products.values()) > 40 * (2 + 2)
    # The number of graphs does not grow with the steps. Inductor guards on more sizes than eager does.
    assert len(runtime_of(model).sites) <= {"eager": 10, "inductor": 12}[backend] * LINEARS


@pytest.mark.parametrize("policy", ["tetrajet", "tetrajet-qema"])
def test_sft(policy, tmp_path, products, policy_warnings, watch_parameters):
    model, callbacks = tiny.qwen3(), None
    if policy == "tetrajet":
        fp4graph.apply(model, policy, backend="eager")
    else:  # has techniques that act at the optimizer's step, so the callback prepares the optimizer
        callbacks = [FP4GraphCallback(policy, backend="eager")]
    changed = watch_parameters(model)
    texts = datasets.Dataset.from_list([{"text": tiny.sentence(index, 5 + index % 4)} for index in range(16)])
    trainer = trl.SFTTrainer(
        model, args=trl.SFTConfig(str(tmp_path), max_steps=4, **COMMON), train_dataset=texts,
        processing_class=tiny.tokenizer(), callbacks=callbacks,
    )  # fmt: skip
    losses = trains(trainer, 4, changed, products, policy_warnings)
    assert losses[-1] < losses[0]
    assert set(products.values()) == {2 * 4}  # each forward, and again in the backward


@pytest.mark.parametrize("reference", ["a copy", "from its folder"])
def test_dpo(reference, tmp_path, products, policy_warnings, watch_parameters):
    model = tiny.qwen3()
    model.save_pretrained(tmp_path / "model")
    model.config._name_or_path = str(tmp_path / "model")  # as from_pretrained leaves it
    fp4graph.apply(model, "tetrajet", backend="eager")
    changed = watch_parameters(model)
    pairs = [
        {"prompt": tiny.sentence(i, 3), "chosen": " " + tiny.sentence(i + 2, 3), "rejected": " " + tiny.sentence(i, 4)}
        for i in range(16)
    ]
    trainer = trl.DPOTrainer(
        model,
        ref_model=copy.deepcopy(model) if reference == "a copy" else None,
        args=trl.DPOConfig(str(tmp_path), max_steps=3, **COMMON),
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=tiny.tokenizer(),
    )
    trains(trainer, 3, changed, products, policy_warnings)
    first = trainer.state.log_history[0]
    if reference == "a copy":  # it is quantized as the model is, so both begin with the same probabilities
        assert runtime_of(trainer.ref_model).count == 3  # an untrained copy follows the count of its model
        assert first["rewards/margins"] == 0
    else:
        assert runtime_of(trainer.ref_model) is None
        assert first["rewards/margins"] != 0
    assert set(products.values()) == {3 * (3 if reference == "a copy" else 2)}
