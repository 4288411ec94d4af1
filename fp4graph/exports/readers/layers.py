"""Gathers the tensors of a checkpoint into the layers of servers: fused matrices and stacked experts."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fp4graph.errors import PolicyWarning
from fp4graph.exports.readers.configuration import Quantization, Scheme
from fp4graph.exports.readers.fused import Activations, Array, Bytes, Fused, ServerError

#: The last names of modules that servers fuse, in the order of their rows, by the fused layer's name: first of linear
#: layers, then of experts.
_FAMILIES: tuple[Mapping[str, tuple[tuple[str, ...], ...]], ...] = (
    {"qkv_proj": (("q_proj", "k_proj", "v_proj"),), "gate_up_proj": (("gate_proj", "up_proj"),)},
    {"w13": (("gate_proj", "up_proj"), ("w1", "w3")), "w2": (("down_proj",), ("w2",))},
)
_EXPERT = re.compile(r"(?P<owner>.+\.experts)\.(?P<index>\d+)\.(?P<last>\w+)$")
#: The names of a module's codes, tensor scale and activations' tensor scale, by layout.
_NAMES = {
    "compressed-tensors": ("weight_packed", "weight_global_scale", "input_global_scale"),
    "modelopt": ("weight", "weight_scale_2", "input_scale"),
}


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer as its tensors stand in the checkpoint, before the server decides about scales.

    Attributes:
        server: the server's name and version, for messages.
        name, modules, rows, codes, scales: as in :class:`Fused`.
        stacked: whether the layer is a stack of experts.
        scale: the tensor scales as stored, fp32 ``[modules]`` or ``[E, modules]``: γ in modelopt's layout, 1/γ in
            compressed-tensors'; None without tensor scales.
        input_scale: the activations' tensor scales, stored like ``scale``.
    """

    server: str
    name: str
    modules: tuple[str, ...]
    rows: tuple[int, ...]
    scheme: Scheme
    stacked: bool
    codes: Bytes
    scales: Bytes
    scale: Array | None = None
    input_scale: Array | None = None

    def fused(self, multiplier: Array | None = None, activations: Activations | None = None) -> Fused:
        """Return the layer with the server's γ, by default 1, and rule for activations, by default high precision."""
        shape = self.codes.shape[:-2]
        gamma = np.ones(shape, np.float32) if multiplier is None else np.asarray(multiplier, np.float32).reshape(shape)
        kind, rule = self.scheme.weights, activations or Activations(None)
        return Fused(self.name, self.modules, self.rows, kind, self.codes, self.scales, gamma, rule)

    def refuse(self, why: str) -> ServerError:
        """Return the error that the server cannot load the layer."""
        return _error(self.server, self.name, why)

    def warn(self, what: str) -> None:
        """Warn as the server does."""
        warnings.warn(f"{self.server} warns about {self.name}: {what}", PolicyWarning, stacklevel=5)


def layers(tensors: Mapping[str, Any], quantized: Quantization, server: str) -> Iterator[Layer]:
    """Yield the quantized layers of a checkpoint.

    Raises:
        ServerError: a tensor is missing, siblings or experts have different schemes, or no server finds the layer.
    """
    for key in tensors:
        if key.endswith(".experts.gate_up_proj"):
            raise _error(server, key, "servers look for all experts in FP4, but these are kept in high precision")
    if quantized.layout == "gpt-oss":
        yield from _gpt_oss(tensors, quantized, server)
        return
    last = "weight_packed" if quantized.layout == "compressed-tensors" else "weight_scale_2"
    packed = {key.removesuffix(f".{last}") for key in tensors if key.endswith(f".{last}")}
    held = {key.rpartition(".")[0] for key in tensors}
    for name, groups, stacked in _grouped(sorted(packed, key=_natural), held):
        modules = [module for group in groups for module in group]
        schemes = {module: quantized.scheme(module) if module in packed else None for module in modules}
        different = [module for module, scheme in schemes.items() if scheme != schemes[modules[0]]]
        scheme = schemes[modules[0]]
        if different or scheme is None:
            why = f"{(different or modules)[0]} is not quantized as its siblings are, or as config.json says"
            raise _error(server, name, why)
        codes_name = _NAMES[scheme.layout][0]
        codes, rows = _joined(tensors, groups, codes_name, stacked, server)
        scales, _ = _joined(tensors, groups, "weight_scale", stacked, server)
        extra = [_scalars(tensors, groups, _NAMES[scheme.layout][i], stacked) for i in (1, 2)]
        if (scheme.weights == "nvfp4" and extra[0] is None) or (scheme.inputs == "nvfp4" and extra[1] is None):
            raise _error(server, name, "it lacks a tensor scale of weights or activations")
        yield Layer(server, name, tuple(groups[0]), rows, scheme, stacked, codes, scales, *extra)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders the numbers in names by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _grouped(packed: Sequence[str], held: Collection[str]) -> Iterator[tuple[str, list[list[str]], bool]]:
    """Yield each layer's name, a list of its modules for each expert or one list, and whether it is a stack of experts.

    Args:
        packed: the modules in FP4.
        held: all modules of the checkpoint.
    """
    done = set()
    for module in packed:
        expert = _EXPERT.match(module)
        owner, last = (expert["owner"], expert["last"]) if expert else module.rpartition(".")[::2]
        families = [(name, names) for name, groups in _FAMILIES[bool(expert)].items() for names in groups]
        layer, names = next(((name, names) for name, names in families if last in names), (last, (last,)))
        prefix = f"{owner}." if owner else ""
        if not expert:
            names = tuple(name for name in names if f"{prefix}{name}" in held)
            layer = last if len(names) == 1 else layer
        if (name := f"{prefix}{layer}") in done:
            continue
        done.add(name)
        if expert:
            indices = {int(match["index"]) for match in map(_EXPERT.match, packed) if match and match["owner"] == owner}
            yield name, [[f"{owner}.{index}.{each}" for each in names] for index in sorted(indices)], True
        else:
            yield name, [[f"{prefix}{each}" for each in names]], False


def _joined(
    tensors: Mapping[str, Any], groups: list[list[str]], last: str, stacked: bool, server: str
) -> tuple[Bytes, tuple[int, ...]]:
    """Return the joined bytes of tensor ``last`` of all modules, and the number of rows of each module in a group."""
    parts = [[_bytes(tensors, f"{module}.{last}", server) for module in group] for group in groups]
    joined = [np.concatenate(group) for group in parts]
    return np.stack(joined) if stacked else joined[0], tuple(len(part) for part in parts[0])


def _scalars(tensors: Mapping[str, Any], groups: list[list[str]], last: str, stacked: bool) -> Array | None:
    keys = [[f"{module}.{last}" for module in group] for group in groups]
    if any(tensors.get(key) is None for group in keys for key in group):
        return None
    scales = np.array([[tensors[key].item() for key in group] for group in keys], np.float32)
    return scales if stacked else scales[0]


def _gpt_oss(tensors: Mapping[str, Any], quantized: Quantization, server: str) -> Iterator[Layer]:
    for key in sorted(tensors, key=_natural):
        name = key.removesuffix("_blocks")
        owner, _, parameter = name.rpartition(".")
        if name != key and (scheme := quantized.scheme(name)) is not None:
            stack = {"gate_up_proj": "w13", "down_proj": "w2"}[parameter]
            codes, scales = (_bytes(tensors, f"{name}_{part}", server) for part in ("blocks", "scales"))
            codes = codes.reshape(*codes.shape[:2], -1)
            yield Layer(server, f"{owner}.{stack}", (name,), codes.shape[1:2], scheme, True, codes, scales)


def _bytes(tensors: Mapping[str, Any], key: str, server: str) -> Bytes:
    """Return a tensor of bytes or FP8, of NumPy or torch, as uint8."""
    if key not in tensors:
        raise _error(server, key, "the checkpoint does not have it")
    tensor = tensors[key]
    array: Bytes = tensor.view(torch.uint8).cpu().numpy() if isinstance(tensor, torch.Tensor) else tensor
    return array.view(np.uint8)


def _error(server: str, name: str, why: str) -> ServerError:
    return ServerError(f"{server} cannot load {name}: {why}")
