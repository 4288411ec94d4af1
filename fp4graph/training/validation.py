"""Checks that a checkpoint is complete and fits the objects that it is loaded into, before any of them is changed."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from fp4graph.errors import Error
from fp4graph.model import state
from fp4graph.training import count
from fp4graph.training.origin import Mismatch
from fp4graph.training.stable_spam import StableSPAM

#: The remedy for a file whose content was changed.
REMEDY = "It was changed after it was written; use a copy or an earlier file"
#: The most faults that an error lists.
SHOWN = 12
_Types = Mapping[str, tuple[type, ...]]
_Kept = Mapping[str, bool]  # tensors that an optimizer keeps for a parameter: whether each has the parameter's shape
_COUNT = (int, type(None))
_COUNTS = range(2**63)  # the count of forwards is kept in an int64
_PARTS: _Types = {
    "policy": (Mapping, type(None)), "model": (Mapping,), "optimizer": (Mapping, type(None)),
    "scaler": (Mapping, type(None)), "scheduler": (object,), "progress": (Mapping,), "ranks": (list,),
}  # fmt: skip
_POLICY: _Types = {"text": (str,), "fingerprint": (str,), "seed": (int,), "total_forwards": _COUNT}
_RANK: _Types = {"rng": (Mapping,), "buffers": (Mapping,)}
_OPTIMIZER: _Types = {"state": (Mapping,), "param_groups": (list,)}
#: Shapes of parameters on which an optimizer is tried. Only state that follows a parameter's shape has these shapes.
_VECTOR, _MATRIX = (3,), (2, 3)


def check_parts(file: str, content: Mapping[str, Any]) -> None:
    """Raise an Error unless ``content`` has all parts of a checkpoint, each of its type."""
    faults = _mistyped("", content, _PARTS)
    if not faults and content["policy"] is not None:
        faults += _mistyped("policy.", content["policy"], _POLICY)
        faults += _mistyped("policy.", content["policy"], {"forwards": _COUNT} if content["version"] > 2 else {})
        counts = {name: content["policy"].get(name) for name in ("forwards", "total_forwards")}
        faults += [f"policy.{name} is {n}" for name, n in counts.items() if isinstance(n, int) and n not in _COUNTS]
    if not faults:
        faults += [] if content["ranks"] else ["ranks is empty"]
        faults += [f for n, of_rank in enumerate(content["ranks"]) for f in _mistyped(f"ranks[{n}].", of_rank, _RANK)]
    if not faults and content["optimizer"] is not None:
        faults += _mistyped("optimizer.", content["optimizer"], _OPTIMIZER)
    if faults:
        raise Error(f"{file} is not a complete checkpoint: {_listed(faults)}. {REMEDY}")


def _mistyped(where: str, value: Any, types: _Types) -> list[str]:
    """Return faults for keys that ``value`` lacks, and for keys whose values have other types than in ``types``."""
    if not isinstance(value, Mapping):
        return [f"{where.removesuffix('.')} is {_named(value)}"]
    faults = [f"{where}{name} is missing" for name in types if name not in value]
    return faults + [
        f"{where}{name} is {_named(value[name])}"
        for name, accepted in types.items()
        if name in value and (not isinstance(value[name], accepted) or (value[name] is True and int in accepted))
    ]


def check_entries(
    file: str, saved: Mapping[str, Any], here: Mapping[str, Any], optional: Collection[str], same_policy: bool
) -> None:
    """Raise :class:`Mismatch` unless ``saved`` can be loaded into the model whose state dict is ``here``. Keys in
    ``optional`` may be missing on either side."""
    needed = here if same_policy else state.strip(here)
    faults = [f"{key} is missing" for key in needed if key not in saved and key not in optional]
    faults += [f"{key} is not in this model" for key in saved if key not in here and key not in optional]
    faults += [
        fault
        for key, value in here.items()
        if key in saved and isinstance(value, Tensor)
        for fault in unequal(key, saved[key], value)
    ]
    if faults:
        raise Mismatch(f"checkpoint {file} is of another model: {_listed(faults)}")


def check_optimizer(file: str, saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`Mismatch` unless ``saved`` can be loaded into ``optimizer``.

    Entries that cannot be predicted are left to the optimizer: for example, the state of an optimizer whose class is
    not torch's and which has made no step.
    """
    groups, here = saved["param_groups"], optimizer.param_groups
    faults = [] if len(groups) == len(here) else [f"param_groups has {len(groups)} groups there and {len(here)} here"]
    parameters: dict[Any, tuple[nn.Parameter, _Kept]] = {}
    for number, (group, current) in enumerate(zip(groups, here, strict=False)):
        where = f"param_groups[{number}]"
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            faults.append(f"{where}.params is missing")
            continue
        indices = group["params"]
        if len(indices) != len(current["params"]):
            faults.append(f"{where} has {len(indices)} parameters there and {len(current['params'])} here")
        options = {key: value for key, value in current.items() if key != "params"}
        needed = {key for key in getattr(optimizer, "defaults", {}) if not _is_flag(options.get(key))}
        faults += _unlike(where, group, options, needed)
        counts = {key: value for key, value in group.items() if str(key).startswith(count.PREFIX)}
        faults += [
            f"{where}.{key} is {_named(value)}"
            for key, value in counts.items()
            if type(value) is not int or (key.startswith(f"{count.PREFIX}forwards") and value not in _COUNTS)
        ]
        if all(isinstance(index, int | str) for index in indices):
            kept = {shape: _kept(optimizer, {**options, **group}, shape) for shape in (_VECTOR, _MATRIX)}
            for index, x in zip(indices, current["params"], strict=False):
                parameters[index] = x, kept[_MATRIX if x.dim() > 1 else _VECTOR]
        else:
            faults.append(f"{where}.params holds no indices")
    for index, values in saved["state"].items():
        where = f"state[{index!r}]"
        if not isinstance(values, Mapping):
            faults.append(f"{where} is {_named(values)}")
        elif index in parameters:
            parameter, expected = parameters[index]
            faults += _state_faults(where, values, parameter, expected, optimizer.state.get(parameter, {}))
    if faults:
        raise Mismatch(f"checkpoint {file} is of another optimizer: {_listed([f'optimizer.{f}' for f in faults])}")


def _kept(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], shape: tuple[int, ...]) -> _Kept:
    """Return the tensors that one step under ``options`` keeps for a parameter of ``shape``, by name, and whether each
    has this shape.

    The step is tried with the optimizer's class, or its base class in torch; if it fails, the result is empty.
    """
    classes = StableSPAM, *(kind for kind in vars(torch.optim).values() if isinstance(kind, type))
    kind: Any = next((base for base in type(optimizer).__mro__ if base in classes), torch.optim.Optimizer)
    names = inspect.signature(kind).parameters
    tried = nn.Parameter(torch.zeros(shape))
    tried.grad = torch.ones(shape)
    try:
        trial = kind([tried], **{name: value for name, value in options.items() if name in names and name != "params"})
        step = type(trial).step
        getattr(step, "__wrapped__", step)(trial)  # without the hooks that users have registered for all optimizers
    except (AssertionError, LookupError, RuntimeError, TypeError, ValueError):  # bad option, or no closure
        return {}
    return {name: x.shape == shape for name, x in trial.state[tried].items() if isinstance(x, Tensor)}


def _state_faults(
    where: str, values: Mapping[str, Any], parameter: nn.Parameter, kept: _Kept, current: Mapping[str, Any]
) -> list[str]:
    """Return the faults of a parameter's saved state; an empty state has no faults.

    Args:
        kept: the tensors that a step keeps for ``parameter``. current: the present state of ``parameter``.
    """
    faults = [f"{where}.{name} is missing" for name in kept if values and name not in values]
    for name, value in values.items():
        reference = current.get(name, parameter if kept.get(name) else None)
        if name == "step" and name in kept and not _is_step(value):
            faults.append(f"{where}.{name} is {_named(value)}, not a number of steps")
        elif isinstance(reference, Tensor) and (kept.get(name) or (reference.dim() and value is not None)):
            faults += unequal(f"{where}.{name}", value, reference)
    return faults


def _is_step(value: Any) -> bool:
    """Return whether a value counts steps as torch's optimizers do: a float tensor, or in old versions a number."""
    return _is_number(value) and (not isinstance(value, Tensor) or value.is_floating_point())


def check_scheduler(file: str, saved: Any, scheduler: Any) -> None:
    """Raise :class:`Mismatch` unless ``saved`` can be loaded into ``scheduler``; checks only torch's schedulers."""
    if isinstance(scheduler, LRScheduler):
        here = scheduler.state_dict()
        here |= {key: tuple(here[key]) for key in ("base_lrs", "_last_lr") if key in here}  # same lengths
        needed = {key for key in here if not key.startswith("_")} | {"_last_lr", "_step_count"}
        faults = _unlike("scheduler", saved, here, needed)
        foreign = [key for key in saved if key not in here and hasattr(scheduler, str(key))] if not faults else []
        faults += [f"scheduler.{key} does not belong to the state of a scheduler" for key in foreign]
        if faults:
            raise Mismatch(f"checkpoint {file} is of another scheduler: {_listed(faults)}")


def check_scaler(file: str, saved: Any, scaler: torch.amp.GradScaler) -> None:
    """Raise :class:`Mismatch` unless ``saved`` can be loaded into ``scaler``."""
    here = scaler.state_dict()
    if faults := _unlike("scaler", saved, here, set(here)):
        raise Mismatch(f"checkpoint {file} is of another loss scaler: {_listed(faults)}")


def check_rng(file: str, where: str, saved: Mapping[str, Any]) -> None:
    """Raise an Error unless new random number generators accept the states ``saved``."""
    trials: dict[str, Callable[[Any], Any]] = {
        "torch": torch.Generator().set_state,
        "cuda": lambda states: [state.view(torch.uint8)[:0] for state in states],
        "numpy": lambda state: np.random.RandomState().set_state(numpy_state(state)),
        "python": random.Random().setstate,
    }
    for name, trial in trials.items():
        try:
            trial(saved[name])
        except Exception as error:  # each library checks in its own way
            fault = f"{where}.{name} is not the state of a generator ({type(error).__name__}: {error})"
            raise Error(f"{file} is not a complete checkpoint: {fault}. {REMEDY}") from error


def numpy_state(saved: Any) -> tuple[Any, ...]:
    """Return the ``saved`` state of NumPy's generator in the form that ``set_state`` takes."""
    name, keys, *position = saved
    return name, keys.numpy().astype(np.uint32), *position


def _unlike(where: str, saved: Any, here: Mapping[str, Any], needed: set[str]) -> list[str]:
    """Return faults for ``needed`` keys of ``here`` that ``saved`` lacks, and for keys with another kind of value."""
    if not isinstance(saved, Mapping):
        return [f"{where} is {_named(saved)}"]
    faults = [f"{where}.{key} is missing" for key in here if key in needed and key not in saved]
    for key, value in here.items():
        if key in saved and not _is_flag(value) and not _alike(saved[key], value):
            faults.append(f"{where}.{key} is {_named(saved[key])} there and {_named(value)} here")
    return faults


def _is_flag(value: Any) -> bool:
    """Return whether an option is on, off or left to torch (None); versions of torch differ in such options."""
    return value is None or isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta)


def _alike(saved: Any, here: Any) -> bool:
    """Return whether two values of plain data are of one kind: numbers, sequences of numbers, text, mappings."""
    if _is_number(here):
        return _is_number(saved)
    if isinstance(here, list | tuple):
        fits = isinstance(saved, list | tuple) and (isinstance(here, list) or len(saved) == len(here))
        return fits and (not all(map(_is_number, here)) or all(map(_is_number, saved)))
    return isinstance(saved, Mapping if isinstance(here, Mapping) else type(here))


def unequal(where: str, saved: Any, here: Tensor) -> list[str]:
    """Return a fault unless ``saved`` is a dense tensor with values, and has the shape and dtype of ``here``."""
    if not isinstance(saved, Tensor):
        return [f"{where} is {_named(saved)}"]
    if saved.layout is not torch.strided or saved.is_meta:
        return [f"{where} is a tensor on the meta device, or a sparse one"]
    pairs = (tuple(saved.shape), tuple(here.shape)), (saved.dtype, here.dtype)
    return next(([f"{where} is {there} there and {now} here"] for there, now in pairs if there != now), [])


def _named(value: Any) -> str:
    """Return the type of a value in words, with the shape of a tensor."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _listed(faults: list[str]) -> str:
    more = f", and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return f"{'; '.join(faults[:SHOWN])}{more}"
