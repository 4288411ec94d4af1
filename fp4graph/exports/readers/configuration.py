"""Reads the ``quantization_config`` of a checkpoint: the scheme of each module."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal

from fp4graph.exports.readers.fused import Kind, ServerError

Layout = Literal["compressed-tensors", "modelopt", "gpt-oss"]


@dataclass(frozen=True)
class Scheme:
    """How the configuration says that a module is quantized."""

    layout: Layout
    weights: Kind
    inputs: Kind | None


@dataclass(frozen=True, eq=False)
class Quantization:
    """The configuration of a checkpoint: its layout, and a function from module to scheme, None if unquantized."""

    layout: Layout
    scheme: Callable[[str], Scheme | None]


def quantization(config: Mapping[str, Any]) -> Quantization:
    """Return the quantization of the checkpoint with this ``config.json``.

    Raises:
        ServerError: the readers do not know the method, the format or the algorithm.
    """
    settings = config.get("quantization_config") or {}
    method = settings.get("quant_method")
    if method == "compressed-tensors":
        return Quantization(method, _compressed_tensors(settings))
    if method == "modelopt":
        return Quantization(method, _modelopt(settings))
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        return Quantization("gpt-oss", lambda module: Scheme("gpt-oss", "mxfp4", None))
    raise ServerError(
        f"config.json has quant_method {method!r} and model_type {config.get('model_type')!r}; these readers know "
        "compressed-tensors, modelopt, and mxfp4 of gpt_oss"
    )


def _compressed_tensors(settings: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    for key in ("transform_config", "sparsity_config"):
        if (settings.get(key) or {}).get("format", "") != "dense" and settings.get(key):
            raise ServerError(f"config.json has a {key}, which these readers do not apply")
    groups = settings.get("config_groups") or {}
    scheme_of = {target: _group(name, group) for name, group in groups.items() for target in group["targets"]}
    ignored = settings.get("ignore") or []

    def scheme(module: str) -> Scheme | None:
        if _named(module, ignored) is not None:
            return None
        target = _named(module, scheme_of)
        return scheme_of.get("Linear" if target is None else target)

    return scheme


def _named(module: str, entries: Iterable[str]) -> str | None:
    """Return the first entry that names the module: by its full name, or by a regular expression after ``re:``."""
    for entry in entries:
        if re.match(entry[3:], module) if entry.startswith("re:") else entry == module:
            return entry
    return None


def _group(name: str, group: Mapping[str, Any]) -> Scheme:
    weights, inputs = _kind(group.get("weights")), group.get("input_activations")
    if weights is None or (inputs is not None and _kind(inputs) != weights):
        raise ServerError(f"config.json has weights or activations in {name} that are neither NVFP4 nor MXFP4")
    return Scheme("compressed-tensors", weights, None if inputs is None else weights)


def _kind(args: Mapping[str, Any] | None) -> Kind | None:
    if args is None or args.get("num_bits") != 4 or args.get("type") != "float" or not args.get("symmetric", True):
        return None
    kinds: dict[tuple[Any, Any], Kind] = {("tensor_group", 16): "nvfp4", ("group", 32): "mxfp4"}
    return kinds.get((args.get("strategy"), args.get("group_size")))


def _modelopt(settings: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    algorithm, excluded = settings.get("quant_algo"), settings.get("ignore") or []
    layers = settings.get("quantized_layers") or {}

    def scheme(module: str) -> Scheme | None:
        if any(fnmatch(module, entry) for entry in excluded):
            return None
        if algorithm == "MIXED_PRECISION":
            return _algorithm(layers[module].get("quant_algo")) if module in layers else None
        return _algorithm(algorithm)

    return scheme


def _algorithm(name: object) -> Scheme:
    if name not in ("NVFP4", "W4A16_NVFP4"):
        raise ServerError(f"config.json has quant_algo {name!r}; these readers know NVFP4 and W4A16_NVFP4")
    return Scheme("modelopt", "nvfp4", "nvfp4" if name == "NVFP4" else None)
