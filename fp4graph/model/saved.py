"""State of ours in the folder that a model was loaded from.

Hugging Face's ``save_pretrained`` writes the whole state dict of an applied model. ``from_pretrained`` gives a plain
model, for which our entries are unexpected keys. They are taken up when a policy is applied to that model.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp4graph.errors import PolicyWarning
from fp4graph.model import state
from fp4graph.numerics.sharding import is_sharded


def restore(root: nn.Module) -> None:
    """Load what the folder of ``root`` (its ``name_or_path``) holds of our state into ``root``, which was applied.

    Nothing is taken unless all weights are those of the folder: the state of other weights describes another training,
    and a model made from a configuration names its folder too.

    Warns:
        PolicyWarning: some of the state is left out; it says why.
    """
    folder = _folder(root)
    files = [] if folder is None else _files(folder)
    ours: dict[str, Tensor] = {}
    plain: list[tuple[Path, str]] = []
    for file in files:
        with _opened(file) as tensors:
            ours |= {key: tensors[key] for key in tensors if state.is_ours(key)}
            plain += [(file, key) for key in tensors if not state.is_ours(key)]
    if not ours:
        return
    here = root.state_dict()
    taken = {k: v for k, v in ours.items() if k in here and (k.endswith("_extra_state") or v.shape == here[k].shape)}
    why = "the policy that is applied now keeps nothing under these names"
    if (changed := _changed(plain, here)) is not None:
        taken, why = {}, f"{changed} is not what the folder holds, so state begins anew"
    if taken:
        root.load_state_dict(taken, strict=False)
    if left := sorted(ours.keys() - taken.keys()):
        warnings.warn(
            f"{folder} holds state of an applied policy, of which {len(left)} entries are left out "
            f"({', '.join(left[:3])}{', ...' if len(left) > 3 else ''}): {why}",
            PolicyWarning,
            stacklevel=3,
        )


def _folder(root: nn.Module) -> Path | None:
    """The folder that Hugging Face loaded ``root`` from, if it is one."""
    path = getattr(root, "name_or_path", None)
    return Path(path) if isinstance(path, str) and path and Path(path).is_dir() else None


def _files(folder: Path) -> list[Path]:
    """The files of weights that ``from_pretrained`` reads: one, or those that an index names."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).exists():
            return [folder / name]
        if (index := folder / f"{name}.index.json").exists():
            return [folder / part for part in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return []


@contextmanager
def _opened(file: Path) -> Iterator[Mapping[str, Tensor]]:
    """The tensors of a file, each read when it is asked for."""
    if file.suffix == ".bin":
        yield torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return
    from safetensors import safe_open

    with safe_open(file, "pt") as content:
        yield _Lazy(content)


class _Lazy(Mapping[str, Tensor]):
    """A safetensors file as a mapping."""

    def __init__(self, content: Any) -> None:
        self._content, self._keys = content, list(content.keys())

    def __getitem__(self, key: str) -> Tensor:
        tensor: Tensor = self._content.get_tensor(key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _changed(plain: list[tuple[Path, str]], here: Mapping[str, Tensor]) -> str | None:
    """The first entry that differs from the model's in the model's dtype, or None.

    One that the model does not have, or that is sharded or without data, cannot be compared and counts as different.
    """
    for file, key in plain:
        current = here.get(key)
        if current is None or is_sharded(current) or current.is_meta:
            return key
        with _opened(file) as tensors:
            if not torch.equal(current.detach().cpu(), tensors[key].to(current.dtype)):
                return key
    return None
