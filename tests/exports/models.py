"""Tiny models to export, trained for a few steps, and the operands that an observer sees their fprop multiply."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import torch
import transformers
import yaml
from safetensors.torch import load_file
from torch import nn

import fp4graph
from fp4graph.model.runtime import runtime_of
from fp4graph.ops.product import total
from fp4graph.technique.operands import Operand
from tests.helpers import mixtures, models
from tests.helpers.mixtures import SIZES
from tests.helpers.policies import MXFP4, NVFP4
from tests.helpers.steps import descend
from tests.helpers.training import applied, operation_by_operation, prepared

__all__ = ["MXFP4", "NVFP4"]
#: Keys of a rule: experts alone; weights in square blocks, as ``operands``.
GROUPED, SQUARE = {"match": {"op": "grouped"}}, {"weights": {"block": [16, 16]}}
TOKENS = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


class Tied(nn.Module):
    """Two layers after an embedding, whose weight is also the second layer's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner, self.head = nn.Embedding(8, 64), nn.Linear(64, 64), nn.Linear(64, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.inner(self.embed(x)))


def from_config(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def llama(**options: Any) -> Any:
    return from_config(transformers.LlamaConfig(**SIZES | options))


def qwen3() -> Any:
    return from_config(transformers.Qwen3Config(**SIZES | {"num_hidden_layers": 1, "head_dim": 16}))


def mixture(name: str, **options: Any) -> Any:
    """Make a mixture whose experts fit blocks of 32."""
    return mixtures.mixture(name, **({"moe_intermediate_size": 64} if name == "Qwen3-MoE" else {}) | options)


def gpt2() -> Any:
    """Make a GPT-2, whose blocks are of Conv1D and whose head is an untied nn.Linear."""
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 97, "n_positions": 64}
    return from_config(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False))


def vit(**options: Any) -> Any:
    return models.vit(**{"img_size": 16, "patch_size": 4, "depth": 3, **options})


def by_rule(quantize: Any, *techniques: Any, name: str = "the rule", **rule: Any) -> dict[str, Any]:
    """Return a policy of one rule, which quantizes every linear layer, or what ``match`` says."""
    only = {"name": name, "match": {"op": "linear"}, "quantize": quantize, **rule}
    return {"version": 1, "name": "p", "rules": [only], "techniques": list(techniques)}


def policy(quantize: Any = MXFP4, *techniques: Any, **rule: Any) -> dict[str, Any]:
    """Return a policy that quantizes the weights of all blocks, and not the activations that they multiply."""
    operands = {"fprop.input": "keep", **rule.pop("operands", {})}
    match = rule.pop("match", {"op": ["linear", "grouped"], "block": True})
    return by_rule(quantize, *techniques, name="blocks", match=match, operands=operands, **rule)


def keeping(name: str, *operands: str) -> dict[str, Any]:
    """Return a shipped policy that keeps ``operands`` in high precision."""
    data: dict[str, Any] = yaml.safe_load(fp4graph.load_policy(name).to_yaml())
    for rule in data["rules"]:
        if "quantize" in rule:
            rule["operands"] = {**rule.get("operands", {}), **dict.fromkeys(operands, "keep")}
    return data


def inputs(model: Any) -> torch.Tensor:
    """Return the argument that a model of this file is called with."""
    return IMAGES if hasattr(model, "patch_embed") else TOKENS


@operation_by_operation()
def logits(model: Any) -> torch.Tensor:
    """Return the outputs of an eval forward."""
    with torch.no_grad():
        y = model(inputs(model))
    return y if isinstance(y, torch.Tensor) else y.logits


@operation_by_operation()
def trained(model: Any, under: Any, steps: int = 2) -> Any:
    """Apply a policy, train ``model`` on its inputs, and return it in eval mode, called once."""
    optimizer, x = prepared(applied(model, under), lr=1e-3), inputs(model)
    output = (lambda: model(x)) if x is IMAGES else (lambda: model(x, labels=x).loss)
    descend(lambda: output().square().mean(), optimizer, steps)
    logits(model.eval())
    return model


@operation_by_operation()
@torch.no_grad()
def recorded(model: Any, operand: Operand) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return ``operand`` of an eval forward, before and after its quantizer, by site in order, where the weight is
    quantized."""
    found = {}

    def record(site: str, left: Any, right: Any) -> None:
        for each in (left, right) if right.program.spec is not None else ():
            if each.operand is operand:
                found[site] = each.given, total(each.terms).float()

    observer = SimpleNamespace(operands=lambda site: partial(record, site), output=lambda site, y: None)
    runtime_of(model).observe(observer, training=False)
    model(inputs(model))
    runtime_of(model).observe(None)
    return found


def multiplied(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights ``[..., N, K]`` that an eval forward multiplies with, by the names of the parameters.

    Experts have two sites: gate_up_proj, and down_proj, which has #1 after the module's name.
    """
    named = {}
    for site, (_, weight) in recorded(model, Operand.FPROP_WEIGHT).items():
        module, _, number = site.partition("#")
        expert = {"": "gate_up_proj", "1": "down_proj"}[number]
        named[f"{module}.{expert}" if module.endswith("experts") else f"{module}.weight"] = weight
    return named


def e2m1(packed: np.ndarray) -> np.ndarray:
    """Return the elements in bytes ``[N, K/2]`` of two codes each, by ml_dtypes, in float64."""
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    return codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def modelopt_parts(folder: Path, module: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return elements, block scales (repeated for each element) and γ of a weight in ModelOpt's layout, in float64."""
    found = load_file(folder / "model.safetensors")
    scales = found[f"{module}.weight_scale"].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    gamma = found[f"{module}.weight_scale_2"].double().numpy()
    return e2m1(found[f"{module}.weight"].numpy()), np.repeat(scales.astype(np.float64), 16, -1), gamma


def configuration(folder: Path) -> dict[str, Any]:
    """Return the ``quantization_config`` of an export."""
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return content


#: Functions that make a model, by name.
MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "qwen3-moe": lambda: mixture("Qwen3-MoE"),
    "gpt-oss": lambda: mixture("GPT-OSS"),
    "gpt2": gpt2,
    "vit": vit,
}
