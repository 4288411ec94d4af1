"""How each server loads a layer: which tensor scale and which rule for activations it takes, or why it refuses.

The rules follow these sources, without their code:

- vLLM 0.33.0 (4ba787ec9), in vllm/model_executor/layers/quantization: compressed_tensors/compressed_tensors.py,
  schemes/compressed_tensors_w4a4_nvfp4.py and _mxfp4.py, compressed_tensors_moe/*_w4a4_nvfp4.py and *_mxfp4.py,
  modelopt.py, mxfp4.py, utils/nvfp4_emulation_utils.py; in vllm/model_executor/models: gpt_oss.py.
- SGLang 0.5.23, in sglang/srt/layers/quantization: compressed_tensors/compressed_tensors.py and utils.py,
  schemes/compressed_tensors_w4a4_nvfp4.py, _w4a4_nvfp4_moe.py, _w4a16_nvfp4.py, _w4a16_nvfp4_moe.py, modelopt_quant.py,
  mxfp4.py; sglang/srt/models/gpt_oss.py.
- TensorRT-LLM, its PyTorch backend, each file at its commit: tensorrt_llm/_torch/modules/linear.py (00bbf71e),
  modules/fused_moe/quantization.py (002366a4), models/checkpoints/hf/weight_mapper.py (f59aed07),
  gpt_oss_weight_mapper.py (f79bd8c9) and compressed_tensors.py (35a24cbc), tensorrt_llm/models/quant_config_utils.py
  (21156a7a), tensorrt_llm/quantization/modelopt_config.py (2edf354d).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fp4graph.exports.readers.fused import Activations, Array, Fused
from fp4graph.exports.readers.layers import Layer

_DIFFER = "its modules have different tensor scales"


@dataclass(frozen=True)
class Server:
    """A server's loader.

    Attributes:
        version: the release, or the commit of the file about linear layers.
        load: returns the layer that the server builds from a checkpoint's tensors; raises a ServerError if it cannot.
    """

    version: str
    load: Callable[[Layer], Fused]


def _vllm(layer: Layer) -> Fused:
    """Take the largest stored tensor scale of a linear layer, and the gate's tensor scale of an expert."""
    scheme = layer.scheme
    if scheme.weights == "mxfp4":
        # In compressed-tensors, vLLM quantizes activations on GPUs that have MXFP4, whatever the configuration says.
        return layer.fused(activations=Activations(None if scheme.layout == "gpt-oss" else "mxfp4"))
    assert layer.scale is not None
    if not layer.stacked and _differ(layer.scale):
        layer.warn(f"{_DIFFER}; it takes the largest stored number")
    return layer.fused(_chosen(layer, layer.scale), _constant(layer))


def _sglang(layer: Layer) -> Fused:
    """Take the scales that vLLM takes; refuse differing scales in compressed-tensors if only weights are quantized."""
    scheme = layer.scheme
    if scheme.weights == "mxfp4":
        if scheme.layout == "compressed-tensors" and not layer.stacked:
            raise layer.refuse("it has no scheme for linear layers in MXFP4, only for experts")
        return layer.fused()
    assert layer.scale is not None
    if scheme.inputs is None and _differ(layer.scale):
        if scheme.layout == "compressed-tensors":
            raise layer.refuse(f"{_DIFFER}, which it does not accept for weights alone")
        if not layer.stacked:
            layer.warn(f"{_DIFFER}; it takes the largest")
    # The runner flashinfer_trtllm keeps the scales of gate and up in modelopt's layout; other runners take the gate's.
    return layer.fused(_chosen(layer, layer.scale), _constant(layer))


def _tensorrt_llm(layer: Layer) -> Fused:
    """Load GPT-OSS, and modelopt's layout with activations; the modules of a linear must share their scales."""
    scheme = layer.scheme
    if scheme.layout == "gpt-oss":
        if layer.name.endswith("w13"):  # gate and up alternate in the file; the server puts gate first
            order = np.r_[0 : layer.rows[0] : 2, 1 : layer.rows[0] : 2]
            layer = replace(layer, codes=layer.codes[:, order], scales=layer.scales[:, order])
        return layer.fused()
    if scheme.layout == "compressed-tensors":
        if scheme.weights == "mxfp4" and not layer.stacked:
            raise layer.refuse("it reads this format as W4A16_MXFP4, for which it has no linear layer")
        if scheme.weights == "nvfp4" and scheme.inputs is None:
            raise layer.refuse("its configuration must describe input_activations")
        raise layer.refuse("its weight mapper looks for weight, not weight_packed")
    if scheme.inputs is None:
        raise layer.refuse("it has no algorithm W4A16_NVFP4")
    assert layer.scale is not None
    assert layer.input_scale is not None
    if not layer.stacked:
        if _differ(layer.scale) or _differ(layer.input_scale):
            raise layer.refuse(f"{_DIFFER}, or constants of activations")
        return layer.fused(layer.scale[0], _constant(layer))
    if not _close(layer.input_scale):
        raise layer.refuse("gate and up have different constants of activations")
    if not _close(layer.scale):
        layer.warn("gate and up have different tensor scales; it takes the larger")
    return layer.fused(layer.scale.max(-1), _constant(layer))


#: The servers by the names that :func:`fp4graph.exports.readers.read` takes.
SERVERS: Mapping[str, Server] = {
    "vllm": Server("0.33.0", _vllm),
    "sglang": Server("0.5.23", _sglang),
    "tensorrt-llm": Server("00bbf71e", _tensorrt_llm),
}


def _differ(scales: Array) -> bool:
    return bool((scales != scales[..., :1]).any())


def _close(scales: Array) -> bool:
    return np.allclose(scales[..., :1], scales)


def _chosen(layer: Layer, stored: Array) -> Array:
    """Return γ: for a linear layer of its largest stored number, 0-d; for experts of the gate, ``[E]``, with a warning.

    compressed-tensors stores 1/γ, so the largest stored number is the smallest γ.
    """
    if layer.stacked and not _close(stored):
        layer.warn("gate and up have different tensor scales; it takes the gate's")
    chosen = stored[:, 0] if layer.stacked else stored.max()
    return np.asarray(1 / chosen if layer.scheme.layout == "compressed-tensors" else chosen, np.float32)


def _constant(layer: Layer) -> Activations:
    """Return the rule for activations, with the largest γ; a linear layer in compressed-tensors has the smallest γ."""
    if layer.scheme.inputs is None:
        return Activations(None)
    assert layer.input_scale is not None
    if layer.scheme.layout == "modelopt":
        scale = layer.input_scale.max()
        return Activations("nvfp4", scale, np.float32(1) / scale)
    divisor = layer.input_scale.min() if layer.stacked else layer.input_scale.max()
    return Activations("nvfp4", np.float32(1) / divisor, divisor)
