"""A small LLaMA, and sequences for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count in steps of one to five, modulo the vocabulary."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(24) * (index % 5 + 1) % 64
        return {"input_ids": tokens, "labels": tokens}


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def llama() -> Callable[..., Any]:
    """Makes the same two-layer LLaMA every time, with dropout in its attention and the head tied to the embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make() -> LlamaForCausalLM:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
            attention_dropout=0.1,
            tie_word_embeddings=True,
        )
        return LlamaForCausalLM(config)

    return make
