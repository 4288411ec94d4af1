"""Models whose training is measured on a batch of random data, unquantized and under a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fp4graph
from benchmarks.processes import Inapplicable

#: The name of the unquantized baseline, which is not a policy.
UNQUANTIZED = "unquantized"
#: Long enough that every policy stays in its first phase.
TOTAL_STEPS = 1_000_000

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """A model and its training batch."""

    make: Callable[[], nn.Module]  # with the same weights after the same seed
    batch: Callable[[int], Batch]  # of a given size, on the CPU
    loss: Callable[[Any, Batch], Tensor]  # of the model's output
    inputs: Callable[[Batch], tuple[tuple[Tensor, ...], Mapping[str, Tensor]]]  # of the model's forward
    size: int  # of a batch, if no other is given


def _vision(name: str, size: int, image: int = 224, **options: Any) -> Model:
    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, img_size=image, **options)
        return model

    return Model(
        make,
        lambda count: {"images": torch.randn(count, 3, image, image), "labels": torch.arange(count) % 10},
        lambda output, batch: cross_entropy(output, batch["labels"]),
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

    def batch(count: int) -> Batch:
        tokens = torch.randint(vocabulary, (count, context))
        return {"input_ids": tokens, "labels": tokens}

    return Model(make, batch, lambda output, _: output.loss, lambda batch: ((), batch), size)


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


class Stack(nn.Module):
    """Equal blocks in sequence, without embeddings and head.

    Args:
        depth: the number of blocks; 0 stands for three, of which only the middle one is called, because policies may
            treat the first and the last differently.
    """

    def __init__(self, make: Callable[[], nn.Module], depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(depth or 3))
        self.called = tuple(range(depth)) if depth else (1,)

    def forward(self, x: Tensor, *rotary: Tensor) -> Tensor:
        for index in self.called:
            x = self.blocks[index](x, *rotary)
        return x


@cache
def _decoder_class() -> Any:
    """Return a decoder layer of LLaMA that takes the rotary embedding as two tensors: one class for all blocks, because
    blocks of a stack have one class."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class Decoder(LlamaDecoderLayer):  # type: ignore[no-untyped-call]
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            y: Tensor = super().forward(x, position_embeddings=(cos, sin))
            return y

    return Decoder


def _decoder(width: int, feed_forward: int, heads: int) -> nn.Module:
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=width, intermediate_size=feed_forward, num_attention_heads=heads)
    config._attn_implementation = "sdpa"
    layer: nn.Module = _decoder_class()(config, 0)
    return layer


def _stack(make: Callable[[], nn.Module], width: int, tokens: int, size: int, head: int = 0, depth: int = 0) -> Model:
    """Return a stack of blocks; ``head`` is the size of an attention head if they take a rotary embedding."""

    def batch(count: int) -> Batch:
        rotary = {name: torch.randn(1, tokens, head) for name in ("cos", "sin") if head}
        return {"x": torch.randn(count, tokens, width), **rotary}

    return Model(
        lambda: Stack(make, depth),
        batch,
        lambda output, _: output.float().square().mean(),
        lambda batch: (tuple(batch.values()), {}),
        size,
    )


def vit_blocks(width: int, heads: int, tokens: int = 197, size: int = 32, depth: int = 0) -> Model:
    """Return a stack of blocks of a ViT."""

    def make() -> nn.Module:
        from timm.models.vision_transformer import Block

        return Block(width, heads, qkv_bias=True)

    return _stack(make, width, tokens, size, depth=depth)


def llama_blocks(width: int, feed_forward: int, heads: int, tokens: int, size: int, depth: int = 0) -> Model:
    """Return a stack of decoder blocks of LLaMA."""
    return _stack(lambda: _decoder(width, feed_forward, heads), width, tokens, size, width // heads, depth)


def autocast(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Return the forward's context: parameters are fp32, and bf16 means autocast, as in training."""
    return nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)


def explained(model: Model, policy: str, size: int) -> fp4graph.Explanation:
    """Explain ``model`` under ``policy``, on fake tensors; raise Inapplicable if the policy does not fit it."""
    arguments, keywords = model.inputs(model.batch(size))
    return fitting(fp4graph.explain(model.make(), policy, arguments, keywords))


def fitting(explanation: fp4graph.Explanation) -> fp4graph.Explanation:
    """Return ``explanation``; raise Inapplicable if the policy does not fit the model."""
    if explanation.problem:
        raise Inapplicable(explanation.problem.partition(";")[0])
    return explanation


def of_inner_blocks(policy: str) -> Any:
    """Return ``policy`` without its rules for the first or last blocks: a single linear stands for an inner block's."""
    if policy == UNQUANTIZED:
        return policy
    loaded = fp4graph.load_policy(policy)
    return replace(loaded, rules=tuple(r for r in loaded.rules if not (r.match.first_blocks or r.match.last_blocks)))


def under(
    module: nn.Module, policy: Any, backend: str, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> nn.Module:
    """Return ``module``, compiled with ``options`` under a policy, or alone if that is :data:`UNQUANTIZED`.

    ``optimizer`` trains it; by default AdamW.
    """
    if policy == UNQUANTIZED:
        module.compile(backend=backend, **options)
        return module
    fp4graph.apply(module, policy, backend=backend, total_forwards=TOTAL_STEPS, **options)
    fp4graph.prepare_optimizer(module, optimizer or torch.optim.AdamW(module.parameters()))
    return module


class Training:
    """A model in training on one batch, compiled at its first step.

    Args:
        policy: a policy, or :data:`UNQUANTIZED` for the model under torch.compile alone.
        backend: of torch.compile; with ``eager`` nothing is compiled.
        mode: of torch.compile.
        lr: AdamW's learning rate.
    """

    def __init__(
        self,
        model: Model,
        policy: str,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: str,
        mode: str | None = None,
        lr: float = 1e-4,
    ) -> None:
        torch.manual_seed(0)
        self.model = model.make().to(device)
        self.batch = {name: value.to(device) for name, value in model.batch(size).items()}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self._kind, self._dtype, self._device = model, dtype, device
        self._policy, self._backend, self._mode = policy, backend, mode

    def compile(self) -> None:
        """Ask for compilation, which happens in the first step."""
        under(self.model, self._policy, self._backend, self.optimizer, mode=self._mode)

    def forward(self) -> Tensor:
        """Return the loss, with its autograd graph."""
        arguments, keywords = self._kind.inputs(self.batch)
        with autocast(self._dtype, self._device):
            return self._kind.loss(self.model(*arguments, **keywords), self.batch)

    def step(self) -> Tensor:
        """Run forward, backward and AdamW; return the loss."""
        self.optimizer.zero_grad()
        loss = self.forward()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()
