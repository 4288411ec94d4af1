"""Reads the FP4 weights of checkpoints: the tensors of each weight, and its values.

A weight is ``element · block scale · γ``. ``element · block scale`` has at most 6 significant bits and is exact; the
product with γ is rounded once, to fp32, as in fprop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp4graph.exports.checkpoint import Checkpoint
from fp4graph.exports.weights import BLOCK, Kind
from fp4graph.files import read_json
from fp4graph.numerics.formats import E2M1, E4M3, E8M0
from fp4graph.numerics.packing import Packed, unpack
from fp4graph.numerics.spec import QuantSpec, ScaleSpec

#: The formats of compressed-tensors, by kind of blocks.
FORMATS: Mapping[Kind, str] = {"mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized"}
_SPECS: Mapping[Kind, QuantSpec] = {
    "mxfp4": QuantSpec(E2M1, BLOCK["mxfp4"], ScaleSpec(E8M0)),
    "nvfp4": QuantSpec(E2M1, BLOCK["nvfp4"], ScaleSpec(E4M3)),
}
#: Kinds by the dtype of their block scales in a file.
_KINDS: Mapping[str, Kind] = {"U8": "mxfp4", "F8_E8M0": "mxfp4", "F8_E4M3": "nvfp4"}
#: Algorithms of ModelOpt whose weights are NVFP4.
_NVFP4 = ("NVFP4", "W4A16_NVFP4")
#: The last parts of the names of tensors for activations and caches, which are ignored.
_ACTIVATIONS = frozenset({"input_scale", "input_global_scale", "output_scale", "q_scale", "k_scale", "v_scale"})
_REMEDY = "load it dequantized with its own library, and apply a policy to that model"


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of the dequantized checkpoint.

    Attributes:
        key: the key of the tensor in its file; of a packed tensor, the key of its codes.
        shape: the shape of the dequantized tensor.
        packed: whether the file holds the tensor as FP4.
        read: a function that returns the tensor, in fp32 if it is packed, else in the file's dtype.
    """

    key: str
    shape: tuple[int, ...]
    packed: bool
    read: Callable[[], Tensor]


def stored_tensors(checkpoint: Checkpoint) -> dict[str, Stored]:
    """Return the tensors of the dequantized checkpoint, by name.

    Raises:
        Error: the checkpoint is not quantized, or has an unknown format; a part of a weight is missing or has a wrong
            shape or dtype. The message names file and key.
    """
    place, settings = _settings(checkpoint)
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        readable = ", ".join(map(repr, _READERS))
        raise checkpoint.settings(place, f"quant_method is {method!r}, not one of {readable}; {_REMEDY}")
    return _READERS[method](checkpoint, place, settings)


def _settings(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
    """Return the file with a checkpoint's quantization settings, and the settings."""
    settings = checkpoint.config.get("quantization_config")
    if isinstance(settings, dict):
        return "config.json", settings
    file = checkpoint.folder / "hf_quant_config.json"
    if file.is_file():
        content = read_json(file)
        details = content.get("quantization") if isinstance(content, dict) else None
        if not isinstance(details, dict):
            raise checkpoint.settings(file.name, "has no 'quantization'; it was damaged, or something else wrote it")
        return file.name, {"quant_method": "modelopt", **details}
    raise checkpoint.settings(
        "config.json", "has no quantization_config; load a checkpoint in high precision with its own library"
    )


# ------------------------------------------------------------------ layouts


def _compressed_tensors(checkpoint: Checkpoint, place: str, settings: Mapping[str, Any]) -> dict[str, Stored]:
    group_of = checkpoint.mapping(place, "config_groups", settings.get("config_groups"))
    groups = [checkpoint.mapping(place, f"config_groups of {name}", group) for name, group in group_of.items()]
    formats = {_format_name(settings.get("format")), *(_format_name(group.get("format")) for group in groups)}
    if unknown := formats - {None, "dense", "mixed-precision", *FORMATS.values()}:
        readable = " or ".join(FORMATS.values())
        raise checkpoint.settings(place, f"format is {min(map(str, unknown))!r}, not {readable}; {_REMEDY}")
    for part in ("transform_config", "sparsity_config"):
        if (config := checkpoint.mapping(place, part, settings.get(part))) and config.get("format") != "dense":
            raise checkpoint.settings(place, f"{part} changes the weights, which is not supported; {_REMEDY}")

    def packed(module: str) -> Stored:
        scales = _required(checkpoint, f"{module}.weight_packed", f"{module}.weight_scale")
        kind = _kind(checkpoint, scales)
        if FORMATS[kind] not in formats:
            raise checkpoint.error(scales, f"is a scale of {FORMATS[kind]}, which {place} does not name")
        gamma = None
        if kind == "nvfp4":
            gamma = _required(checkpoint, f"{module}.weight_packed", f"{module}.weight_global_scale")
        return _weight(checkpoint, kind, f"{module}.weight_packed", scales, gamma, inverse=True)

    return _by_module(checkpoint, "weight_packed", {"weight_scale", "weight_global_scale"}, packed)


def _format_name(name: object) -> str | None:
    """Return a hashable name of a format; a value that is not text becomes an unknown name."""
    return None if name is None else str(name)


def _modelopt(checkpoint: Checkpoint, place: str, settings: Mapping[str, Any]) -> dict[str, Stored]:
    algorithms = {"quant_algo": settings.get("quant_algo")}
    if algorithms["quant_algo"] == "MIXED_PRECISION":
        layers = checkpoint.mapping(place, "quantized_layers", settings.get("quantized_layers"))
        layers = {name: checkpoint.mapping(place, f"quantized_layers of {name}", each) for name, each in layers.items()}
        algorithms = {f"quant_algo of {name}": layer.get("quant_algo") for name, layer in layers.items()}
    for name, algorithm in algorithms.items():
        if algorithm not in _NVFP4:
            readable = " or ".join(_NVFP4)
            raise checkpoint.settings(place, f"{name} is {algorithm!r}, not {readable}; {_REMEDY}")

    def packed(module: str) -> Stored:
        weight = _required(checkpoint, f"{module}.weight_scale_2", f"{module}.weight")
        scales = _required(checkpoint, f"{module}.weight_scale_2", f"{module}.weight_scale")
        if _kind(checkpoint, scales) != "nvfp4":
            raise checkpoint.error(scales, f"has dtype {checkpoint.dtype(scales)}; NVFP4 has scales in F8_E4M3")
        return _weight(checkpoint, "nvfp4", weight, scales, f"{module}.weight_scale_2", inverse=False)

    return _by_module(checkpoint, "weight_scale_2", {"weight", "weight_scale"}, packed)


def _gpt_oss(checkpoint: Checkpoint, place: str, settings: Mapping[str, Any]) -> dict[str, Stored]:
    names = [key.removesuffix("_blocks") for key in checkpoint.keys if key.endswith("_blocks")]
    used = {f"{name}_{part}" for name in names for part in ("blocks", "scales")}
    tensors = {key: _plain(checkpoint, key) for key in checkpoint.keys if key not in used}
    for name in names:
        scales = _required(checkpoint, f"{name}_blocks", f"{name}_scales")
        # The file has [E, N, K]; transformers holds the experts' weights as [E, K, N].
        tensors[name] = _weight(checkpoint, "mxfp4", f"{name}_blocks", scales, None, inverse=False, transposed=True)
    return tensors


_READERS: Mapping[str, Callable[[Checkpoint, str, Mapping[str, Any]], dict[str, Stored]]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "mxfp4": _gpt_oss,
}


def _by_module(
    checkpoint: Checkpoint, mark: str, others: set[str], packed: Callable[[str], Stored]
) -> dict[str, Stored]:
    """Return all tensors; a module with a tensor ``mark`` stores its weight in ``mark`` and ``others``."""
    modules = {key.removesuffix(f".{mark}") for key in checkpoint.keys if key.endswith(f".{mark}")}
    tensors = {f"{module}.weight": packed(module) for module in sorted(modules)}
    for key in checkpoint.keys:
        module, _, last = key.rpartition(".")
        if last not in _ACTIVATIONS and not (module in modules and last in {mark, *others}):
            tensors[key] = _plain(checkpoint, key)
    return tensors


# ------------------------------------------------------------------ tensors


def _required(checkpoint: Checkpoint, key: str, partner: str) -> str:
    """Return ``partner``, a tensor that ``key`` needs; raise an Error if the checkpoint lacks it."""
    if partner not in checkpoint.keys:
        raise checkpoint.error(key, f"needs {partner!r}, which no file has; the checkpoint is incomplete")
    return partner


def _kind(checkpoint: Checkpoint, scales: str) -> Kind:
    if (dtype := checkpoint.dtype(scales)) not in _KINDS:
        raise checkpoint.error(scales, f"has dtype {dtype}; block scales must be U8 (MXFP4) or F8_E4M3 (NVFP4)")
    return _KINDS[dtype]


def _plain(checkpoint: Checkpoint, key: str) -> Stored:
    return Stored(key, checkpoint.shape(key), False, lambda: checkpoint.tensor(key))


def _weight(
    checkpoint: Checkpoint,
    kind: Kind,
    codes: str,
    scales: str,
    gamma: str | None,
    *,
    inverse: bool,
    transposed: bool = False,
) -> Stored:
    """Return the weight of codes ``[..., K/2]`` or ``[..., K/block, block/2]`` and scales ``[..., K/block]``.

    Args:
        gamma: the key of γ, one number; with ``inverse``, the key of 1/γ.
        transposed: swaps the last two axes.
    """
    *lines, blocks = checkpoint.shape(scales)
    code_shape, half = checkpoint.shape(codes), BLOCK[kind] // 2
    if checkpoint.dtype(codes) != "U8":
        raise checkpoint.error(codes, f"has dtype {checkpoint.dtype(codes)}; two elements per byte must be U8")
    if code_shape not in ((*lines, blocks * half), (*lines, blocks, half)):
        raise checkpoint.error(
            codes,
            f"has shape {list(code_shape)}, which does not fit scales {[*lines, blocks]} of blocks of {BLOCK[kind]}",
        )
    if gamma is not None and any(size != 1 for size in checkpoint.shape(gamma)):
        raise checkpoint.error(gamma, f"has shape {list(checkpoint.shape(gamma))}; a weight has one tensor scale")
    shape = (*lines, blocks * BLOCK[kind])

    def read() -> Tensor:
        code_bytes = checkpoint.tensor(codes).reshape(*lines, blocks * half)
        scale_bytes = checkpoint.tensor(scales).view(torch.uint8)
        values = unpack(Packed(code_bytes, scale_bytes, _SPECS[kind], shape, len(shape) - 1, torch.float32))
        if gamma is not None:
            multiplier = checkpoint.tensor(gamma).to(torch.float32).reshape(())
            values = values * (1 / multiplier if inverse else multiplier)
        if not torch.isfinite(values).all():
            raise checkpoint.error(codes, "times its scales has NaN or Inf; the checkpoint is damaged, fetch it again")
        return values.mT.contiguous() if transposed else values

    return Stored(codes, (*lines[:-1], shape[-1], lines[-1]) if transposed else shape, True, read)
