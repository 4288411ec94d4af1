"""The eyes of a server: reads an export as the loaders of vLLM, SGLang and TensorRT-LLM do, in NumPy.

A server does not multiply with the tensors of a checkpoint. It fuses q, k and v, and gate and up, stacks experts, keeps
one tensor scale for a fused matrix, and decides by the configuration how to quantize activations. The readers do the
same, from the servers' public sources (``servers.py`` names files and versions), and return what the server multiplies
with. They share no code with :func:`fp4graph.export`, whose values they test.

The readers follow a server only through loading, not into its kernels. They neither swizzle scales nor pad matrices,
because this changes no value. Some kernels round further; docs/servers.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from fp4graph.errors import Error, suggest
from fp4graph.exports.checkpoint import Checkpoint
from fp4graph.exports.readers.configuration import quantization
from fp4graph.exports.readers.fused import Activations, Fused, ServerError
from fp4graph.exports.readers.layers import layers
from fp4graph.exports.readers.servers import SERVERS
from fp4graph.files import read_json

__all__ = ["SERVERS", "Activations", "Fused", "ServerError", "fuse", "read"]


def read(folder: str | PathLike[str], server: str = "vllm") -> dict[str, Fused]:
    """Return the fused layers of the checkpoint in ``folder``; arguments and errors are those of :func:`fuse`.

    ``hf_quant_config.json`` is read if ``config.json`` has no ``quantization_config``.

    Raises:
        Error: a file is missing or damaged; the message names it.
    """
    with Checkpoint(Path(folder)) as checkpoint:
        config = dict(checkpoint.config)
        separate = checkpoint.folder / "hf_quant_config.json"
        if "quantization_config" not in config and separate.is_file():
            details = dict(checkpoint.mapping(separate.name, "quantization", read_json(separate).get("quantization")))
            excluded = details.pop("exclude_modules", None) or []
            config["quantization_config"] = {"quant_method": "modelopt", "ignore": excluded, **details}
        return fuse({key: checkpoint.tensor(key) for key in checkpoint.keys}, config, server)


def fuse(tensors: Mapping[str, Any], config: Mapping[str, Any], server: str = "vllm") -> dict[str, Fused]:
    """Return the quantized layers that ``server`` builds from a checkpoint, by their names in the server.

    ``model.layers.0.self_attn.qkv_proj`` has the rows of q, k and v; ``...mlp.gate_up_proj`` those of gate and up;
    ``...mlp.experts.w13`` and ``.w2`` are ``[E, N, K]``. Other quantized layers keep their names. Layers in high
    precision are left out.

    Args:
        tensors: NumPy arrays or tensors by their names in the checkpoint. Block scales are bytes or FP8. Tensors of
            unquantized layers may be of any type, or missing.
        config: the content of ``config.json``, with its ``quantization_config``.
        server: ``vllm``, ``sglang`` or ``tensorrt-llm``.

    Raises:
        ServerError: the server cannot load the checkpoint; the message names the layer and the reason.
        Error: there is no such server.

    Warns:
        PolicyWarning: the server warns that siblings have different tensor scales, and takes one of them.
    """
    if server not in SERVERS:
        raise Error(f"unknown server {server!r}; {suggest(server, SERVERS)}")
    version, load = SERVERS[server].version, SERVERS[server].load
    return {layer.name: load(layer) for layer in layers(tensors, quantization(config), f"{server} {version}")}
