"""Small models that several tests train, the same weights every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    """Two linears, ``first`` and ``second``, with ``activation`` between them."""

    def __init__(
        self, inputs: int, hidden: int, outputs: int, activation: Callable[[Tensor], Tensor] = torch.relu
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Return ``second(activation(first(x)))``."""
        result: Tensor = self.second(self.activation(self.first(x)))
        return result


class SwiGlu(nn.Module):
    """``down(silu(gate(x))·up(x))``."""

    def __init__(self, width: int, hidden: int, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = (nn.Linear(width, hidden, bias=bias) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return rows of ``width`` numbers."""
        result: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return result


def module_of(forward: Callable[..., Any], **parts: Any) -> Any:
    """Make a module of a new class with the submodules ``parts`` and this ``forward(self, ...)``."""
    module = type("Made", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
#: From torch 2.15 on, Dynamo compiles the rest of a frame that calls an LSTM.
RESUMES_AFTER_RNN = _TORCH >= (2, 15)
#: From torch 2.15 on, torch.compile takes ``F.grouped_mm`` in fp32.
COMPILES_GROUPED_FP32 = _TORCH >= (2, 15)
if not COMPILES_GROUPED_FP32:
    import transformers.integrations.moe  # noqa: F401  # registers the operator that grouped_mm() calls


def grouped_mm(x: Tensor, w: Tensor, *, offs: Tensor) -> Tensor:
    """Multiply tokens ``x [T, K]``, sorted by expert, with their experts' matrices ``w [E, K, N]``, under any torch.

    Where torch.compile refuses torch's own product, models of transformers call an operator of transformers, and so
    does this function.
    """
    if COMPILES_GROUPED_FP32 or x.dtype is not torch.float32:
        return nn.functional.grouped_mm(x, w, offs=offs)
    result: Tensor = torch.ops.transformers.grouped_mm_fallback(x, w, offs)
    return result


def vit(**options: Any) -> nn.Module:
    """Make a two-block timm ViT of width 64 for images of 32x32."""
    import timm

    torch.manual_seed(0)
    settings = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 10}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", **{**settings, **options})
    return model


def llama(**options: Any) -> nn.Module:
    """Make a two-layer Hugging Face LLaMA of width 64 and vocabulary 97."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 97,
        "max_position_embeddings": 32,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": False,
    }
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**{**settings, **options}))
    return model
