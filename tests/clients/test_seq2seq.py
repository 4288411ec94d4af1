"""T5 and Whisper: training, ``generate`` with the encoder called by itself, and Seq2SeqTrainer."""

import pytest
import torch
import transformers

import fp4graph
from fp4graph.model.runtime import runtime_of
from tests.clients import tiny
from tests.helpers.steps import descend
from tests.helpers.training import prepared

TOKENS = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(3))
LABELS = TOKENS[:, :5].contiguous()


def t5():
    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    config = transformers.T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def whisper():
    torch.manual_seed(0)
    parts = ("encoder", "decoder")
    sizes = {f"{part}_layers": 2 for part in parts} | {f"{part}_attention_heads": 2 for part in parts}
    sizes |= {f"{part}_ffn_dim": 96 for part in parts}
    sizes |= {"d_model": 64, "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 2}
    config = transformers.WhisperConfig(
        vocab_size=64, suppress_tokens=None, begin_suppress_tokens=None, **sizes, **special
    )
    return transformers.WhisperForConditionalGeneration(config)


INPUTS = {
    "t5": (t5, {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}),
    "whisper": (whisper, {"input_features": torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1))}),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_train_and_generate(kind, products, policy_warnings, watch_parameters):
    make, inputs = INPUTS[kind]
    model = fp4graph.apply(make(), "tetrajet", backend="eager")
    changed = watch_parameters(model)
    losses = descend(lambda: model(**inputs, labels=LABELS).loss, prepared(model), 2)
    assert losses[1] < losses[0]
    assert set(products.values()) == {2}
    sites = set(products)
    encoder = {site for site in sites if "encoder" in site.split(".")}
    assert (len(encoder), len(sites)) == (2 * 6, 2 * 6 + 2 * 10)
    assert sites <= {name.removesuffix(".weight") for name in changed()}

    model.eval()
    products.clear()
    tokens = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6)
    # Keys and values of the encoder's output are computed once.
    assert {products[site] for site in encoder} == {1}
    assert {products[site] for site in sites - encoder} == {1, 6}
    (warned,) = policy_warnings()
    assert "encoder" in warned
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(tokens, model.generate(**inputs, max_new_tokens=6, min_new_tokens=6))
    assert runtime_of(model).count == 2


@pytest.mark.filterwarnings("ignore:.*runs uncompiled:fp4graph.errors.PolicyWarning")
def test_seq2seq_trainer(tmp_path, products, watch_parameters):
    model = fp4graph.apply(t5(), "tetrajet", backend="eager")
    changed = watch_parameters(model)
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, per_device_eval_batch_size=2, learning_rate=1e-2,
        predict_with_generate=True, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", logging_steps=1,
    )  # fmt: skip
    trainer = transformers.Seq2SeqTrainer(
        model, args, train_dataset=data, eval_dataset=data,
        data_collator=transformers.DataCollatorForSeq2Seq(tiny.tokenizer(), model),
        compute_metrics=lambda prediction: {"generated": float(len(prediction.predictions))},
    )  # fmt: skip
    trainer.train()
    products.clear()
    metrics = trainer.evaluate(max_new_tokens=6, min_new_tokens=6)
    assert metrics["eval_generated"] == 4
    # Two batches, each with a forward for the loss and a generation of six tokens.
    assert set(products.values()) == {2 * (1 + 1), 2 * (1 + 6)}
    assert len(products) == 32
    assert set(products) <= {name.removesuffix(".weight") for name in changed()}
    assert runtime_of(model).count == 2
