"""A small LLaMA and its training data."""

from functools import partial

import pytest
import torch

from tests.helpers import models


@pytest.fixture
def counting():
    """Return 40 sequences that count in steps of one to five, modulo the size of the vocabulary."""
    rows = (torch.arange(24) * (index % 5 + 1) % 64 for index in range(40))
    return [{"input_ids": row, "labels": row} for row in rows]


@pytest.fixture
def llama():
    """Return a function that makes a two-layer LLaMA with dropout in its attention and a tied head; weights are always
    the same."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2}
    options = {"vocab_size": 64, "attention_dropout": 0.1, "tie_word_embeddings": True, "use_cache": True}
    return partial(models.llama, **sizes, **options)
