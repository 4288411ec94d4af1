"""``fp4graph.load_quantized``: a checkpoint of FP4 weights as the start of training."""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fp4graph.errors import Error, PolicyWarning
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
        name: in the checkpoint. shape: there.
        places: int64, of ``shape``: the flat index of every element in the model's tensor. None: all of it, in order.
    """

    name: str
    shape: tuple[int, ...]
    places: Tensor | None


def load_quantized(model: M, directory: str | PathLike[str]) -> M:
    """Load a checkpoint of FP4 weights into a plain model: the start of a training.

    The layouts are those that :func:`fp4graph.export` writes, whoever wrote the files: compressed-tensors with
    ``mxfp4-pack-quantized`` and ``nvfp4-pack-quantized``, ModelOpt with NVFP4, and the MXFP4 experts of GPT-OSS.
    Weights become ``element · block scale · γ`` in fp32. Only the product with γ is rounded, as in fprop.
    compressed-tensors stores 1/γ, whose inverse may differ from γ by an ulp.

    Each tensor of the model is overwritten, in its own dtype and on its device. The configuration of a transformers
    model loses its ``quantization_config``. Apply a policy afterwards.

    Args:
        model: plain, of the checkpoint's architecture: from ``AutoModelForCausalLM.from_config``, or of timm.
        directory: ``config.json`` and ``model.safetensors``, or shards with their index.

    Returns:
        ``model`` itself.

    Raises:
        Error: a file is missing, damaged or cut off; the ``quant_method`` or a format is not known; the checkpoint
            lacks a tensor of the model, has one more, or one of another shape; the model is applied, sharded or without
            data. The message names file and key. The model is as it was, unless a weight is not finite: then it is
            partly loaded.

    Warns:
        PolicyWarning: the model's dtype cannot hold the values, which were rounded to it.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise Error("load_quantized() needs safetensors, which is not installed; pip install 'fp4graph[export]' has it")
    if runtime_of(model) is not None or mark_hooks(model):
        raise Error("load_quantized() takes a plain model; call it before fp4graph.apply, or fp4graph.remove() first")
    with Checkpoint(Path(directory)) as checkpoint:
        stored = stored_tensors(checkpoint)
        own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        once = _once(own, stored, checkpoint)
        wanted = {name: _parts(model, name, value, stored) for name, value in once.items()}
        _require_match(checkpoint, stored, wanted, own)
        _require_linear(checkpoint, stored, model)
        rounded = [name for name, parts in wanted.items() if _fill(own[name], parts, stored)]
    if rounded:
        warnings.warn(
            f"{len(rounded)} weights of the model do not hold the values of {directory} and were rounded "
            f"({rounded[0]} to {own[rounded[0]].dtype}); load into a model in float32",
            PolicyWarning,
            stacklevel=2,
        )
    config: Any = getattr(model, "config", None)
    if is_hugging_face(model) and hasattr(config, "quantization_config"):
        del config.quantization_config
    return model


def _once(own: Mapping[str, Tensor], stored: Mapping[str, Stored], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors of a model, each of those that share memory under the first name that is stored.

    Raises:
        Error: the checkpoint has different values for names that share memory, or a tensor cannot be filled.
    """
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, value in own.items():
        if is_sharded(value) or value.is_meta:
            what = "is sharded" if is_sharded(value) else "has no data (device meta)"
            raise Error(f"load_quantized() cannot fill {name!r}, which {what}; load into a whole model on a device")
        shared = (value.device, value.data_ptr(), value.shape, value.stride()) if value.numel() else (name,)
        groups.setdefault(shared, []).append(name)
    for names in groups.values():
        first, *others = [name for name in names if name in stored] or names[:1]
        for other in others:
            if not torch.equal(stored[first].read().float(), stored[other].read().float()):
                raise checkpoint.error(
                    stored[other].key,
                    f"has other values than {first!r}, with which it shares one tensor of the model; make the model "
                    "without sharing, as with tie_word_embeddings=False",
                )
    return {name: own[name] for names in groups.values() for name in [_stored_name(names, stored)]}


def _stored_name(names: list[str], stored: Mapping[str, Stored]) -> str:
    return next((name for name in names if name in stored), names[0])


def _parts(model: nn.Module, name: str, value: Tensor, stored: Mapping[str, Stored]) -> list[_Part]:
    """Return the tensors of a checkpoint that make tensor ``name`` of the model.

    Export's own function for names is asked where each element goes.
    """
    if name in stored:
        return [_Part(name, tuple(value.shape), None)]
    converted = stored_names(model, {name: value.detach()})
    if len(converted) == 1:
        ((other, same),) = converted.items()
        if same.data_ptr() == value.data_ptr() and same.shape == value.shape and same.stride() == value.stride():
            return [_Part(other, tuple(value.shape), None)]
    places = stored_names(model, {name: torch.arange(value.numel()).reshape(value.shape)})
    return [_Part(part, tuple(indices.shape), indices) for part, indices in places.items()]


def _require_match(
    checkpoint: Checkpoint, stored: Mapping[str, Stored], wanted: Mapping[str, list[_Part]], own: Mapping[str, Tensor]
) -> None:
    """Raise an Error where checkpoint and model have not the same tensors."""
    asked = {part.name for parts in wanted.values() for part in parts}
    absent, more = sorted(asked - stored.keys()), sorted(stored.keys() - asked - own.keys())
    if absent or more:
        said = [f"it lacks {_some(absent)}"] if absent else []
        said += [f"{checkpoint.file(stored[more[0]].key)} has {_some(more)}, which the model has not"] if more else []
        raise Error(
            f"{checkpoint.folder} is no checkpoint of this model: {'; '.join(said)}. Make the model from the "
            "checkpoint's own config.json"
        )
    for part in (part for parts in wanted.values() for part in parts):
        found = stored[part.name]
        if found.shape != part.shape:
            raise checkpoint.error(
                found.key, f"makes {part.name} of shape {list(found.shape)}, and the model's is {list(part.shape)}"
            )


def _require_linear(checkpoint: Checkpoint, stored: Mapping[str, Stored], model: nn.Module) -> None:
    """Raise an Error where a weight ``[out, in]`` is stored for a Conv1D of transformers, which holds ``[in, out]``."""
    modules = dict(model.named_modules())
    for name, found in stored.items():
        if found.packed and type(modules.get(name.removesuffix(".weight"))).__name__ == "Conv1D":
            raise checkpoint.error(
                found.key,
                f"is [out, in], and {name} belongs to a Conv1D, which holds [in, out]; load such a model from a "
                "checkpoint in high precision",
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@torch.no_grad()
def _fill(target: Tensor, parts: list[_Part], stored: Mapping[str, Stored]) -> bool:
    """Write a tensor of the model; return whether its dtype does not hold what was dequantized, or made plain numbers
    infinite."""
    if len(parts) == 1 and parts[0].places is None:
        value = stored[parts[0].name].read()
    else:
        pieces = list(_pieces(parts, stored))
        # An expert in high precision beside quantized ones has a shorter dtype than what they are dequantized to.
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
