"""The names that tensors have in a checkpoint, which are not always those in the model.

Transformers holds the experts of a layer in one parameter ``experts.gate_up_proj [E, 2·I, H]``; its checkpoints hold
two matrices of each expert, ``experts.0.gate_proj.weight`` and ``experts.0.up_proj.weight``. It has functions for both
ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fp4graph.exports.weights import Fp4Weight, refusal


def stored_names(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors``, by names of the model, under the names of a checkpoint; one may become several."""
    if not is_hugging_face(model) or not tensors:
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    loaded: Any = model
    return dict(revert_weight_conversion(loaded, dict(tensors)))


def is_hugging_face(model: nn.Module) -> bool:
    """Return whether ``model`` is one of transformers' (which is not imported for others)."""
    return any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


def by_module(model: nn.Module, weight: Fp4Weight, parts: Sequence[Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """Return parts of ``weight`` by the modules that a checkpoint has for it: one, or one of each expert and matrix.

    Args:
        parts: each with the axes ``[..., N, ?]`` of the weight's own parameter, and cut as that parameter is.

    Raises:
        ExportError: the checkpoint holds the experts in one tensor, or the model has no checkpoint that is known.
    """
    found: dict[str, tuple[Tensor, ...]] = {}
    for part in parts:
        for name, tensor in stored_names(model, {weight.name: part}).items():
            module, _, last = name.rpartition(".")
            if last != "weight" or tensor.dim() != 2:
                raise refusal(
                    weight,
                    "it holds all experts in one tensor, and this format has a module for each expert",
                    "use format='gpt-oss' for GPT-OSS; other experts must be those of a transformers model whose "
                    "checkpoints name every expert",
                )
            found[module] = (*found.get(module, ()), tensor.contiguous())
    return found


def kept_modules(model: nn.Module, names: Mapping[str, Tensor]) -> list[str]:
    """Return the modules, by their names in a checkpoint, that a reader could take for quantized ones.

    Args:
        names: the tensors that stay in high precision, by their names in the model.
    """
    owners = dict(model.named_modules(remove_duplicate=False))
    outside = (nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.ConvTranspose1d)
    matrices = {
        name: tensor
        for name, tensor in names.items()
        if tensor.dim() in (2, 3) and not isinstance(owners.get(name.rpartition(".")[0]), outside)
    }
    kept = stored_names(model, matrices)
    return sorted({name.rpartition(".")[0] for name, x in kept.items() if name.endswith(".weight") or x.dim() == 3})
