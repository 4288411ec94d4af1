"""Restores technique state from the folder that a Hugging Face model was loaded from.

``save_pretrained`` writes the whole state dict of an applied model. ``from_pretrained`` returns a plain model, to which
the entries of technique state are unexpected keys. fp4graph restores them when a policy is applied to that model.
"""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from fp4graph.errors import PolicyWarning
from fp4graph.model import state
from fp4graph.numerics.sharding import is_sharded


def restore(root: nn.Module) -> None:
    """Load technique state from the folder of ``root`` (its ``name_or_path``) into ``root``, an applied model.

    Load nothing unless all weights equal the stored weights: state beside other weights belongs to another training,
    and a model made from a configuration alone names a folder too.

    Warns:
        PolicyWarning: some of the entries are left out; the text says why.
    """
    name = getattr(root, "name_or_path", None)
    folder = Path(name) if isinstance(name, str) and name else None
    saves = _saves(folder) if folder is not None and folder.is_dir() else []
    # Values of other phases have no entry yet. They wait for their phase, and their shape is unknown until then.
    later = {key: torch.empty(0, device="meta") for key in state.of_some_phases(root)}
    unknown = set(map(id, later.values()))
    current = later | root.state_dict()
    entries, stored, differs = _entries_beside_the_weights(root, saves, current)
    if not entries:
        return
    names = {id(value): name for name, value in current.items()}
    known = {key: names[id(x)] for key, x in stored.items() if id(x) in names}
    fit = {k: v for k, v in entries.items() if k in known and (id(stored[k]) in unknown or v.shape == stored[k].shape)}
    taken = {known[key]: value for key, value in fit.items()}
    why = "the policy that is applied now keeps nothing under these names, or keeps other shapes"
    if differs is not None:
        fit, taken, why = {}, {}, f"{differs} is not what the folder holds, so state begins anew"
    if taken:
        root.load_state_dict(taken, strict=False)
    if left_out := sorted(entries.keys() - fit.keys()):
        warnings.warn(
            f"{folder} holds state of an applied policy; {len(left_out)} of its entries are left out "
            f"({', '.join(left_out[:3])}{', ...' if len(left_out) > 3 else ''}): {why}",
            PolicyWarning,
            stacklevel=4,
        )


def _entries_beside_the_weights(
    root: nn.Module, saves: list[list[Path]], current: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Mapping[str, Tensor], str | None]:
    """Return the entries of the first save whose weights are those of ``root``, ``current`` under the names of the
    save, and None; if there is no such save, the first one with entries, and a key that differs."""
    first: tuple[dict[str, Tensor], Mapping[str, Tensor], str | None] = {}, current, None
    for files in saves:
        entries: dict[str, Tensor] = {}
        plain: list[tuple[Path, str]] = []
        for file in files:
            with _opened(file) as (keys, tensor):
                entries |= {key: tensor(key) for key in keys if state.is_ours(key)}
                plain += [(file, key) for key in keys if not state.is_ours(key)]
        entries, _ = state.from_former(entries)
        if not entries and len(saves) == 1:
            break
        stored = current if all(key in current for _, key in plain) else _as_stored(root, current)
        if (differs := _changed(plain, stored)) is None:
            return entries, stored, None
        first = first if first[0] else (entries, stored, differs)
    return first


def _as_stored(root: nn.Module, state_dict: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """Return ``state_dict`` as ``save_pretrained`` writes it: transformers renames weights and fuses experts when it
    loads some models, and undoes this in a saved folder."""
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # the model is of another library
        return state_dict
    reverted: dict[str, Tensor] = (
        revert_weight_conversion(root, state_dict) if isinstance(root, PreTrainedModel) else {}
    )
    return reverted or state_dict


def _saves(folder: Path) -> list[list[Path]]:
    """Return the files of each set of weights in ``folder``, the plain one first, then the variants of
    ``save_pretrained(variant="fp16")``: one file, or the files that an index names, as ``from_pretrained`` picks them.

    A model does not know the variant that it was loaded from; only the values show it.
    """
    saves: dict[str, list[Path]] = {}
    for stem, suffix in ("model", ".safetensors"), ("pytorch_model", ".bin"):
        indices = {
            index.name.removeprefix(f"{stem}{suffix}.index").removesuffix(".json"): sorted(
                {folder / part for part in json.loads(index.read_text())["weight_map"].values()}
            )
            for index in folder.glob(f"{stem}{suffix}.index*.json")
        }
        shards = {file for files in indices.values() for file in files}
        for file in {*folder.glob(f"{stem}{suffix}"), *folder.glob(f"{stem}.*{suffix}")} - shards:
            saves.setdefault(file.name.removeprefix(stem).removesuffix(suffix), [file])
        for variant, files in indices.items():
            saves.setdefault(variant, files)
    return [saves[variant] for variant in sorted(saves)]


@contextmanager
def _opened(file: Path) -> Iterator[tuple[list[str], Callable[[str], Tensor]]]:
    """Open a file of tensors: yield its keys, and the function that reads one of them."""
    if file.suffix == ".bin":
        mapped = zipfile.is_zipfile(file)  # torch maps no file of the format before torch 1.6
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        yield list(tensors), tensors.__getitem__
        return
    from safetensors import safe_open

    with safe_open(file, "pt") as content:
        yield list(content.keys()), content.get_tensor


def _changed(plain: list[tuple[Path, str]], state_dict: Mapping[str, Tensor]) -> str | None:
    """Return the first key of ``plain`` whose stored tensor, in the model's dtype, differs from the model's, or None.

    Tensors that the model does not have, or has sharded or on the meta device, cannot be compared and count as
    different.
    """
    for file, key in plain:
        current = state_dict.get(key)
        if current is None or is_sharded(current) or current.is_meta:
            return key
        with _opened(file) as (_, tensor):
            if not torch.equal(current.detach().cpu(), tensor(key).to(current.dtype)):
                return key
    return None
