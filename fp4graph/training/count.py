"""Carries the count of a model's forwards, its noise seed and its policy in the state dict of its optimizer.

A model's state dict holds only tensors of the model and of its techniques, so that it loads into a plain model and into
averages of weights. The count belongs to the training, as the optimizer's moments do. Every parameter group of the
state dict holds it as integers, which every way of saving an optimizer keeps.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fp4graph.errors import PolicyWarning
from fp4graph.model.runtime import Runtime, runtime_of
from fp4graph.training.memory import is_ours

#: Beginning of fp4graph's keys in parameter groups.
PREFIX = "fp4graph."
#: The key of the number of techniques' entries in the state, which shows whether a load left some out.
ENTRIES = f"{PREFIX}entries"


class ForwardCounts:
    """Writes the counts of an optimizer's models when its state is saved, and restores them when a state is loaded.

    If an optimizer loaded its state before it was prepared, its groups hold the counts; :meth:`of` restores them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._roots: list[weakref.ref[nn.Module]] = []
        self._loaded: dict[str, Any] = {}  # entries of models that are not prepared yet
        optimizer.register_state_dict_pre_hook(self._write)
        optimizer.register_state_dict_post_hook(self._written)
        optimizer.register_load_state_dict_pre_hook(self._loading)
        optimizer.register_load_state_dict_post_hook(self._restore)

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, runtime: Runtime) -> None:
        """Let ``optimizer`` carry the count of the model of ``runtime``."""
        while not hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):  # a wrapper of another optimizer
            inner = getattr(optimizer, "optimizer", getattr(optimizer, "_base_optimizer", None))
            if inner is None:
                warnings.warn(
                    f"{type(optimizer).__name__} runs no hooks when its state is saved, so the state lacks the count "
                    "of forwards, and a resumed training repeats noise and phases; save with "
                    "fp4graph.training.checkpoint, which keeps the count",
                    PolicyWarning,
                    stacklevel=3,
                )
                return
            optimizer = inner
        counts: ForwardCounts | None = optimizer.__dict__.get("_fp4graph_counts")
        if counts is None:
            optimizer.__dict__["_fp4graph_counts"] = counts = ForwardCounts(optimizer)
        if all(root() is not runtime.root for root in counts._roots):
            counts._roots.append(weakref.ref(runtime.root))
        counts._loaded |= _pop(optimizer.param_groups)
        counts._restore(optimizer)

    def _write(self, optimizer: torch.optim.Optimizer) -> None:
        for number, runtime in self._runtimes():
            for group in optimizer.param_groups:
                group |= {f"{PREFIX}{name}{number}": value for name, value in _facts(runtime).items()}

    def _written(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        if _pop(optimizer.param_groups):
            for group in saved["param_groups"]:
                group[ENTRIES] = _entries(saved["state"])

    def _loading(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        groups = [dict(group) for group in saved["param_groups"]]
        self._loaded = _pop(groups)
        return {**saved, "param_groups": groups}

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        saved_entries, same = self._loaded.pop(ENTRIES, 0), True
        for number, runtime in self._runtimes():
            names = ("forwards", "seed", "policy")
            saved = {name: self._loaded.pop(f"{PREFIX}{name}{number}", None) for name in names}
            if saved["forwards"] is None:
                continue
            current = _facts(runtime)
            if changed := [name for name in ("seed", "policy") if saved[name] not in (None, current[name])]:
                warnings.warn(
                    f"the optimizer's state was saved under another {' and another '.join(changed)} of fp4graph.apply "
                    f"(this model has policy {runtime.policy.name!r} and seed {current['seed']}), so the training will "
                    "not continue as before; apply the saved policy and seed if it should",
                    PolicyWarning,
                    stacklevel=4,
                )
            same = same and not changed
            runtime.count_from(int(saved["forwards"]))
        if same and (missing := saved_entries - _entries(optimizer.state)) > 0:
            warnings.warn(
                f"{missing} of the {saved_entries} entries that techniques had in the optimizer's saved state were not "
                "loaded, so they begin anew. torch.distributed.checkpoint.load reads only entries that the optimizer "
                "has already: train one step before it, or use fp4graph.training.checkpoint",
                PolicyWarning,
                stacklevel=3,
            )

    def _runtimes(self) -> Iterable[tuple[str, Runtime]]:
        for number, reference in enumerate(self._roots):
            root = reference()
            runtime = None if root is None else runtime_of(root)
            if runtime is not None and runtime.root_state is not None:
                yield f".{number}" if number else "", runtime


def _facts(runtime: Runtime) -> dict[str, int]:
    policy = int(runtime.policy.fingerprint[:12], 16)
    return {"forwards": runtime.count or 0, "seed": runtime.settings.seed, "policy": policy}


def _entries(state: Mapping[Any, Mapping[Any, Any]]) -> int:
    """Return the number of entries of techniques in an optimizer's state."""
    return sum(is_ours(name) for of_parameter in state.values() for name in of_parameter)


def _pop(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Remove fp4graph's entries from parameter groups, and return them."""
    entries: dict[str, Any] = {}
    for group in groups:
        for key in [key for key in group if key.startswith(PREFIX)]:
            entries[key] = group.pop(key)
    return entries
