"""Models whose training is timed on a batch of random data, unquantized and under a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fp4graph

#: The name of the unquantized baseline, which is not a policy.
UNQUANTIZED = "unquantized"
#: Long enough that every policy stays in its first phase.
TOTAL_STEPS = 1_000_000

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """A model and its training batch.

    Attributes:
        make: builds the model, with the same weights after the same seed.
        batch: builds a batch of a given size, on the CPU.
        loss: computes the model's loss on a batch.
        inputs: returns the arguments of the model's forward from a batch.
        size: the default size of a batch.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    inputs: Callable[[Batch], tuple[tuple[Tensor, ...], Mapping[str, Tensor]]]
    size: int


def _vision(name: str, size: int, image: int = 224, **options: Any) -> Model:
    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, img_size=image, **options)
        return model

    return Model(
        make,
        lambda count: {"images": torch.randn(count, 3, image, image), "labels": torch.arange(count) % 10},
        lambda model, batch: cross_entropy(model(batch["images"]), batch["labels"]),
        lambda batch: ((batch["images"],), {}),
        size,
    )


def _llama(width: int, feed_forward: int, layers: int, heads: int, vocabulary: int, context: int, size: int) -> Model:
    def make() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=width,
                intermediate_size=feed_forward,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                max_position_embeddings=context,
                use_cache=False,
            )
        )

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value: Tensor = model(**batch).loss
        return value

    def batch(count: int) -> Batch:
        tokens = torch.randint(vocabulary, (count, context))
        return {"input_ids": tokens, "labels": tokens}

    return Model(make, batch, loss, lambda batch: ((), batch), size)


#: ``trial-`` models are small, for trials of a benchmark. LLaMA-60M is that of GaLore (Zhao et al. 2024): 58 million
#: parameters, sequences of 256 tokens.
MODELS = {
    "deit-tiny": _vision("deit_tiny_patch16_224", 16),
    "deit-small": _vision("deit_small_patch16_224", 16),
    "deit-base": _vision("deit_base_patch16_224", 16),
    "llama-60m": _llama(512, 1376, 8, 8, 32_000, context=256, size=8),
    "trial-vit": _vision("vit_tiny_patch16_224", 4, 32, patch_size=8, depth=2, embed_dim=64, num_heads=2),
    "trial-llama": _llama(64, 176, 2, 2, 256, context=32, size=4),
}


def autocast(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Return the forward's context: parameters are fp32, and bf16 means autocast, as in training."""
    return nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)


def explained(model: Model, policy: str, size: int) -> fp4graph.Explanation:
    """Explain ``model`` under ``policy``, on fake tensors."""
    arguments, keywords = model.inputs(model.batch(size))
    return fp4graph.explain(model.make(), policy, arguments, keywords)


class Training:
    """A model in training on one batch, compiled at its first step.

    Args:
        policy: a policy, or :data:`UNQUANTIZED` for the model under torch.compile alone.
        backend: of torch.compile; with ``eager`` nothing is compiled.
    """

    def __init__(
        self, model: Model, policy: str, size: int, dtype: torch.dtype, device: torch.device, backend: str
    ) -> None:
        torch.manual_seed(0)
        self.model = model.make().to(device)
        self.batch = {name: value.to(device) for name, value in model.batch(size).items()}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._loss, self._dtype, self._device = model.loss, dtype, device
        self._policy, self._backend = policy, backend

    def compile(self) -> None:
        """Ask for compilation, which happens in the first step."""
        if self._policy == UNQUANTIZED:
            self.model.compile(backend=self._backend)
            return
        fp4graph.apply(self.model, self._policy, backend=self._backend, total_forwards=TOTAL_STEPS)
        fp4graph.prepare_optimizer(self.model, self.optimizer)

    def forward(self) -> Tensor:
        """Return the loss, with its autograd graph."""
        with autocast(self._dtype, self._device):
            return self._loss(self.model, self.batch)

    def step(self) -> Tensor:
        """Run forward, backward and AdamW; return the loss."""
        self.optimizer.zero_grad()
        loss = self.forward()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()
