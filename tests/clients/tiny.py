"""Language models and a tokenizer that need no download."""

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

SPECIAL = ["<pad>", "<eos>", "<unk>"]
WORDS = [f"w{index}" for index in range(61)]
_TOKENS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}


def tokenizer() -> Any:
    """Make a tokenizer of 64 words."""
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def gpt2(**options: Any) -> Any:
    """Make a two-layer GPT-2 of width 64, the same weights every time."""
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128, "vocab_size": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **_TOKENS, **options}))


def qwen3(**options: Any) -> Any:
    """Make a two-layer Qwen3 of width 64, the same weights every time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 128}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**sizes, **heads, **_TOKENS, **options}))


def sentence(index: int, length: int = 6) -> str:
    """Return a sentence of ``length`` words, whose numbers count in steps of ``index + 1``."""
    return " ".join(WORDS[(index + 1) * place % len(WORDS)] for place in range(length))
