"""Reads the FP4 weights of other people's checkpoints: which tensors make a weight, and its values.

A weight is ``element · block scale · γ``. ``element · block scale`` has at most 6 significant bits and is exact; the
product with γ is rounded once, to fp32. That is what fprop multiplies with.
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

#: The formats of compressed-tensors that hold a kind of blocks.
FORMATS: Mapping[Kind, str] = {"mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized"}
_SPECS: Mapping[Kind, QuantSpec] = {
    "mxfp4": QuantSpec(E2M1, BLOCK["mxfp4"], ScaleSpec(E8M0)),
    "nvfp4": QuantSpec(E2M1, BLOCK["nvfp4"], ScaleSpec(E4M3)),
}
#: Kinds by the dtype of their block scales in a file.
_KINDS: Mapping[str, Kind] = {"U8": "mxfp4", "F8_E8M0": "mxfp4", "F8_E4M3": "nvfp4"}
#: Algorithms of ModelOpt whose weights are NVFP4.
_NVFP4 = ("NVFP4", "W4A16_NVFP4")
#: The last parts of names whose tensors are about activations and caches, which no weight needs.
_ACTIVATIONS = frozenset({"input_scale", "input_global_scale", "output_scale", "q_scale", "k_scale", "v_scale"})
_REMEDY = "load it by its own library, dequantized, and apply a policy to that"


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of a plain checkpoint, wherever its values come from.

    Attributes:
        key: the tensor of the file, or the first of several.
        shape: of the tensor.
        packed: whether it is dequantized.
        read: returns the tensor: fp32 if it is dequantized, else as the file holds it.
    """

    key: str
    shape: tuple[int, ...]
    packed: bool
    read: Callable[[], Tensor]


def stored_tensors(checkpoint: Checkpoint) -> dict[str, Stored]:
    """Return the tensors of the plain checkpoint that ``checkpoint`` stands for, by their names there.

    Raises:
        Error: it is not quantized, or in a way that is not known; a part of a weight is missing or has another shape or
            dtype. The message names file and key.
    """
    place, settings = _settings(checkpoint)
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        known = ", ".join(map(repr, _READERS))
        raise checkpoint.settings(place, f"quant_method is {method!r}; {known} are read. Else {_REMEDY}")
    return _READERS[method](checkpoint, place, settings)


def _settings(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
    """Return how a checkpoint is quantized, and the file that says so."""
    found = checkpoint.config.get("quantization_config")
    if isinstance(found, dict):
        return "config.json", found
    apart = checkpoint.folder / "hf_quant_config.json"
    if apart.is_file():
        content = read_json(apart)
        details = content.get("quantization") if isinstance(content, dict) else None
        if not isinstance(details, dict):
            raise checkpoint.settings(apart.name, "has no 'quantization'; it was damaged, or something else wrote it")
        return apart.name, {"quant_method": "modelopt", **details}
    raise checkpoint.settings(
        "config.json", "has no quantization_config; a checkpoint in high precision is loaded by its own means"
    )


# ------------------------------------------------------------------ layouts


def _compressed_tensors(checkpoint: Checkpoint, place: str, settings: Mapping[str, Any]) -> dict[str, Stored]:
    named = checkpoint.mapping(place, "config_groups", settings.get("config_groups"))
    groups = [checkpoint.mapping(place, f"config_groups of {name}", group) for name, group in named.items()]
    formats = {_said(settings.get("format")), *(_said(group.get("format")) for group in groups)}
    if wrong := formats - {None, "dense", "mixed-precision", *FORMATS.values()}:
        known = " and ".join(FORMATS.values())
        raise checkpoint.settings(place, f"format is {min(map(str, wrong))!r}; {known} are read. Else {_REMEDY}")
    for part in ("transform_config", "sparsity_config"):
        if (said := checkpoint.mapping(place, part, settings.get(part))) and said.get("format") != "dense":
            raise checkpoint.settings(place, f"{part} changes the weights in a way that is not read; {_REMEDY}")

    def packed(module: str) -> Stored:
        scales = _beside(checkpoint, f"{module}.weight_packed", f"{module}.weight_scale")
        kind = _kind(checkpoint, scales)
        if FORMATS[kind] not in formats:
            raise checkpoint.error(scales, f"is a scale of {FORMATS[kind]}, which {place} does not name")
        gamma = None
        if kind == "nvfp4":
            gamma = _beside(checkpoint, f"{module}.weight_packed", f"{module}.weight_global_scale")
        return _weight(checkpoint, kind, f"{module}.weight_packed", scales, gamma, inverse=True)

    return _by_module(checkpoint, "weight_packed", {"weight_scale", "weight_global_scale"}, packed)


def _said(name: object) -> str | None:
    """Return the name of a format, or the text of what stands in its place, which no format has."""
    return None if name is None else str(name)


def _modelopt(checkpoint: Checkpoint, place: str, settings: Mapping[str, Any]) -> dict[str, Stored]:
    algorithms = {"quant_algo": settings.get("quant_algo")}
    if algorithms["quant_algo"] == "MIXED_PRECISION":
        named = checkpoint.mapping(place, "quantized_layers", settings.get("quantized_layers"))
        layers = {name: checkpoint.mapping(place, f"quantized_layers of {name}", one) for name, one in named.items()}
        algorithms = {f"quant_algo of {name}": layer.get("quant_algo") for name, layer in layers.items()}
    for name, algorithm in algorithms.items():
        if algorithm not in _NVFP4:
            known = " and ".join(_NVFP4)
            raise checkpoint.settings(place, f"{name} is {algorithm!r}; {known} are read. Else {_REMEDY}")

    def packed(module: str) -> Stored:
        weight = _beside(checkpoint, f"{module}.weight_scale_2", f"{module}.weight")
        scales = _beside(checkpoint, f"{module}.weight_scale_2", f"{module}.weight_scale")
        if _kind(checkpoint, scales) != "nvfp4":
            raise checkpoint.error(scales, f"has dtype {checkpoint.dtype(scales)}; NVFP4 has scales in F8_E4M3")
        return _weight(checkpoint, "nvfp4", weight, scales, f"{module}.weight_scale_2", inverse=False)

    return _by_module(checkpoint, "weight_scale_2", {"weight", "weight_scale"}, packed)


def _gpt_oss(checkpoint: Checkpoint, place: str, settings: Mapping[str, Any]) -> dict[str, Stored]:
    names = [key.removesuffix("_blocks") for key in checkpoint.keys if key.endswith("_blocks")]
    used = {f"{name}_{part}" for name in names for part in ("blocks", "scales")}
    found = {key: _plain(checkpoint, key) for key in checkpoint.keys if key not in used}
    for name in names:
        scales = _beside(checkpoint, f"{name}_blocks", f"{name}_scales")
        # The file has [E, N, K]; transformers holds the experts' weights as [E, K, N].
        found[name] = _weight(checkpoint, "mxfp4", f"{name}_blocks", scales, None, inverse=False, transposed=True)
    return found


_READERS: Mapping[str, Callable[[Checkpoint, str, Mapping[str, Any]], dict[str, Stored]]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "mxfp4": _gpt_oss,
}


def _by_module(
    checkpoint: Checkpoint, mark: str, others: set[str], packed: Callable[[str], Stored]
) -> dict[str, Stored]:
    """Return all tensors, where a module with a tensor ``mark`` has its weight in that and in ``others``."""
    keys = set(checkpoint.keys)
    modules = {key.removesuffix(f".{mark}") for key in keys if key.endswith(f".{mark}")}
    found = {f"{module}.weight": packed(module) for module in sorted(modules)}
    for key in checkpoint.keys:
        module, _, last = key.rpartition(".")
        if last not in _ACTIVATIONS and not (module in modules and last in {mark, *others}):
            found[key] = _plain(checkpoint, key)
    return found


# ------------------------------------------------------------------ tensors


def _beside(checkpoint: Checkpoint, key: str, other: str) -> str:
    """Return ``other``, a tensor without which ``key`` has no values, or raise an Error that there is none."""
    if other not in checkpoint.keys:
        raise checkpoint.error(key, f"has no {other!r} beside it, in any file of the checkpoint; it is not complete")
    return other


def _kind(checkpoint: Checkpoint, scales: str) -> Kind:
    if (dtype := checkpoint.dtype(scales)) not in _KINDS:
        raise checkpoint.error(scales, f"has dtype {dtype}; block scales are U8 (MXFP4) or F8_E4M3 (NVFP4)")
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
        gamma: the key of γ, one number; of 1/γ with ``inverse``.
        transposed: the last two axes change places.
    """
    *lines, blocks = checkpoint.shape(scales)
    given, half = checkpoint.shape(codes), BLOCK[kind] // 2
    if checkpoint.dtype(codes) != "U8":
        raise checkpoint.error(codes, f"has dtype {checkpoint.dtype(codes)}; two elements to a byte are U8")
    if given not in ((*lines, blocks * half), (*lines, blocks, half)):
        raise checkpoint.error(
            codes, f"has shape {list(given)}, and its scales {[*lines, blocks]} are for blocks of {BLOCK[kind]}"
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
            raise checkpoint.error(codes, "makes NaN or Inf with its scales; the checkpoint is damaged, fetch it again")
        return values.mT.contiguous() if transposed else values

    return Stored(codes, (*lines[:-1], shape[-1], lines[-1]) if transposed else shape, True, read)
