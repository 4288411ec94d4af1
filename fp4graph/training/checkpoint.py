"""Checkpoints from which training goes on as if it had never stopped; a killed save leaves the old one intact.

>>> if Path("run.pt").exists():
...     progress = checkpoint.load("run.pt", model, optimizer, scaler=scaler, scheduler=scheduler)
>>> checkpoint.save("run.pt", model, optimizer, scaler=scaler, scheduler=scheduler, progress={"step": step})

A checkpoint is one file of tensors and plain data, read without running code, with a digest of its bytes. It holds the
model with the state of its techniques, the optimizer, the loss scaler, the scheduler, the states of the random number
generators (torch's, NumPy's and Python's), the caller's ``progress``, and the policy.

With several processes, all call :func:`save` and :func:`load`, and rank 0 writes the file. Random states, and
technique state that differs between ranks, are kept for each rank. Sharded tensors are gathered before they are
written, so that a run may go on with another number of processes, under ``fully_shard`` or without it.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fp4graph.errors import Error, PolicyWarning
from fp4graph.files import replacing
from fp4graph.model import state
from fp4graph.model.distributed import unwrapped
from fp4graph.model.source import require_loadable
from fp4graph.training import sealed, validation
from fp4graph.training.origin import Mismatch, applied_part, check_policy, written_under
from fp4graph.training.ranks import differing_buffers, gathered, gathered_whole, placed, rank, together
from fp4graph.training.validation import unequal

__all__ = ["Mismatch", "Stateful", "Summary", "load", "read_summary", "save"]

#: The mark of fp4graph's checkpoints, and the version of this layout.
FORMAT, VERSION = "fp4graph.checkpoint", 4
#: Older layouts that can be read, both without a digest: 2 has the count of forwards among the model's entries.
UNDIGESTED = 2, 3
#: Types that ``torch.load`` reads without running code. It reads no subclass of them.
PLAIN = (type(None), bool, float, str, torch.dtype, torch.device, torch.Size)
#: Types with subclasses that have an exact plain value, which ``__getnewargs__`` returns.
VALUES: tuple[Any, ...] = int, float, str, bytes


class Stateful(Protocol):
    """An object with a state dict: a scheduler or the like."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def save(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: Stateful | None = None,
    progress: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint; an older file at ``path`` stays until the new one is complete.

    Args:
        path: the path of the file, in a folder that exists.
        model: an applied or a plain model; it may be under DDP or ``fully_shard``.
        optimizer, scaler, scheduler: each is saved unless it is None.
        progress: numbers, strings, tensors, and lists and dicts of them.

    Raises:
        Error: a value is neither a tensor nor plain data, :func:`load` could not read it back, or the file cannot be
            written.
    """
    path = Path(path)
    module = unwrapped(model)
    if not isinstance(progress, Mapping | None):
        raise Error(f"progress is a {type(progress).__name__}; give a dict, such as {{'step': step}}")
    content = {
        "format": FORMAT,
        "version": VERSION,
        "policy": written_under(module),
        "model": gathered_whole(module.state_dict()),
        "optimizer": None if optimizer is None else gathered_whole(optimizer.state_dict()),
        "scaler": None if scaler is None else scaler.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "progress": dict(progress or {}),
        "ranks": gathered({"rng": _rng_state(), "buffers": differing_buffers(module)}),
    }
    with together():
        if rank() == 0:
            content = {name: _unfolded(value, name) for name, value in content.items()}
            try:
                with replacing(path) as file:
                    sealed.save(content, file)
            except OSError as error:
                raise _unwritten(path, error.strerror or str(error)) from error
            except RuntimeError as error:  # from torch.save's zip file, which does not pass on the system's error
                first = "".join(str(error).splitlines()[:1])
                raise _unwritten(path, f"the disk may be full ({first})") from error


def _unwritten(path: str | PathLike[str], reason: str) -> Error:
    return Error(
        f"cannot write checkpoint {path}: {reason}. The old content is unchanged; free disk space or choose another "
        "path"
    )


def load(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: Stateful | None = None,
    same_policy: bool = True,
) -> dict[str, Any]:
    """Restore everything as it was at :func:`save`. A file that is damaged or does not fit changes nothing.

    Without an optimizer, the random number generators stay as they are.

    Args:
        path: the path of the file. model, optimizer, scaler, scheduler: constructed as in the run that wrote it.
        same_policy: False accepts a model under another policy, or a plain model. Entries of techniques that the model
            does not have are left out; those that the file lacks start anew.

    Returns:
        The ``progress`` that was saved.

    Raises:
        Mismatch: the file is of another policy, noise seed or model, or lacks a part that is to be loaded.
        Error: the file does not exist, is truncated, damaged or changed, or was not written by :func:`save`.
    """
    module = unwrapped(model)
    with together():  # all ranks check their parts before any rank changes anything
        content = _read(path)
        file, ranks = str(path), content["ranks"]
        wanted = {"optimizer": optimizer, "scaler": scaler, "scheduler": scheduler}
        if missing := [name for name, part in wanted.items() if part is not None and content[name] is None]:
            raise Mismatch(f"checkpoint {path} holds no {' and no '.join(missing)}: the run that wrote it saved none")
        if same_policy:
            check_policy(f"checkpoint {path}", content["policy"], module)
            if scaler is not None and scaler.is_enabled() != bool(content["scaler"]):
                there, here = ("enabled", "disabled") if content["scaler"] else ("disabled", "enabled")
                raise Mismatch(f"checkpoint {path} was written with loss scaling {there}, here it is {here}")
        of_rank = ranks[rank()] if rank() < len(ranks) else None
        entries, forwards = _entries(content, of_rank)
        entries = _fitting(file, entries, module, same_policy)
        parts: list[tuple[Any, Any]] = []
        if scheduler is not None:
            validation.check_scheduler(file, content["scheduler"], scheduler)
            parts.append((scheduler, content["scheduler"]))
        if scaler is not None and scaler.is_enabled() and content["scaler"]:
            validation.check_scaler(file, content["scaler"], scaler)
            parts.append((scaler, content["scaler"]))
        if optimizer is not None:
            validation.check_optimizer(file, content["optimizer"], optimizer)
            parts.append((optimizer, _placed_state(content["optimizer"], optimizer)))
            if of_rank is not None:
                validation.check_rng(file, f"ranks[{rank()}].rng", of_rank["rng"])
    _load_parts(file, parts)
    module.load_state_dict(entries)
    if forwards is not None and (runtime := applied_part(module)) is not None:
        runtime.count_from(forwards)
    if optimizer is not None and of_rank is not None:
        _set_rng_state(of_rank["rng"])
    progress: dict[str, Any] = content["progress"]
    return progress


def _load_parts(file: str, parts: Sequence[tuple[Any, Any]]) -> None:
    """Load each state into its object; if an object refuses its state, restore the states of all."""
    previous: list[tuple[Any, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)  # about the policy, which load has checked
        for part, saved in parts:
            current = part.state_dict()
            previous.append((part, current if isinstance(part, torch.optim.Optimizer) else copy.deepcopy(current)))
            try:
                part.load_state_dict(saved)
            except Exception as error:  # the user's class may raise anything
                for loaded, before in previous:
                    loaded.load_state_dict(before)
                name = type(part).__name__
                raise Mismatch(f"checkpoint {file} is of another {name}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Summary:
    """What a checkpoint says about its run: the policy as YAML (None for a plain model), and the progress."""

    policy: str | None
    progress: dict[str, Any]


def read_summary(path: str | PathLike[str]) -> Summary:
    """Read the policy and the progress of a checkpoint without a model; raise the Errors of :func:`load`."""
    content = _read(path)
    return Summary(content["policy"] and content["policy"]["text"], content["progress"])


def _unfolded(value: Any, where: str) -> Any:
    """Return :func:`_plain` of one part of a checkpoint; raise Error if the part contains itself."""
    try:
        return _plain(value, where)
    except RecursionError:
        raise Error(f"{where} contains itself, or is nested too deeply; leave it out") from None


def _plain(value: Any, where: str) -> Any:
    """Return ``value`` in types that can be read back without running code."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, np.generic):
        value = value.item()
    if kind := next((kind for kind in VALUES if isinstance(value, kind) and not isinstance(value, bool)), None):
        value = kind.__getnewargs__(value)[0]
    if type(value) in PLAIN or _is_usual(value):
        return value
    if isinstance(value, Tensor | int | bytes):
        sealed.require_readable(value, where)
        return value
    if isinstance(value, Mapping):
        mapping = {_plain(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
        return Counter(mapping) if isinstance(value, Counter) else mapping  # MultiStepLR calls its elements()
    if isinstance(value, Sequence):
        items = [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    raise Error(
        f"{where} is a {type(value).__name__}; a checkpoint holds tensors, numbers, text, lists and dicts of them"
    )


def _is_usual(value: Any) -> bool:
    """Return whether ``value`` is an int of 64 bits or a plain tensor without attributes, which torch.load reads."""
    return (type(value) is int and value.bit_length() < 64) or (type(value) is Tensor and not vars(value))


def _placed_state(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict, in which tensors of a parameter's shape are sharded as the parameter is.

    torch.distributed.checkpoint cannot do this: it allocates the state by a step of the optimizer, in which techniques
    would act.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    state = {
        index: {name: placed(value, parameter) for name, value in saved["state"][index].items()}
        for index, parameter in zip(indices, parameters, strict=False)  # load_state_dict reports what does not fit
        if index in saved["state"]
    }
    return {**saved, "state": state}


def _rng_state() -> dict[str, Any]:
    name, keys, *position = np.random.get_state()
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # reading a device's state initializes it
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if in_use else [],
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *position],
        "python": random.getstate(),
    }


def _set_rng_state(saved: Mapping[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    if torch.cuda.is_available():
        for device, generator in zip(range(torch.cuda.device_count()), saved["cuda"], strict=False):
            torch.cuda.set_rng_state(generator, device)
    np.random.set_state(validation.numpy_state(saved["numpy"]))
    random.setstate(saved["python"])


def _read(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the content of a checkpoint, checked to be complete."""
    path = Path(path)
    if not path.exists():
        leftover = " (the .tmp file beside it is left over from an interrupted save, and not a checkpoint)"
        raise Error(f"there is no checkpoint {path}{leftover if path.with_name(path.name + '.tmp').exists() else ''}")
    content, digested = sealed.read(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Error(
            f"{path} was not written by fp4graph.training.checkpoint.save; a plain state dict goes into "
            "model.load_state_dict"
        )
    version = content.get("version")
    if type(version) is not int or version not in (*UNDIGESTED, VERSION):
        raise Error(f"{path} has version {version!r} of the layout; this fp4graph reads 2 to {VERSION}")
    if not digested and version == VERSION:
        raise Error(
            f"{path} has lost the digest of its content: it is damaged, or another program wrote it again. Use a copy "
            "or an earlier file"
        )
    validation.check_parts(str(path), content)
    if not digested:
        warnings.warn(
            f"checkpoint {path} has version {version} of the layout, which has no digest, so changed values cannot be "
            "detected; save it again",
            stacklevel=3,
        )
    return content


def _entries(content: Mapping[str, Any], of_rank: Mapping[str, Any] | None) -> tuple[dict[str, Any], int | None]:
    """Return the model's entries, overridden by this rank's buffers, and the count of forwards."""
    entries = {**content["model"], **(of_rank["buffers"] if of_rank is not None else {})}
    entries, forwards = state.from_former(entries)
    return entries, (content["policy"] or {}).get("forwards", forwards)


def _fitting(file: str, saved: dict[str, Any], module: nn.Module, same_policy: bool) -> dict[str, Any]:
    """Return the entries to load into ``module``, sharded as the module's entries are.

    The entries are checked here, because ``load_state_dict`` writes before it raises.
    """
    here, optional = module.state_dict(), state.of_some_phases(module)
    if not same_policy:  # drop entries of techniques that do not fit
        fits = {key for key in saved if isinstance(here.get(key), Tensor) and not unequal(key, saved[key], here[key])}
        saved = {key: value for key, value in saved.items() if not state.is_ours(key) or key in fits}
    validation.check_entries(file, saved, here, optional, same_policy)
    require_loadable(module, saved)
    return {key: placed(value, here.get(key)) for key, value in saved.items()}
