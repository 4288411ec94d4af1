"""Checkpoints that a kill cannot ruin, and from which training goes on as if it had never stopped.

>>> if Path("run.pt").exists():
...     progress = checkpoint.load("run.pt", model, optimizer, scaler=scaler, scheduler=scheduler)
>>> checkpoint.save("run.pt", model, optimizer, scaler=scaler, scheduler=scheduler, progress={"step": step})

A checkpoint is one file of tensors and plain data, read without running code. It holds the model with the state of its
techniques, optimizer, loss scaler, scheduler, the states of the random number generators (torch's, NumPy's and
Python's), whatever the caller calls progress, and the policy.

With several processes every one calls :func:`save` and :func:`load`; the first writes the file. Random states, and
state of ours that differs from rank to rank, are kept for each. Sharded tensors are written whole, so that a run may go
on with another number of processes, under ``fully_shard`` or without it.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fp4graph.errors import Error
from fp4graph.model import state
from fp4graph.model.distributed import unwrapped
from fp4graph.model.runtime import runtime_of
from fp4graph.numerics.sharding import is_sharded, like, whole
from fp4graph.text import difference, name_in

#: What tells our files from others, and this layout from later ones.
FORMAT, VERSION = "fp4graph.checkpoint", 2
#: Types that ``torch.load`` reads without running code.
PLAIN = (type(None), bool, int, float, str, bytes, Tensor, torch.dtype, torch.device, torch.Size)
#: Lines of a difference between two policies, or of missing keys, that an error shows.
SHOWN = 12


class Stateful(Protocol):
    """Schedulers and the like."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Mismatch(Error):
    """A checkpoint that is whole, but of another model, another policy or another kind of run."""


@contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` once the block has ended well.

    Whatever happens before that, ``path`` is what it was. What a kill leaves behind, ``path`` with ``.tmp``, is
    overwritten the next time. One process at a time may write ``path``.
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a power failure could leave the new name on an empty file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def save(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: Stateful | None = None,
    progress: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint; the one at ``path`` stays until this one is complete.

    Args:
        path: of the file, in a folder that exists.
        model: applied or plain, under DDP or ``fully_shard`` too.
        optimizer, scaler, scheduler: as far as there are any.
        progress: numbers, strings, tensors, and lists and dicts of them.

    Raises:
        Error: something is neither a tensor nor plain data, or the file cannot be written.
    """
    path = Path(path)
    module = unwrapped(model)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "policy": written_under(module),
        "model": _gathered_whole(module.state_dict()),
        "optimizer": None if optimizer is None else _gathered_whole(optimizer.state_dict()),
        "scaler": None if scaler is None else scaler.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "progress": dict(progress or {}),
        "ranks": _gathered({"rng": _rng_state(), "buffers": _own_buffers(module)}),
    }
    if _rank() == 0:
        content = {name: _plain(value, name) for name, value in content.items()}
        try:
            with replacing(path) as file:
                torch.save(content, file)
        except OSError as error:
            raise _unwritten(path, error.strerror or str(error)) from error
        except RuntimeError as error:  # from torch.save's zip file, which does not say what the system said
            first = "".join(str(error).splitlines()[:1])
            raise _unwritten(path, f"the disk is full, or may be ({first})") from error
    if _distributed():
        torch.distributed.barrier()


def _unwritten(path: str | PathLike[str], reason: str) -> Error:
    return Error(
        f"cannot write checkpoint {path}: {reason}. What was there before is untouched; make room,"
        " or name another place"
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
    """Take everything back to where :func:`save` was called. Nothing is touched if the file does not fit.

    Without an optimizer this reads a model to look at, and leaves the random number generators alone.

    Args:
        path: of the file. model, optimizer, scaler, scheduler: made as for the run that wrote it.
        same_policy: False accepts a model under another policy, or under none: state that it does not keep is left
            out, state that the file lacks begins anew.

    Returns:
        The ``progress`` that was saved.

    Raises:
        Mismatch: the file is of another policy, noise seed or model, or lacks what is to be loaded.
        Error: there is no file, it is cut off, or something else wrote it.
    """
    content = _read(path)
    module = unwrapped(model)
    _check_parts(path, content, optimizer=optimizer, scaler=scaler, scheduler=scheduler)
    if same_policy:
        check_policy(f"checkpoint {path}", content["policy"], module)
        if scaler is not None and scaler.is_enabled() != bool(content["scaler"]):
            there, here = ("enabled", "disabled") if content["scaler"] else ("disabled", "enabled")
            raise Mismatch(f"checkpoint {path} was written with loss scaling {there}, here it is {here}")
    ranks = content["ranks"]
    entries = {**content["model"], **(ranks[_rank()]["buffers"] if _rank() < len(ranks) else {})}
    entries = _fitting(path, entries, module, same_policy)
    if optimizer is not None:  # before the model: it looks before it writes
        try:
            optimizer.load_state_dict(_placed_state(content["optimizer"], optimizer))
        except (ValueError, KeyError) as error:
            raise Mismatch(f"checkpoint {path} is of another optimizer: {error}") from error
    module.load_state_dict(entries)
    if scaler is not None and scaler.is_enabled() and content["scaler"]:
        scaler.load_state_dict(content["scaler"])
    if scheduler is not None:
        scheduler.load_state_dict(content["scheduler"])
    if optimizer is not None and _rank() < len(ranks):
        _set_rng_state(ranks[_rank()]["rng"])
    progress: dict[str, Any] = content["progress"]
    return progress


@dataclass(frozen=True)
class Summary:
    """What a checkpoint says of itself: the policy's text (None for a plain model), and the progress."""

    policy: str | None
    progress: dict[str, Any]


def read_summary(path: str | PathLike[str]) -> Summary:
    """Look into a checkpoint without a model.

    Raises:
        Error: as :func:`load`.
    """
    content = _read(path)
    return Summary(content["policy"] and content["policy"]["text"], content["progress"])


# ---------------------------------------------------------------------- what is in the file


def _plain(value: Any, where: str) -> Any:
    """``value`` in types that are read back without running code."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence):
        items = [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    raise Error(
        f"{where} is a {type(value).__name__}; a checkpoint holds tensors, numbers, text, lists and dicts of them"
    )


def _gathered_whole(value: Any) -> Any:
    """``value``, nested, with its sharded tensors whole and on the CPU; on other ranks than the first without them."""
    if isinstance(value, Mapping):
        return {key: _gathered_whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_gathered_whole(item) for item in value]
    if is_sharded(value):
        full = whole(value)  # every rank has a part in it
        return full.cpu() if _rank() == 0 else None
    return value


def _placed(value: Any, reference: Any) -> Any:
    """``value`` sharded as ``reference`` is, where that is of the same shape."""
    if is_sharded(reference) and isinstance(value, Tensor) and value.shape == reference.shape:
        return like(value.to(reference.device), reference)
    return value


def _placed_state(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state dict with moments and the like sharded as their parameters are.

    Not by torch.distributed.checkpoint: it makes room for the state by a step of the optimizer, which would let
    techniques act.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    state = {
        index: {name: _placed(value, parameter) for name, value in saved["state"][index].items()}
        for index, parameter in zip(indices, parameters, strict=False)  # load_state_dict says what does not fit
        if index in saved["state"]
    }
    return {**saved, "state": state}


def _own_buffers(module: nn.Module) -> dict[str, Tensor]:
    """State of ours in which this process differs from the first: written from what this process multiplied."""
    own: dict[str, Tensor] = {}
    if _distributed():
        for name, value in module.state_dict().items():
            if state.is_ours(name) and isinstance(value, Tensor) and not is_sharded(value):
                mine = value.detach().reshape(-1).view(torch.uint8)
                first = mine.clone()
                torch.distributed.broadcast(first, 0)
                if not torch.equal(mine, first):
                    own[name] = value.cpu()
    return own


def _rng_state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if _uses_cuda() else [],
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
        "python": random.getstate(),
    }


def _uses_cuda() -> bool:
    # Asking a device for its state would start one that is not in use.
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _set_rng_state(saved: Mapping[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    if torch.cuda.is_available():
        for device, generator in zip(range(torch.cuda.device_count()), saved["cuda"], strict=False):
            torch.cuda.set_rng_state(generator, device)
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(saved["python"])


# ---------------------------------------------------------------------- whether it is whole, and fits


def _read(path: str | PathLike[str]) -> dict[str, Any]:
    path = Path(path)
    if not path.exists():
        leftover = " (a save that was cut off left a .tmp beside it, which is no checkpoint)"
        raise Error(f"there is no checkpoint {path}{leftover if path.with_name(path.name + '.tmp').exists() else ''}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError, OSError) as error:
        first = str(error).strip().splitlines()[:1]
        raise Error(
            f"{path} cannot be read as a checkpoint: it is cut off, damaged, or something else wrote it "
            f"({type(error).__name__}: {''.join(first)})"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Error(
            f"{path} was not written by fp4graph.training.checkpoint.save; a plain state dict goes into "
            "model.load_state_dict"
        )
    if content["version"] != VERSION:
        raise Error(f"{path} has layout {content['version']}; this fp4graph reads layout {VERSION}")
    return content


def _check_parts(path: str | PathLike[str], content: Mapping[str, Any], **wanted: object) -> None:
    missing = [name for name, value in wanted.items() if value is not None and content[name] is None]
    if missing:
        raise Mismatch(f"checkpoint {path} holds no {' and no '.join(missing)}: the run that wrote it saved none")


def written_under(module: nn.Module) -> dict[str, Any] | None:
    """What a checkpoint remembers of the policy and the noise seed of an applied model; None for a plain one."""
    runtime = runtime_of(module)
    if runtime is None:
        return None
    policy = runtime.policy
    return {
        "text": policy.to_yaml(),
        "fingerprint": policy.fingerprint,
        "seed": runtime.seed,
        "total_forwards": runtime.total_forwards if policy.phases else None,
    }


def check_policy(source: str, saved: Mapping[str, Any] | None, module: nn.Module) -> None:
    """Raise :class:`Mismatch`, which says what differs, unless ``module`` trains as :func:`written_under` remembers.

    Args:
        source: what was written, as the subject of the sentence.
    """
    runtime = runtime_of(module)
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
    if saved["seed"] != runtime.seed:
        raise Mismatch(
            f"{source} was written under fp4graph.apply(..., seed={saved['seed']}), this model has seed "
            f"{runtime.seed}: the noise would be another. Apply with the former, or pass same_policy=False"
        )
    total = runtime.total_forwards
    if runtime.policy.phases and None not in (saved["total_forwards"], total) and saved["total_forwards"] != total:
        raise Mismatch(
            f"{source} was written for a training of {saved['total_forwards']} forwards, this one has {total}: phases "
            "would begin elsewhere. Say the former, or pass same_policy=False"
        )


def _fitting(path: str | PathLike[str], saved: dict[str, Any], module: nn.Module, same_policy: bool) -> dict[str, Any]:
    """The entries to load into ``module``, after a look at their names and shapes: load_state_dict writes first and
    complains afterwards. Sharded as those of ``module`` are."""
    here = module.state_dict()
    if not same_policy:
        saved = {key: value for key, value in saved.items() if not state.is_ours(key) or _alike(value, here.get(key))}
    plain_saved, plain_here = state.strip(saved), state.strip(here)
    wrong = [f"{key} is missing" for key in plain_here if key not in plain_saved]
    wrong += [f"{key} is not in this model" for key in saved if key not in here]
    wrong += [
        f"{key} is {tuple(saved[key].shape)} there and {tuple(value.shape)} here"
        for key, value in here.items()
        if isinstance(value, Tensor)
        and isinstance(saved.get(key), Tensor)
        and saved[key].shape != value.shape
        # The policy's text, where it is kept as bytes, has the length of the policy.
        and not key.endswith("_extra_state")
    ]
    if wrong:
        more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise Mismatch(f"checkpoint {path} is of another model: {'; '.join(wrong[:SHOWN])}{more}")
    return {key: _placed(value, here[key]) for key, value in saved.items()}


def _alike(value: Any, here: Any) -> bool:
    return isinstance(value, Tensor) and isinstance(here, Tensor) and value.shape == here.shape


# ---------------------------------------------------------------------- processes


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank() -> int:
    return torch.distributed.get_rank() if _distributed() else 0


def _gathered(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Of all ranks, on the first; on the others a list without meaning."""
    if not _distributed():
        return [own]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.gather_object(own, everyone if _rank() == 0 else None, 0)
    return everyone
