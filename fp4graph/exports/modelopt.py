"""ModelOpt's layout of NVFP4, which TensorRT-LLM, vLLM and SGLang read.

Each quantized linear layer has ``weight`` (uint8, two elements per byte), ``weight_scale`` (float8_e4m3fn),
``weight_scale_2`` (γ) and, if activations are quantized, ``input_scale`` (γ of the activations).
``hf_quant_config.json`` and ``config.json`` both describe the quantization.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp4graph.exports.folder import write_config, write_json
from fp4graph.exports.layouts import Exported, Layout
from fp4graph.exports.packing import element_bytes, matrices
from fp4graph.exports.weights import BLOCK, Fp4Weight, refusal

#: The version of ModelOpt whose layout this is.
VERSION = "0.47.0"


class ModelOpt(Layout):
    """The layout of NVIDIA's ModelOpt."""

    def packed(self, model: nn.Module, weight: Fp4Weight, input_scale: Tensor | None) -> dict[str, dict[str, Tensor]]:
        """Return ``weight``, ``weight_scale``, ``weight_scale_2`` and ``input_scale`` of each module."""
        if weight.scheme.weights != "nvfp4":
            raise refusal(
                weight,
                "ModelOpt's checkpoints do not support MXFP4 weights",
                "use format='compressed-tensors', or 'gpt-oss' for the experts of GPT-OSS",
            )
        tensors_of = {}
        for module, matrix in matrices(model, weight).items():
            tensors_of[module] = {
                "weight": element_bytes(matrix.elements),
                "weight_scale": matrix.scales.to(torch.float8_e4m3fn),
                "weight_scale_2": matrix.multiplier,
            }
            if weight.scheme.inputs is not None:
                tensors_of[module]["input_scale"] = torch.ones(()) if input_scale is None else input_scale.clone()
        return tensors_of

    def write_config(self, folder: Path, exported: Exported) -> None:
        """Write ``hf_quant_config.json``, and ``config.json`` with the same facts in ``quantization_config``."""
        block, kept = BLOCK["nvfp4"], list(exported.kept)
        by_algorithm: dict[str, list[str]] = {}
        for module, scheme in exported.schemes.items():
            by_algorithm.setdefault("W4A16_NVFP4" if scheme.inputs is None else "NVFP4", []).append(module)
        details: dict[str, Any] = {"kv_cache_quant_algo": None, "exclude_modules": kept}
        embedded: dict[str, Any] = {"ignore": kept, "quant_method": "modelopt"}
        if len(by_algorithm) == 1:
            (algorithm,) = by_algorithm
            details |= {"quant_algo": algorithm, "group_size": block}
            embedded["config_groups"] = {"group_0": _group(algorithm, ["Linear"])}
        else:
            algorithm = "MIXED_PRECISION"
            layers = {
                module: {"quant_algo": each, "group_size": block}
                for each, modules in by_algorithm.items()
                for module in modules
            }
            details |= {"quant_algo": algorithm, "quantized_layers": layers}
            groups = enumerate(by_algorithm.items())
            embedded["config_groups"] = {f"group_{i}": _group(each, sorted(modules)) for i, (each, modules) in groups}
            embedded["quantized_layers"] = layers
        producer = {"name": "modelopt", "version": VERSION}
        embedded |= {"quant_algo": algorithm, "producer": producer}
        write_config(folder, exported.model, embedded)
        write_json(folder / "hf_quant_config.json", {"producer": producer, "quantization": details})


def _group(algorithm: str, targets: list[str]) -> dict[str, Any]:
    """Return a config group in the form of ModelOpt's ``config.json``."""
    args = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK["nvfp4"]}
    inputs = {} if algorithm == "W4A16_NVFP4" else {"input_activations": dict(args)}
    return {**inputs, "weights": args, "targets": targets}
