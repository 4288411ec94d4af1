"""Small mixtures of experts of transformers, the same weights every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
_DEEPSEEK: dict[str, Any] = {
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
#: By name: the class of the configuration, and its options beyond :data:`SIZES`.
CONFIGS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Qwen3-MoE": (transformers.Qwen3MoeConfig, {"head_dim": 16, "moe_intermediate_size": 48, "num_experts": 4}),
    "Mixtral": (transformers.MixtralConfig, {"num_local_experts": 4}),
    "GPT-OSS": (transformers.GptOssConfig, {"head_dim": 16, "num_local_experts": 4}),
    "DeepSeek-V3": (transformers.DeepseekV3Config, {"moe_intermediate_size": 48, "n_routed_experts": 4, **_DEEPSEEK}),
}


def mixture(name: str = "Qwen3-MoE", form: str = "grouped_mm", **options: Any) -> Any:
    """Make a mixture with four experts in each layer, two for each token, and transformers' ``form`` of experts."""
    torch.manual_seed(0)
    make, more = CONFIGS[name]
    config = make(**{**SIZES, "num_experts_per_tok": 2, **more, **options})
    config._experts_implementation = form
    make_model: Any = transformers.AutoModelForCausalLM.from_config
    return make_model(config, attn_implementation="eager")
