"""A small LLaMA, and sequences for it."""

from functools import partial

import pytest
import torch

from tests.helpers import models


@pytest.fixture
def counting():
    """Sequences that count in steps of one to five, modulo the vocabulary."""
    rows = (torch.arange(24) * (index % 5 + 1) % 64 for index in range(40))
    return [{"input_ids": row, "labels": row} for row in rows]


@pytest.fixture
def llama():
    """Makes the same two-layer LLaMA every time, with dropout in its attention and the head tied to the embedding."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2}
    options = {"vocab_size": 64, "attention_dropout": 0.1, "tie_word_embeddings": True, "use_cache": True}
    return partial(models.llama, **sizes, **options)
