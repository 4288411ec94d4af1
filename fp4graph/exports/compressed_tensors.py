"""compressed-tensors: the layout of llm-compressor and vLLM, which transformers reads too.

Each quantized linear layer has ``weight_packed`` (uint8) and ``weight_scale`` (uint8 for MXFP4, float8_e4m3fn for
NVFP4). NVFP4 adds ``weight_global_scale`` (1/γ) and, if activations are quantized, ``input_global_scale`` (1/γ of the
activations). The library compressed-tensors packs the bytes and makes the configuration.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp4graph.errors import PolicyWarning
from fp4graph.exports.folder import write_config
from fp4graph.exports.layouts import Exported, Layout
from fp4graph.exports.packing import matrices, scale_bytes
from fp4graph.exports.stored import FORMATS
from fp4graph.exports.weights import Fp4Weight, Kind, Scheme


class CompressedTensors(Layout):
    """The layout of the library compressed-tensors."""

    def __init__(self) -> None:
        self._experts: set[Kind] = set()  # the kinds of the experts' weights that were packed

    def packed(self, model: nn.Module, weight: Fp4Weight, input_scale: Tensor | None) -> dict[str, dict[str, Tensor]]:
        """Return ``weight_packed``, ``weight_scale`` and global scales of each module."""
        from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

        if weight.elements.dim() == 3:
            if weight.scheme.weights == "nvfp4" and not self._experts:
                warnings.warn(
                    f"{weight.name} holds experts in NVFP4: servers read them, but from_pretrained() of transformers "
                    "ignores the global scales of experts and loads wrong weights; dequantize the checkpoint with "
                    "compressed-tensors first (docs/export.md)",
                    PolicyWarning,
                    stacklevel=5,
                )
            self._experts.add(weight.scheme.weights)
        nvfp4 = weight.scheme.weights == "nvfp4"
        tensors_of = {}
        for module, matrix in matrices(model, weight).items():
            scales = matrix.scales.to(torch.float8_e4m3fn) if nvfp4 else scale_bytes(matrix.scales)
            tensors = {"weight_packed": pack_fp4_to_uint8(matrix.elements), "weight_scale": scales}
            if nvfp4:
                tensors["weight_global_scale"] = (1 / matrix.multiplier).reshape(1)
            if nvfp4 and weight.scheme.inputs is not None:
                gamma = torch.ones(()) if input_scale is None else input_scale
                tensors["input_global_scale"] = (1 / gamma).reshape(1)
            tensors_of[module] = tensors
        return tensors_of

    def kept(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``tensors`` under their names in the checkpoint.

        If other experts are in MXFP4, experts in high precision keep their names in the model: transformers tries to
        decompress every tensor with the name of a single expert, and drops uncompressed tensors.
        """
        stacks = {name: tensor for name, tensor in tensors.items() if "mxfp4" in self._experts and tensor.dim() == 3}
        return super().kept(model, {k: tensor for k, tensor in tensors.items() if k not in stacks}) | stacks

    def write_config(self, folder: Path, exported: Exported) -> None:
        """Write ``config.json`` with its ``quantization_config``."""
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

        groups = _groups(exported.schemes)
        formats = sorted({FORMATS[scheme.weights] for scheme in exported.schemes.values()})
        config = QuantizationConfig(
            config_groups={f"group_{i}": _scheme(scheme, names) for i, (scheme, names) in enumerate(groups.items())},
            ignore=list(exported.kept),
            format=formats[0] if len(formats) == 1 else "mixed-precision",
            quantization_status=QuantizationStatus.COMPRESSED,
        )
        write_config(folder, exported.model)
        ModelCompressor(quantization_config=config).update_config(str(folder))


def _groups(schemes: Mapping[str, Scheme]) -> dict[Scheme, list[str]]:
    """Return the names of each scheme's modules, or the name of all linear layers, ``Linear``, for a single scheme."""
    groups: dict[Scheme, list[str]] = {}
    for module, scheme in schemes.items():
        groups.setdefault(scheme, []).append(module)
    return groups if len(groups) > 1 else {scheme: ["Linear"] for scheme in groups}


def _scheme(scheme: Scheme, targets: list[str]) -> Any:
    """Return the library's preset for a scheme; presets with A16 in their names keep activations in high precision."""
    from compressed_tensors.quantization import preset_name_to_scheme

    preset = preset_name_to_scheme(scheme.weights.upper() + ("A16" if scheme.inputs is None else ""), targets)
    preset.format = FORMATS[scheme.weights]
    return preset
