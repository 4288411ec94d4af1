"""The names of tensors in a checkpoint, which may differ from the names in the model.

Transformers holds the experts of a layer in one parameter ``experts.gate_up_proj [E, 2·I, H]``; its checkpoints hold
two matrices of each expert, ``experts.0.gate_proj.weight`` and ``experts.0.up_proj.weight``. Its functions convert both
ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fp4graph.exports.weights import NO_LAYER, Fp4Weight, refusal


def stored_names(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's ``tensors`` under their names in a checkpoint, where one tensor may become several."""
    if not is_hugging_face(model) or not tensors:
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    loaded: Any = model
    return dict(revert_weight_conversion(loaded, dict(tensors)))


def is_hugging_face(model: nn.Module) -> bool:
    """Return whether ``model`` is a model of transformers, without importing transformers."""
    return any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


def keeps_stacks(model: nn.Module, weight: Fp4Weight) -> bool:
    """Return whether checkpoints of ``model`` hold the experts of ``weight`` in one tensor, as for GPT-OSS."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return kind == "gpt_oss" and weight.elements.dim() == 3


def by_module(model: nn.Module, weight: Fp4Weight, parts: Sequence[Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """Return parts of ``weight`` by module of the checkpoint, which has a module for each matrix of each expert.

    Args:
        parts: tensors ``[..., N, ?]`` with the axes of the weight's parameter. They are split like the parameter.

    Raises:
        ExportError: it is not the weight of a layer, the checkpoint holds the experts in one tensor, or the model's
            checkpoints are unknown.
    """
    of_module: dict[str, tuple[Tensor, ...]] = {}
    for part in parts:
        for name, tensor in stored_names(model, {weight.name: part}).items():
            module, _, last = name.rpartition(".")
            if weight.elements.dim() == 2 and last != "weight":
                raise refusal(weight, *NO_LAYER)
            if last != "weight" or tensor.dim() != 2:
                raise refusal(
                    weight,
                    "it holds all experts in one tensor, but this format has a module for each expert",
                    "use format='gpt-oss' for GPT-OSS; otherwise use a transformers model whose checkpoints name "
                    "every expert",
                )
            of_module[module] = (*of_module.get(module, ()), tensor.contiguous())
    return of_module


def kept_modules(model: nn.Module, names: Mapping[str, Tensor]) -> list[str]:
    """Return the names in a checkpoint of modules that a reader could mistake for quantized ones.

    Args:
        names: the high-precision tensors, by their names in the model.
    """
    owners = dict(model.named_modules(remove_duplicate=False))
    never_quantized = (nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.ConvTranspose1d)
    matrices = {
        name: tensor
        for name, tensor in names.items()
        if tensor.dim() in (2, 3) and not isinstance(owners.get(name.rpartition(".")[0]), never_quantized)
    }
    kept = stored_names(model, matrices)
    return sorted({name.rpartition(".")[0] for name, x in kept.items() if name.endswith(".weight") or x.dim() == 3})
