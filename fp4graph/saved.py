"""State of ours in the folder that a model was loaded from.

Hugging Face's ``save_pretrained`` writes the whole state dict of an applied model. ``from_pretrained`` gives a plain
model, for which our entries are unexpected keys. They are taken up when a policy is applied to that model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from fp4graph import state
from fp4graph.errors import PolicyWarning
from fp4graph.sharding import is_sharded


def restore(root: nn.Module) -> None:
    """Load what the folder of ``root`` (its ``name_or_path``) holds of our state into ``root``, which was applied.

    An entry is taken only where the weights of its module are those of the folder: the state of a weight that has
    changed since describes another weight.

    Warns:
        PolicyWarning: some of it is left out; it says why.
    """
    if not (saved := dict(_entries(root))):
        return
    here = root.state_dict(keep_vars=True)
    ours = {key: value for key, value in saved.items() if state.is_ours(key)}
    fitting = {k: v for k, v in ours.items() if k in here and _same_shape(k, v, here[k])}
    modules = {_owner(key) for key in fitting}
    changed = {name for name in modules if not _unchanged(name, saved, here)}
    taken = {key: value for key, value in fitting.items() if _owner(key) not in changed}
    if taken:
        root.load_state_dict(taken, strict=False)
    if left := sorted(ours.keys() - taken.keys()):
        names = ", ".join(sorted(name or "(root)" for name in changed)[:4])
        why = "the policy that is applied now keeps nothing under these names"
        if changed:
            why = f"the weights of {names} are not those of the folder, so their state begins anew"
        warnings.warn(
            f"{_folder(root)} holds state of an applied policy, of which {len(left)} entries are left out "
            f"({', '.join(left[:3])}{', ...' if len(left) > 3 else ''}): {why}",
            PolicyWarning,
            stacklevel=3,
        )


def _folder(root: nn.Module) -> Path | None:
    """The folder that Hugging Face loaded ``root`` from, if it is one."""
    path = getattr(root, "name_or_path", None)
    return Path(path) if isinstance(path, str) and path and Path(path).is_dir() else None


def _entries(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the folder of ``root``, if any of them are ours."""
    folder = _folder(root)
    if folder is None:
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return
    from safetensors import safe_open

    for file in files:
        with safe_open(file, "pt") as content:
            keys = list(content.keys())
            owners = {_owner(key) for key in keys if state.is_ours(key)}
            for key in keys:
                if state.is_ours(key) or key.rpartition(".")[0] in owners:
                    yield key, content.get_tensor(key)


def _owner(key: str) -> str:
    """The module whose state an entry is."""
    return ".".join(key.split(".")[: key.split(".").index(state.NAME)])


def _same_shape(key: str, saved: Tensor, here: Tensor) -> bool:
    return key.endswith("_extra_state") or saved.shape == here.shape


def _unchanged(module: str, saved: dict[str, Tensor], here: dict[str, Tensor]) -> bool:
    """Whether the parameters and buffers that ``module`` owns are those that were saved, in the dtype of now."""
    for key, value in saved.items():
        if state.is_ours(key) or key.rpartition(".")[0] != module:
            continue
        current = here.get(key)
        if current is None or is_sharded(current) or current.is_meta:
            return current is None or is_sharded(current)
        if not torch.equal(current.detach().cpu(), value.to(current.dtype)):
            return False
    return True
