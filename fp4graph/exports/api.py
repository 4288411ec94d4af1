"""``fp4graph.export``: writes a trained model as a checkpoint of real FP4 weights for servers."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Collection, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp4graph.errors import Error, PolicyWarning, install, suggest
from fp4graph.exports.activations import input_scales
from fp4graph.exports.compressed_tensors import CompressedTensors
from fp4graph.exports.folder import Saving, copy_tokenizer, new_folder, write_json, write_tensors
from fp4graph.exports.gpt_oss import GptOss
from fp4graph.exports.layouts import Exported, Layout
from fp4graph.exports.modelopt import ModelOpt
from fp4graph.exports.names import kept_modules
from fp4graph.exports.packing import require_storable
from fp4graph.exports.siblings import Siblings, change, require_shared
from fp4graph.exports.weights import Fp4Weight, Scheme, fp4_weights, refuse_computed
from fp4graph.model import state
from fp4graph.model.distributed import unwrapped
from fp4graph.model.runtime import Runtime, require_runtime

#: The layouts by the values of ``format=``, with the packages that they need.
LAYOUTS: Mapping[str, tuple[type[Layout], tuple[str, ...]]] = {
    "compressed-tensors": (CompressedTensors, ("compressed_tensors", "safetensors", "huggingface_hub")),
    "modelopt": (ModelOpt, ("safetensors", "huggingface_hub")),
    "gpt-oss": (GptOss, ("safetensors", "huggingface_hub")),
}
#: The values of ``sibling_scales=``.
SIBLING_SCALES = ("refuse", "share", "own")


def export(
    model: nn.Module,
    directory: str | PathLike[str],
    *,
    format: str = "compressed-tensors",
    activations: bool = True,
    calibration: Iterable[Any] | None = None,
    sibling_scales: str = "refuse",
    tokenizer: Saving | None = None,
    max_shard_size: str | int = "5GB",
) -> Path:
    """Write the model as a checkpoint of FP4 weights that other programs load and serve.

    The weights equal those of a forward in eval mode: the policy quantizes them, with its techniques and their present
    state. Weights that the policy keeps are written in their dtype. Under ``torch.autocast`` weights are quantized from
    autocast's dtype, as in a forward; call export() in the same context as the model.

    Args:
        model: an applied model that was called at least once after ``apply``.
        directory: a new folder. It appears when everything is written.
        format: ``compressed-tensors`` (MXFP4, NVFP4), ``modelopt`` (NVFP4) or ``gpt-oss`` (experts of GPT-OSS in
            MXFP4).
        activations: whether the configuration describes the quantizers of activations. False exports only weights.
        calibration: batches for a policy with tensor scales of activations. Servers read these scales as constants, so
            export measures them. A batch is a mapping of keywords, a tuple or list of arguments, a single argument, or
            a function that calls the model. Without batches export warns (PolicyWarning) and writes only weights.
        sibling_scales: the treatment of matrices that servers fuse (query, key and value; gate and up), if their tensor
            scales differ. Servers read one scale for a fused matrix. ``refuse`` raises an error. ``share`` writes one
            scale and rounds the block scales to it; the relative error of each group is printed, and recorded in
            ``sibling_scales.json``. ``own`` writes the scales of training, for readers that fuse nothing.
        tokenizer: a tokenizer or processor to save. None copies its files from the folder that the model came from.
        max_shard_size: the largest size of a file of weights.

    Returns:
        ``directory``.

    Raises:
        ExportError: the format cannot hold the result of the policy, or siblings have different tensor scales; the
            message names weights and remedy.
        Error: the folder exists or cannot be written, a package is missing, the format is unknown, or the policy
            quantizes nothing.
    """
    target = Path(directory)
    layout = _layout(format)
    if sibling_scales not in SIBLING_SCALES:
        raise Error(f"unknown sibling_scales {sibling_scales!r}; {suggest(sibling_scales, SIBLING_SCALES)}")
    root = unwrapped(model)
    runtime = require_runtime(root, "export").up_to_date()
    with new_folder(target) as folder:
        _write(folder, runtime, layout, sibling_scales, activations, calibration, max_shard_size)
        copy_tokenizer(folder, root, tokenizer)
    return target


def _write(
    folder: Path,
    runtime: Runtime,
    layout: Layout,
    sibling_scales: str,
    activations: bool,
    calibration: Iterable[Any] | None,
    max_shard_size: str | int,
) -> None:
    """Write weights and configuration; the arguments are those of :func:`export`."""
    root = runtime.root
    scales, activations = _scales(root, runtime, activations, calibration)
    tensors: dict[str, Tensor] = {}
    schemes: dict[str, Scheme] = {}
    done: set[str] = set()
    siblings = Siblings()

    def write(weight: Fp4Weight, scale: Tensor | None) -> None:
        require_storable(weight)
        for module, parts in layout.packed(root, weight, scale).items():
            tensors.update({f"{module}.{name}": part for name, part in parts.items()})
            schemes[module] = weight.scheme

    for weight in fp4_weights(runtime, activations=activations):
        write(weight, scales.get(weight.name))
        siblings.add(weight, scales.get(weight.name))
        done.add(weight.name)
    refuse_computed(runtime, done)
    if not done:
        raise Error(
            f"policy {runtime.policy.name!r} quantizes no weight in fprop, so there is nothing in FP4 to export; save "
            "the state dict with fp4graph.strip() instead"
        )
    differing = [] if sibling_scales == "own" else siblings.differing()
    if sibling_scales == "refuse":
        require_shared(
            differing,
            "sibling_scales='share' (--sibling-scales share) to write each group with one scale and print the "
            "resulting error, or 'own' for readers that fuse nothing, such as transformers",
        )
    changes = []
    for group in differing:
        shared = list(group.shared())
        for weight, scale in shared:
            write(weight, scale)
        changes.append(change(group, shared))
        errors = ", ".join(f"{name} {sibling['error']:.2e}" for name, sibling in changes[-1]["own"].items())
        print(f"{group.owner}: one tensor scale, relative error {changes[-1]['error']:.2e} ({errors})")
    state_dict = state.strip(root.state_dict())
    written = _all_names(root, done)
    kept = {name: x for name, x in state_dict.items() if name not in written and isinstance(x, Tensor)}
    write_tensors(folder, tensors | layout.kept(root, _without_aliases(kept)), max_shard_size)
    layout.write_config(folder, Exported(root, schemes, kept_modules(root, kept)))
    if changes:
        write_json(folder / "sibling_scales.json", changes)


def _layout(name: str) -> Layout:
    if name not in LAYOUTS:
        raise Error(f"unknown export format {name!r}; {suggest(name, LAYOUTS)}")
    layout, packages = LAYOUTS[name]
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise Error(f"format {name!r} needs {missing[0]}, which is not installed; {install('export')}")
    return layout()


def _scales(
    root: nn.Module, runtime: Runtime, activations: bool, calibration: Iterable[Any] | None
) -> tuple[dict[str, Tensor], bool]:
    """Return the measured tensor scales of activations, and whether to export the activations' quantizers."""
    if not activations:
        return {}, False
    scaled = [weight.name for weight in fp4_weights(runtime) if weight.scheme.inputs_scaled]
    if not scaled:
        return {}, True
    if calibration is None:
        warnings.warn(
            f"the activations of {scaled[0]} and others have a new tensor scale at every call, but servers read a "
            "constant: only weights are exported. Give calibration= batches to measure constants, or "
            "activations=False (--weights-only) to accept this",
            PolicyWarning,
            stacklevel=4,
        )
        return {}, False
    used = [weight for weight in runtime.weights if weight.is_captured]
    scales = input_scales(root, used, calibration)
    if missing := [name for name in scaled if name not in scales]:
        raise Error(
            f"no calibration batch reaches {missing[0]}; add batches that do, or export with activations=False "
            "(--weights-only)"
        )
    return scales, True


def _all_names(root: nn.Module, names: Collection[str]) -> set[str]:
    """Return ``names`` of weights, and their other names, which they have if a module has several.

    A module is asked for its name and not for a parameter, which it lacks while its weight is packed.
    """
    modules = dict(root.named_modules(remove_duplicate=False))
    held: dict[nn.Module, set[str]] = {}
    for owner, _, last in (name.rpartition(".") for name in names):
        held.setdefault(modules[owner], set()).add(last)
    return {f"{fqn}.{last}" for fqn, module in modules.items() for last in held.get(module, ())}


def _without_aliases(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``kept`` with only the first name of each shared tensor, because readers tie the others themselves."""
    seen: set[tuple[Any, ...]] = set()
    unique = {}
    for name, value in kept.items():
        place = value.device, value.data_ptr(), value.shape, value.stride()
        if value.numel() and place in seen and value.device != torch.device("meta"):
            continue
        seen.add(place)
        unique[name] = value
    return unique
