"""``fp4graph.load_quantized``: loads a checkpoint of FP4 weights as the start of a training."""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fp4graph.errors import Error, PolicyWarning, install
from fp4graph.exports.checkpoint import Checkpoint
from fp4graph.exports.names import is_hugging_face, stored_names
from fp4graph.exports.stored import Stored, stored_tensors
from fp4graph.model.hooks import mark_hooks
from fp4graph.model.runtime import runtime_of
from fp4graph.numerics.sharding import is_sharded

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class _Part:
    """A tensor of a checkpoint, and its place in a tensor of the model.

    Attributes:
        name, shape: name and shape of the checkpoint's tensor.
        places: the flat index of each element in the model's tensor, int64 of ``shape``; None if it fills that tensor.
    """

    name: str
    shape: tuple[int, ...]
    places: Tensor | None


def load_quantized(model: M, directory: str | PathLike[str]) -> M:
    """Load a checkpoint of FP4 weights into a plain model, as the start of a training.

    Reads the layouts of :func:`fp4graph.export`, also if another program wrote them: compressed-tensors with
    ``mxfp4-pack-quantized`` and ``nvfp4-pack-quantized``, ModelOpt with NVFP4, and the MXFP4 experts of GPT-OSS.
    Weights become ``element · block scale · γ`` in fp32. Only the product with γ is rounded, as in fprop.
    compressed-tensors stores 1/γ, whose inverse may differ from γ by an ulp.

    Each tensor of the model is overwritten, in its dtype and on its device. The configuration of a transformers model
    loses its ``quantization_config``. Apply a policy afterwards.

    Args:
        model: a plain model of the checkpoint's architecture: from ``AutoModelForCausalLM.from_config``, or of timm.
        directory: a folder with ``config.json`` and ``model.safetensors``, or with shards and their index.

    Returns:
        ``model``.

    Raises:
        Error: a file is missing, damaged or truncated; the ``quant_method`` or a format is unknown; a tensor is missing
            from the checkpoint or from the model, or has another shape; the model is applied, sharded or without data.
            The message names file and key. The model is unchanged, except if a weight is not finite: then it is partly
            loaded.

    Warns:
        PolicyWarning: the values were rounded to the model's dtype.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise Error(f"load_quantized() needs safetensors, which is not installed; {install('export')}")
    if runtime_of(model) is not None or mark_hooks(model):
        raise Error("load_quantized() takes a plain model; call it before fp4graph.apply, or fp4graph.remove() first")
    with Checkpoint(Path(directory)) as checkpoint:
        stored = stored_tensors(checkpoint)
        targets = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        unique = _unique(targets, stored, checkpoint)
        wanted = {name: _parts(model, name, value, stored) for name, value in unique.items()}
        _require_match(checkpoint, stored, wanted, targets)
        _require_linear(checkpoint, stored, model)
        rounded = [name for name, parts in wanted.items() if _fill(targets[name], parts, stored)]
    if rounded:
        warnings.warn(
            f"the values of {directory} for {len(rounded)} weights were rounded "
            f"({rounded[0]} to {targets[rounded[0]].dtype}); load into a model in float32",
            PolicyWarning,
            stacklevel=2,
        )
    config: Any = getattr(model, "config", None)
    if is_hugging_face(model) and hasattr(config, "quantization_config"):
        del config.quantization_config
    return model


def _unique(targets: Mapping[str, Tensor], stored: Mapping[str, Stored], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors of a model by name; of several names of one tensor, take the first that is stored.

    Raises:
        Error: the checkpoint has different values for names that share a tensor, or a tensor cannot be filled.
    """
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, value in targets.items():
        if is_sharded(value) or value.is_meta:
            what = "is sharded" if is_sharded(value) else "has no data (device meta)"
            raise Error(f"load_quantized() cannot fill {name!r}, which {what}; load into an unsharded model with data")
        shared = (value.device, value.data_ptr(), value.shape, value.stride()) if value.numel() else (name,)
        groups.setdefault(shared, []).append(name)
    for names in groups.values():
        first, *others = [name for name in names if name in stored] or names[:1]
        for other in others:
            if not torch.equal(stored[first].read().float(), stored[other].read().float()):
                raise checkpoint.error(
                    stored[other].key,
                    f"has other values than {first!r}, but the model has one tensor for both names; make the model "
                    "without shared tensors, for instance with tie_word_embeddings=False",
                )
    firsts = (next((name for name in names if name in stored), names[0]) for names in groups.values())
    return {name: targets[name] for name in firsts}


def _parts(model: nn.Module, name: str, value: Tensor, stored: Mapping[str, Stored]) -> list[_Part]:
    """Return the tensors of a checkpoint that make tensor ``name`` of the model.

    The place of each element comes from :func:`stored_names`, which export uses too.
    """
    if name in stored:
        return [_Part(name, tuple(value.shape), None)]
    converted = stored_names(model, {name: value.detach()})
    if len(converted) == 1:
        ((stored_name, view),) = converted.items()
        if view.data_ptr() == value.data_ptr() and view.shape == value.shape and view.stride() == value.stride():
            return [_Part(stored_name, tuple(value.shape), None)]
    places = stored_names(model, {name: torch.arange(value.numel()).reshape(value.shape)})
    return [_Part(part, tuple(indices.shape), indices) for part, indices in places.items()]


def _require_match(
    checkpoint: Checkpoint, stored: Mapping[str, Stored], wanted: Mapping[str, list[_Part]], names: Collection[str]
) -> None:
    """Raise an Error unless checkpoint and model have equal tensors; ``names`` has all names of the model's tensors."""
    parts = [part for parts in wanted.values() for part in parts]
    needed = {part.name for part in parts}
    missing, extra = sorted(needed - stored.keys()), sorted(stored.keys() - needed - set(names))
    if missing or extra:
        reasons = [f"it lacks {_listed(missing)}"] if missing else []
        if extra:
            reasons.append(f"{checkpoint.file(stored[extra[0]].key)} has {_listed(extra)}, which the model lacks")
        raise Error(
            f"{checkpoint.folder} is not a checkpoint of this model: {'; '.join(reasons)}. Make the model from the "
            "checkpoint's config.json"
        )
    for part in parts:
        tensor = stored[part.name]
        if tensor.shape != part.shape:
            raise checkpoint.error(
                tensor.key, f"gives {part.name} the shape {list(tensor.shape)}, but the model gives {list(part.shape)}"
            )


def _require_linear(checkpoint: Checkpoint, stored: Mapping[str, Stored], model: nn.Module) -> None:
    """Raise an Error if a packed weight ``[out, in]`` belongs to a Conv1D of transformers, which has ``[in, out]``."""
    modules = dict(model.named_modules())
    for name, tensor in stored.items():
        if tensor.packed and type(modules.get(name.removesuffix(".weight"))).__name__ == "Conv1D":
            raise checkpoint.error(
                tensor.key,
                f"is [out, in], but {name} belongs to a Conv1D, which has [in, out]; load such a model from a "
                "checkpoint in high precision",
            )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@torch.no_grad()
def _fill(target: Tensor, parts: list[_Part], stored: Mapping[str, Stored]) -> bool:
    """Write a tensor of the model; return whether its dtype rounded dequantized values, or overflowed for others."""
    if len(parts) == 1 and parts[0].places is None:
        value = stored[parts[0].name].read()
    else:
        pieces = list(_pieces(parts, stored))
        # An expert in high precision may have a narrower dtype than the dequantized experts.
        dtype = functools.reduce(torch.promote_types, (piece.dtype for _, piece in pieces))
        value = torch.empty(math.prod(target.shape), dtype=dtype)
        for places, piece in pieces:
            value[places.flatten()] = piece.flatten().to(dtype)
        value = value.reshape(target.shape)
    target.copy_(value)
    if any(stored[part.name].packed for part in parts):
        return not torch.equal(target.to("cpu", value.dtype), value)
    return value.is_floating_point() and bool((torch.isfinite(value) & ~torch.isfinite(target.cpu())).any())


def _pieces(parts: list[_Part], stored: Mapping[str, Stored]) -> Iterator[tuple[Tensor, Tensor]]:
    for part in parts:
        assert part.places is not None
        yield part.places, stored[part.name].read()
