"""sentence-transformers' trainer."""

import math

import pytest
import torch
import transformers

import fp4graph
from fp4graph.model.runtime import runtime_of
from tests.clients import tiny

st = pytest.importorskip("sentence_transformers", reason="needs fp4graph[clients]")
losses = pytest.importorskip("sentence_transformers.losses", reason="needs fp4graph[clients]")
datasets = pytest.importorskip("datasets", reason="needs fp4graph[clients]")


def test_contrastive_training(tmp_path, products, policy_warnings, watch_parameters):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=64, max_position_embeddings=32, **sizes)
    for part in (transformers.BertModel(config), tiny.tokenizer()):
        part.save_pretrained(tmp_path / "bert")
    model = st.SentenceTransformer(str(tmp_path / "bert"), device="cpu")
    fp4graph.apply(model, "tetrajet", backend="eager")
    changed = watch_parameters(model)
    pairs = [{"anchor": tiny.sentence(index), "positive": tiny.sentence(index, 9)} for index in range(16)]
    trainer = st.SentenceTransformerTrainer(
        model=model,
        args=st.SentenceTransformerTrainingArguments(
            str(tmp_path / "run"), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-3, report_to=[],
            use_cpu=True, disable_tqdm=True, logging_steps=1, save_strategy="no",
        ),
        train_dataset=datasets.Dataset.from_list(pairs),
        loss=losses.MultipleNegativesRankingLoss(model),
    )  # fmt: skip
    trainer.train()
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    assert len(products) == 2 * 6
    assert set(products.values()) == {2 * 3}  # anchors and positives
    assert {f"{site}.weight" for site in products} <= changed()
    assert runtime_of(model).count == 2 * 3
    products.clear()
    vectors = model.encode([tiny.sentence(1), tiny.sentence(2, 4)])
    assert set(products.values()) == {1}
    assert not policy_warnings()

    model.save_pretrained(str(tmp_path / "saved"))
    again = st.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert not any("fp4graph" in name for name in again.state_dict())
    fp4graph.apply(again, "tetrajet", backend="eager")
    assert (again.encode([tiny.sentence(1), tiny.sentence(2, 4)]) == vectors).all()
