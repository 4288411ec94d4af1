"""The origin of saved state: the policy and the noise seed that it was written under."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from fp4graph.errors import Error
from fp4graph.files import read_json, write
from fp4graph.model.runtime import Runtime, runtime_of

_SHOWN = 12  # lines of a difference


class Mismatch(Error):
    """A checkpoint is complete, but belongs to another model, another policy or another kind of run."""


def applied_part(module: nn.Module) -> Runtime | None:
    """Return the runtime of the one module, ``module`` or a part of it, that a policy is applied to; None without one.

    Raises:
        Error: policies are applied to several parts.
    """
    runtimes = {name: runtime for name, part in module.named_modules() if (runtime := runtime_of(part)) is not None}
    if len(runtimes) > 1:
        raise Error(
            f"a policy is applied to each of {' and '.join(runtimes)}, and a checkpoint holds one applied model; save "
            "and load each separately"
        )
    return next(iter(runtimes.values()), None)


def written_under(module: nn.Module) -> dict[str, Any] | None:
    """Return the origin of the state of ``module``, an applied model or a model with an applied part: policy, noise
    seed, count of forwards, length of the training. Return None for a plain model."""
    runtime = applied_part(module)
    if runtime is None:
        return None
    policy = runtime.policy
    return {
        "text": policy.to_yaml(),
        "fingerprint": policy.fingerprint,
        "seed": runtime.settings.seed,
        "forwards": runtime.count,
        "total_forwards": runtime.settings.total_forwards if policy.phases else None,
    }


def check_policy(source: str, saved: Mapping[str, Any] | None, module: nn.Module) -> None:
    """Raise :class:`Mismatch` with the difference unless policy, seed and length of training are those of ``saved``.

    ``source`` names the saved state in the error; ``saved`` is the result of :func:`written_under` for the saved model.
    """
    runtime = applied_part(module)
    if saved is None and runtime is None:
        return
    remedy = "apply the policy it was written under, or pass same_policy=False to go on under this one"
    if saved is None or runtime is None:
        here = "this model is not applied" if runtime is None else f"this model has {runtime.policy.name!r}"
        there = "no policy" if saved is None else f"policy {name_in(saved['text'])!r}"
        raise Mismatch(f"{source} was written under {there}, but {here}: {remedy}")
    if saved["fingerprint"] != runtime.policy.fingerprint:
        shown = difference(saved["text"], runtime.policy.to_yaml()) or "  (a number format, by its values)"
        raise Mismatch(
            f"{source} was written under policy {name_in(saved['text'])!r}, this model has {runtime.policy.name!r}.\n"
            f"From that policy (-) to this one (+):\n{shown}\n{remedy}"
        )
    if saved["seed"] != runtime.settings.seed:
        raise Mismatch(
            f"{source} was written under fp4graph.apply(..., seed={saved['seed']}), this model has seed "
            f"{runtime.settings.seed}: the noise would differ. Apply with the saved seed, or pass same_policy=False"
        )
    total = runtime.settings.total_forwards
    if runtime.policy.phases and None not in (saved["total_forwards"], total) and saved["total_forwards"] != total:
        raise Mismatch(
            f"{source} was written for a training of {saved['total_forwards']} forwards, this one has {total}: phases "
            "would begin at other steps. Pass the saved length, or same_policy=False"
        )


def _origin_file(folder: str | PathLike[str], number: int) -> Path:
    """Return the file, in a folder of saved state, that holds the policy of the applied model of a number."""
    return Path(folder) / (f"fp4graph_{number}.json" if number else "fp4graph.json")


def write_origin(folder: str | PathLike[str], module: nn.Module, number: int = 0) -> None:
    """Write the result of :func:`written_under` beside the state in ``folder``, which may hold several applied models,
    each with a number."""
    write(_origin_file(folder, number), json.dumps(written_under(module)))


def check_origin(folder: str | PathLike[str], module: nn.Module, number: int = 0) -> None:
    """Raise :class:`Mismatch` unless the state in ``folder`` was written under the policy and seed of ``module``."""
    file = _origin_file(folder, number)
    check_policy(f"the state in {folder}", read_json(file) if file.exists() else None, module)


def name_in(text: str) -> str:
    """Return the name in a policy's YAML, as ``Policy.to_yaml`` writes it."""
    return next((line[6:] for line in text.splitlines() if line.startswith("name: ")), "?")


def difference(old: str, new: str) -> str:
    """Return the changed lines from one policy's YAML (-) to another's (+), indented, a dozen lines at most.

    If only names and descriptions differ, the result is "".
    """
    ignored = "-description:", "+description:", "+++", "---"
    changed = [
        line
        for line in difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
        if line[:1] in "+-" and not line.startswith(ignored)
    ]
    if not any(line[1:6] != "name:" for line in changed):
        return ""
    shown = "\n".join(f"  {line}" for line in changed[:_SHOWN])
    return shown + (f"\n  ... and {len(changed) - _SHOWN} lines more" if len(changed) > _SHOWN else "")
