"""Gathers the tensors of a checkpoint into the layers that servers make of them: fused matrices and stacked experts."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp4graph.errors import PolicyWarning
from fp4graph.exports.readers.configuration import Quantization, Scheme
from fp4graph.exports.readers.fused import Activations, Array, Bytes, Fused, ServerError

#: The names of modules that servers fuse, by the name of the fused one.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
#: The names of an expert's modules, in the order of their rows, by the name of the stack.
_STACKS = {"w13": (("gate_proj", "up_proj"), ("w1", "w3")), "w2": (("down_proj",), ("w2",))}
_EXPERT = re.compile(r"(?P<owner>.+\.experts)\.(?P<index>\d+)\.(?P<last>\w+)$")
#: The names of a module's codes, tensor scale and constant of activations.
_NAMES = {
    "compressed-tensors": ("weight_packed", "weight_global_scale", "input_global_scale"),
    "modelopt": ("weight", "weight_scale_2", "input_scale"),
}


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer as its tensors stand in the checkpoint, before the server decides about scales.

    Attributes:
        server: name and version, for messages.
        name, modules, rows, codes, scales: those of :class:`Fused`.
        stacked: whether the layer is a stack of experts.
        scale: the tensor scales as stored, fp32 ``[modules]`` or ``[E, modules]``: γ in modelopt's layout, 1/γ in
            compressed-tensors'; None without one.
        input_scale: the constants of activations, likewise.
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
        """Return the layer with the server's γ, by default 1, and its rule for activations, by default none."""
        shape = self.codes.shape[:-2]
        gamma = np.ones(shape, np.float32) if multiplier is None else np.asarray(multiplier, np.float32).reshape(shape)
        kind, rule = self.scheme.weights, activations or Activations(None)
        return Fused(self.name, self.modules, self.rows, kind, self.codes, self.scales, gamma, rule)

    def refuse(self, why: str) -> ServerError:
        """Return the error that the server cannot load the layer."""
        return ServerError(f"{self.server} cannot load {self.name}: {why}")

    def warn(self, what: str) -> None:
        """Warn as the server does."""
        warnings.warn(f"{self.server} warns about {self.name}: {what}", PolicyWarning, stacklevel=5)


def layers(tensors: Mapping[str, Any], quantized: Quantization, server: str) -> Iterator[Layer]:
    """Yield the quantized layers of a checkpoint.

    Raises:
        ServerError: a tensor is missing, siblings or experts have different schemes, or no server finds the layer.
    """
    if quantized.layout == "gpt-oss":
        yield from _gpt_oss(tensors, quantized, server)
        return
    last = "weight_packed" if quantized.layout == "compressed-tensors" else "weight_scale_2"
    packed = {key.removesuffix(f".{last}") for key in tensors if key.endswith(f".{last}")}
    for name, groups, stacked in _grouped(sorted(packed, key=_natural)):
        modules = [module for group in groups for module in group]
        schemes = {module: quantized.scheme(module) if module in packed else None for module in modules}
        different = [module for module, scheme in schemes.items() if scheme != schemes[modules[0]]]
        scheme = schemes[modules[0]]
        if different or scheme is None:
            raise ServerError(
                f"{server} cannot load {name}: {(different or modules)[0]} is not quantized like its siblings, or "
                "config.json and tensors differ in what is quantized"
            )
        parts = [[_part(tensors, module, scheme, server) for module in group] for group in groups]
        codes, scales, rows = _joined(parts, stacked)
        extra = [_scalars(tensors, groups, _NAMES[scheme.layout][i], stacked) for i in (1, 2)]
        if (scheme.weights == "nvfp4" and extra[0] is None) or (scheme.inputs == "nvfp4" and extra[1] is None):
            raise ServerError(f"{server} cannot load {name}: a tensor scale of its weights or activations is missing")
        yield Layer(server, name, tuple(groups[0]), rows, scheme, stacked, codes, scales, *extra)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key by which numbers in names are in their order."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _grouped(packed: Sequence[str]) -> Iterator[tuple[str, list[list[str]], bool]]:
    """Yield each layer's name, the modules of its rows, by expert, and whether it is a stack of experts."""
    done = set()
    for module in packed:
        owner, _, last = module.rpartition(".")
        prefix = f"{owner}." if owner else ""
        if match := _EXPERT.match(module):
            found = ((name, n) for name, families in _STACKS.items() for n in families if match["last"] in n)
            stack, names = next(found, (match["last"], (match["last"],)))
            owner = match["owner"]
            experts = sorted({int(m["index"]) for each in packed if (m := _EXPERT.match(each)) and m["owner"] == owner})
            name, groups = f"{owner}.{stack}", [[f"{owner}.{e}.{n}" for n in names] for e in experts]
        else:
            fused = next(((name, names) for name, names in _FUSED.items() if last in names), (last, (last,)))
            name, groups = f"{prefix}{fused[0]}", [[f"{prefix}{n}" for n in fused[1]]]
        if name not in done:
            done.add(name)
            yield name, groups, match is not None


def _part(tensors: Mapping[str, Any], module: str, scheme: Scheme, server: str) -> tuple[Bytes, Bytes]:
    codes, scales = (f"{module}.{last}" for last in (_NAMES[scheme.layout][0], "weight_scale"))
    if missing := [key for key in (codes, scales) if key not in tensors]:
        raise ServerError(f"{server} cannot load {module}: the checkpoint has no {missing[0]}")
    return _bytes(tensors[codes]), _bytes(tensors[scales])


def _joined(parts: list[list[tuple[Bytes, Bytes]]], stacked: bool) -> tuple[Bytes, Bytes, tuple[int, ...]]:
    """Return codes and scales of all rows, and the rows of each module."""
    joined = [[np.concatenate(each) for each in zip(*group, strict=True)] for group in parts]
    codes, scales = (np.stack(each) if stacked else each[0] for each in zip(*joined, strict=True))
    return codes, scales, tuple(len(part[0]) for part in parts[0])


def _scalars(tensors: Mapping[str, Any], groups: list[list[str]], last: str, stacked: bool) -> Array | None:
    keys = [[f"{module}.{last}" for module in group] for group in groups]
    if any(key not in tensors for group in keys for key in group):
        return None
    scales = np.array([[float(np.asarray(tensors[key]).reshape(())) for key in group] for group in keys], np.float32)
    return scales if stacked else scales[0]


def _gpt_oss(tensors: Mapping[str, Any], quantized: Quantization, server: str) -> Iterator[Layer]:
    for key in sorted(tensors, key=_natural):
        name, _, last = key.rpartition("_")
        owner, _, parameter = name.rpartition(".")
        if key.endswith(".experts.gate_up_proj"):
            raise ServerError(
                f"{server} cannot load {key}: it is in high precision, but the server reads the experts of all layers "
                "in MXFP4, whatever modules_to_not_convert says"
            )
        if last == "blocks" and (scheme := quantized.scheme(name)) is not None:
            stack = {"gate_up_proj": "w13", "down_proj": "w2"}[parameter]
            codes, scales = _bytes(tensors[key]), _bytes(tensors[f"{name}_scales"])
            codes = codes.reshape(*codes.shape[:2], -1)
            yield Layer(server, f"{owner}.{stack}", (name,), codes.shape[1:2], scheme, True, codes, scales)


def _bytes(tensor: Any) -> Bytes:
    """Return a tensor of bytes or FP8, of NumPy or torch, as uint8."""
    if not isinstance(tensor, np.ndarray):
        import torch

        tensor = tensor.view(torch.uint8).numpy()
    return tensor.view(np.uint8)
