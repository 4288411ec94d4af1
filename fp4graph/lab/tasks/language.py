"""Language modelling: LLaMAs of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fp4graph.errors import Error
from fp4graph.lab.data import text
from fp4graph.lab.data.extras import needs
from fp4graph.lab.data.loading import Batch, InMemory
from fp4graph.lab.tasks.task import PAPER, Problem, Recipe, Settings, Task

#: Width, feed-forward width, layers, heads, vocabulary. All but the first are those of GaLore (Zhao et al. 2024), which
#: StableSPAM took over: 8,995,968, 58,073,600, 367,969,280 and 1,339,082,752 parameters. The design-space paper takes
#: its 350M and 1B from Tseng et al. 2025 instead, "Training LLMs with MXFP4", and prints the sizes of none.
SIZES = {
    "tiny": (64, 176, 2, 2, text.BYTES),
    "9m": (128, 352, 4, 4, 32_000),
    "60m": (512, 1376, 8, 8, 32_000),
    "350m": (1024, 2736, 24, 16, 32_000),
    "1b": (2048, 5461, 24, 32, 32_000),
}
#: Sequences validated on, at most.
VALIDATED = 1024


def llama(width: int, feed_forward: int, layers: int, heads: int, vocabulary: int, **options: Any) -> Any:
    """Return an untrained LLaMA; ``options`` are those of ``transformers.LlamaConfig``."""
    needs("transformers", "this task's model is transformers'")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": feed_forward, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_attention_heads=heads, **sizes, **options))


class Language(Problem):
    """Cross-entropy per token of the next token, in sequences of ``context`` tokens from random places of the text.

    Validation goes through the first sequences of the validation text that do not overlap, at most ``VALIDATED``.
    Perplexity is the exponential of the mean loss. Losses are comparable under one text and one vocabulary only.
    ``data`` is the text unless the run names another.
    """

    def __init__(self, size: str, context: int, settings: Settings, data: str = "wikitext") -> None:
        tokens = tokens_of(settings.data or data, SIZES[size][-1])
        self.tokens, self.context, self.tokens_per_sample = tokens.train, context, context
        self.samples, sequences = len(tokens.train) // context, len(tokens.validation) // context
        if not (self.samples and sequences):
            raise Error(
                f"{len(tokens.train)} tokens to train on and {len(tokens.validation)} to validate on are too few for "
                f"sequences of {context}; give more text"
            )
        ids = np.asarray(tokens.validation[: min(VALIDATED, sequences) * context], dtype=np.int64)
        super().__init__(settings, None, InMemory(torch.from_numpy(ids).view(-1, context)))
        options = {"max_position_embeddings": max(1024, context), "use_cache": False}
        self.model = llama(*SIZES[size], bos_token_id=text.SEPARATOR, eos_token_id=text.SEPARATOR, **options)

    def batches(self, start: int) -> Iterator[Batch]:
        for number in count(start):
            yield (text.batch(self.tokens, self.batch_size, self.context, self.seed, number),)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        (ids,) = batch
        logits = model(input_ids=ids).logits[:, :-1].float()
        return {"loss": cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)}

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        loss = means["loss"]
        return {"perplexity": math.exp(loss) if loss < 700 else math.inf}


@lru_cache(maxsize=2)  # a sweep trains on one text many times
def tokens_of(data: str, vocabulary: int) -> text.Parts:
    """Return the text that ``--data`` names as tokens; the tokenizer is trained on the text and kept."""
    return text.prepared(text.given(data), vocabulary)


_task = partial(Task, "language", data="wikitext, stdlib, FILE or FOLDER of text")


def _llama(size: str, context: int, recipe: Recipe) -> Task:
    description = f"LLaMA {size.upper()} on WikiText, {context} tokens per sequence"
    source = f"{PAPER}; sizes of GaLore (Zhao et al. 2024)"
    return _task(f"llama-{size}", description, recipe, partial(Language, size, context), source=source)


TASKS = (
    _task("text", "A LLaMA of 2 blocks and 133,440 parameters on the bytes of Python's standard library",
          Recipe(lr=3e-3, batch_size=32, steps=300, warmup=0.1),
          partial(Language, "tiny", 64, data="stdlib"), embedded=True),
    _llama("9m", 128, Recipe(lr=1e-3, batch_size=4096, tokens=0.9e9, autocast=True)),
    _llama("60m", 512, Recipe(lr=1e-4, batch_size=128, tokens=6e9, autocast=True)),
    _llama("350m", 1024, Recipe(lr=1e-4, batch_size=16, accumulate=8, tokens=14.7e9, autocast=True)),
    _llama("1b", 1024, Recipe(lr=1e-4, batch_size=4, accumulate=512, tokens=42e9, autocast=True)),
)  # fmt: skip
