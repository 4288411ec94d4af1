"""Tiny models to export, trained a little; what their fprop multiplies with, as an observer is shown it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
import yaml

import fp4graph
from fp4graph.model.runtime import runtime_of
from fp4graph.ops.product import total
from fp4graph.technique.operands import Operand

TOKENS = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
MXFP4 = {"element": "e2m1", "block": 32, "scale": {"format": "e8m0", "rounding": "ceil"}}
NVFP4 = {"element": "e2m1", "block": 16, "scale": {"format": "e4m3", "rounding": "nearest_even"}}


def _of(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def llama(**options: Any) -> Any:
    return _of(transformers.LlamaConfig(**SIZES | options))


def mixture(kind: str, **options: Any) -> Any:
    """Make a Qwen3-MoE or a GPT-OSS of four experts a layer."""
    sizes = {**SIZES, "head_dim": 16, "num_experts_per_tok": 2, **options}
    if kind == "qwen3-moe":
        config: Any = transformers.Qwen3MoeConfig(**{"moe_intermediate_size": 64, **sizes}, num_experts=4)
    else:
        config = transformers.GptOssConfig(**sizes, num_local_experts=4)
    config._experts_implementation = "grouped_mm"
    return _of(config)


def gpt2() -> Any:
    """Make a GPT-2, whose blocks are of Conv1D and whose head is an untied nn.Linear."""
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 97, "n_positions": 64}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
    return _of(transformers.GPT2Config(**sizes, **tokens))


def vit(**options: Any) -> Any:
    import timm

    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 3, "num_heads": 2, "num_classes": 10, **options}
    return timm.create_model("vit_tiny_patch16_224", **sizes)


def policy(quantize: Any = MXFP4, *techniques: Any, **rule: Any) -> dict[str, Any]:
    """Return a policy that quantizes the weights of all blocks, and not the activations that they multiply."""
    operands = {"fprop.input": "keep", **rule.pop("operands", {})}
    match = rule.pop("match", {"op": ["linear", "grouped"], "block": True})
    only = {"name": "blocks", "match": match, "quantize": quantize, "operands": operands, **rule}
    return {"version": 1, "name": "p", "rules": [only], "techniques": list(techniques)}


def keeping(name: str, *operands: str) -> dict[str, Any]:
    """Return a shipped policy that keeps ``operands`` in high precision."""
    data: dict[str, Any] = yaml.safe_load(fp4graph.load_policy(name).to_yaml())
    for rule in data["rules"]:
        if "quantize" in rule:
            rule["operands"] = {**rule.get("operands", {}), **dict.fromkeys(operands, "keep")}
    return data


def trained(model: Any, under: Any, steps: int = 2, **call: Any) -> Any:
    """Apply a policy, train ``model`` on :data:`TOKENS` or on ``call``, and return it in eval mode."""
    fp4graph.apply(model, under, backend="eager")
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(steps):
        output = model(**call) if call else model(TOKENS, labels=TOKENS).loss
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(**call) if call else model(TOKENS)
    return model


class _Weights:
    """A recording of the weights that fprop multiplies with, by site and in their order."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def operands(self, site: str) -> Any:
        def observe(left: Any, right: Any) -> None:
            if right.operand is Operand.FPROP_WEIGHT and right.program.spec is not None:
                self.found[site] = total(right.terms).float()

        return observe

    def output(self, site: str, y: torch.Tensor) -> None:
        pass


@torch.no_grad()
def multiplied(model: Any, *args: Any) -> dict[str, torch.Tensor]:
    """Return what an eval forward multiplies with, ``[..., N, K]``, by site: the module, with #1 for its second."""
    seen = _Weights()
    runtime_of(model).observe(seen, training=False)
    model(*args)
    runtime_of(model).observe(None)
    return seen.found


def parameters(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights by the names of transformers' parameters; the experts' sites are gate_up_proj, then down_proj."""
    named = {}
    for site, weight in found.items():
        module, _, number = site.partition("#")
        expert = {"": "gate_up_proj", "1": "down_proj"}[number]
        named[f"{module}.{expert}" if module.endswith("experts") else f"{module}.weight"] = weight
    return named


def fprop_parameters(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights that a language model multiplies :data:`TOKENS` with, by the names of its parameters."""
    return parameters(multiplied(model, TOKENS))


#: By name, each made anew by a call.
MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "qwen3-moe": lambda: mixture("qwen3-moe"), "vit": vit}
